"""Plan of a run's workers, before any of them is started: names, roles, devices, threads.

A worker is a process and has one role, or, on a device that actor and rollout share, both of them (`FusedRole`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.cluster.machine.token_files import TokenPlace
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.roles.rollout_role import FusedRole, RolloutRole
from headway.cluster.roles.training_roles import ActorRole, CriticRole, LogpRole, RefRole
from headway.cluster.worker_group import PartOf, Worker, WorkerGroup
from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, DeviceGroup, NodeShare, Placement
from headway.data.assignment import Cost

EPISODE_WORKER = "episode-worker"
"""The role's name, in the names of its workers."""
TRAINING = ("headway.engines.train.fsdp.engine", "headway.models.pretrained")
"""Modules that a training rank, or one that computes log-probs, is made of."""
GENERATING = ("headway.engines.rollout.native.engine", "headway.models.pretrained")
"""Modules that a replica of the native engine is made of."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of one worker, made as ``role(**arguments, **what the backend adds)``."""

    name: str
    role: type[Any]
    device: int
    """Index of the worker's device in the placement, or of the first one of several."""
    threads: int
    """Number of threads that the settings give it; 0: its share of the cores of the node that it lands on."""
    arguments: dict[str, Any]
    beside: bool = False
    """True for a worker that computes on the CPU, beside the one that has the device."""
    further: tuple[int, ...] = ()
    """Devices that it has beside the first one, on the same machine."""
    modules: tuple[str, ...] = ()
    """Modules that its process imports first of all, while other workers start and the model is warmed up."""

    @property
    def devices(self) -> DeviceGroup:
        """All devices that the worker has."""
        return (self.device, *self.further)

    @property
    def only_trains(self) -> bool:
        """True where the process has a training rank, or one that computes log-probs, and no replica."""
        return self.role in (ActorRole, RefRole, LogpRole, CriticRole)


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank of a role, or a replica: a whole worker or a part of one."""

    name: str
    worker: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Plan of all workers of a run, and of what runs on them."""

    workers: tuple[WorkerSpec, ...]
    actor: tuple[Rank, ...]
    rollout: tuple[Rank, ...]
    ref: tuple[Rank, ...]
    """Ranks of the reference; empty without one, or where it shares the trainer's ranks."""
    logp: tuple[Rank, ...]
    critic: tuple[Rank, ...]
    on_trainer_ranks: frozenset[str]
    """Roles that share the trainer's ranks: ``ref``, ``logp``, ``critic``."""
    shared: bool
    """True where each replica shares the device, and the process, of a training rank."""
    shares: tuple[NodeShare, ...]
    """What has to be on one machine, of the devices that have a worker."""

    def ranks(self, role: str) -> tuple[Rank, ...]:
        """Return the ranks of ``role`` that compute together."""
        return {ACTOR: self.actor, REF: self.ref, LOGP: self.logp, CRITIC: self.critic}[role]


def plan_cluster(
    config: Config,
    placement: Placement,
    *,
    model_path: str,
    total_optimizer_steps: int,
    logs: Path | None = None,
    journal: Path | None = None,
    tokens: TokenPlace | None = None,
) -> ClusterPlan:
    """Spread the roles over the placement's devices.

    A role that shares a device with the trainer runs on all of the trainer's ranks. ``logs``: the directory for what
    programs print; ``journal``: that of the run's journal; ``tokens``: where tokens of finished
    groups are left, None where all roles are in one process.
    """
    train, generate = placement.devices[ACTOR], placement.devices[ROLLOUT]
    inside = frozenset(role for role in (REF, LOGP, CRITIC) if placement.shared(role, ACTOR))
    own = {role: () if role in inside else placement.devices.get(role, ()) for role in (REF, LOGP, CRITIC)}
    replicas = [(f"{ROLLOUT}-{index}", group) for index, group in enumerate(placement.replicas)]
    shared = placement.shared(ACTOR, ROLLOUT)
    train_threads, rollout_threads = config.trainer.threads, config.rollout.threads
    common = {"config": config, "model_path": model_path}
    generating = GENERATING if config.rollout.name == "native" else ()
    # As many mini-batches as the policy has, each as often as the critic has epochs.
    critic_steps = total_optimizer_steps // config.actor.ppo_epochs * config.critic.ppo_epochs

    def actor(rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "world_size": len(train),
            "total_optimizer_steps": total_optimizer_steps,
            "with_reference": REF in inside,
            "total_critic_steps": critic_steps if CRITIC in inside else None,
        }

    workers: list[WorkerSpec] = []
    for rank, device in enumerate(train):
        name = f"{ACTOR}-{rank}"
        if shared and device in generate:
            parts = {"actor": actor(rank), "rollout": {"name": f"{ROLLOUT}-{generate.index(device)}"}}
            # Roles of one process take turns, so each may have all of its threads.
            threads = max(train_threads, rollout_threads)
            both = (*TRAINING, *generating)
            workers.append(WorkerSpec(name, FusedRole, device, threads, {**common, **parts}, modules=both))
        else:
            arguments = {**common, **actor(rank)}
            workers.append(WorkerSpec(name, ActorRole, device, train_threads, arguments, modules=TRAINING))
    if not shared:
        for name, devices in replicas:
            first, others = devices[0], devices[1:]
            workers.append(
                WorkerSpec(name, RolloutRole, first, rollout_threads, common, further=others, modules=generating)
            )
    kinds: tuple[tuple[str, type[Any], dict[str, Any]], ...] = (
        (REF, RefRole, {"with_reference": True}),
        (LOGP, LogpRole, {}),
        (CRITIC, CriticRole, {"total_critic_steps": critic_steps}),
    )
    for role, kind, further in kinds:
        for rank, device in enumerate(own[role]):
            arguments = {**common, **further, "rank": rank, "world_size": len(own[role])}
            workers.append(WorkerSpec(f"{role}-{rank}", kind, device, train_threads, arguments, modules=TRAINING))
    workers += [
        WorkerSpec(
            f"{EPISODE_WORKER}-{index}",
            EpisodeWorkerRole,
            share.devices[0],
            1,
            {**common, "logs": logs, "journal": journal, "tokens": tokens},
            beside=True,
        )
        for index, share in enumerate(placement.on_nodes(ROLLOUT))
    ]
    used = {device for spec in workers for device in spec.devices}
    hosts = {spec.device: spec.name for spec in workers if spec.role is FusedRole}

    def ranks(role: str) -> tuple[Rank, ...]:
        return tuple(Rank(f"{role}-{rank}", f"{role}-{rank}") for rank in range(len(own[role])))

    return ClusterPlan(
        workers=tuple(workers),
        actor=tuple(
            Rank(f"{ACTOR}-{rank}", f"{ACTOR}-{rank}", "actor" if device in hosts else None)
            for rank, device in enumerate(train)
        ),
        rollout=tuple(
            Rank(name, hosts.get(devices[0], name), "rollout" if devices[0] in hosts else None)
            for name, devices in replicas
        ),
        ref=ranks(REF),
        logp=ranks(LOGP),
        critic=ranks(CRITIC),
        on_trainer_ranks=inside,
        shared=shared,
        shares=tuple(part for share in placement.shares if (part := share.only(used)).devices),
    )


