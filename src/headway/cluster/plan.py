"""Which workers a run has, before any of them is started: names, roles, devices, threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.cluster.hardware import available_cores
from headway.cluster.roles import ActorRole, RefRole, Role, RolloutRole
from headway.config.placement import ACTOR, REF, ROLLOUT, Placement
from headway.config.schema import Config


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: ``role(**arguments, **what the backend adds)``."""

    name: str
    role: type[Role]
    device: int
    """Index in the placement."""
    threads: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All workers of a run."""

    actor: tuple[WorkerSpec, ...]
    rollout: tuple[WorkerSpec, ...]
    ref: tuple[WorkerSpec, ...]
    """Empty when the run has no reference, or it shares the trainer's ranks."""
    ref_inside_fetch: bool

    def __iter__(self) -> Iterator[WorkerSpec]:
        yield from (*self.actor, *self.rollout, *self.ref)


def plan_cluster(
    config: Config, placement: Placement, *, model_path: str, total_optimizer_steps: int, machines: int = 1
) -> ClusterPlan:
    """Spread the roles over the placement's devices.

    A reference that shares a device with the trainer runs on all of the trainer's ranks. Threads that are not set
    divide a machine's cores among its workers, at least one each.
    """
    train, generate = placement.devices[ACTOR], placement.devices[ROLLOUT]
    inside = placement.shared(REF, ACTOR)
    ref = () if inside else placement.devices.get(REF, ())
    workers = len(train) + len(generate) + len(ref)
    share = max(1, available_cores() * machines // workers)
    train_threads = config.trainer.threads or share
    common = {"config": config, "model_path": model_path}

    def spec(role: type[Role], kind: str, index: int, device: int, threads: int, **more: Any) -> WorkerSpec:
        return WorkerSpec(f"{kind}-{index}", role, device, threads, {**common, **more})

    return ClusterPlan(
        actor=tuple(
            spec(
                ActorRole,
                ACTOR,
                rank,
                device,
                train_threads,
                rank=rank,
                world_size=len(train),
                total_optimizer_steps=total_optimizer_steps,
                with_reference=inside,
            )
            for rank, device in enumerate(train)
        ),
        rollout=tuple(
            spec(RolloutRole, ROLLOUT, index, device, config.rollout.threads or share)
            for index, device in enumerate(generate)
        ),
        ref=tuple(
            spec(RefRole, REF, rank, device, train_threads, rank=rank, world_size=len(ref))
            for rank, device in enumerate(ref)
        ),
        ref_inside_fetch=inside,
    )
