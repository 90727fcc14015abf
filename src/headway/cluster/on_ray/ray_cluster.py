"""Ray cluster of a run: started if no address is given, else joined. Only a run that started it shuts it down."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import ray

from headway.cluster.machine.worker_setup import available_cores
from headway.cluster.on_ray.network_interface import check_listens
from headway.cluster.on_ray.ray_node import (
    RayNode,
    restore_sigterm,
    sessions_of_their_own,
    sigterm_kept,
    without_services,
)
from headway.cluster.on_ray.ray_worker import RayWorker, messages_in, remove_elsewhere
from headway.cluster.on_ray.resource_pool import ResourcePool
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.schema import Config
from headway.config.sizing.timeouts import KILLED_S
from headway.data.types import ColumnName
from headway.devices import chosen, kind_of
from headway.errors import ConfigError, RunError, boundary
from headway.runtime.task_groups import never

WORKER_BYTES = 128 * 2**20
"""Smallest memory of a process with torch and Ray, without a model, in bytes."""
MIN_OBJECT_STORE = 256 * 2**20
VERSIONS_STORED = 3
"""Number of versions in the object store: the one being sent, the previous one, held by the driver, and a spare."""
RESERVING_SHARE = ANSWERING_SHARE = 0.95
"""Shares of the start's remaining time for Ray to reserve or to answer. The rest is left for an error message."""


class RayCluster:
    """Implementation of `Cluster` on Ray."""

    separate_processes = True

    def __init__(self, config: Config, run_dir: Path, weights_bytes: int = 0) -> None:
        """Prepare to use Ray. ``weights_bytes``: size of a version that goes through the object store; 0 if none
        does.
        """
        self._config = config
        self._run_dir = run_dir
        self._weights_bytes = weights_bytes
        self._up: Future[None] | None = None
        """Future that is done when Ray has started or was joined; None before the start and after `stop`."""
        self._left = Event()
        """Event that lets the thread that started Ray end."""
        self._messages = ExitStack()
        """Context that redirects Ray's messages to a log of the run until it is closed."""
        self._node: RayNode | None = None
        """Ray node that this run started; None if the run joined a cluster."""
        self._launched: dict[str, RayWorker] = {}
        """Name of the first worker in each place -> current worker there."""
        self._tokens: Path | None = None
        """Directory of token files, the same path on each machine; None before the first worker that writes there."""
        self._deadline: float | None = None
        """Time on the event loop's clock by which the whole start has to be over."""
        self._pool: ResourcePool | None = None
        self._device = "cpu"

    @property
    def address(self) -> str:
        here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return here

    def begin(self) -> None:
        if self._config.cluster.address is None and not ray.is_initialized():
            self._begin()

    async def connect(self) -> str:
        """Start Ray or join it. Returns the device of workers. Raises `ConfigError` without an answer or a device."""
        self._deadline = asyncio.get_running_loop().time() + self._config.cluster.start_timeout_s
        if self._up is None and not ray.is_initialized():
            if self._config.cluster.address is not None:
                timeout_s = ANSWERING_SHARE * self._config.cluster.start_timeout_s
                await check_answers(self._config.cluster.address, timeout_s)
            self._begin()
        if self._up is not None:
            try:
                await asyncio.shield(asyncio.wrap_future(self._up))
            finally:
                restore_sigterm()
        self._device = chosen(
            self._config.cluster.device,
            lambda kind: kind.ray_resource is None or _resource(kind.ray_resource) > 0,
            "Ray sees no {}",
        )
        return self._device

    def _begin(self) -> None:
        # Ray's processes inherit these: no reports to its makers; devices hidden from no worker that asked for none;
        # workers that do not yield to all else on the machine: niced by 15, as Ray has it, they take minutes to start
        # beside a few busy processes.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray gives its first process 30 s, too little for a busy disk to read it.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(int(self._config.cluster.start_timeout_s)))
        self._up = up = Future[None]()
        self._messages.enter_context(messages_in(self._run_dir / "logs" / "ray.log"))

        def live() -> None:
            try:
                # With its services Ray takes three seconds of the processor more, for which `ray.init` partly waits.
                with sigterm_kept(), sessions_of_their_own(), without_services():
                    self._init()
                up.set_result(None)
            except BaseException as failure:
                up.set_exception(failure)
            if self._left.is_set() and self._node is not None:  # Ray came up too late
                self._node.leave(KILLED_S)
            self._left.wait()  # Ray's processes die with the thread that started them

        Thread(target=live, name="headway-ray", daemon=True).start()

    async def reserve(self, plan: ClusterPlan) -> None:
        self._check_enough_memory(plan)
        assert self._deadline is not None, "devices are reserved after the cluster has answered"
        left = max(0.0, self._deadline - asyncio.get_running_loop().time())
        self._pool = await ResourcePool.reserve(
            plan.shares,
            [spec.devices for spec in plan.workers if spec.further],
            on_gpus=kind_of(self._device).ray_resource is not None,
            timeout_s=left * RESERVING_SHARE,
            may_grow=self._config.cluster.address is not None,
        )

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        """Wait as `Cluster.find_place` does. A device of a lost machine moves to another machine with room."""
        assert self._pool is not None, "a worker is replaced on devices that were reserved"
        return await self._pool.find_place(spec.device, others, move=not spec.beside)

    def avoid(self, spec: WorkerSpec) -> None:
        assert self._pool is not None, "a worker of the run is on it"
        self._pool.avoid(spec.device)

    def launch(self, spec: WorkerSpec) -> RayWorker:
        assert self._pool is not None, "workers are launched after devices were reserved for them"
        log_file = (self._run_dir / "logs" / f"{spec.name}.log").absolute()
        sharing = self._pool.sharing(spec.device)
        options = self._pool.options(spec.device, beside=spec.beside)
        worker = RayWorker(spec, self._device, log_file, sharing, options, self._node)
        # `rollout-0+1` is in the place of `rollout-0`: of each place only the present worker counts.
        self._launched[spec.name.partition("+")[0]] = worker
        if (tokens := spec.arguments.get("tokens")) is not None:
            self._tokens = tokens.directory
        return worker

    async def died(self) -> NoReturn:
        """Wait until the Ray started here is lost, and raise `WorkerDied`. Waits for ever if Ray was joined."""
        if self._node is not None:
            await self._node.died()
        await never()

    async def stop(self) -> None:
        """Release the devices, remove tokens from other machines and disconnect from Ray. A Ray that this run started
        ends then.
        """
        if self._pool is not None:
            if self._node is None or self._node.lost is None:  # otherwise Ray is gone, with the devices
                self._pool.release()
            self._pool = None
        if self._up is not None:
            up, self._up = self._up, None
            restore_sigterm()  # where it was begun, and never waited for
            try:
                # Not left to the workers: a fenced worker removes nothing.
                if self._node is None and self._tokens is not None:
                    await remove_elsewhere(self._tokens)
            finally:
                # In one call on a thread, so that a cancellation does not cut it short.
                await asyncio.to_thread(self._leave, up)

    def _leave(self, up: Future[None]) -> None:
        """Leave Ray. If it was started here, returns when all its processes are gone."""
        try:
            # Ray may still be starting in its thread: an interrupt ends only the wait for it.
            wait([up], self._config.cluster.start_timeout_s)
            node, self._node = self._node, None
            if node is None:
                ray.shutdown()
                return
            if any(worker.pid is None for worker in self._launched.values()):  # one process did not start
                node.keep_logs()
            node.leave(max((worker.killed_s for worker in self._launched.values()), default=KILLED_S))
        finally:
            self._messages.close()
            self._left.set()

    def _init(self) -> None:
        address = self._config.cluster.address
        if address is not None:
            with boundary(f"cluster.address={address}: cannot join Ray there", ConfigError):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        with boundary("Ray does not start on this machine", RunError):
            context: Any = ray.init(
                address="local",  # without it Ray would join the cluster that RAY_ADDRESS names
                num_cpus=available_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=object_store_bytes(self._config) + VERSIONS_STORED * self._weights_bytes,
            )
        self._node = RayNode(Path(context.address_info["session_dir"]), self._run_dir.absolute() / "logs" / "ray")

    def _check_enough_memory(self, plan: ClusterPlan) -> None:
        """Check that memory is enough: nothing else bounds CPU processes, and a machine out of memory stops
        answering.
        """
        there = _resource("memory")
        if self._config.cluster.address is None and len(plan.workers) * WORKER_BYTES > there:
            raise ConfigError(
                f"the run needs {len(plan.workers)} processes, each with {WORKER_BYTES / 2**20:g} MiB or more, and Ray "
                f"has {there / 2**30:.1f} GiB on this machine; ask for fewer (trainer.n_gpus_per_node, "
                "rollout.n_gpus_per_node), or join a cluster (cluster.address)"
            )


