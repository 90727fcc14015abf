"""Plan of a run's workers, before any of them is started: names, roles, devices, threads.

A worker is a process and has one role, or, on a device that actor and rollout share, both of them (`FusedRole`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.cluster.machine.token_files import TokenPlace
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.roles.role import Role
from headway.cluster.roles.rollout_role import FusedRole, RolloutRole
from headway.cluster.roles.training_roles import ActorRole, CriticRole, LogpRole, RefRole
from headway.cluster.worker_group import PartOf, Worker
from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, DeviceGroup, NodeShare, Placement

EPISODE_WORKER = "episode-worker"
"""The role's name, in the names of its workers."""
TRAINING = ("headway.engines.train.fsdp.engine", "headway.models.pretrained")
"""Modules that a rank needs for training or log-probs."""
TRAINING_ROLES: dict[str, type[Role]] = {ACTOR: ActorRole, REF: RefRole, LOGP: LogpRole, CRITIC: CriticRole}
"""Roles whose ranks compute together, the trainer's first."""
GENERATING = ("headway.engines.rollout.native.engine", "headway.models.pretrained")
"""Modules that a replica of the native engine needs."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of one worker, made as ``role(**arguments, **what the backend adds)``."""

    name: str
    role: type[Any]
    device: int
    """Index of the worker's device in the placement, or of the first one of several."""
    threads: int
    """Configured number of threads; 0 for its share of the cores of its node."""
    arguments: dict[str, Any]
    beside: bool = False
    """True for a worker that computes on the CPU, on the node of ``device``."""
    further: tuple[int, ...] = ()
    """Further devices of the worker, on the same machine."""
    modules: tuple[str, ...] = ()
    """Modules that the process imports first, while other workers start and the model is warmed up."""

    @property
    def devices(self) -> DeviceGroup:
        """All devices of the worker."""
        return (self.device, *self.further)

    @property
    def only_trains(self) -> bool:
        """True if the process has a rank for training or log-probs, and no replica."""
        return self.role in TRAINING_ROLES.values()


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank of a role, or a replica: a whole worker or a part of one."""

    name: str
    worker: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Plan of all workers of a run, and of the ranks on them."""

    workers: tuple[WorkerSpec, ...]
    ranks: Mapping[str, Sequence[Rank]]
    """Role -> its ranks or replicas. Unused roles, and roles on the trainer's ranks, are absent."""
    on_trainer_ranks: frozenset[str]
    """Roles that share the trainer's ranks: ``ref``, ``logp``, ``critic``."""
    shared: bool
    """True if each replica shares the device and the process of a training rank."""
    shares: tuple[NodeShare, ...]
    """Shares of machines, limited to devices with a worker."""

    def workers_of(self, *roles: str) -> list[str]:
        """Return the names of the workers that have ranks of these roles."""
        return [rank.worker for role in roles for rank in self.ranks.get(role, ())]


