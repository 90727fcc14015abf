"""Entry to the cluster: from a configuration to running engines, on Ray or in this process, and back to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from headway.cluster.roles.weight_roles import transport_in
from headway.cluster.startup import Startup
from headway.cluster.worker_group import Worker, proxy
from headway.cluster.workers import Cluster, Workers, any_dies
from headway.config.schema import Config
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.training import SupervisedEngine
from headway.errors import StallError
from headway.runtime.user_code import resolve_spec

T = TypeVar("T")


async def start_backend(
    config: Config,
    *,
    model_path: str,
    run_dir: Path,
    total_optimizer_steps: int,
    warm: Awaitable[None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    cluster: Cluster | None = None,
) -> Workers:
    """Start all roles of ``config`` on ``cluster.backend``, each with the model at ``model_path``, serving version 0.

    Whatever fails, everything that was started is ended before the error is raised.

    Args:
        warm: ends when the model may be loaded; workers' processes start meanwhile, and no limit of time counts.
        tell: called with what is up, each time that something is.
        cluster: one that was begun; None: one is made here.

    Raises:
        ConfigError: a Ray address that does not answer; a transport, placement or ``on_update`` that cannot be had.
        ModelError: the model at ``model_path`` cannot be opened.
        StallError: not everything was up within `Timeouts.start_s`; the message says what was waited for.
    """
    undo = AsyncExitStack()
    startup = Startup(
        _with_absolute_files(config),
        cluster or make_cluster(config, run_dir, model_path),
        undo,
        model_path=model_path,
        total_optimizer_steps=total_optimizer_steps,
        run_dir=run_dir,
        tell=tell,
    )
    try:
        return await _up(startup, startup.launch(), startup.run, warm)
    except BaseException:  # a start that is cancelled, too, has workers to end
        await undo.aclose()
        raise


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """Training ranks without any other worker."""

    engine: SupervisedEngine
    workers: Sequence[Worker]
    cluster: Cluster
    timeouts: Timeouts
    """Time limits of the run."""

    async def watch(self) -> NoReturn:
        """Wait until the cluster or a rank ends, even while no call is under way; raise `WorkerDied`."""
        await any_dies(self.cluster, self.workers)


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
    async with AsyncExitStack() as stack:
        cluster = make_cluster(config, run_dir, model_path)
        startup = Startup(
            _with_absolute_files(config),
            cluster,
            stack,
            model_path=model_path,
            total_optimizer_steps=total_optimizer_steps,
            run_dir=run_dir,
            tell=tell,
        )
        ranks = await _up(startup, startup.launch(trainer_only=True), startup.run_trainer)
        yield TrainerRanks(proxy(ranks, SupervisedEngine), ranks.workers, cluster, startup.timeouts)


async def _up(
    startup: Startup,
    launching: Awaitable[None],
    run: Callable[[], Awaitable[T]],
    warm: Awaitable[None] | None = None,
) -> T:
    """Wait until the workers are launched and run, and say, where that takes too long, what it waited for."""
    start_s = startup.timeouts.start_s
    try:
        async with asyncio.timeout(start_s) as limit:
            await launching
            # Before the limit is lifted below: `reschedule(None)` forgets when it was.
            left = (limit.when() or 0.0) - asyncio.get_running_loop().time()
            left += startup.timeouts.start_s - start_s  # the device is known now, on which kernels are compiled
            if warm is not None:
                limit.reschedule(None)
                await warm
            limit.reschedule(asyncio.get_running_loop().time() + left)
            return await run()
    except StallError:  # a TimeoutError that knows more than the next
        raise
    except TimeoutError:
        raise StallError(
            f"not everything was up within {startup.timeouts.start_limit()}: the driver waited for {startup.waits}. "
            f"Worker logs are in {startup.run_dir / 'logs'}; where nothing is wrong there, raise the limit"
        ) from None


def _with_absolute_files(config: Config) -> Config:
    """Return the configuration for workers, which run in another directory: the user's functions by absolute paths."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss.model_copy(update={"loss_mode": resolve_spec(algorithm.policy_loss.loss_mode)})
    changes: dict[str, object] = {"adv_estimator": resolve_spec(algorithm.adv_estimator), "policy_loss": loss}
    changes["rollout_correction"] = tuple(
        one.model_copy(update={"name": resolve_spec(str(one.name))}) for one in algorithm.corrections
    )
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=changes)})


@contextmanager
def begun_cluster(config: Config, run_dir: Path, model_path: str) -> Iterator[Cluster]:
    """Begin to start the cluster of ``config`` beside the block. What is left of it at the block's end is stopped."""
    cluster = make_cluster(config, run_dir, model_path)
    try:
        cluster.begin()
        yield cluster
    finally:
        asyncio.run(cluster.stop())


def make_cluster(config: Config, run_dir: Path, model_path: str) -> Cluster:
    """Return the cluster of ``cluster.backend``. Ray is imported only where it is asked for."""
    match config.cluster.backend:
        case "ray":
            from headway.cluster.on_ray.ray_cluster import RayCluster

            stored = TRANSPORTS[transport_in(config)].leaves == "objects"
            return RayCluster(config, run_dir, model_nbytes(model_path) if stored else 0)
        case "inline":
            from headway.cluster.inline_cluster import InlineCluster

            return InlineCluster(config)
