"""Starts of ranks that compute together, at the start of a run and in its course, and who waits for what meanwhile.

    launch ─▶ up ─▶ meet at a store of their own ─▶ load the initial model ─▶ ready for updates

Each role's ranks meet at a store in their rank zero, so that no role depends on the processes of another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

from headway.cluster.roles.actor_role import ActorRole
from headway.cluster.roles.critic_role import CriticRole
from headway.cluster.roles.logprob_role import LogpRole, RefRole
from headway.cluster.roles.rollout_role import RolloutRole
from headway.cluster.weight_sync.weight_sync import WeightSync
from headway.cluster.worker_group import PartOf, Worker, WorkerGroup
from headway.cluster.worker_plan import ClusterPlan, Rank, WorkerSpec
from headway.cluster.workers import Cluster, any_dies
from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF
from headway.config.sizing.run_memory import restarts_ranks, restarts_trainer
from headway.config.sizing.timeouts import Timeouts
from headway.data.assignment import Cost
from headway.engines.weights.protocols import Address
from headway.engines.weights.weight_layout import Manifest
from headway.errors import StallError
from headway.pipeline.recovery.rank_restarts import RestartableRanks
from headway.runtime.task_groups import concurrently

T = TypeVar("T")


class StartWaits:
    """Answers that a start waits for, in words.

    Example:
        >>> async def start(waits):
        ...     waiting = asyncio.ensure_future(waits.wait("rollout-0 to start", asyncio.sleep(0.01)))
        ...     await asyncio.sleep(0)
        ...     before = str(waits)
        ...     await waiting
        ...     return before, str(waits)
        >>> asyncio.run(start(StartWaits()))
        ('rollout-0 to start', 'nothing')
    """

    def __init__(self) -> None:
        self._pending: dict[str, None] = {}

    def __str__(self) -> str:
        return "; ".join(self._pending) or "nothing"

    async def wait(self, what: str, answer: Awaitable[T]) -> T:
        """Return the ``answer``, for which the start waits meanwhile. ``what``: who has to do what."""
        self._pending[what] = None
        result = await answer
        del self._pending[what]
        return result


@dataclass(frozen=True, slots=True)
class WorkerGroups:
    """Worker groups of a run, one for each role; None for a role without ranks of its own."""

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


def make_groups(plan: ClusterPlan, workers: dict[str, Worker], cost: Cost, inner: int) -> WorkerGroups:
    """Make the groups of ``plan``. ``inner``: number of ranks of an inner mesh, for roles on the trainer's mesh."""

    def worker(rank: Rank) -> Worker:
        hosting = workers[rank.worker]
        return hosting if rank.part is None else PartOf(hosting, rank.part, rank.name)

    def group(role: type, ranks: Sequence[Rank], inner: int = 1) -> WorkerGroup:
        return WorkerGroup(role, [worker(rank) for rank in ranks], cost, inner=inner)

    return WorkerGroups(
        actor=group(ActorRole, plan.actor, inner),
        rollouts=tuple(group(RolloutRole, [rank]) for rank in plan.rollout),
        ref=group(RefRole, plan.ref, inner) if plan.ref else None,
        logp=group(LogpRole, plan.logp, inner) if plan.logp else None,
        critic=group(CriticRole, plan.critic, inner) if plan.critic else None,
    )


