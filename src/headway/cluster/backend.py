"""Entry to the cluster: from a configuration to running engines, on Ray or in this process, and back to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from headway.cluster.machine.worker_setup import Hardware
from headway.cluster.profiled_processes import ProfiledProcess, profiled
from headway.cluster.proxy import proxy
from headway.cluster.remote_episode_worker import RemoteEpisodeWorker
from headway.cluster.replacements import Replacements
from headway.cluster.startup import Cluster, Launched, Startup
from headway.cluster.weight_sync.probe_tolerance import ProbeTolerance
from headway.cluster.worker_engines import RolloutReplica, TrainGroup, critic_of, reference_of
from headway.cluster.worker_group import Worker
from headway.config.schema import Config
from headway.config.sizing.placement import LOGP
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS, transport_of
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol
from headway.data.interfaces.rollout import RolloutEngine
from headway.data.interfaces.training import CriticEngine, LogProbEngine, ProximalEngine, SupervisedEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.errors import StallError
from headway.runtime.progress import Living
from headway.runtime.task_groups import concurrently
from headway.runtime.user_code import names_user_code, resolve_spec

T = TypeVar("T")


@dataclass(slots=True)
class Workers:
    """Workers and engines of a run. `watch` raises when a part of it dies; `close` ends it."""

    train: TrainGroup
    rollouts: list[RolloutReplica]
    """Current replicas: those of the start, with lost ones exchanged for their replacements."""
    episode_workers: list[RemoteEpisodeWorker]
    """Current episode workers of the run's groups, as with replicas."""
    ref: LogProbEngine | None
    """Engine of the reference policy; None where the algorithm asks for none."""
    proximal: ProximalEngine | None
    """Engine that recomputes log π_prox; None where none does."""
    critic: CriticEngine | None
    """Engine of the critic; None where the algorithm asks for none."""
    receivers: Sequence[PolicyReceiver]
    """Workers that hold a copy of the policy and generate nothing."""
    inside_fetch: frozenset[str]
    """Roles, of ``ref``, ``logp`` and ``critic``, that run on the trainer's ranks."""
    needed: Sequence[Worker]
    """Workers each of which the run cannot go on without, for supervision."""
    cluster: Cluster
    timeouts: Timeouts
    """Time limits for the model's size and for what was measured at the start."""
    rounding: ProbeTolerance
    """Tolerances, in nats, by which the log-probs of each receiver may differ from the trainer's by rounding."""
    hardware: Mapping[str, Hardware]
    """Hardware that each worker computes on, by the worker's name."""
    padded: str | None
    """Reason why the policy's rows are padded and not packed; None where they are packed."""
    replacements: Replacements[RolloutReplica] | None
    replacements_of_episode_workers: Replacements[RemoteEpisodeWorker] | None
    undo: AsyncExitStack

    async def watch(self) -> NoReturn:
        """Wait until the cluster or a needed worker ends, even while no call is under way; raise `WorkerDied`."""
        await concurrently([self.cluster.died(), *(worker.died() for worker in self.needed)])
        raise AssertionError("unreachable: died() never returns")

    def living(self) -> list[Living]:
        """Return every worker once, for heartbeats. A replica in the process of a training rank counts as that rank."""
        episode_workers = self.episode_workers if self.replaces_episode_workers else ()
        return [*self.needed, *(self.rollouts if self.replaces else ()), *episode_workers]

    def profiled(self, *, replicas: bool) -> list[ProfiledProcess]:
        """Return the processes that compute, once each: those of the ranks and, with ``replicas``, of their engines."""
        episode_workers = {episode_worker.name for episode_worker in self.episode_workers}
        computing = [worker for worker in self.needed if worker.name not in episode_workers]
        if replicas:
            computing += [replica.worker for replica in self.rollouts]
        return profiled(computing, separate_processes=self.cluster.separate_processes)

    @property
    def replaces(self) -> bool:
        """True where a lost replica can be replaced."""
        return self.replacements is not None

    async def replace_replica(self, lost: str) -> RolloutEngine:
        """Start a replica in the place of ``lost``; it serves nothing before it has received a version."""
        assert self.replacements is not None, "ask `replaces` first"
        replica = await self.replacements.start(lost, self.rounding.measure)
        self.rollouts[:] = [*(one for one in self.rollouts if one.name != lost), replica]
        return replica

    async def watch_replica(self, replica: RolloutEngine) -> NoReturn:
        """Wait until the replica's process ends, and raise `WorkerDied`."""
        await next(own for own in self.rollouts if own.name == replica.name).died()

    @property
    def replaces_episode_workers(self) -> bool:
        """True where a lost episode worker can be replaced."""
        return self.replacements_of_episode_workers is not None

    async def replace_episode_worker(self, lost: str) -> EpisodeWorkerProtocol:
        """Start an episode worker in the place of ``lost``, which knows no replica yet."""
        assert self.replacements_of_episode_workers is not None, "ask `replaces_episode_workers` first"
        episode_worker = await self.replacements_of_episode_workers.start(lost)
        self.episode_workers[:] = [*(one for one in self.episode_workers if one.name != lost), episode_worker]
        return episode_worker

    async def watch_episode_worker(self, episode_worker: EpisodeWorkerProtocol) -> NoReturn:
        """Wait until the episode worker's process ends, or its machine does not answer, and raise `WorkerDied`."""
        await next(own for own in self.episode_workers if own.name == episode_worker.name).died()

    async def close(self) -> None:
        """End all workers and leave the cluster; returns when no process is left. A second call does nothing."""
        await self.undo.aclose()


