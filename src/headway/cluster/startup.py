"""Start of a run, from a configuration to running engines, step by step, the same on every backend.

launch:  connect ─▶ plan ─▶ reserve ─▶ launch all ─▶ up
run:     see the same files ─▶ build (models load side by side) ─▶ meet for weights ─▶ serve

Ranks that compute together meet at a store in their rank zero, so that no role depends on another role's processes.
Replacements of lost ranks start in the same way, and are then ready for the next update.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from headway.cluster.machine.token_files import (
    SHARED_MEMORY,
    TokenPlace,
    directory_in_memory,
    remove_abandoned,
    token_directory,
)
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.roles.role import FileProbe
from headway.cluster.roles.rollout_role import FusedRole, RolloutRole
from headway.cluster.roles.weight_roles import transport_in
from headway.cluster.shared_filesystem import SharedFilesystem
from headway.cluster.snapshots import Snapshots
from headway.cluster.weight_sync.host_weights import WithinProcesses
from headway.cluster.weight_sync.weight_sync import WeightPaths, WeightSync
from headway.cluster.worker_engines import (
    LogpReceiver,
    ProbeTolerance,
    RemoteEpisodeWorker,
    RolloutReplica,
    TrainGroup,
    clock_offset,
    critic_of,
    reference_of,
)
from headway.cluster.worker_group import Worker, WorkerGroup, proxy
from headway.cluster.worker_plan import TRAINING_ROLES, Rank, in_meshes, plan_cluster, trainer_alone, worker_of
from headway.cluster.workers import Cluster, LaunchedWorkers, StartWaits, Workers, any_dies
from headway.config.schema import Config
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, concurrent, resolve_placement
from headway.config.sizing.process_memory import room
from headway.config.sizing.run_memory import rank_memory, restarts_ranks, restarts_trainer
from headway.config.sizing.timeouts import PLACES_S, ROOM_SHARE, Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS
from headway.data.assignment import Cost
from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import ProximalEngine
from headway.devices import kind_of
from headway.engines.weights.protocols import Address
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, RunError, StallError, UserError
from headway.models.dtypes import compute_dtype, served_dtype
from headway.models.model_folder import hidden_size, text_config
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.rank_restarts import RestartableRanks
from headway.runtime.task_groups import both, concurrently


class Startup:
    """Start of a run's workers: `launch` them, then `run` all engines, or `run_trainer` alone."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        undo: AsyncExitStack,
        *,
        model_path: str,
        total_optimizer_steps: int,
        run_dir: Path,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare a start. ``undo`` collects the clean-up, also for a start that fails. ``tell`` is called with a text
        each time that a part is up.
        """
        self._config = config
        self.cluster = cluster
        self._undo = undo
        folder = Path(model_path).expanduser()
        # Absolute, since workers of a joined cluster run in another directory. A name on the hub stays as it is.
        self._model_path = model_path = str(folder.absolute()) if folder.is_dir() else model_path
        self._total_optimizer_steps = total_optimizer_steps
        self.run_dir = run_dir
        self._tell = tell
        self.waits = StartWaits()
        """Answers of workers that the start waits for."""
        self._wait = self.waits.wait
        self._transport = transport_in(config)
        known = folder / "config.json"
        self._shape = ModelShape.of(text_config(known)) if known.is_file() else None
        workers = sum(len(devices) for devices in resolve_placement(config).devices.values())
        self.timeouts = Timeouts.of(config, model_nbytes(model_path), workers=workers)
        """Time limits of the run, updated with what is measured."""
        self._workers = LaunchedWorkers(cluster, self.timeouts)
        self._files: SharedFilesystem | None = None
        """Check of shared files; None if workers have no processes of their own."""
        self._manifests: dict[str, Manifest] = {}
        """Dtype -> layout of the weights that the trainer's current ranks send."""
        self._paths: WeightPaths

    async def launch(self, *, trainer_only: bool = False) -> None:
        """Start the workers' processes, all or only the trainer's."""
        config = self._config
        # Before connecting, which starts Ray's processes and may be interrupted.
        self._undo.push_async_callback(self.cluster.stop)
        self._device = await self._wait("the cluster to answer", self.cluster.connect())
        self.timeouts.on_gpu = kind_of(self._device).flex_attention
        tokens = None
        if self.cluster.separate_processes:
            self._tell("Ray is up")
            tokens = TokenPlace(self.cluster.address, self._undo.enter_context(token_directory(config)))
        remove_abandoned(SHARED_MEMORY)  # left by killed runs; also if this run does not use it
        plan = plan_cluster(
            config,
            resolve_placement(config),
            model_path=self._model_path,
            total_optimizer_steps=self._total_optimizer_steps,
            run_dir=self.run_dir.absolute(),
            tokens=tokens,
        )
        self._plan = plan = trainer_alone(plan) if trainer_only else plan
        await self._wait("devices to be free", self.cluster.reserve(plan))
        self._directory = self._weights_directory()  # before the workers, so that it is removed after they end
        self._undo.push_async_callback(self._workers.kill)  # pushed after the cluster's `stop`: undone before it
        for spec in plan.workers:
            self._workers.launch(spec)
        up: list[str] = []

        async def wait_for(worker: Worker) -> None:
            await self._wait(f"{worker.name} to start", worker.up())
            up.append(worker.name)
            if self.cluster.separate_processes:
                self._tell(f"{worker.name} is up, {len(up)} of {len(plan.workers)}")

        await concurrently(wait_for(self._workers[spec.name]) for spec in plan.workers)
        width = hidden_size(self._model_path)
        cost = Cost() if width is None else Cost(width)
        inner = config.actor.parallel.inner
        self._groups = {
            role: WorkerGroup(kind, self._workers_of(role), cost, inner=inner)
            for role, kind in TRAINING_ROLES.items()
            if role in plan.ranks
        }
        """Role -> group of ranks that compute together, the trainer's first."""
        self._replicas = [WorkerGroup(RolloutRole, [worker], cost) for worker in self._workers_of(ROLLOUT)]

    def _workers_of(self, role: str) -> list[Worker]:
        """Return the current workers of the ranks of ``role``."""
        return [worker_of(rank, self._workers.by_name) for rank in self._plan.ranks.get(role, ())]

    async def run_trainer(self) -> WorkerGroup:
        """Start only the trainer, without other workers."""
        await self._check_files()
        await self._build()
        self._tell("the model is loaded")
        return self._groups[ACTOR]

    async def run(self) -> Workers:
        """Start all engines on the workers, which load the model now."""
        config, plan, replicas = self._config, self._plan, self._replicas
        actor, logp = self._groups[ACTOR], self._groups.get(LOGP)
        await self._check_files()
        loading = now()
        hosts = [self._workers[spec.name] for spec in plan.workers if spec.role is EpisodeWorkerRole]
        store, episode_workers = await both(
            self._build(), concurrently(self._start_episode_worker(host, self.waits) for host in hosts)
        )
        self.timeouts.first_load_s = now() - loading
        self._tell("the models are loaded")
        computing = [spec.name for spec in plan.workers if not spec.beside]
        hardware = await concurrently(
            self._wait(f"{name} to describe its machine", self._workers[name].call("hardware")) for name in computing
        )
        dtype, computed = served_dtype(config, self._device), compute_dtype(config, self._device)
        self._dtypes = {ROLLOUT: dtype, LOGP: computed}
        holders = {group.name: (group.workers, dtype) for group in replicas}
        if logp is not None:
            holders[LOGP] = (logp.workers, computed)
        await self._lay_out(sorted({of for _, of in holders.values()}), self.waits)
        nbytes = [manifest.nbytes for manifest in self._manifests.values()]
        self.timeouts.weights_nbytes = max(self.timeouts.weights_nbytes, *nbytes)
        if plan.shared:
            self._paths = WithinProcesses(actor, self.timeouts, verify=config.param_update.verify)
        else:
            self._paths = WeightSync(
                actor,
                config,
                self._manifests,
                address=store,
                device=self._device,
                directory=self._directory,
                timeouts=self.timeouts,
            )
        paths = self._paths
        for name, (ranks, of) in holders.items():
            await self._wait(f"{name} to be reached for weights", paths.add(name, ranks, of))
        # Connect now and not at the first update: a failure must be known before anything is generated.
        await self._wait(f"{', '.join(holders)} to meet {actor.name} for weights", paths.reach([*holders]))
        self._rollouts = rollouts = await concurrently(map(self._serve, replicas))
        apart = []
        if logp is not None:
            await self._serve_logp(logp, self.waits)
            apart.append(LogpReceiver(logp, paths, config.param_update.verify))
        expected = None
        if config.param_update.verify:
            expected = await self._wait("the trainer to compute the log-probs of the probe", actor.probe())
        self._rounding = rounding = ProbeTolerance((dtype, computed), expected)
        probing = now()
        measuring = rounding.measure([*rollouts, *apart])
        await self._wait("receivers to compute the log-probs of the probe", measuring)
        self.timeouts.first_probe_s = now() - probing
        restartable = self._restartable()
        replace_replica = replace_episode_worker = None
        replaced: list[type] = []
        if not plan.shared:
            replace_replica = partial(self._workers.replace, start=self._replace, current=rollouts)
            replaced.append(RolloutRole)
        if self.cluster.separate_processes:
            others = [spec.device for spec in plan.workers if spec.role in (RolloutRole, FusedRole)]
            replace_episode_worker = partial(
                self._workers.replace, start=self._replace_episode_worker, current=episode_workers, others=others
            )
            replaced.append(EpisodeWorkerRole)
        restarted = plan.workers_of(*restartable)
        snapshots = None
        if config.trainer.snapshot is not None:
            snapshots = Snapshots(actor, lambda: [one.worker for one in episode_workers])
        critic, reference = (
            actor if role in plan.on_trainer_ranks else self._groups.get(role) for role in (CRITIC, REF)
        )
        train = TrainGroup(actor, paths, with_returns=critic is not None)
        own = None if logp is None else proxy(logp, ProximalEngine)
        return Workers(
            trainer=train,
            rollouts=rollouts,
            episode_workers=episode_workers,
            reference=None if reference is None else reference_of(reference),
            proximal=train if LOGP in plan.on_trainer_ranks else own,
            critic=None if critic is None else critic_of(critic),
            receivers=apart,
            on_trainer_ranks=plan.on_trainer_ranks,
            restartable=restartable,
            snapshots=snapshots,
            ranks=lambda: [worker for role in restartable for worker in self._groups[role].workers],
            needed=[
                self._workers[spec.name]
                for spec in plan.workers
                if spec.role not in replaced and spec.name not in restarted
            ],
            cluster=self.cluster,
            timeouts=self.timeouts,
            probe_tolerance=rounding.tolerance,
            hardware=dict(zip(computing, hardware, strict=True)),
            padded=await self._wait("actor-0 to say how it packs rows", actor.padded()),
            replace_replica=replace_replica,
            replace_episode_worker=replace_episode_worker,
            undo=self._undo,
        )

    async def _check_files(self) -> None:
        """Check that workers see the run's files, if they have processes of their own."""
        if self.cluster.separate_processes:
            self._files = SharedFilesystem(
                self._config, self.run_dir, self._model_path, self._directory, FileProbe(self.cluster.address)
            )
            await self._wait(
                "every worker to say which files it sees", self._files.check(self._plan, self._workers.by_name)
            )

    async def _build(self) -> Address | None:
        """Load all workers' models side by side. Returns the address of the trainer's store; None without one."""
        actor, *others = self._groups.values()
        meet = self.cluster.separate_processes
        store, *_ = await concurrently(
            _build(group, self.waits, meet=meet and group not in self._replicas)
            for group in (actor, *self._replicas, *others)
        )
        return store

    async def _lay_out(self, dtypes: Iterable[str], waits: StartWaits) -> None:
        """Let the trainer's current ranks lay out weights in ``dtypes`` and prepare to send updates."""
        actor = self._groups[ACTOR]
        for dtype in dtypes:
            layout = waits.wait(f"{actor.workers[0].name} to lay weights out", actor.layout(dtype))
            self._manifests[dtype] = await layout
            await waits.wait(f"{actor.name} to prepare updates", actor.open_route(dtype))

    async def _serve_logp(self, logp: WorkerGroup, waits: StartWaits) -> None:
        await waits.wait(f"{logp.name} to be ready", logp.serve(self._manifests[self._dtypes[LOGP]]))

    async def _start_episode_worker(self, worker: Worker, waits: StartWaits) -> RemoteEpisodeWorker:
        await waits.wait(f"{worker.name} to load the tokenizer", worker.call("build"))
        await worker.call("serve")
        return RemoteEpisodeWorker(worker)

    def _weights_directory(self) -> Path | None:
        """Return the directory where a transport stores files; None without files. A directory in memory is removed at
        the end.
        """
        leaves = TRANSPORTS[self._transport].leaves
        if leaves == "memory":
            if not SHARED_MEMORY.is_dir():
                raise ConfigError(
                    f"param_update.transport={self._transport} needs {SHARED_MEMORY}, which this system does not have; "
                    "choose another"
                )
            return self._undo.enter_context(directory_in_memory(SHARED_MEMORY))
        folder = self._config.param_update.directory or self.run_dir / "weights"
        return folder.absolute() if leaves == "files" else None

    async def _serve(self, group: WorkerGroup) -> RolloutReplica:
        """Start the engine of a replica. Raises `ConfigError` if it lacks a capability that the run needs."""
        (worker,), config = group.workers, self._config
        manifest = self._manifests[self._dtypes[ROLLOUT]]
        offset = await clock_offset(worker)
        able = await self._wait(f"{worker.name} to start its engine", group.serve(manifest, offset))
        asked = OnUpdate(config.async_training.on_update)
        if asked not in able.on_update:
            known = " or ".join(sorted(able.on_update)) or "no updates at all"
            raise ConfigError(
                f"async_training.on_update={asked}: the rollout engine of {worker.name} cannot do that; it can do "
                f"{known}. Set async_training.on_update (or mode) to one that it can do"
            )
        if config.cluster.placement == "shared" and not able.sleep:
            raise ConfigError(
                f"cluster.placement=shared: the rollout engine of {worker.name} cannot give its device back to the "
                "trainer; set cluster.placement=split (or another mode)"
            )
        return RolloutReplica(worker, able, concurrent(config), self._paths, config.param_update.verify)

    # ------------------------------------------------------------------------------------------ in place of lost ones

    async def _replace(self, worker: Worker, waits: StartWaits) -> RolloutReplica:
        """Start a launched replica that replaces another."""
        await worker.up()
        if self._files is not None:
            await self._files.check_later(worker, receives=True)
        group = WorkerGroup(RolloutRole, [worker])
        await group.build(None)
        await self._paths.add(worker.name, [worker], self._dtypes[ROLLOUT])
        replica = await self._serve(group)
        await waits.wait(f"{worker.name} to compute the log-probs of the probe", self._rounding.measure([replica]))
        return replica

    async def _replace_episode_worker(self, worker: Worker, waits: StartWaits) -> RemoteEpisodeWorker:
        """Start a launched episode worker that replaces another."""
        await worker.up()
        if self._files is not None:
            await self._files.check_later(worker, receives=False)
        return await self._start_episode_worker(worker, waits)

    def _restartable(self) -> dict[str, RestartableRanks]:
        """Return role -> ranks that may be restarted."""

        async def watch(group: WorkerGroup) -> NoReturn:
            await any_dies(self.cluster, group.workers)

        found = {}
        for role, group in self._groups.items():
            able = restarts_trainer if role in (ACTOR, CRITIC) else restarts_ranks  # the former redo batches
            if able(self._config):
                ranks = partial(getattr, group, "workers")  # looked up at each call: a restart replaces them
                replicas = (lambda: self._rollouts) if self._plan.shared and role == ACTOR else None
                found[role] = RestartableRanks(ranks, partial(watch, group), partial(self._restart, role), replicas)
        return found

    async def _restart(self, role: str) -> None:
        """Start new ranks of ``role`` with the initial model, and prepare them for updates. They connect to their
        receivers, or to the trainer, at the next update.
        """
        group, waits = self._groups[role], StartWaits()
        try:
            async with asyncio.timeout(self.timeouts.start_s):
                store = await self._replace_ranks(role, waits)
                if role == ACTOR:
                    await self._lay_out([*self._manifests], waits)
                    self._paths.trainer_restarted(store)
                    if self._plan.shared:
                        starts = concurrently(self._replace(worker, waits) for worker in self._workers_of(ROLLOUT))
                        # In place: `Workers` has this list.
                        self._rollouts[:] = await waits.wait("replicas in the same processes to start", starts)
                elif role == LOGP:
                    await self._paths.add(LOGP, group.workers, self._dtypes[LOGP])
                    await self._serve_logp(group, waits)
        except TimeoutError:
            raise StallError(
                f"{group.name}: not up again within {self.timeouts.start_limit()}: the driver waited for {waits}"
            ) from None

    async def _replace_ranks(self, role: str, waits: StartWaits) -> Address | None:
        """Replace the ranks of ``role`` by new ones, which load the model. They are fewer if some have no place and the
        model fits into fewer parts. Returns the address of their store.
        """
        group = self._groups[role]
        # All ranks, also living ones: a process group without one of its ranks cannot be used.
        await waits.wait(f"{group.name} to end", concurrently(worker.kill() for worker in group.workers))
        asked, too_few = self._plan.ranks[role], 0
        waiting = f"machines that are alive to have room for the ranks of {role}, or some of them"
        while True:
            ranks = await waits.wait(waiting, self._with_places(role, group, too_few))
            fewer = self._of_fewer(len(ranks), len(asked))
            for number, (rank, device) in enumerate(ranks.items()):
                await self._workers.launch_again(rank.worker, device, waits, **(fewer and fewer | {"rank": number}))
            workers = [worker_of(rank, self._workers.by_name) for rank in ranks]
            group.consist_of(workers)
            await concurrently(waits.wait(f"{worker.name} to start", worker.up()) for worker in workers)
            if (files := self._files) is not None:
                await concurrently(self._check_rank(files, worker, waits) for worker in workers)
            looking = self._too_full(role, workers, fewer["config"] if fewer else None)
            if (full := await waits.wait(f"{group.name} to say what memory is free", looking)) is None:
                return await _build(group, waits)
            lost, too_few = ", ".join(rank.name for rank in asked if rank not in ranks), len(ranks)
            waiting = f"a machine with room for {lost}: without it {full}"

    async def _too_full(self, role: str, workers: Sequence[Worker], config: Config | None) -> str | None:
        """Return a message if a rank of ``role`` needs more memory than its device has; None if all fit or sizes are
        unknown. ``config``: configuration of a reduced number of ranks; None: nothing is checked. On CPUs the ranks of
        a machine share its memory.
        """
        if config is None or (shape := self._shape) is None:
            return None
        found = await concurrently(worker.call("memory") for worker in workers)
        beside = Counter(machine for machine, _, _ in found)
        for worker, (machine, whole, free) in zip(workers, found, strict=True):
            on_cpu, count = whole is None, len(workers)
            takes = rank_memory(config, shape, role, count, on_cpu=on_cpu, device_bytes=whole).device
            if free is not None and takes > (has := room(free // beside[machine] if on_cpu else free)):
                return (
                    f"each of {count} ranks takes up to {takes / 1e9:.1f} GB of its device, and that of {worker.name} "
                    f"on {machine} has {has / 1e9:.1f} to spare; add a machine, or lower what a rank takes "
                    "(docs/training.md), and go on with `headway train --resume RUN`"
                )
        return None

    async def _check_rank(self, files: SharedFilesystem, worker: Worker, waits: StartWaits) -> None:
        """Raise `RunError` if a restarted rank does not see the run's files, and avoid its machine from then on."""
        try:
            await waits.wait(f"{worker.name} to say which files it sees", files.check_rank(worker))
        except UserError as blind:
            self._workers.avoid(worker.name)
            raise RunError(f"{blind}. It is not started there again") from blind

    async def _with_places(self, role: str, group: WorkerGroup, too_few: int) -> dict[Rank, int]:
        """Return rank -> device of the ranks of ``role`` to restart: all or, if some of ``group`` have no place for
        `ROOM_SHARE` of the time, as many as make a mesh. Waits until there are enough, and more than ``too_few``.
        """
        ranks, parallel = self._plan.ranks[role], self._config.actor.parallel
        inner, least = parallel.inner, parallel.least_ranks
        if self._plan.shared and role == ACTOR:  # a replica cannot go on without its rank
            least = len(ranks)
        elif parallel.replicate > 1:  # whole copies of the model: the remaining ones are unchanged
            inner = least = len(ranks) // parallel.replicate
        # Ranks that went on with fewer do not wait for the missing ones again.
        present = {worker.name.partition("+")[0] for worker in group.workers}
        here = [rank.worker for rank in ranks if rank.worker in present]
        others = [rank.worker for rank in ranks if rank.worker not in present]
        while True:
            places = await self._workers.places(here, self.timeouts.start_s * ROOM_SHARE)
            places |= await self._workers.places(others, PLACES_S)
            if len(places) < len(ranks):  # time has passed: the first places may be gone, too
                places = await self._workers.places([*places], PLACES_S)
            if len(found := in_meshes(ranks, places, inner=inner, least=least)) > too_few:
                return {rank: places[rank.worker] for rank in found}

    def _of_fewer(self, count: int, asked: int) -> dict[str, Any]:
        """Return the changed arguments for ``count`` ranks of a role, if fewer than ``asked``; else an empty dict."""
        if count == asked:
            return {}
        config = self._config
        if (copies := config.actor.parallel.replicate) > 1:
            parallel = config.actor.parallel.model_copy(update={"replicate": count * copies // asked})
            config = config.model_copy(update={"actor": config.actor.model_copy(update={"parallel": parallel})})
        return {"config": config, "world_size": count}


async def _build(group: WorkerGroup, waits: StartWaits, *, meet: bool = True) -> Address | None:
    """Load the model on the ranks of ``group``. With ``meet``, they connect at a store of their own. Returns the
    store's address; None without one.
    """
    store: Address | None = None
    if meet:
        store = await waits.wait(f"{group.workers[0].name} to open a store", group.open_store())
    await waits.wait(f"{group.name} to load the model", group.build(store))
    return store