class RankStarts:
    """Starts of ranks in the places of lost ones."""

    def __init__(self, config: Config, cluster: Cluster, timeouts: Timeouts, undo: AsyncExitStack) -> None:
        """Set up. ``undo``: kills, when it closes, the workers that were started."""
        self._config = config
        self._cluster = cluster
        self._timeouts = timeouts
        self._undo = undo
        self._restarts = 0

    def restartable(
        self,
        groups: WorkerGroups,
        plan: ClusterPlan,
        exchange: WeightSync,
        manifests: Mapping[str, Manifest],
        computed: str,
    ) -> dict[str, RestartableRanks]:
        """Return the ranks that may be started again, by role. ``computed``: dtype in which log-probs are recomputed,
        ``manifests``: layouts of the weights by dtype.
        """
        found = {}
        for role, group in groups.by_role.items():
            able = restarts_trainer if role in (ACTOR, CRITIC) else restarts_ranks  # the former redo batches
            if able(self._config):
                names = {worker.name for worker in group.workers}
                specs = [spec for spec in plan.workers if spec.name in names]
                ready = partial(self._ready, role, group, exchange, manifests, computed)
                found[role] = RestartableRanks(
                    partial(getattr, group, "workers"),
                    partial(self._any_dies, group),
                    partial(self._restart, group, specs, ready),
                )
        return found

    async def _any_dies(self, group: WorkerGroup) -> NoReturn:
        await any_dies(self._cluster, group.workers)

    async def _restart(
        self, group: WorkerGroup, specs: Sequence[WorkerSpec], ready: Callable[[StartWaits, Address], Awaitable[None]]
    ) -> None:
        """End the ranks of ``group``, start others in their bundles, with the initial model, and make them ``ready``.

        Raises `StallError` if they are not up within `Timeouts.start_s`.
        """
        self._restarts += 1
        number, waits = self._restarts, StartWaits()
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                await waits.wait(f"{group.name} to end", concurrently(worker.kill() for worker in group.workers))
                found = []
                for spec in specs:
                    name = f"{spec.name}+{number}"
                    device = await waits.wait(f"a device for {name}", self._cluster.find_place(spec))
                    found.append(replace(spec, name=name, device=device))
                workers = [self._cluster.launch(spec) for spec in found]
                group.consist_of(workers)  # at once: the next restart ends those of the group alone
                for worker in workers:
                    self._undo.push_async_callback(worker.kill)
                await concurrently(waits.wait(f"{worker.name} to start", worker.up()) for worker in workers)
                store = await build_group(group, waits)
                assert store is not None, "ranks of one process are not started again"
                await ready(waits, store)
        except TimeoutError:
            raise StallError(
                f"{group.name}: not up again within {self._timeouts.start_limit()}: the driver waited for {waits}"
            ) from None

    async def _ready(
        self,
        role: str,
        group: WorkerGroup,
        exchange: WeightSync,
        manifests: Mapping[str, Manifest],
        computed: str,
        waits: StartWaits,
        store: Address,
    ) -> None:
        """Prepare ranks of ``role`` for updates, at the next of which they meet their receivers or the trainer."""
        if role == ACTOR:
            for dtype in manifests:
                await waits.wait(f"{group.name} to prepare updates", group.open_route(dtype))
            exchange.trainer_restarted(store)
        elif role == LOGP:
            await add_receiver(exchange, LOGP, group.workers, computed, self._config)
            await waits.wait(f"{group.name} to be ready", group.serve(manifests[computed]))


async def build_group(group: WorkerGroup, waits: StartWaits, *, meet: bool = True) -> Address | None:
    """Let the ranks of ``group`` load their model; those that compute together ``meet`` at a store of their own.
    Returns its address; None without one.
    """
    store: Address | None = None
    if meet:
        store = await waits.wait(f"{group.workers[0].name} to open a store", group.open_store())
    await waits.wait(f"{group.name} to load the model", group.build(store))
    return store


async def add_receiver(exchange: WeightSync, name: str, ranks: Sequence[Worker], dtype: str, config: Config) -> None:
    """Add a receiver to ``exchange``, with weights in ``dtype``: one worker, or several that hold a copy together."""
    copies = await concurrently(_copy(name, rank, exchange, config) for rank in ranks)
    exchange.add(name, ranks, dtype, copies)


async def _copy(receiver: str, worker: Worker, exchange: WeightSync, config: Config) -> str:
    """Return the name of the copy of the weights that ``worker`` loads from: one for its machine, or its own."""
    rollout = config.rollout
    alone = exchange.between_devices or not rollout.enable_dual_buffer
    if receiver != LOGP and rollout.name == "native" and alone:
        return worker.name.partition("+")[0]  # a replacement takes over the links of the one that is gone
    domain: str = await worker.call("memory_domain")
    return f"{domain}/{LOGP}" if receiver == LOGP else domain
