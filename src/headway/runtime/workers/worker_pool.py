"""Processes with user code, and the jobs that they serve.

    run(job) ─▶ waits for a worker with room ─▶ JOB ─▶ ASK, answered by on_ask, any number of times ─▶ result
                        │                                                                         └▶ error with its text
                        └ spawned, or forked from a fork server that has loaded the user's code

A worker that ends is replaced. Its jobs fail with `RunnerLost`, which their callers handle.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from headway.errors import RunnerLost, WorkerDied, said_by
from headway.runtime.frames import Frame
from headway.runtime.process_tree import END_S
from headway.runtime.workers.redaction import RedactedLog, Redaction, passed_on, secrets_of
from headway.runtime.workers.user_code_boundary import HostedSpec
from headway.runtime.workers.user_code_worker import (
    LOOK_S,
    TICKS,
    ForkServer,
    OnAsk,
    StepNote,
    UserCodeWorker,
    WorkerJob,
    WorkerProcess,
    spawn,
)
from headway.runtime.workers.worker_main import WorkerStart

START_TIMEOUT_S = 120.0
"""Limit in seconds for a process to start and to load the user's code, which loads no model of the run."""
STOP_TIMEOUT_S = 2 * END_S + 10.0
"""Limit in seconds for killed processes to end: longer than the limits of a fork server and then its guard."""


