"""From a configuration to running engines, step by step, the same on every backend.

connect ─▶ plan ─▶ reserve ─▶ launch all ─▶ up ─▶ build (models load side by side) ─▶ join weights ─▶ serve
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headway.cluster.engines import RolloutReplica, clock_offset
from headway.cluster.hardware import Hardware
from headway.cluster.plan import ClusterPlan, WorkerSpec, plan_cluster
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.config.placement import resolve_placement
from headway.config.schema import Config
from headway.errors import ConfigError
from headway.interfaces import Capabilities, Manifest, OnUpdate
from headway.pipeline.concurrently import concurrently
from headway.weights.transports.links import Address, make_link

T = TypeVar("T")


class Cluster(Protocol):
    """A place where workers run."""

    transports: tuple[str, ...]
    """Values of ``param_update.transport`` that work here; ``auto`` is the first."""

    separate_processes: bool
    """Whether ranks are processes, which meet at a store."""

    @property
    def machines(self) -> int: ...

    async def connect(self) -> str:
        """Reach the cluster; nothing is reserved yet. Returns the device that workers use: ``cpu`` or ``cuda``."""

    async def reserve(self, plan: ClusterPlan) -> None:
        """Hold what the plan needs, until `stop`. Raises `ConfigError` for a plan that cannot run here."""

    def launch(self, spec: WorkerSpec) -> Worker:
        """Begin to start one worker; `Worker.up` waits for it."""

    async def stop(self) -> None:
        """Give everything back, also after a failed `connect`. The workers were killed before."""


@dataclass(frozen=True, slots=True)
class Started:
    """What a start has brought up."""

    actor: WorkerGroup
    rollouts: tuple[RolloutReplica, ...]
    ref: WorkerGroup | None
    """The ranks that compute the reference's log-probs: its own, or the trainer's. None without a reference."""
    ref_inside_fetch: bool
    workers: tuple[Worker, ...]
    hardware: dict[str, Hardware]
    """Worker → what it computes on."""


@dataclass(frozen=True, slots=True)
class _Groups:
    actor: WorkerGroup
    rollouts: tuple[WorkerGroup, ...]
    ref: WorkerGroup | None


class Startup:
    """One start. `waiting_for` says, at any moment, who has not answered yet."""

    def __init__(self, config: Config, cluster: Cluster, *, model_path: str, total_optimizer_steps: int) -> None:
        self._config = config
        self._cluster = cluster
        self._model_path = model_path
        self._total_optimizer_steps = total_optimizer_steps
        self._pending: dict[str, None] = {}

    @property
    def waiting_for(self) -> str:
        return "; ".join(self._pending) or "nothing"

    async def run(self, stack: AsyncExitStack) -> Started:
        """Start everything. What has to be undone is left on ``stack``, also when this raises."""
        transport = self._transport()
        stack.push_async_callback(self._cluster.stop)
        device = await self._wait("the cluster to answer", self._cluster.connect())
        plan = plan_cluster(
            self._config,
            resolve_placement(self._config),
            model_path=self._model_path,
            total_optimizer_steps=self._total_optimizer_steps,
            machines=self._cluster.machines,
        )
        await self._wait("devices to be free", self._cluster.reserve(plan))
        workers = await self._launch(stack, plan)
        groups = _group(plan, workers)
        store = None
        if self._cluster.separate_processes:
            store = await self._wait("actor-0 to open a store", _result(groups.actor.open_store))
        manifest = await self._build(groups, store)
        hardware = await concurrently(
            self._wait(f"{name} to describe its machine", worker.call("hardware")) for name, worker in workers.items()
        )
        await self._join_weights(groups, transport, store, device)
        rollouts = await concurrently(self._serve(group, manifest) for group in groups.rollouts)
        return Started(
            actor=groups.actor,
            rollouts=tuple(rollouts),
            ref=groups.actor if plan.ref_inside_fetch else groups.ref,
            ref_inside_fetch=plan.ref_inside_fetch,
            workers=tuple(workers.values()),
            hardware=dict(zip(workers, hardware, strict=True)),
        )

    def _transport(self) -> str:
        asked = self._config.param_update.transport
        known = self._cluster.transports
        if asked != "auto" and asked not in known:
            raise ConfigError(
                f"param_update.transport={asked} does not work with cluster.backend={self._config.cluster.backend}; "
                f"set it to {' or '.join(known)}, or to auto"
            )
        return known[0] if asked == "auto" else asked

    async def _launch(self, stack: AsyncExitStack, plan: ClusterPlan) -> dict[str, Worker]:
        started: dict[str, Worker] = {}

        async def kill_all() -> None:
            await concurrently(worker.kill() for worker in started.values())

        stack.push_async_callback(kill_all)
        for spec in plan:
            started[spec.name] = self._cluster.launch(spec)
        await concurrently(self._wait(f"{name} to start", worker.up()) for name, worker in started.items())
        return started

    async def _build(self, groups: _Groups, store: Address | None) -> Manifest:
        """Load all models side by side. Returns the layout in which the trainer will send weights."""
        everyone = [groups.actor, *groups.rollouts, *([groups.ref] if groups.ref is not None else [])]
        results = await concurrently(
            self._wait(f"{group.name} to load the model", _result(group.build, store)) for group in everyone
        )
        manifest: Manifest = results[0]
        return manifest

    async def _join_weights(self, groups: _Groups, transport: str, store: Address | None, device: str) -> None:
        """Open both ends of the transport; with ``broadcast`` each end waits for all others."""
        receivers = tuple(group.name for group in groups.rollouts)
        link = make_link(
            transport,
            receivers=receivers,
            timeout_s=self._config.param_update.timeout_s,
            sender=groups.actor.workers[0].name,
            address=store,
            device=device,
        )
        await concurrently(
            self._wait(f"{group.name} to join the transport of weights", _result(group.connect, link))
            for group in (groups.actor, *groups.rollouts)
        )

    async def _serve(self, group: WorkerGroup, manifest: Manifest) -> RolloutReplica:
        (worker,) = group.workers
        offset = await clock_offset(worker)
        capabilities = await self._wait(f"{worker.name} to start its engine", _result(group.serve, manifest, offset))
        self._check_can(worker.name, capabilities)
        return RolloutReplica(worker, capabilities, self._config.rollout.max_concurrent)

    def _check_can(self, name: str, capabilities: Capabilities) -> None:
        asked = OnUpdate(self._config.async_training.on_update)
        if asked not in capabilities.on_update:
            known = " or ".join(sorted(capabilities.on_update)) or "no updates at all"
            raise ConfigError(
                f"async_training.on_update={asked}: the rollout engine of {name} cannot do that; it can do {known}. "
                "Set async_training.on_update (or mode) to one that it can do"
            )

    async def _wait(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        self._pending[what] = None
        result = await answer
        del self._pending[what]
        return result


def _group(plan: ClusterPlan, workers: dict[str, Worker]) -> _Groups:
    def group(specs: Sequence[WorkerSpec]) -> WorkerGroup:
        return WorkerGroup(specs[0].role, [workers[spec.name] for spec in specs])

    return _Groups(
        actor=group(plan.actor),
        rollouts=tuple(group([spec]) for spec in plan.rollout),
        ref=group(plan.ref) if plan.ref else None,
    )


async def _result(method: Callable[..., Awaitable[T]], *args: Any) -> T:
    """The call as a coroutine that begins when it is awaited."""
    return await method(*args)
