"""Entry to the cluster: starts the engines of a configuration, on Ray or in this process, and ends them."""

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

    If anything fails, everything that was started is ended before the error is raised.

    Args:
        warm: awaitable that ends when the model may be loaded. Workers' processes start meanwhile, and the time
        limit does not run.
        tell: function called with a text each time that a part is up.
        cluster: a cluster whose start has begun; None to make one here.

    Raises:
        ConfigError: the Ray address does not answer, or the transport, placement or ``on_update`` is not available.
        ModelError: the model at ``model_path`` cannot be opened.
        StallError: a part was not up within `Timeouts.start_s`; the message names it.
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
    except BaseException:  # also a cancelled start has workers to end
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
    """Wait until the workers are launched and run. If that takes too long, the error names the missing ones."""
    start_s = startup.timeouts.start_s
    try:
        async with asyncio.timeout(start_s) as limit:
            await launching
            # Before the limit is lifted below: `reschedule(None)` forgets when it was.
            left = (limit.when() or 0.0) - asyncio.get_running_loop().time()
            left += startup.timeouts.start_s - start_s  # the device is known now, and so the time to compile kernels
            if warm is not None:
                limit.reschedule(None)
                await warm
            limit.reschedule(asyncio.get_running_loop().time() + left)
            return await run()
    except StallError:  # a TimeoutError with a better message than the next
        raise
    except TimeoutError:
        raise StallError(
            f"not everything was up within {startup.timeouts.start_limit()}: the driver waited for {startup.waits}. "
            f"Worker logs are in {startup.run_dir / 'logs'}; where nothing is wrong there, raise the limit"
        ) from None


def _with_absolute_files(config: Config) -> Config:
    """Return the configuration with absolute paths of the user's functions, for workers in another directory."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss.model_copy(update={"loss_mode": resolve_spec(algorithm.policy_loss.loss_mode)})
    changes: dict[str, object] = {"adv_estimator": resolve_spec(algorithm.adv_estimator), "policy_loss": loss}
    changes["rollout_correction"] = tuple(
        one.model_copy(update={"name": resolve_spec(str(one.name))}) for one in algorithm.corrections
    )
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=changes)})


@contextmanager
def begun_cluster(config: Config, run_dir: Path, model_path: str) -> Iterator[Cluster]:
    """Start the cluster of ``config`` in the background of the block. It is stopped at the block's end."""
    cluster = make_cluster(config, run_dir, model_path)
    try:
        cluster.begin()
        yield cluster
    finally:
        asyncio.run(cluster.stop())


def make_cluster(config: Config, run_dir: Path, model_path: str) -> Cluster:
    """Return the cluster of ``cluster.backend``. Ray is imported only if it is chosen."""
    match config.cluster.backend:
        case "ray":
            from headway.cluster.on_ray.ray_cluster import RayCluster

            stored = TRANSPORTS[transport_in(config)].leaves == "objects"
            return RayCluster(config, run_dir, model_nbytes(model_path) if stored else 0)
        case "inline":
            from headway.cluster.inline_cluster import InlineCluster

            return InlineCluster(config)