def trainer_alone(plan: ClusterPlan) -> ClusterPlan:
    """Return the plan's training ranks without all else. None of them shares its process with a replica."""
    workers = tuple(spec for spec in plan.workers if spec.role is ActorRole)
    used = {device for spec in workers for device in spec.devices}
    shares = tuple(part for share in plan.shares if (part := share.only(used)).devices)
    return replace(plan, workers=workers, rollout=(), ref=(), logp=(), critic=(), shares=shares)


def in_meshes(ranks: Sequence[Rank], workers: Collection[str], *, inner: int, least: int) -> list[Rank]:
    """Return the ranks of whole inner meshes whose ``workers`` have a place: a multiple of ``least``.

    ``inner``: number of neighbours that make an inner mesh.
    """
    meshes = [ranks[first : first + inner] for first in range(0, len(ranks), inner)]
    whole = [rank for mesh in meshes if all(rank.worker in workers for rank in mesh) for rank in mesh]
    return whole[: len(whole) // least * least]


@dataclass(frozen=True, slots=True)
class WorkerGroups:
    """Worker groups of a run by role; None for a role that has no ranks, or those of another."""

    actor: WorkerGroup
    rollouts: tuple[WorkerGroup, ...]
    ref: WorkerGroup | None
    logp: WorkerGroup | None
    critic: WorkerGroup | None

    @property
    def all(self) -> list[WorkerGroup]:
        actor, *others = self.by_role.values()
        return [actor, *self.rollouts, *others]

    @property
    def by_role(self) -> dict[str, WorkerGroup]:
        """Groups whose ranks compute together, by role, the trainer's first."""
        roles = {ACTOR: self.actor, REF: self.ref, LOGP: self.logp, CRITIC: self.critic}
        return {role: group for role, group in roles.items() if group is not None}


def worker_of(rank: Rank, workers: Mapping[str, Worker]) -> Worker:
    """Return the worker of a rank among ``workers``, by first names. Parts of ``actor-0+1`` end in ``+1`` as well."""
    hosting = workers[rank.worker]
    again = hosting.name.removeprefix(rank.worker)
    return hosting if rank.part is None else PartOf(hosting, rank.part, rank.name + again)


def make_groups(plan: ClusterPlan, workers: Mapping[str, Worker], cost: Cost, inner: int) -> WorkerGroups:
    """Make the groups of ``plan``. ``inner``: number of ranks of an inner mesh, for roles on the trainer's mesh."""

    def group(role: type, ranks: Sequence[Rank], inner: int = 1) -> WorkerGroup:
        return WorkerGroup(role, [worker_of(rank, workers) for rank in ranks], cost, inner=inner)

    return WorkerGroups(
        actor=group(ActorRole, plan.actor, inner),
        rollouts=tuple(group(RolloutRole, [rank]) for rank in plan.rollout),
        ref=group(RefRole, plan.ref, inner) if plan.ref else None,
        logp=group(LogpRole, plan.logp, inner) if plan.logp else None,
        critic=group(CriticRole, plan.critic, inner) if plan.critic else None,
    )
