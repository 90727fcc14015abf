"""Placement of roles on devices: arithmetic over device numbers. It says which devices must be on one machine; the
cluster chooses the machine (`headway.cluster.on_ray.resource_pool`).

counts    │ actor ... │ rollout ... │ ref ... │ logp ... │ critic ... │   (the last three may be on the actor's)
shares    │ actor ──▶ │ logp │ ref │  idle  │ ◀── rollout │               (logp and ref may be on the actor's)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from headway.config.schema import Config
from headway.config.sections.learning import CriticConfig, LogpConfig, RefConfig
from headway.config.sections.rollout_section import RolloutConfig
from headway.errors import ConfigError

DeviceGroup = tuple[int, ...]
"""Devices that work as one, in the machine's order: an inner mesh of training ranks, or a replica's."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Devices on one machine, in its order. Shares of one owner are on different machines; a machine with room takes
    shares of several owners."""

    owner: str
    """Configuration section whose ``nnodes`` counts these shares, like ``trainer``."""
    node: int
    """Index among the owner's shares."""
    devices: tuple[int, ...]

    def only(self, devices: Collection[int]) -> NodeShare:
        """Return the part of this share that is among ``devices``."""
        chosen = frozenset(devices)
        return replace(self, devices=tuple(device for device in self.devices if device in chosen))


def node_shares(owner: str, devices: Sequence[int], per_node: int) -> tuple[NodeShare, ...]:
    """Return the shares of ``owner``, which fills node after node with ``per_node`` of its ``devices``."""
    starts = range(0, len(devices), per_node)
    return tuple(NodeShare(owner, node, tuple(devices[start : start + per_node])) for node, start in enumerate(starts))


ACTOR, ROLLOUT, REF, LOGP, CRITIC = "actor", "rollout", "ref", "logp", "critic"
SHARE_NAMES = ("train", "logp", "ref_logp", "generate")

MOST_SLOTS = 256
"""Default maximum of trajectories that a replica decodes at once: beyond it a step's cost per row falls little."""
ALWAYS_SLOTS = 64
"""Number of trajectories that a replica may always decode at once, however long their contexts become."""
WHOLE_CONTEXT_TOKENS = 2**18
"""Maximum tokens of all slots' whole contexts, beyond `ALWAYS_SLOTS`, if the memory is not given: 34 GB of an 8 B
model's keys and values (8 heads of 128 in 32 layers, bfloat16)."""


GROUP_RELATIVE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "maxrl",
    "grpo_passk",
    "pass_at_k",
    "reinforce_plus_plus_baseline",
    "gigpo",
)
"""Estimators that compare the trajectories of a group."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Device numbers of each role, in rank order. A role that the algorithm does not need is absent."""

    devices: Mapping[str, tuple[int, ...]]
    total: int
    """Number of devices, idle ones included."""
    shares: tuple[NodeShare, ...]
    """Node shares, in the devices' order."""
    per_replica: int = 1
    """Number of devices of one replica, a divisor of the rollout role's number."""

    def on_nodes(self, role: str) -> list[NodeShare]:
        """Return the role's devices by node. Nodes without any are left out."""
        parts = [share.only(self.devices.get(role, ())) for share in self.shares]
        return [part for part in parts if part.devices]

    def groups(self, role: str, size: int = 1) -> list[DeviceGroup]:
        """Return the role's devices in groups of ``size`` neighbours that work as one, in rank order."""
        devices = self.devices.get(role, ())
        return [devices[start : start + size] for start in range(0, len(devices), size)]

    @property
    def replicas(self) -> list[DeviceGroup]:
        """Devices of each replica, in the replicas' order."""
        return self.groups(ROLLOUT, self.per_replica)

    def straddles(self, group: DeviceGroup) -> bool:
        """Tell whether a group has devices on several machines."""
        return len({share for share in self.shares if set(share.devices) & set(group)}) > 1

    @property
    def idle(self) -> tuple[int, ...]:
        used = {device for devices in self.devices.values() for device in devices}  # a set: roles may share devices
        return tuple(device for device in range(self.total) if device not in used)

    def shared(self, one: str, other: str) -> bool:
        """Tell whether two roles have a device in common."""
        return not set(self.devices.get(one, ())).isdisjoint(self.devices.get(other, ()))


def needs_reference(config: Config) -> bool:
    """Tell whether the loss or the reward has a KL term to a reference policy."""
    algorithm = config.algorithm
    in_loss = config.actor.use_kl_loss and config.actor.kl_loss_coef > 0
    return in_loss or (algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0)