async def start_backend(
    config: Config,
    *,
    model_path: str,
    run_dir: Path,
    total_optimizer_steps: int,
    warm: Awaitable[None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Workers:
    """Start all roles of ``config`` on ``cluster.backend``, each with the model at ``model_path``, serving version 0.

    Whatever fails, everything that was started is ended before the error is raised.

    Args:
        warm: ends when the model may be loaded; workers' processes start meanwhile, and no limit of time counts.
        tell: called with what is up, each time that something is.

    Raises:
        ConfigError: a Ray address that does not answer; a transport, placement or ``on_update`` that cannot be had.
        ModelError: the model at ``model_path`` cannot be opened.
        StallError: not everything was up within `Timeouts.start_s`; the message says what was waited for.
    """
    cluster, startup = _startup(config, model_path, run_dir, total_optimizer_steps, tell)
    async with AsyncExitStack() as stack:
        started = await _up(startup, run_dir, startup.run, startup.launch(stack), warm)
        train = TrainGroup(started.actor, started.paths, with_returns=started.critic is not None)
        undo = stack.pop_all()
        workers = Workers(
            train=train,
            rollouts=list(started.rollouts),
            episode_workers=list(started.episode_workers),
            ref=reference_of(started.ref) if started.ref is not None else None,
            proximal=proxy(started.logp, ProximalEngine)
            if started.logp
            else train
            if LOGP in started.inside_fetch
            else None,
            critic=critic_of(started.critic) if started.critic is not None else None,
            receivers=started.receivers,
            inside_fetch=started.inside_fetch,
            needed=started.needed,
            cluster=cluster,
            timeouts=startup.timeouts,
            rounding=started.rounding,
            hardware=started.hardware,
            padded=started.padded,
            replacements=started.replacements,
            replacements_of_episode_workers=started.replacements_of_episode_workers,
            undo=undo,
        )
        for replacements in (workers.replacements, workers.replacements_of_episode_workers):
            if replacements is not None:
                replacements.ends_with(undo)
        return workers


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """Training ranks without any other worker."""

    engine: SupervisedEngine
    separate_processes: bool
    """True where the ranks are processes of their own, which read tokens from files."""
    workers: Sequence[Worker]
    cluster: Cluster
    timeouts: Timeouts
    """Time limits of the run."""

    async def watch(self) -> NoReturn:
        """Wait until the cluster or a rank ends, even while no call is under way; raise `WorkerDied`."""
        await concurrently([self.cluster.died(), *(worker.died() for worker in self.workers)])
        raise AssertionError("unreachable: died() never returns")


@asynccontextmanager
async def start_trainer(
    config: Config,
    *,
    model_path: str,
    run_dir: Path,
    total_optimizer_steps: int,
    tell: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[TrainerRanks]:
    """Start the training ranks of ``config`` alone, with the model at ``model_path``, until the block ends.

    Raises as `start_backend` does.
    """
    cluster, startup = _startup(config, model_path, run_dir, total_optimizer_steps, tell)
    async with AsyncExitStack() as stack:
        ranks = await _up(startup, run_dir, startup.run_trainer, startup.launch(stack, trainer_only=True))
        yield TrainerRanks(
            proxy(ranks, SupervisedEngine), cluster.separate_processes, ranks.workers, cluster, startup.timeouts
        )


def _startup(
    config: Config, model_path: str, run_dir: Path, total_optimizer_steps: int, tell: Callable[[str], None]
) -> tuple[Cluster, Startup]:
    model_path = _for_any_directory(model_path)
    cluster = make_cluster(config, run_dir, model_path)
    startup = Startup(
        _with_absolute_files(config),
        cluster,
        model_path=model_path,
        total_optimizer_steps=total_optimizer_steps,
        run_dir=run_dir,
        tell=tell,
    )
    return cluster, startup


async def _up(
    startup: Startup,
    run_dir: Path,
    run: Callable[[Launched], Awaitable[T]],
    launching: Awaitable[Launched],
    warm: Awaitable[None] | None = None,
) -> T:
    """Wait until the workers are launched and run, and say, where that takes too long, what it waited for."""
    start_s = startup.timeouts.start_s
    try:
        async with asyncio.timeout(start_s) as limit:
            launched = await launching
            left = (limit.when() or 0.0) - asyncio.get_running_loop().time()
            left += startup.timeouts.start_s - start_s  # the device is known now, on which kernels are compiled
            if warm is not None:
                limit.reschedule(None)
                await warm
            limit.reschedule(asyncio.get_running_loop().time() + left)
            return await run(launched)
    except StallError:  # a TimeoutError that knows more than the next
        raise
    except TimeoutError:
        raise StallError(
            f"not everything was up within {startup.timeouts.start_limit()}: the driver waited for "
            f"{startup.waiting_for}. Worker logs are in {run_dir / 'logs'}; where nothing is wrong there, "
            "as on a busy machine, raise the limit"
        ) from None


def _for_any_directory(model_path: str) -> str:
    """Make a folder's path absolute: workers of a cluster that was joined run in another directory than this process.

    Anything else, such as a model's name on the hub, is returned unchanged.
    """
    folder = Path(model_path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model_path


def _with_absolute_files(config: Config) -> Config:
    """Return the configuration for workers, which run in another directory: the user's functions by absolute paths."""

    def absolute(spec: str) -> str:
        return resolve_spec(spec) if names_user_code(spec) else spec

    algorithm = config.algorithm
    loss = algorithm.policy_loss.model_copy(update={"loss_mode": absolute(algorithm.policy_loss.loss_mode)})
    changes: dict[str, object] = {"adv_estimator": absolute(algorithm.adv_estimator), "policy_loss": loss}
    correction = algorithm.rollout_correction
    also = tuple(one.model_copy(update={"name": one.name and absolute(one.name)}) for one in correction.also)
    first = {"name": correction.name and absolute(correction.name), "also": also}
    changes["rollout_correction"] = correction.model_copy(update=first)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=changes)})


def _weights_bytes(config: Config, model_path: str) -> int:
    """Return the bytes of a version in the object store; 0 where versions go another way, or no folder is there."""
    shared = config.cluster.placement == "shared"
    transport = transport_of(config.param_update.transport, backend=config.cluster.backend, shared=shared)
    if TRANSPORTS[transport].leaves != "objects":
        return 0
    return model_nbytes(model_path)


def make_cluster(config: Config, run_dir: Path, model_path: str) -> Cluster:
    """Return the cluster of ``cluster.backend``. Ray is imported only where it is asked for."""
    match config.cluster.backend:
        case "ray":
            from headway.cluster.on_ray.ray_cluster import RayCluster

            return RayCluster(config, run_dir, _weights_bytes(config, model_path))
        case "inline":
            from headway.cluster.inline_cluster import InlineCluster

            return InlineCluster(config)