def _resource(name: str) -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get(name, 0)


_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); ray.shutdown()"


async def check_answers(address: str, timeout_s: float) -> None:
    """Raise `ConfigError` unless a Ray cluster answers at ``address`` in time.

    It is tried in a separate process: joining cannot be cancelled, and Ray ends the process after a minute without an
    answer.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    await check_listens(address, timeout_s)
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROBE, address, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout_at(deadline):
            _, errors = await probe.communicate()
    except TimeoutError:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answered within {timeout_s:g} s "
            "(cluster.start_timeout_s). Give the address that `ray start --head` printed"
        ) from None
    finally:
        if probe.returncode is None:  # also where the start was cancelled
            probe.kill()
            await probe.wait()
    if probe.returncode:
        said = errors.decode(errors="replace").strip()
        reason = said.rpartition("\n")[2]
        if "InvalidAuthToken" in said:
            reason += (
                ". It wants an authentication token: set RAY_AUTH_MODE=token (the token of `ray start` on this machine "
                "is found in ~/.ray/auth_token; that of another one goes into RAY_AUTH_TOKEN)"
            )
        raise ConfigError(f"cluster.address={address}: cannot join the Ray cluster there: {reason}")


def object_store_bytes(config: Config) -> int:
    """Return the bytes for all columns of all groups that may be in flight, twice over."""
    bytes_per_token = 4 * len(ColumnName)
    group = config.rollout.n * (config.data.max_prompt_length + config.data.max_response_length) * bytes_per_token
    groups = (1 + config.async_training.staleness_threshold) * config.groups_per_version + config.groups_per_batch
    return max(MIN_OBJECT_STORE, int(2 * groups * group))