def plan_cluster(
    config: Config,
    placement: Placement,
    *,
    model_path: str,
    total_optimizer_steps: int,
    run_dir: Path = Path(),
    tokens: TokenPlace | None = None,
) -> ClusterPlan:
    """Spread the roles over the placement's devices.

    A role that shares a device with the trainer runs on all of the trainer's ranks. ``run_dir``: the run's directory;
    ``tokens``: where tokens of finished groups are left, None where all roles are in one process.
    """
    train, generate = placement.devices[ACTOR], placement.devices[ROLLOUT]
    inside = frozenset(role for role in (REF, LOGP, CRITIC) if placement.shared(role, ACTOR))
    own = {role: placement.devices.get(role, ()) for role in (REF, LOGP, CRITIC) if role not in inside}
    shared = placement.shared(ACTOR, ROLLOUT)
    train_threads, rollout_threads = config.trainer.threads, config.rollout.threads
    common = {"config": config, "model_path": model_path}
    generating = GENERATING if config.rollout.name == "native" else ()
    # The policy's number of mini-batches, times the critic's epochs.
    critic_steps = total_optimizer_steps // config.actor.ppo_epochs * config.critic.ppo_epochs
    of_actor = {
        "world_size": len(train),
        "total_optimizer_steps": total_optimizer_steps,
        "with_reference": REF in inside,
        "total_critic_steps": critic_steps if CRITIC in inside else None,
    }
    workers: list[WorkerSpec] = []
    ranks: dict[str, list[Rank]] = defaultdict(list)

    def add_trainer(role: str, rank: int, device: int, arguments: dict[str, Any]) -> None:
        name, arguments = f"{role}-{rank}", {**common, **arguments, "rank": rank}
        workers.append(WorkerSpec(name, TRAINING_ROLES[role], device, train_threads, arguments, modules=TRAINING))
        ranks[role].append(Rank(name, name))

    for rank, device in enumerate(train):
        if not shared or device not in generate:
            add_trainer(ACTOR, rank, device, of_actor)
            continue
        name, replica = f"{ACTOR}-{rank}", f"{ROLLOUT}-{generate.index(device)}"
        parts = {"actor": {**of_actor, "rank": rank}, "rollout": {"name": replica}}
        # Roles in one process take turns, so each may use all of its threads.
        threads = max(train_threads, rollout_threads)
        modules = (*TRAINING, *generating)
        workers.append(WorkerSpec(name, FusedRole, device, threads, {**common, **parts}, modules=modules))
        ranks[ACTOR].append(Rank(name, name, "actor"))
        ranks[ROLLOUT].append(Rank(replica, name, "rollout"))
    if not shared:
        for index, (first, *others) in enumerate(placement.replicas):
            name, rest = f"{ROLLOUT}-{index}", tuple(others)
            workers.append(
                WorkerSpec(name, RolloutRole, first, rollout_threads, common, further=rest, modules=generating)
            )
            ranks[ROLLOUT].append(Rank(name, name))
    further: dict[str, dict[str, Any]] = {REF: {"with_reference": True}, CRITIC: {"total_critic_steps": critic_steps}}
    for role, devices in own.items():
        for rank, device in enumerate(devices):
            add_trainer(role, rank, device, {**further.get(role, {}), "world_size": len(devices)})
    workers += [
        WorkerSpec(
            f"{EPISODE_WORKER}-{index}",
            EpisodeWorkerRole,
            share.devices[0],
            1,
            {**common, "run_dir": run_dir, "tokens": tokens},
            beside=True,
        )
        for index, share in enumerate(placement.on_nodes(ROLLOUT))
    ]
    return ClusterPlan(tuple(workers), dict(ranks), inside, shared, _shares(placement.shares, workers))


def _shares(shares: Iterable[NodeShare], workers: Iterable[WorkerSpec]) -> tuple[NodeShare, ...]:
    """Return the parts of ``shares`` that ``workers`` use."""
    used = {device for spec in workers for device in spec.devices}
    return tuple(part for share in shares if (part := share.only(used)).devices)


def trainer_alone(plan: ClusterPlan) -> ClusterPlan:
    """Return a plan with only the training ranks, none of which shares its process with a replica."""
    workers = tuple(spec for spec in plan.workers if spec.role is ActorRole)
    return replace(plan, workers=workers, ranks={ACTOR: plan.ranks[ACTOR]}, shares=_shares(plan.shares, workers))


def in_meshes(ranks: Sequence[Rank], workers: Collection[str], *, inner: int, least: int) -> list[Rank]:
    """Return the ranks of complete inner meshes whose ``workers`` have a place. Their number is a multiple of
    ``least``.

    ``inner``: number of neighbours that make an inner mesh.
    """
    meshes = [ranks[first : first + inner] for first in range(0, len(ranks), inner)]
    whole = [rank for mesh in meshes if all(rank.worker in workers for rank in mesh) for rank in mesh]
    return whole[: len(whole) // least * least]


def worker_of(rank: Rank, workers: Mapping[str, Worker]) -> Worker:
    """Return the worker of a rank. ``workers``: first name -> worker. Parts of ``actor-0+1`` end in ``+1`` as well."""
    hosting = workers[rank.worker]
    again = hosting.name.removeprefix(rank.worker)
    return hosting if rank.part is None else PartOf(hosting, rank.part, rank.name + again)
