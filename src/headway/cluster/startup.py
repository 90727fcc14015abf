"""Start of a run, from a configuration to running engines, step by step, the same on every backend.

launch:  connect ─▶ plan ─▶ reserve ─▶ launch all ─▶ up
run:     see the same files ─▶ build (models load side by side) ─▶ meet for weights ─▶ serve

Ranks that compute together meet at a store in their rank zero, so that no role depends on the processes of another one.
Ranks in the places of lost ones start as the first ones did, and are then ready for the next update.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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
from headway.cluster.worker_plan import Rank, in_meshes, make_groups, plan_cluster, trainer_alone, worker_of
from headway.cluster.workers import Cluster, LaunchedWorkers, StartWaits, Workers, any_dies
from headway.config.schema import Config
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, concurrent, resolve_placement
from headway.config.sizing.process_memory import room
from headway.config.sizing.run_memory import rank_memory, restarts_ranks, restarts_trainer
from headway.config.sizing.timeouts import PLACES_S, ROOM_SHARE, Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS
from headway.data.assignment import Cost
from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import ProximalEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.devices import kind_of
from headway.engines.weights.protocols import Address
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, RunError, StallError, UserError
from headway.models.model_folder import hidden_size, text_config
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.rank_restarts import RestartableRanks
from headway.runtime.task_groups import both, concurrently

T = TypeVar("T")


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
        """Prepare a start. ``undo`` gets what has to be undone, also where the start fails. ``tell`` is called with
        what is up, in words, each time that something is.
        """
        self._config = config
        self._cluster = cluster
        self._undo = undo
        self._model_path = model_path
        self._total_optimizer_steps = total_optimizer_steps
        self._run_dir = run_dir
        self._tell = tell
        self.waits = StartWaits()
        """Those workers that have not answered yet."""
        self._wait = self.waits.wait
        self._transport = transport_in(config)
        known = Path(model_path).expanduser() / "config.json"
        self._shape = ModelShape.of(text_config(known)) if known.is_file() else None
        workers = sum(len(devices) for devices in resolve_placement(config).devices.values())
        self.timeouts = Timeouts.of(config, model_nbytes(model_path), workers=workers)
        """Time limits of the run, which follow what is known and measured by now."""
        self._workers = LaunchedWorkers(cluster, self.timeouts)
        self._files: SharedFilesystem | None = None
        """None where workers are no processes of their own."""

    async def launch(self, *, trainer_only: bool = False) -> None:
        """Start the workers' processes, all or only the trainer's."""
        config = self._config
        # Before connecting: Ray's processes are there from its middle on, and an interrupt may come then.
        self._undo.push_async_callback(self._cluster.stop)
        self._device = await self._wait("the cluster to answer", self._cluster.connect())
        self.timeouts.on_gpu = kind_of(self._device).flex_attention
        tokens = None
        if self._cluster.separate_processes:
            self._tell("Ray is up")
            tokens = TokenPlace(self._cluster.address, self._undo.enter_context(token_directory(config)))
        remove_abandoned(SHARED_MEMORY)  # what killed runs left there, whether this run uses it or not
        plan = plan_cluster(
            config,
            resolve_placement(config),
            model_path=self._model_path,
            total_optimizer_steps=self._total_optimizer_steps,
            logs=(self._run_dir / "logs").absolute(),
            journal=(self._run_dir / "journal").absolute(),
            tokens=tokens,
        )
        self._plan = plan = trainer_alone(plan) if trainer_only else plan
        await self._wait("devices to be free", self._cluster.reserve(plan))
        self._directory = self._weights_directory()  # made before the workers: it is removed when they have ended
        self._undo.push_async_callback(self._workers.kill)  # pushed after the cluster's `stop`: undone before it
        for spec in plan.workers:
            self._workers.launch(spec)
        up: list[str] = []

        async def wait_for(worker: Worker) -> None:
            await self._wait(f"{worker.name} to start", worker.up())
            up.append(worker.name)
            if self._cluster.separate_processes:
                self._tell(f"{worker.name} is up, {len(up)} of {len(plan.workers)}")

        await concurrently(wait_for(self._workers[spec.name]) for spec in plan.workers)
        width = hidden_size(self._model_path)
        cost = Cost() if width is None else Cost(width)
        self._groups = make_groups(plan, self._workers.by_name, cost, config.actor.parallel.inner)

    async def run_trainer(self) -> WorkerGroup:
        """Start the trainer alone; there are no other workers."""
        await self._check_files()
        await self._build()
        self._tell("the model is loaded")
        return self._groups.actor

    async def run(self) -> Workers:
        """Start all engines on the workers, which load the model now."""
        config, plan, groups = self._config, self._plan, self._groups
        await self._check_files()
        loading = now()
        store, episode_workers = await both(self._build(), self._start_episode_workers())
        self.timeouts.first_load_s = now() - loading
        self._tell("the models are loaded")
        computing = [spec.name for spec in plan.workers if not spec.beside]
        hardware = await concurrently(
            self._wait(f"{name} to describe its machine", self._workers[name].call("hardware")) for name in computing
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
        if plan.shared:
            paths = WithinProcesses(groups.actor, self.timeouts, verify=config.param_update.verify)
        else:
            paths = WeightSync(
                groups.actor,
                config,
                manifests,
                address=store,
                device=self._device,
                directory=self._directory,
                timeouts=self.timeouts,
            )
        for name, (ranks, of) in holders.items():
            await self._wait(f"{name} to be reached for weights", paths.add(name, ranks, of))
        # Meet now and not at the first update: ends that cannot must be known before anything is generated.
        await self._wait(f"{', '.join(holders)} to meet {groups.actor.name} for weights", paths.reach([*holders]))
        rollouts = await concurrently(self._serve(group, manifests[dtype], paths) for group in groups.rollouts)
        apart = []
        if groups.logp is not None:
            await self._wait(f"{groups.logp.name} to be ready", groups.logp.serve(manifests[computed]))
            apart.append(LogpReceiver(groups.logp, paths, config.param_update.verify))
        rounding = await self._measured([*rollouts, *apart], (dtype, computed))
        replace_replica = replace_episode_worker = None
        replaced: list[type] = []
        start = partial(self._replace, manifest=manifests[dtype], paths=paths)

        async def start_with_ranks() -> None:
            hosted = [worker_of(rank, self._workers.by_name) for rank in plan.rollout]
            rollouts[:] = await concurrently(start(worker) for worker in hosted)  # in place: `Workers` has this list
            await rounding.measure(rollouts)

        within = (start_with_ranks, lambda: rollouts) if plan.shared else None
        restartable = self._restartable(paths, manifests, computed, within)
        if not plan.shared:
            replace_replica = partial(self._workers.replace, start=start, current=rollouts, measure=rounding.measure)
            replaced.append(RolloutRole)
        if self._cluster.separate_processes:
            others = [spec.device for spec in plan.workers if spec.role in (RolloutRole, FusedRole)]
            replace_episode_worker = partial(
                self._workers.replace, start=self._replace_episode_worker, current=episode_workers, others=others
            )
            replaced.append(EpisodeWorkerRole)
        restarted = {worker.name for role in restartable for worker in groups.by_role[role].workers}
        snapshots = None
        if config.trainer.snapshot is not None:
            snapshots = Snapshots(groups.actor, lambda: [keeper.worker for keeper in episode_workers])
        critic = groups.actor if CRITIC in plan.on_trainer_ranks else groups.critic
        reference = groups.actor if REF in plan.on_trainer_ranks else groups.ref
        train = TrainGroup(groups.actor, paths, with_returns=critic is not None)
        own = None if groups.logp is None else proxy(groups.logp, ProximalEngine)
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
            ranks=lambda: [worker for role in restartable for worker in groups.by_role[role].workers],
            needed=[
                self._workers[spec.name]
                for spec in plan.workers
                if spec.role not in replaced and spec.name not in restarted
            ],
            cluster=self._cluster,
            timeouts=self.timeouts,
            probe_tolerance=rounding.tolerance,
            hardware=dict(zip(computing, hardware, strict=True)),
            padded=await self._wait("actor-0 to say how it packs rows", groups.actor.padded()),
            replace_replica=replace_replica,
            replace_episode_worker=replace_episode_worker,
            undo=self._undo,
        )

    async def _check_files(self) -> None:
        """Check that workers see the files of the run, where they are processes of their own."""
        if self._cluster.separate_processes:
            self._files = SharedFilesystem(
                self._config, self._run_dir, self._model_path, self._directory, FileProbe(self._cluster.address)
            )
            await self._wait(
                "every worker to say which files it sees", self._files.check(self._plan, self._workers.by_name)
            )

    async def _measured(self, receivers: Sequence[PolicyReceiver], dtypes: tuple[str, str]) -> ProbeTolerance:
        """Measure the receivers' rounding before any update. Raises `ModelError` for more than rounding."""
        if not self._config.param_update.verify:
            return ProbeTolerance(dtypes, None)
        expected = await self._wait("the trainer to compute the log-probs of the probe", self._groups.actor.probe())
        rounding = ProbeTolerance(dtypes, expected)
        probing = now()
        await self._wait("receivers to compute the log-probs of the probe", rounding.measure(receivers))
        self.timeouts.first_probe_s = now() - probing
        return rounding

    async def _build(self) -> Address | None:
        """Let all workers load their models side by side. Returns the address of the trainer's store."""
        separate, groups = self._cluster.separate_processes, self._groups
        stores = await concurrently(
            _build(group, self.waits, meet=separate and group not in groups.rollouts) for group in groups.all
        )
        return stores[0]

    async def _start_episode_workers(self) -> list[RemoteEpisodeWorker]:
        workers = [self._workers[spec.name] for spec in self._plan.workers if spec.role is EpisodeWorkerRole]
        await concurrently(
            self._wait(f"{worker.name} to load the tokenizer", worker.call("build")) for worker in workers
        )
        await concurrently(worker.call("serve") for worker in workers)
        return [RemoteEpisodeWorker(worker) for worker in workers]

    def _weights_directory(self) -> Path | None:
        """Return the directory where a transport that uses files leaves them. One in memory is removed at the end."""
        match TRANSPORTS[self._transport].leaves:
            case "files":
                return (self._config.param_update.directory or self._run_dir / "weights").absolute()
            case "memory":
                if not SHARED_MEMORY.is_dir():
                    raise ConfigError(
                        f"param_update.transport={self._transport}: this system has no {SHARED_MEMORY}; choose another"
                    )
                return self._undo.enter_context(directory_in_memory(SHARED_MEMORY))
            case _:
                return None

    async def _serve(self, group: WorkerGroup, manifest: Manifest, paths: WeightPaths) -> RolloutReplica:
        """Start the engine of a replica. Raises `ConfigError` where it lacks what the run asks of it."""
        (worker,), config = group.workers, self._config
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
        return RolloutReplica(worker, able, concurrent(config), paths, config.param_update.verify)

    # ------------------------------------------------------------------------------------------ in place of lost ones

    async def _replace(self, worker: Worker, manifest: Manifest, paths: WeightPaths) -> RolloutReplica:
        """Start a launched replica that takes the place of another."""
        await worker.up()
        if self._files is not None:
            await self._files.check_later(worker, receives=True)
        group = WorkerGroup(RolloutRole, [worker])
        await group.build(None)
        await paths.add(worker.name, [worker], await group.served_dtype())
        return await self._serve(group, manifest, paths)

    async def _replace_episode_worker(self, worker: Worker) -> RemoteEpisodeWorker:
        """Start a launched episode worker that takes the place of another."""
        await worker.up()
        if self._files is not None:
            await self._files.check_later(worker, receives=False)
        await worker.call("build")
        await worker.call("serve")
        return RemoteEpisodeWorker(worker)

    def _restartable(
        self,
        paths: WeightPaths,
        manifests: dict[str, Manifest],
        computed: str,
        within: tuple[Callable[[], Awaitable[None]], Callable[[], Sequence[RolloutReplica]]] | None,
    ) -> dict[str, RestartableRanks]:
        """Return the ranks that may be started again, by role.

        Args:
            manifests: layouts of the weights by dtype.
            computed: dtype in which log-probs are recomputed.
            within: starts the replicas in the processes of the trainer's ranks, and returns them; None without any.
        """

        async def watch(group: WorkerGroup) -> NoReturn:
            await any_dies(self._cluster, group.workers)

        async def restart(role: str, group: WorkerGroup) -> None:
            """Start other ranks, with the initial model, and prepare them for updates, at the next of which they meet
            their receivers or the trainer.
            """
            waits = StartWaits()
            try:
                async with asyncio.timeout(self.timeouts.start_s):
                    store = await self._restart(role, group, waits)
                    if role == ACTOR:
                        for dtype in manifests:
                            # In place: `paths` has this mapping. As many ranks send as there are now.
                            layout = waits.wait(f"{group.name} to lay weights out", group.layout(dtype))
                            manifests[dtype] = await layout
                            await waits.wait(f"{group.name} to prepare updates", group.open_route(dtype))
                        paths.trainer_restarted(store)
                        if within is not None:
                            await waits.wait("replicas in the same processes to start", within[0]())
                    elif role == LOGP:
                        await paths.add(LOGP, group.workers, computed)
                        await waits.wait(f"{group.name} to be ready", group.serve(manifests[computed]))
            except TimeoutError:
                raise StallError(
                    f"{group.name}: not up again within {self.timeouts.start_limit()}: the driver waited for {waits}"
                ) from None

        found = {}
        for role, group in self._groups.by_role.items():
            able = restarts_trainer if role in (ACTOR, CRITIC) else restarts_ranks  # the former redo batches
            if able(self._config):
                ranks = partial(getattr, group, "workers")  # looked up at each call: a restart exchanges them
                replicas = within[1] if within is not None and role == ACTOR else None
                found[role] = RestartableRanks(ranks, partial(watch, group), partial(restart, role, group), replicas)
        return found

    async def _restart(self, role: str, group: WorkerGroup, waits: StartWaits) -> Address | None:
        """End the ranks of ``group``, and let others in their places load the model: fewer of them where there is no
        place for all, and room for the model in fewer parts. Returns the address of their store.
        """
        # All of them, also those that live: a process group that has lost a rank serves no more.
        await waits.wait(f"{group.name} to end", concurrently(worker.kill() for worker in group.workers))
        asked, too_few = self._plan.ranks(role), 0
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
        """Say what ranks of ``role`` take of a device that has less. ``config``: that of ranks that are fewer than was
        asked for. None where each has room, or that is not known. On CPUs the ranks of a machine share its memory.
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
        """Raise `RunError` where a rank that was started again does not see the run's files, and avoid its machine."""
        try:
            await waits.wait(f"{worker.name} to say which files it sees", files.check_rank(worker))
        except UserError as blind:
            self._workers.avoid(worker.name)
            raise RunError(f"{blind}. It is not started there again") from blind

    async def _with_places(self, role: str, group: WorkerGroup, too_few: int) -> dict[Rank, int]:
        """Return the ranks of ``role`` that are started again, each with its device: all of them or, where some of
        ``group`` have no place for `ROOM_SHARE` of the time, as many others as make a mesh. Waits until there are so
        many, and more than ``too_few``.
        """
        ranks, parallel = self._plan.ranks(role), self._config.actor.parallel
        inner, least = parallel.inner, parallel.least_ranks
        if self._plan.shared and role == ACTOR:  # a replica cannot go on without its rank
            least = len(ranks)
        elif parallel.replicate > 1:  # whole copies of the model: each of those that are left stays as it is
            inner = least = len(ranks) // parallel.replicate
        # Ranks that went on without others do not wait for these again.
        present = {worker.name.partition("+")[0] for worker in group.workers}
        here = [rank.worker for rank in ranks if rank.worker in present]
        others = [rank.worker for rank in ranks if rank.worker not in present]
        while True:
            places = await self._workers.places(here, self.timeouts.start_s * ROOM_SHARE)
            places |= await self._workers.places(others, PLACES_S)
            if len(places) < len(ranks):  # time has passed: what was found first may be gone, too
                places = await self._workers.places([*places], PLACES_S)
            if len(found := in_meshes(ranks, places, inner=inner, least=least)) > too_few:
                return {rank: places[rank.worker] for rank in found}

    def _of_fewer(self, count: int, asked: int) -> dict[str, Any]:
        """Return what differs for a role's ranks where there are ``count``, fewer than ``asked``; nothing for all."""
        if count == asked:
            return {}
        config = self._config
        if (copies := config.actor.parallel.replicate) > 1:
            parallel = config.actor.parallel.model_copy(update={"replicate": count * copies // asked})
            config = config.model_copy(update={"actor": config.actor.model_copy(update={"parallel": parallel})})
        return {"config": config, "world_size": count}


async def _build(group: WorkerGroup, waits: StartWaits, *, meet: bool = True) -> Address | None:
    """Let the ranks of ``group`` load their model; those that compute together ``meet`` at a store of their own.
    Returns its address; None without one.
    """
    store: Address | None = None
    if meet:
        store = await waits.wait(f"{group.workers[0].name} to open a store", group.open_store())
    await waits.wait(f"{group.name} to load the model", group.build(store))
    return store