@dataclass(eq=False, repr=False)
class WorkerPool:
    """Runs jobs in at most ``processes`` processes that have loaded ``spec``. Use from one event loop.

    Making one is free; `start` or the first `run` starts a process.
    """

    name: str
    """Name of its workers in messages."""
    spec: HostedSpec
    _: KW_ONLY
    processes: int
    at_once: int | None
    """Maximum number of concurrent jobs of a process; None: no limit. With 1 it has no event loop, and an abandoned job
    is killed with its process; otherwise jobs share an event loop."""
    forked: bool = False
    """True if processes are forked from one that has loaded the user's code. They take one job at a time, and after a
    failed job the next one gets a new process. Otherwise each process loads the code itself."""
    stall_s: float | None = None
    """Seconds after which a process with a blocked event loop is ended; None: never."""
    log_path: Path | None
    """File for the processes' output; None for this process's stderr."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of `passed_on`. The log and errors show their values as ``***``; the
    log does so with this process's secrets, too."""
    start_timeout_s: float = START_TIMEOUT_S
    close_s: float = 0.0
    """Seconds that a process has for closing its code's resources when the pool is closed."""

    def __post_init__(self) -> None:
        if self.forked and self.at_once != 1:
            raise ValueError("workers that are forked take one job at a time")
        self._alone = self.at_once == 1
        if self._alone:
            self.stall_s = None
        self._look_s = LOOK_S if self.stall_s is None else min(LOOK_S, self.stall_s / TICKS)
        self._log: RedactedLog | None = None
        self._fork_server: ForkServer | None = None
        self._workers: list[UserCodeWorker] = []
        """Workers that are ready, or whose process has not ended yet."""
        self._alive: set[WorkerProcess] = set()
        self._launches: set[asyncio.Task[Any]] = set()
        self._waiting: deque[WorkerJob] = deque()
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = count(1)
        self._closed = False

    async def start(self) -> Any:
        """Let one process load the user's code, and return the code's description of itself.

        Shared workers are then all started, so that jobs spread over them; others start meanwhile, or when needed.

        Raises:
            UserError: as the user's code raised it while it was loaded, or `UserCodeError` for anything else.
            WorkerDied: the process ended, or was not ready in time.
        """
        try:
            # Shielded: a launch cancelled halfway would leave a process that `close` does not know.
            described = await asyncio.shield(self._begin_launch())
            more = [] if self.forked else [self._begin_launch() for _ in range(self.processes - self._size)]
            if not self._alone and more:
                await asyncio.wait(more)
                for launch in more:
                    launch.result()
        except RunnerLost as cause:
            end = f"was not ready within {self.start_timeout_s:g} s" if cause.timed_out else "ended"
            raise WorkerDied(f"a {self.name} {end} while it loaded {self.spec.shown}{self._see_log()}") from cause
        return described

    async def run(
        self,
        job: Any,
        on_ask: OnAsk | None = None,
        *,
        timeout_s: float | None = None,
        on_begin: Callable[[], object] | None = None,
    ) -> Any:
        """Do ``job`` in a worker and return its result. Jobs wait for a worker in the order in which they come.

        Each ask of the job is answered by awaiting ``on_ask``. If that raises a `HeadwayError`, the job gets it in
        place of an answer; any other exception ends the job and is raised here. ``on_begin`` is called when the job
        begins; ``timeout_s`` counts from then. Cancelling this ends the job.

        Raises:
            HeadwayError: with the class and text that `Hosted.serve` raised; `UserCodeFailed` for anything else.
            RunnerLost: the process ended, or the job took longer than ``timeout_s``; or no process could be started.
            UserError: the process started for it could not load the user's code.
        """
        if self._closed:
            raise RunnerLost(f"the {self.name} is closed", culprit=False)
        result = asyncio.get_running_loop().create_future()
        waiting = WorkerJob(next(self._numbers), pickle.dumps(job), on_ask, on_begin, timeout_s, result)
        self._waiting.append(waiting)
        self._give_room()
        try:
            return await result
        finally:
            # After a result this does nothing; if the wait was cancelled it ends the job.
            if waiting.worker is not None:
                waiting.worker.leave(waiting)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)

    async def close(self) -> None:
        """End all processes, busy or not. Waiting and running jobs fail with `RunnerLost`. Processes that still read
        their connection first close their resources.

        Raises `WorkerDied` if a process still exists `STOP_TIMEOUT_S` after it was killed.
        """
        # First: a launch that ends during this wait must not add a worker, nor begin another launch.
        self._closed = True

        def closed(_: int = 0) -> RunnerLost:
            return RunnerLost(f"the {self.name} was closed", culprit=False)

        for job in self._waiting:
            job.end(error=closed())
        self._waiting.clear()
        # Before their jobs are removed: `load` counts these.
        # These are killed: a computing worker does not see that its connection was closed.
        busy = {worker.process for worker in self._workers if worker.load and self._alone}
        for worker in self._workers:
            worker.lose(closed)
        if self._looking is not None:
            self._looking.cancel()
        forking = self._fork_server.process if self._fork_server is not None else None
        within_s = self.close_s + STOP_TIMEOUT_S
        deadline = asyncio.get_running_loop().time() + within_s
        while self._alive or self._launches:
            for process in self._alive:
                # The fork server ends last: its workers are its children, and die with it unreaped.
                if process is not forking or len(self._alive) == 1:  # last: it reports the end of the others
                    if process in busy or not self.close_s or not process.loaded.done():
                        process.kill()
                    else:
                        process.leave(self.close_s)
            ends = [*(process.ended for process in self._alive), *self._launches]
            left = deadline - asyncio.get_running_loop().time()
            if not (await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED))[0]:
                raise WorkerDied(f"{self.name}s did not end within {within_s:g} s{self._see_log()}")
        if self._log is not None:
            self._log.close()
        self._log = None

    # ------------------------------------------------------------------------------------------ room

    @property
    def _size(self) -> int:
        return len(self._workers) + len(self._launches)

    def _give_room(self) -> None:
        """Begin jobs on workers with room, and start processes for waiting jobs."""
        while self._waiting and (worker := self._free()) is not None:
            worker.begin(self._waiting.popleft())
        # Not one launch per job: the launches under way will take some.
        while len(self._waiting) > len(self._launches) and self._size < self.processes:
            self._begin_launch()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _free(self) -> UserCodeWorker | None:
        """Return the worker with the fewest jobs, if it has room for another one."""
        free = [one for one in self._workers if not one.dying and (self.at_once is None or one.load < self.at_once)]
        return min(free, key=lambda one: one.load, default=None)

    def _on_room(self, worker: UserCodeWorker) -> None:
        if self.forked and worker.failed:
            worker.kill()  # its job may have left threads or files behind
        self._give_room()

    def _look(self) -> None:
        """Check for stopped processes and blocked event loops, repeatedly as long as there are jobs."""
        self._looking = None
        if self._fork_server is not None:
            self._fork_server.process.look(self._look_s)
        for worker in self._workers:
            worker.look(self._look_s, self.stall_s)
        if self._waiting or any(worker.load for worker in self._workers):
            self._looking = asyncio.get_running_loop().call_later(self._look_s, self._look)

    # ------------------------------------------------------------------------------------------ processes

    def _begin_launch(self) -> asyncio.Task[Any]:
        launch = asyncio.create_task(self._start_one())
        self._launches.add(launch)
        # Kept in the set until then: the loop itself holds tasks weakly.
        launch.add_done_callback(self._on_launch_end)
        return launch

    def _on_launch_end(self, launch: asyncio.Task[Any]) -> None:
        self._launches.discard(launch)
        if launch.cancelled():  # the event loop ends
            return
        error = launch.exception()
        if isinstance(error, RunnerLost):  # the next one may succeed
            if self._waiting:
                self._waiting.popleft().end(error=error)
        elif error is not None:  # user code that does not load will not load for the next job either
            while self._waiting:
                self._waiting.popleft().end(error=error)
        if not self._closed:
            self._give_room()

    async def _start_one(self) -> Any:
        """Add a worker. Returns the code's description of itself.

        Raises:
            UserError: the user's code does not load.
            RunnerLost: the process did not start.
        """
        note = None if self._alone else StepNote()
        worker = UserCodeWorker(self.name, note, self._on_room)
        try:
            if self.forked:
                described = await self._fork(worker)
                self._watch(worker.process, worker)
            else:
                # Watched before it is waited for: `close` finds it while it loads.
                worker.process = self._spawn(worker.on_frame, note)
                self._watch(worker.process, worker)
                described = await self._loaded(worker.process)
        except OSError as cause:
            raise RunnerLost(f"a {self.name} could not be started: {said_by(cause)}", culprit=False) from cause
        if self._closed:
            raise RunnerLost(f"the {self.name} was closed", culprit=False)
        self._workers.append(worker)
        return described

    async def _fork(self, worker: UserCodeWorker) -> Any:
        """Give ``worker`` a process forked by the fork server. Returns the code's description of itself."""
        for tries_left in (1, 0):  # an ended fork server costs no job; one that does not start does
            if self._fork_server is None or self._fork_server.lost:
                self._fork_server = ForkServer(self._spawn)
                self._watch(self._fork_server.process)
            fork_server = self._fork_server
            described = await self._loaded(fork_server.process)
            try:
                worker.process = await fork_server.fork(worker.on_frame)
                break
            except RunnerLost:
                if not tries_left or self._closed:
                    raise
        return described

    async def _loaded(self, process: WorkerProcess) -> Any:
        await asyncio.wait([process.loaded], timeout=self.start_timeout_s)
        if process.loaded.done():
            return process.loaded.result()
        process.kill()
        text = f"a {self.name} was not ready within {self.start_timeout_s:g} s"
        raise RunnerLost(text, end="SIGKILL", culprit=False, timed_out=True)

    def _watch(self, process: WorkerProcess, worker: UserCodeWorker | None = None) -> None:
        self._alive.add(process)
        process.ended.add_done_callback(partial(self._on_process_end, process, worker))

    def _on_process_end(
        self, process: WorkerProcess, worker: UserCodeWorker | None, ended: asyncio.Future[str]
    ) -> None:
        self._alive.discard(process)
        if worker is None:
            return
        # Before `on_end`, which removes the jobs.
        over_a_job = worker.dying or bool(worker.jobs)
        worker.on_end(ended.result())
        if self._closed or worker not in self._workers:
            return
        self._workers.remove(worker)
        if over_a_job and not self.forked and self._size < self.processes:
            self._begin_launch()  # the next job finds it loaded
        self._give_room()

    def _spawn(self, on_frame: Callable[[Frame], object], note: StepNote | None = None) -> WorkerProcess:
        """Start a process; the first call also opens the output for processes."""
        if self._log is None:
            redaction = Redaction([*self.env.values(), *secrets_of(os.environ)])
            self._log = RedactedLog(self.log_path, redaction, begins=f"{self.name} runs {self.spec.shown}")
        start = WorkerStart(
            spec=pickle.dumps(self.spec),
            shown=self.spec.shown,
            forks=self.forked,
            alone=self._alone,
            secrets=tuple(self.env.values()),
            prints=self.log_path is not None,
        )
        environment = {**passed_on(os.environ), **self.env}
        return spawn(self.name, start, environment, self._log.writer, on_frame, note)

    def _see_log(self) -> str:
        return f"; see {self.log_path}" if self.log_path is not None else ""
