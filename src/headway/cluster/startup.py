"""Start of a run, from a configuration to running engines, step by step, the same on every backend.

launch:  connect ─▶ plan ─▶ reserve ─▶ launch all ─▶ up
run:     see the same files ─▶ build (models load side by side) ─▶ meet for weights ─▶ serve
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.cluster.machine.token_files import (
    SHARED_MEMORY,
    TokenPlace,
    directory_in_memory,
    remove_abandoned,
    token_directory,
)
from headway.cluster.roles.actor_role import ActorRole
from headway.cluster.roles.critic_role import CriticRole
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.roles.fused_role import FusedRole
from headway.cluster.roles.logprob_role import LogpRole, RefRole
from headway.cluster.roles.role import FileProbe
from headway.cluster.roles.rollout_role import RolloutRole
from headway.cluster.shared_filesystem import SharedFiles, SharedFilesystem
from headway.cluster.weight_sync.host_weights import WithinProcesses
from headway.cluster.weight_sync.probe_tolerance import ProbeTolerance
from headway.cluster.weight_sync.weight_sync import WeightPaths, WeightSync, exchange_settings
from headway.cluster.worker_engines import (
    LogpReceiver,
    RemoteEpisodeWorker,
    RolloutReplica,
    TrainGroup,
    clock_offset,
    critic_of,
    reference_of,
)
from headway.cluster.worker_group import PartOf, Worker, WorkerGroup, proxy
from headway.cluster.worker_plan import ClusterPlan, Rank, plan_cluster, trainer_alone
from headway.cluster.workers import Cluster, Replacements, Workers, any_dies
from headway.config.schema import Config
from headway.config.sizing.placement import CRITIC, LOGP, REF, concurrent, resolve_placement
from headway.config.sizing.run_memory import restarts_trainer
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS, transport_of
from headway.data.assignment import Cost
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.data.interfaces.training import ProximalEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.devices import kind_of
from headway.engines.weights.protocols import Address
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, StallError
from headway.models.model_folder import hidden_size
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.trainer_restarts import RestartableTrainer
from headway.runtime.task_groups import both, concurrently

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launched:
    """Workers whose processes are up, and which hold nothing yet."""

    device: str
    plan: ClusterPlan
    workers: dict[str, Worker]
    directory: Path | None
    """Directory where a transport that uses files leaves them."""
    undo: AsyncExitStack


@dataclass(frozen=True, slots=True)
class _WorkerGroups:
    actor: WorkerGroup
    rollouts: tuple[WorkerGroup, ...]
    ref: WorkerGroup | None
    logp: WorkerGroup | None
    critic: WorkerGroup | None

    @property
    def all(self) -> list[WorkerGroup]:
        others = [group for group in (self.ref, self.logp, self.critic) if group is not None]
        return [self.actor, *self.rollouts, *others]


class Startup:
    """Start of a run's workers. `waiting_for` says at any moment which of them have not answered yet."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        *,
        model_path: str,
        total_optimizer_steps: int,
        run_dir: Path,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare a start. ``tell`` is called with what is up, in words, each time that something is."""
        self._config = config
        self._cluster = cluster
        self._model_path = model_path
        self._total_optimizer_steps = total_optimizer_steps
        self._run_dir = run_dir
        self._tell = tell
        self._pending: dict[str, None] = {}
        self._restarts = 0
        workers = sum(len(devices) for devices in resolve_placement(config).devices.values())
        self.timeouts = Timeouts.of(config, model_nbytes(model_path), workers=workers)
        """Time limits of the run, which follow what is known and measured by now."""

    @property
    def waiting_for(self) -> str:
        return "; ".join(self._pending) or "nothing"

    async def launch(self, stack: AsyncExitStack, *, trainer_only: bool = False) -> Launched:
        """Start the workers' processes, all or only the trainer's. What has to be undone is left on ``stack``, also
        when this raises.
        """
        stack.push_async_callback(self._cluster.stop)
        device = await self._wait("the cluster to answer", self._cluster.connect())
        self.timeouts.on_gpu = kind_of(device).flex_attention
        if self._cluster.separate_processes:
            self._tell("Ray is up")
        remove_abandoned(SHARED_MEMORY)  # what killed runs left there, whether this run uses it or not
        plan = plan_cluster(
            self._config,
            resolve_placement(self._config),
            model_path=self._model_path,
            total_optimizer_steps=self._total_optimizer_steps,
            logs=(self._run_dir / "logs").absolute(),
            journal=(self._run_dir / "journal").absolute(),
            tokens=self._token_place(stack),
        )
        if trainer_only:
            plan = trainer_alone(plan)
        await self._wait("devices to be free", self._cluster.reserve(plan))
        directory = self._directory(stack)  # made before the workers: it is removed when they have ended
        return Launched(device, plan, await self._launch(stack, plan), directory, stack)

    async def run_trainer(self, launched: Launched) -> WorkerGroup:
        """Start the trainer alone; ``launched`` has no other workers."""
        groups = self._groups(launched)
        store, _ = await self._met(launched, groups.actor)
        await self._build(groups, store)
        self._tell("the model is loaded")
        return groups.actor

    def _groups(self, launched: Launched) -> _WorkerGroups:
        cost, inner = _cost(self._model_path), self._config.actor.parallel.inner
        return _group(launched.plan, launched.workers, cost, inner)

    async def _met(self, launched: Launched, actor: WorkerGroup) -> tuple[Address | None, SharedFilesystem | None]:
        """Check the files that workers see, and open the store at which ranks meet. None within one process."""
        if not self._cluster.separate_processes:
            return None, None
        sight = self._sight(launched.directory)
        await self._wait("every worker to say which files it sees", sight.check(launched.plan, launched.workers))
        return await self._wait("actor-0 to open a store", _result(actor.open_store)), sight

    async def run(self, launched: Launched) -> Workers:
        """Start all engines on the workers, which load the model now."""
        device, plan, workers, directory = launched.device, launched.plan, launched.workers, launched.directory
        groups = self._groups(launched)
        store, sight = await self._met(launched, groups.actor)
        loading = now()
        _, episode_workers = await both(self._build(groups, store), self._start_episode_workers(plan, workers))
        self.timeouts.first_load_s = now() - loading
        self._tell("the models are loaded")
        computing = {spec.name: workers[spec.name] for spec in plan.workers if not spec.beside}
        hardware = await concurrently(
            self._wait(f"{name} to describe its machine", worker.call("hardware")) for name, worker in computing.items()
        )
        dtype = await self._wait("rollout-0 to say its dtype", _result(groups.rollouts[0].served_dtype))
        computed = await self._wait("actor-0 to say its dtype", _result(groups.actor.compute_dtype))
        holders = {group.name: (group.workers, dtype) for group in groups.rollouts}
        if groups.logp is not None:
            holders[LOGP] = (groups.logp.workers, computed)
        manifests: dict[str, Manifest] = {}
        for needed in sorted({of for _, of in holders.values()}):
            manifests[needed] = await self._wait("actor-0 to lay weights out", _result(groups.actor.layout, needed))
            await self._wait(f"{groups.actor.name} to prepare updates", _result(groups.actor.open_route, needed))
        nbytes = [manifest.nbytes for manifest in manifests.values()]
        self.timeouts.weights_nbytes = max(self.timeouts.weights_nbytes, *nbytes)
        paths: WeightPaths
        start: Callable[[Worker], Awaitable[RolloutReplica]] | None = None
        if plan.shared:
            await self._join_within(plan, workers, dtype)
            replicas = {name: ranks[0] for name, (ranks, _) in holders.items()}
            paths = WithinProcesses(groups.actor, replicas, dtype, verify=self._config.param_update.verify)
        else:
            settings = exchange_settings(self._config, store, device, directory, self.timeouts)
            exchange = WeightSync(groups.actor, settings, manifests)
            for name, (ranks, of) in holders.items():
                exchange.add(name, ranks, of, await concurrently(self._copy(name, rank, exchange) for rank in ranks))
            # Meet now and not at the first update: ends that cannot must be known before anything is generated.
            await self._wait(
                f"{', '.join(holders)} to meet {groups.actor.name} for weights", exchange.reach([*holders])
            )
            paths = exchange
            start = partial(self._replace, manifest=manifests[dtype], exchange=exchange, sight=sight)
        rollouts = await concurrently(self._serve(group, manifests[dtype], paths) for group in groups.rollouts)
        if groups.logp is not None:
            await self._wait(f"{groups.logp.name} to be ready", _result(groups.logp.serve, manifests[computed]))
        apart = () if groups.logp is None else (LogpReceiver(groups.logp, paths, self._config.param_update.verify),)
        rounding = await self._measured(groups.actor, [*rollouts, *apart], (dtype, computed))
        replicas_replaced = episode_workers_replaced = None
        alone: set[str] = set()
        if start is not None:
            replicas_replaced = Replacements(
                self._cluster, start, rollouts, launched.undo, timeouts=self.timeouts, measure=rounding.measure
            )
            alone |= self._registered(replicas_replaced, RolloutRole, launched)
        if self._cluster.separate_processes:
            episode_workers_replaced = Replacements(
                self._cluster,
                partial(self._replace_episode_worker, sight=sight),
                episode_workers,
                launched.undo,
                timeouts=self.timeouts,
                others=[spec.device for spec in plan.workers if spec.role in (RolloutRole, FusedRole)],
            )
            alone |= self._registered(episode_workers_replaced, EpisodeWorkerRole, launched)
        restartable: RestartableTrainer | None = None
        if isinstance(paths, WeightSync) and restarts_trainer(self._config):
            restart = partial(self._restart_trainer, launched, groups.actor, paths, list(manifests))
            restartable = RestartableTrainer(
                lambda: groups.actor.workers, lambda: any_dies(self._cluster, groups.actor.workers), restart
            )
            alone |= {spec.name for spec in plan.workers if spec.role is ActorRole}
        critic = groups.actor if CRITIC in plan.on_trainer_ranks else groups.critic
        reference = groups.actor if REF in plan.on_trainer_ranks else groups.ref
        train = TrainGroup(groups.actor, paths, with_returns=critic is not None)
        own = None if groups.logp is None else proxy(groups.logp, ProximalEngine)
        return Workers(
            train=train,
            rollouts=rollouts,
            episode_workers=episode_workers,
            ref=None if reference is None else reference_of(reference),
            proximal=train if LOGP in plan.on_trainer_ranks else own,
            critic=None if critic is None else critic_of(critic),
            receivers=apart,
            on_trainer_ranks=plan.on_trainer_ranks,
            restartable=restartable,
            ranks=lambda: groups.actor.workers,
            needed=[worker for name, worker in workers.items() if name not in alone],
            cluster=self._cluster,
            timeouts=self.timeouts,
            rounding=rounding,
            hardware=dict(zip(computing, hardware, strict=True)),
            padded=await self._padded(groups),
            replicas_replaced=replicas_replaced,
            episode_workers_replaced=episode_workers_replaced,
            undo=launched.undo,
        )

    async def _restart_trainer(
        self, launched: Launched, actor: WorkerGroup, exchange: WeightSync, dtypes: Sequence[str]
    ) -> None:
        """End the trainer's ranks and start others in their bundles, with the initial model. Receivers meet them at the
        next update.

        Raises `StallError` if they are not up within `Timeouts.start_s`.
        """
        self._restarts += 1
        self._pending.clear()
        try:
            async with asyncio.timeout(self.timeouts.start_s):
                await self._wait(f"{actor.name} to end", _all_killed(actor.workers))
                workers = []
                for spec in launched.plan.workers:
                    if spec.role is ActorRole:
                        name = f"{spec.name}+{self._restarts}"
                        device = await self._wait(f"a device for {name}", self._cluster.find_place(spec))
                        workers.append(self._cluster.launch(replace(spec, name=name, device=device)))
                        launched.undo.push_async_callback(workers[-1].kill)
                actor.consist_of(workers)
                await concurrently(self._wait(f"{worker.name} to start", worker.up()) for worker in workers)
                store: Address = await self._wait(f"{workers[0].name} to open a store", _result(actor.open_store))
                await self._wait(f"{actor.name} to load the model", _result(actor.build, store))
                for dtype in dtypes:
                    await self._wait(f"{actor.name} to prepare updates", _result(actor.open_route, dtype))
        except TimeoutError:
            raise StallError(
                f"the trainer was not up again within {self.timeouts.start_limit()}: the driver waited for "
                f"{self.waiting_for}"
            ) from None
        exchange.trainer_restarted(store)

    def _registered(self, replacements: Replacements[Any], role: type, launched: Launched) -> set[str]:
        """Make the launched workers of ``role`` known to ``replacements``. Returns their names."""
        specs = [spec for spec in launched.plan.workers if spec.role is role]
        for spec in specs:
            replacements.know(spec, launched.workers[spec.name])
        return {spec.name for spec in specs}

    async def _padded(self, groups: _WorkerGroups) -> str | None:
        """Return why rows of the policy are padded, on the trainer's ranks or on those that recompute log-probs."""
        for group in (groups.actor, groups.logp):
            if group is not None:
                reason: str | None = await self._wait(f"{group.name} to say how it packs rows", _result(group.padded))
                if reason is not None:
                    return reason
        return None

    async def _measured(
        self, actor: WorkerGroup, receivers: Sequence[PolicyReceiver], dtypes: tuple[str, str]
    ) -> ProbeTolerance:
        """Measure the receivers' rounding before any update. Raises `ModelError` for more than rounding."""
        if not self._config.param_update.verify:
            return ProbeTolerance(dtypes, None)
        expected = await self._wait("the trainer to compute the log-probs of the probe", _result(actor.probe))
        rounding = ProbeTolerance(dtypes, expected)
        probing = now()
        await self._wait("receivers to compute the log-probs of the probe", rounding.measure(receivers))
        self.timeouts.first_probe_s = now() - probing
        return rounding

    async def _launch(self, stack: AsyncExitStack, plan: ClusterPlan) -> dict[str, Worker]:
        started: dict[str, Worker] = {}

        async def kill_all() -> None:
            """Kill all workers, even if one of them fails to end."""
            ends = await asyncio.gather(*(worker.kill() for worker in started.values()), return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end

        stack.push_async_callback(kill_all)
        for spec in plan.workers:
            started[spec.name] = self._cluster.launch(spec)
        up: list[str] = []

        async def wait_for(name: str, worker: Worker) -> None:
            await self._wait(f"{name} to start", worker.up())
            up.append(name)
            if self._cluster.separate_processes:
                self._tell(f"{name} is up, {len(up)} of {len(started)}")

        await concurrently(wait_for(name, worker) for name, worker in started.items())
        return started

    async def _build(self, groups: _WorkerGroups, store: Address | None) -> None:
        """Let all workers load their models side by side."""
        await concurrently(
            self._wait(f"{group.name} to load the model", _result(group.build, store)) for group in groups.all
        )

    async def _start_episode_workers(self, plan: ClusterPlan, workers: dict[str, Worker]) -> list[RemoteEpisodeWorker]:
        """Start the episode workers of ``plan``."""
        episode_workers = [workers[rank.worker] for rank in plan.episode_workers]
        await concurrently(
            self._wait(f"{worker.name} to load the tokenizer", worker.call("build")) for worker in episode_workers
        )
        await concurrently(worker.call("serve") for worker in episode_workers)
        return [RemoteEpisodeWorker(worker) for worker in episode_workers]

    async def _join_within(self, plan: ClusterPlan, workers: dict[str, Worker], dtype: str) -> None:
        """Connect each replica to the training rank that shares its process, from which it gets weights."""
        timeout_s = self.timeouts.transport_s
        await concurrently(
            self._wait(
                f"{rank.name} to meet {rank.worker}", workers[rank.worker].call("connect_within", dtype, timeout_s)
            )
            for rank in plan.rollout
        )

    def _directory(self, stack: AsyncExitStack) -> Path | None:
        """Return the directory where a transport that uses files leaves them. One in memory is removed at the end."""
        update, shared = self._config.param_update, self._config.cluster.placement == "shared"
        transport = transport_of(update.transport, backend=self._config.cluster.backend, shared=shared)
        match TRANSPORTS[transport].leaves:
            case "files":
                return (update.directory or self._run_dir / "weights").absolute()
            case "memory":
                if not SHARED_MEMORY.is_dir():
                    raise ConfigError(
                        f"param_update.transport={transport}: this system has no {SHARED_MEMORY}; choose another"
                    )
                return stack.enter_context(directory_in_memory(SHARED_MEMORY))
            case _:
                return None

    def _token_place(self, stack: AsyncExitStack) -> TokenPlace | None:
        """Make the directory of the driver's machine for tokens of finished groups, until ``stack`` closes."""
        if not self._cluster.separate_processes:
            return None
        return TokenPlace(self._cluster.address, stack.enter_context(token_directory(self._config)))

    def _sight(self, directory: Path | None) -> SharedFilesystem:
        update, shared = self._config.param_update, self._config.cluster.placement == "shared"
        transport = transport_of(update.transport, backend=self._config.cluster.backend, shared=shared)
        files = SharedFiles(self._run_dir, self._model_path, transport, directory)
        return SharedFilesystem(files, FileProbe(self._cluster.address))

    async def _serve(self, group: WorkerGroup, manifest: Manifest, paths: WeightPaths) -> RolloutReplica:
        (worker,) = group.workers
        offset = await clock_offset(worker)
        capabilities = await self._wait(f"{worker.name} to start its engine", _result(group.serve, manifest, offset))
        self._check_can(worker.name, capabilities)
        return RolloutReplica(worker, capabilities, concurrent(self._config), paths, self._config.param_update.verify)

    async def _replace(
        self, worker: Worker, manifest: Manifest, exchange: WeightSync, sight: SharedFilesystem | None
    ) -> RolloutReplica:
        """Start a launched replica that takes the place of another."""
        await worker.up()
        if sight is not None:
            await sight.check_replica(worker)
        group = WorkerGroup(RolloutRole, [worker])
        await group.build(None)
        exchange.add(
            worker.name, [worker], await _result(group.served_dtype), [await self._copy(worker.name, worker, exchange)]
        )
        return await self._serve(group, manifest, exchange)

    async def _replace_episode_worker(self, worker: Worker, sight: SharedFilesystem | None) -> RemoteEpisodeWorker:
        """Start a launched episode worker that takes the place of another."""
        await worker.up()
        if sight is not None:
            await sight.check_episode_worker(worker)
        await worker.call("build")
        await worker.call("serve")
        return RemoteEpisodeWorker(worker)

    async def _copy(self, receiver: str, worker: Worker, exchange: WeightSync) -> str:
        """Return the name of the copy of the weights that ``worker`` loads from: one for its machine, or its own."""
        rollout = self._config.rollout
        alone = exchange.between_devices or not rollout.enable_dual_buffer
        if receiver != LOGP and rollout.name == "native" and alone:
            return worker.name.partition("+")[0]  # a replacement takes over the links of the one that is gone
        domain: str = await worker.call("memory_domain")
        return f"{domain}/{LOGP}" if receiver == LOGP else domain

    def _check_can(self, name: str, capabilities: Capabilities) -> None:
        asked = OnUpdate(self._config.async_training.on_update)
        if asked not in capabilities.on_update:
            known = " or ".join(sorted(capabilities.on_update)) or "no updates at all"
            raise ConfigError(
                f"async_training.on_update={asked}: the rollout engine of {name} cannot do that; it can do {known}. "
                "Set async_training.on_update (or mode) to one that it can do"
            )
        if self._config.cluster.placement == "shared" and not capabilities.sleep:
            raise ConfigError(
                f"cluster.placement=shared: the rollout engine of {name} cannot give its device back to the trainer; "
                "set cluster.placement=split (or another mode)"
            )

    async def _wait(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        self._pending[what] = None
        result = await answer
        del self._pending[what]
        return result


def _cost(model_path: str) -> Cost:
    width = hidden_size(model_path)
    return Cost() if width is None else Cost(width)


def _group(plan: ClusterPlan, workers: dict[str, Worker], cost: Cost, inner: int) -> _WorkerGroups:
    """Make the groups of ``plan``. ``inner``: number of ranks of an inner mesh, for roles on the trainer's mesh."""

    def worker(rank: Rank) -> Worker:
        hosting = workers[rank.worker]
        return hosting if rank.part is None else PartOf(hosting, rank.part, rank.name)

    def group(role: type, ranks: Sequence[Rank], inner: int = 1) -> WorkerGroup:
        return WorkerGroup(role, [worker(rank) for rank in ranks], cost, inner=inner)

    return _WorkerGroups(
        actor=group(ActorRole, plan.actor, inner),
        rollouts=tuple(group(RolloutRole, [rank]) for rank in plan.rollout),
        ref=group(RefRole, plan.ref, inner) if plan.ref else None,
        logp=group(LogpRole, plan.logp, inner) if plan.logp else None,
        critic=group(CriticRole, plan.critic, inner) if plan.critic else None,
    )


async def _all_killed(workers: Sequence[Worker]) -> None:
    await concurrently(worker.kill() for worker in workers)


async def _result(method: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Return a coroutine of ``call``, which begins when it is awaited."""
    return await method(*args)
