"""Start of a run, from a configuration to running engines, step by step, the same on every backend.

launch:  connect ─▶ plan ─▶ reserve ─▶ launch all ─▶ up
run:     see the same files ─▶ build (models load side by side) ─▶ meet for weights ─▶ serve
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
from headway.cluster.rank_starts import (
    RankStarts,
    StartWaits,
    WorkerGroups,
    add_receiver,
    build_group,
    make_groups,
)
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.roles.fused_role import FusedRole
from headway.cluster.roles.role import FileProbe
from headway.cluster.roles.rollout_role import RolloutRole
from headway.cluster.shared_filesystem import SharedFiles, SharedFilesystem
from headway.cluster.snapshots import Snapshots
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
from headway.cluster.worker_group import Worker, WorkerGroup, proxy
from headway.cluster.worker_plan import ClusterPlan, plan_cluster, trainer_alone
from headway.cluster.workers import Cluster, Replacements, Workers
from headway.config.schema import Config
from headway.config.sizing.placement import CRITIC, LOGP, REF, concurrent, resolve_placement
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS, transport_of
from headway.data.assignment import Cost
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.data.interfaces.training import ProximalEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.devices import kind_of
from headway.engines.weights.protocols import Address
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError
from headway.models.model_folder import hidden_size
from headway.pipeline.admission.pipeline_state import now
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
        self._waits = StartWaits()
        self._wait = self._waits.wait
        workers = sum(len(devices) for devices in resolve_placement(config).devices.values())
        self.timeouts = Timeouts.of(config, model_nbytes(model_path), workers=workers)
        """Time limits of the run, which follow what is known and measured by now."""

    @property
    def waiting_for(self) -> str:
        return str(self._waits)

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
        await self._checked(launched)
        await self._build(groups)
        self._tell("the model is loaded")
        return groups.actor

    def _groups(self, launched: Launched) -> WorkerGroups:
        cost, inner = _cost(self._model_path), self._config.actor.parallel.inner
        return make_groups(launched.plan, launched.workers, cost, inner)

    async def _checked(self, launched: Launched) -> SharedFilesystem | None:
        """Check the files that workers see. None within one process."""
        if not self._cluster.separate_processes:
            return None
        sight = self._sight(launched.directory)
        await self._wait("every worker to say which files it sees", sight.check(launched.plan, launched.workers))
        return sight

    async def run(self, launched: Launched) -> Workers:
        """Start all engines on the workers, which load the model now."""
        device, plan, workers, directory = launched.device, launched.plan, launched.workers, launched.directory
        groups = self._groups(launched)
        sight = await self._checked(launched)
        loading = now()
        store, episode_workers = await both(self._build(groups), self._start_episode_workers(plan, workers))
        self.timeouts.first_load_s = now() - loading
        self._tell("the models are loaded")
        computing = {spec.name: workers[spec.name] for spec in plan.workers if not spec.beside}
        hardware = await concurrently(
            self._wait(f"{name} to describe its machine", worker.call("hardware")) for name, worker in computing.items()
        )
        dtype = await self._wait("rollout-0 to say its dtype", groups.rollouts[0].served_dtype())
        computed = await self._wait("actor-0 to say its dtype", groups.actor.compute_dtype())
        holders = {group.name: (group.workers, dtype) for group in groups.rollouts}
        if groups.logp is not None:
            holders[LOGP] = (groups.logp.workers, computed)
        manifests: dict[str, Manifest] = {}
        for needed in sorted({of for _, of in holders.values()}):
            manifests[needed] = await self._wait("actor-0 to lay weights out", groups.actor.layout(needed))
            await self._wait(f"{groups.actor.name} to prepare updates", groups.actor.open_route(needed))
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
                await add_receiver(exchange, name, ranks, of, self._config)
            # Meet now and not at the first update: ends that cannot must be known before anything is generated.
            await self._wait(
                f"{', '.join(holders)} to meet {groups.actor.name} for weights", exchange.reach([*holders])
            )
            paths = exchange
            start = partial(self._replace, manifest=manifests[dtype], exchange=exchange, sight=sight)
        rollouts = await concurrently(self._serve(group, manifests[dtype], paths) for group in groups.rollouts)
        if groups.logp is not None:
            await self._wait(f"{groups.logp.name} to be ready", groups.logp.serve(manifests[computed]))
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
        restarted = {}
        if isinstance(paths, WeightSync):
            starts = RankStarts(self._config, self._cluster, self.timeouts, launched.undo)
            restarted = starts.restartable(groups, plan, paths, manifests, computed)
            alone |= {worker.name for role in restarted for worker in groups.by_role[role].workers}
        snapshots = None
        if self._config.trainer.snapshot is not None:
            snapshots = Snapshots(groups.actor, lambda: [keeper.worker for keeper in episode_workers])
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
            restartable=restarted,
            snapshots=snapshots,
            ranks=lambda: [worker for role in restarted for worker in groups.by_role[role].workers],
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

    def _registered(self, replacements: Replacements[Any], role: type, launched: Launched) -> set[str]:
        """Make the launched workers of ``role`` known to ``replacements``. Returns their names."""
        specs = [spec for spec in launched.plan.workers if spec.role is role]
        for spec in specs:
            replacements.know(spec, launched.workers[spec.name])
        return {spec.name for spec in specs}

    async def _padded(self, groups: WorkerGroups) -> str | None:
        """Return why rows of the policy are padded, on the trainer's ranks or on those that recompute log-probs."""
        for group in (groups.actor, groups.logp):
            if group is not None:
                reason: str | None = await self._wait(f"{group.name} to say how it packs rows", group.padded())
                if reason is not None:
                    return reason
        return None

    async def _measured(
        self, actor: WorkerGroup, receivers: Sequence[PolicyReceiver], dtypes: tuple[str, str]
    ) -> ProbeTolerance:
        """Measure the receivers' rounding before any update. Raises `ModelError` for more than rounding."""
        if not self._config.param_update.verify:
            return ProbeTolerance(dtypes, None)
        expected = await self._wait("the trainer to compute the log-probs of the probe", actor.probe())
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

    async def _build(self, groups: WorkerGroups) -> Address | None:
        """Let all workers load their models side by side. Returns the address of the trainer's store."""
        separate = self._cluster.separate_processes
        stores = await concurrently(
            build_group(group, self._waits, meet=separate and group not in groups.rollouts) for group in groups.all
        )
        return stores[0]

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
        chosen = self._config.run.storage
        storage = None if chosen is None or "://" in chosen else Path(chosen).absolute()
        files = SharedFiles(self._run_dir, self._model_path, transport, directory, storage)
        return SharedFilesystem(files, FileProbe(self._cluster.address))

    async def _serve(self, group: WorkerGroup, manifest: Manifest, paths: WeightPaths) -> RolloutReplica:
        (worker,) = group.workers
        offset = await clock_offset(worker)
        capabilities = await self._wait(f"{worker.name} to start its engine", group.serve(manifest, offset))
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
        await add_receiver(exchange, worker.name, [worker], await group.served_dtype(), self._config)
        return await self._serve(group, manifest, exchange)

    async def _replace_episode_worker(self, worker: Worker, sight: SharedFilesystem | None) -> RemoteEpisodeWorker:
        """Start a launched episode worker that takes the place of another."""
        await worker.up()
        if sight is not None:
            await sight.check_episode_worker(worker)
        await worker.call("build")
        await worker.call("serve")
        return RemoteEpisodeWorker(worker)

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


def _cost(model_path: str) -> Cost:
    width = hidden_size(model_path)
    return Cost() if width is None else Cost(width)