def needs_logp(config: Config) -> bool:
    """Tell whether log π_prox is recomputed."""
    return not config.async_training.use_rollout_log_probs and config.actor.prox_logp_method == "recompute"


def needs_critic(config: Config) -> bool:
    """Tell whether advantages are computed from a critic's values."""
    enable = config.critic.enable
    return config.algorithm.adv_estimator == "gae" if enable is None else enable


def needs_greedy_baseline(config: Config) -> bool:
    """Tell whether each group gets an additional greedy answer."""
    asked = config.rollout.greedy_baseline
    return config.algorithm.adv_estimator == "remax" if asked is None else asked


def min_episodes(config: Config) -> int:
    """Return the minimum number of a group's episodes that must not fail: ``agent.min_episodes``, or the
    estimator's.
    """
    algorithm = config.algorithm
    if config.agent.min_episodes is not None:
        return config.agent.min_episodes
    of_k = {"pass_at_k": algorithm.pass_k, "grpo_passk": algorithm.pass_k}
    least = of_k.get(algorithm.adv_estimator, 2 if algorithm.adv_estimator in GROUP_RELATIVE else 1)
    return min(least, config.rollout.n)


def concurrent(config: Config) -> int:
    """Return the number of trajectories that one replica decodes at once: ``rollout.max_concurrent``, or its default.

    More slots than trajectories in flight would only take memory. Without a bound on the KV cache each slot has room
    for a whole context, so that long contexts get fewer slots.
    """
    rollout = config.rollout
    if rollout.max_concurrent is not None:
        return rollout.max_concurrent
    in_flight = -(-most_in_flight(config) // len(resolve_placement(config).replicas))
    # The memory is bounded: a slot need not have room for a whole context.
    if rollout.kv_cache_gib is not None:
        return min(in_flight, MOST_SLOTS)
    context = config.data.max_prompt_length + config.data.max_response_length
    return min(in_flight, MOST_SLOTS, max(ALWAYS_SLOTS, WHOLE_CONTEXT_TOKENS // context))


def most_in_flight(config: Config) -> int:
    """Return the maximum number of trajectories in flight over all replicas: ⌊(1+η)·B⌋ · ``n``.

    Greedy baselines and held-out answers are not included.
    """
    groups = floor((1 + config.async_training.staleness_threshold) * config.groups_per_version)
    return groups * config.rollout.n


def several_nodes(config: Config) -> dict[str, int]:
    """Return section → its number of machines, for sections with more than one.

    Raises:
        ConfigError: as `resolve_placement`.
    """
    asked = Counter(share.owner for share in resolve_placement(config).shares)
    return {owner: count for owner, count in asked.items() if count > 1}


def resolve_placement(config: Config) -> Placement:
    """Place roles by ``trainer.use_nodes_ratios`` if given, else by counts.

    Raises:
        ConfigError: a share is not a whole number of devices, shares do not fit, a role has no device, or the
            generating devices do not make whole replicas.
    """
    ratios = config.trainer.use_nodes_ratios
    placement = _by_counts(config) if ratios is None else _by_shares(config, ratios)
    return _in_replicas(config, placement)


def _in_replicas(config: Config, placement: Placement) -> Placement:
    """Return the placement with the replicas' size. A replica's devices are on one machine."""
    size, setting = config.rollout.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
    if size == 1 or config.cluster.placement == "shared":  # where it has no effect, as `idle` says
        return placement
    there = [len(share.devices) for share in placement.on_nodes(ROLLOUT)]
    if (odd := next((count for count in there if count % size), None)) is not None:
        raise ConfigError(
            f"{setting}={size}: a replica has its devices on one machine, and {odd} generate on one; expected a "
            f"divisor of {odd} (rollout.n_gpus_per_node, or generation's share of trainer.use_nodes_ratios)"
        )
    return replace(placement, per_replica=size)


def _by_counts(config: Config) -> Placement:
    trainer, rollout = config.trainer, config.rollout
    if rollout.nnodes == 0:
        raise ConfigError("rollout.nnodes: got 0, expected at least 1: somebody has to generate")
    train = _devices(0, trainer.nnodes * trainer.n_gpus_per_node)
    devices = {ACTOR: train}
    shares = node_shares("trainer", train, trainer.n_gpus_per_node)

    def own(role: str, section: RolloutConfig | RefConfig | LogpConfig | CriticConfig) -> tuple[int, ...]:
        nonlocal shares
        used = sum(len(share.devices) for share in shares)
        # After all shares so far: a device's number is its position among them.
        of_role = _devices(used, section.nnodes * section.n_gpus_per_node)
        shares += node_shares(role, of_role, section.n_gpus_per_node)
        return of_role

    devices[ROLLOUT] = _of_trainers_nodes(config) if config.cluster.placement == "shared" else own(ROLLOUT, rollout)
    # Without own nodes: on the trainer's ranks.
    if needs_reference(config):
        devices[REF] = own(REF, config.ref) or train
    if needs_logp(config):
        devices[LOGP] = own(LOGP, config.logp) or train
    if needs_critic(config):
        devices[CRITIC] = own(CRITIC, config.critic) or train
    return Placement(devices, sum(len(share.devices) for share in shares), shares)


def _of_trainers_nodes(config: Config) -> tuple[int, ...]:
    """Return the generating devices if they are the trainer's: the first devices of each of its first nodes."""
    trainer, rollout = config.trainer, config.rollout
    if rollout.nnodes > trainer.nnodes or rollout.n_gpus_per_node > trainer.n_gpus_per_node:
        raise ConfigError(
            f"cluster.placement=shared: rollout.nnodes={rollout.nnodes} × rollout.n_gpus_per_node="
            f"{rollout.n_gpus_per_node} devices generate and trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node} train, but they are the same ones; expected at most as many nodes, and at most "
            "as many devices on each"
        )
    firsts = range(0, rollout.nnodes * trainer.n_gpus_per_node, trainer.n_gpus_per_node)
    return tuple(device for first in firsts for device in _devices(first, rollout.n_gpus_per_node))


def _by_shares(config: Config, ratios: tuple[Fraction, ...]) -> Placement:
    if config.cluster.placement == "shared":
        raise ConfigError(
            "trainer.use_nodes_ratios divides the devices, and cluster.placement=shared gives all of them to both "
            "sides; drop one of the two"
        )
    total = config.trainer.nnodes * config.trainer.n_gpus_per_node
    train, logp, ref, generate = _whole_devices(ratios, total)
    with_logp, with_ref = needs_logp(config), needs_reference(config)
    _check_shares(train, logp, ref, generate, total, with_logp=with_logp, with_reference=with_ref)
    devices = {ACTOR: _devices(0, train), ROLLOUT: _devices(total - generate, generate)}
    disjoint = train + logp + ref + generate <= total
    if with_logp:
        # If shares overlap, logp and ref have the first of the trainer's devices.
        devices[LOGP] = _devices(train, logp) if logp and disjoint else devices[ACTOR][: logp or train]
    if with_ref:
        devices[REF] = _devices(train + logp, ref) if ref and disjoint else devices[ACTOR][: ref or train]
    shares = node_shares("trainer", range(total), config.trainer.n_gpus_per_node)
    # The four shares do not include a critic: its devices are additional.
    if needs_critic(config):
        own = _devices(total, config.critic.nnodes * config.critic.n_gpus_per_node)
        devices[CRITIC] = own or devices[ACTOR]
        shares += node_shares(CRITIC, own, config.critic.n_gpus_per_node)
        total += len(own)
    return Placement(devices, total, shares)


def _whole_devices(ratios: tuple[Fraction, ...], total: int) -> list[int]:
    # Exact, so that a fractional number of devices is refused, not rounded.
    counts = [share * total for share in ratios]
    problems = [
        f"{name}'s share {float(share):g} of {total} devices is {float(count):g} devices"
        for name, share, count in zip(SHARE_NAMES, ratios, counts, strict=True)
        if count.denominator != 1
    ]
    if problems:
        raise ConfigError(f"trainer.use_nodes_ratios: {'; '.join(problems)}; expected whole numbers of devices")
    return [int(count) for count in counts]


def _check_shares(
    train: int, logp: int, ref: int, generate: int, total: int, *, with_logp: bool, with_reference: bool
) -> None:
    problems = []
    if train == 0 or generate == 0:
        problems.append(f"train has {train} and generate {generate} of {total} devices, expected at least 1 each")
    if train + generate > total:
        problems.append(f"train and generate together have {train + generate} of {total} devices, expected at most all")
    if logp > 0 and not with_logp:
        problems.append(
            "logp's share must be 0: no log-probs are recomputed unless async_training.use_rollout_log_probs=false and "
            "actor.prox_logp_method=recompute"
        )
    if ref > 0 and not with_reference:
        problems.append(
            "ref_logp's share must be 0: there is no reference policy without actor.use_kl_loss or "
            "algorithm.use_kl_in_reward"
        )
    if train + logp + ref + generate > total:
        for name, count in (("logp", logp), ("ref_logp", ref)):
            if count > train:
                problems.append(f"{name} lies on train's devices, but has {count} where train has {train}")
    if problems:
        raise ConfigError(f"trainer.use_nodes_ratios: {'; '.join(problems)}")


def _devices(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))
