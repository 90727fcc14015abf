"""The host's side of one worker: starts, connects and watches its process until its end, and runs its jobs.

ready ── begin ─▶ has jobs ── result, error ─▶ ready            a job that is left: cancelled, or the process killed
                      └── the process ends, is stopped, or its loop stands still ─▶ every job fails with `RunnerLost`
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any

from headway.errors import HeadwayError, RunError, RunnerLost
from headway.runtime.frames import Frame, FrameChannel
from headway.runtime.process_tree import END_S, STOPPED_S, is_stopped, python_command
from headway.runtime.workers.user_code_boundary import FrameKind, raised, unpickled
from headway.runtime.workers.worker_main import BOOT, HELD_BACK, SHOWS_WHERE, WorkerStart

SHOWN_S = 0.2
"""Seconds that a process has to print its threads' tracebacks."""
LOOK_S = 1.0
"""Maximum number of seconds between two checks for a stopped process or a blocked event loop."""
CUT_S = 1.0
"""Seconds that a process may outlive its connection."""
TOLD_S = END_S + 10.0
"""Limit in seconds for a fork server to fork a worker, or to kill an ended worker's leftovers and report its end."""
WITH_FORK_SERVER = "the process that forked it"
"""End of a worker whose fork server has ended: all workers of the fork server end with it."""


@dataclass(eq=False, repr=False)
class WorkerProcess:
    """A process with user code, watched on the host's event loop.

    loaded    future of the loaded code's description; its errors: `UserError` or `RunnerLost`
    ended     future of the process's end, such as ``exit code 3`` or ``SIGKILL``
    """

    pid: int
    sock: InitVar[socket.socket]
    on_frame: Callable[[Frame], object]
    end_of: Callable[[int], Awaitable[str]]
    """Function that returns how the process ended. The process stays unreaped until the result is awaited."""
    guarded: bool = False
    """True if ``pid`` is the process's guard (`headway.runtime.process_tree`)."""

    def __post_init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._works_as = self.pid
        """Id of the process that runs the user's code: the guard's child, if there is a guard."""
        self._stopped_s = 0.0
        """Seconds over consecutive checks that found the process stopped."""
        self.loaded: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._ending: asyncio.Task[None] | None = None
        # A process without a connection gets a moment to end by itself: its exit code tells more.
        self.channel = FrameChannel(sock, self._receive, lambda: loop.call_later(CUT_S, self.kill))
        self._pidfd = os.pidfd_open(self.pid)
        self._ends_by = signal.SIGTERM if self.guarded else signal.SIGKILL
        loop.add_reader(self._pidfd, self._on_gone)

    @property
    def was_stopped(self) -> bool:
        """True once the process has been killed because it was stopped."""
        return self._stopped_s > STOPPED_S

    def look(self, every_s: float) -> bool:
        """Kill the process if it has been stopped for `STOPPED_S`. Returns whether it did. Call it every ``every_s``
        seconds.

        Checks are counted, not time: a host that was itself suspended has made only one check.
        """
        if not self.was_stopped:
            self._stopped_s = self._stopped_s + every_s if is_stopped(self._works_as) else 0.0
            if self.was_stopped:
                self.kill()
        return self.was_stopped

    def kill(self, *, shown_first: bool = False) -> None:
        """Kill the process. ``shown_first``: first let it print its tracebacks."""
        if self._ending is None:
            with suppress(ProcessLookupError):
                # By descriptor: once the process was reaped, its id may be another process's.
                signal.pidfd_send_signal(self._pidfd, SHOWS_WHERE if shown_first else self._ends_by)
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)  # a stopped guard would end nothing
            if shown_first:
                # Later: the traceback requested by the signal must be in the log before the process is killed.
                asyncio.get_running_loop().call_later(SHOWN_S, self.kill)

    def leave(self, within_s: float) -> None:
        """Let the process end by itself, by closing its connection. It is killed after ``within_s`` seconds."""
        if self.channel.is_open:
            self.channel.close()
            asyncio.get_running_loop().call_later(within_s, self.kill)

    def _receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.LOADED:
                self._works_as = frame.detail
                try:
                    self.loaded.set_result(unpickled(frame.payload, "what the user's code describes itself as"))
                except Exception as error:
                    self.loaded.set_exception(error)
            case FrameKind.FAILED:
                self.loaded.set_exception(raised(frame.payload))
            case _:
                self.on_frame(frame)

    def _on_gone(self) -> None:
        # Before the descriptor is closed: the loop would go on to watch the next file with its number.
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.channel.drain()  # messages sent before its end count
        self.channel.close()
        os.close(self._pidfd)
        self._ending = asyncio.create_task(self._find_out())

    async def _find_out(self) -> None:
        end = await self.end_of(self.pid)
        if not self.loaded.done():
            self.loaded.set_exception(RunnerLost(f"ended with {end}", end=end, culprit=False))
        self.loaded.exception()  # retrieved even if nothing waits for it any more
        self.ended.set_result(end)


def spawn(
    name: str,
    start: WorkerStart,
    environment: Mapping[str, str],
    output: int,
    on_frame: Callable[[Frame], object],
    note: StepNote | None = None,
) -> WorkerProcess:
    """Start a new process for user code. Raises `OSError` if that fails.

    ``environment``: its whole environment; ``output``: descriptor for its output; ``note``: file in which it notes the
    job of the current step, or None.
    """
    here, there = socket.socketpair()
    # Closed here once the process has it: while this side holds it, the connection cannot end.
    with there:
        passed = [there.fileno()] if note is None else [there.fileno(), note.descriptor]
        command = python_command(BOOT, name, *map(str, passed))
        # Signals of a terminal never reach the process, not even before it leaves its session. SIGTERM is not held
        # back: sent to the host's group, it ends a process that is just starting.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=passed,
                # Ctrl-C reaches a terminal's whole group: the host decides when workers end.
                start_new_session=True,
            )
        except OSError:
            here.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if note is not None:
                os.close(note.descriptor)  # the worker has it by now

    async def end_of(_pid: int) -> str:
        return end_text(popen.wait())

    process = WorkerProcess(popen.pid, here, on_frame, end_of, guarded=True)
    # On the channel, never as an argument: all users of the machine can read command lines.
    process.channel.send(Frame(FrameKind.START, payload=pickle.dumps(start)))
    return process


class ForkServer:
    """A process that forks workers."""

    def __init__(self, start: Callable[[Callable[[Frame], object]], WorkerProcess]) -> None:
        """Start the process by ``start``, which takes the callback for its frames. Raises `OSError` if ``start``
        does.
        """
        self.process = start(self._on_frame)
        self.lost = False
        """True once the fork server cannot fork any more."""
        self.process.ended.add_done_callback(self._on_end)
        self._orders: dict[int, asyncio.Future[int]] = {}
        self._last = 0

    async def fork(self, on_frame: Callable[[Frame], object]) -> WorkerProcess:
        """Fork a worker. Raises `RunnerLost` if that fails; the fork server is then ended."""
        here, there = socket.socketpair()
        try:
            with there:
                pid = await self._ordered(Frame(FrameKind.FORK), there.fileno())
            if pid < 0:
                here.close()
                raise RunnerLost(f"could not be forked: {os.strerror(-pid)}", culprit=False)
            process = WorkerProcess(pid, here, on_frame, self._end_of)
        except OSError as cause:
            here.close()  # a worker that was forked nevertheless ends by this
            self.lost = True
            self.process.kill()
            raise RunnerLost(f"could not be forked: {cause}", culprit=False) from cause
        process.loaded.set_result(None)
        return process

    async def _end_of(self, pid: int) -> str:
        try:
            return end_text(await self._ordered(Frame(FrameKind.REAP, detail=pid)))
        except OSError:
            return WITH_FORK_SERVER

    async def _ordered(self, order: Frame, descriptor: int | None = None) -> int:
        """Send an order, and return its result. Raises `OSError` if there is none."""
        self._last += 1
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._orders[self._last] = told
        order = order._replace(number=self._last)
        try:
            if descriptor is None:
                self.process.channel.send(order)
            else:
                self.process.channel.send_with(order, descriptor)
            # With a limit: a stopped fork server neither answers nor ends.
            waited: list[asyncio.Future[Any]] = [told, self.process.ended]
            await asyncio.wait(waited, timeout=TOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                how = "has ended" if self.process.ended.done() else f"did not answer within {TOLD_S:g} s"
                raise ConnectionError(f"the process that forks them {how}")
            return told.result()
        finally:
            del self._orders[order.number]

    def _on_end(self, _: asyncio.Future[str]) -> None:
        self.lost = True

    def _on_frame(self, frame: Frame) -> None:
        told = self._orders.get(frame.number)
        if told is not None and not told.done():
            told.set_result(frame.detail)


class StepNote:
    """File in which a worker's event loop notes the job of its current step."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("headway-worker")
        os.truncate(self.descriptor, mmap.PAGESIZE)  # an empty file cannot be mapped
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._view = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Release the memory. Nothing can be read any more."""
        self._view.release()  # first: memory with an open view cannot be closed
        self._memory.close()

    @property
    def whose(self) -> int:
        """Number of the current step's job; 0 if none or unknown."""
        return int(self._view[0])

    @property
    def steps(self) -> int:
        """Number of steps made so far."""
        return int(self._view[1])


def end_text(exit_code: int) -> str:
    """Return how a process ended: its exit code, or the signal if the code is negative."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


OnAsk = Callable[[Any], Awaitable[Any]]
LEAVES_S = 30.0
"""Limit in seconds for a cancelled job to end."""
TICKS = 20
"""Minimum number of checks of a silent event loop before it counts as blocked."""


@dataclass(slots=True, eq=False)
class WorkerJob:
    """One job, from the call that asked for it to its end."""

    number: int
    payload: bytes
    on_ask: OnAsk | None
    on_begin: Callable[[], object] | None
    timeout_s: float | None
    result: asyncio.Future[Any]
    worker: UserCodeWorker | None = None
    """The worker that has begun the job; None while it waits for one."""
    limit: asyncio.TimerHandle | None = None
    asks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of the asks that are being answered, by number."""

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the job, unless it has ended."""
        if self.limit is not None:
            self.limit.cancel()
        for ask in self.asks.values():
            ask.cancel()
        self.asks.clear()
        if self.result.done():
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)
            self.result.exception()  # retrieved even if nothing waits for it any more


class UserCodeWorker:
    """A process that serves jobs."""

    def __init__(self, name: str, note: StepNote | None, on_room: Callable[[UserCodeWorker], object]) -> None:
        """Make a worker without a process. ``note``: None if jobs share no event loop; then there is one job at a time,
        and killing the process ends it. ``on_room`` is called when the worker may take a further job.
        """
        self.process: WorkerProcess
        self.dying = False
        """True once the worker takes no more jobs."""
        self.failed = False
        """True if the user's code raised in the last job."""
        self.jobs: dict[int, WorkerJob] = {}
        self._name, self._note, self._on_room = name, note, on_room
        self._leaving: set[int] = set()
        """Numbers of jobs that were cancelled and have not ended yet."""
        self._heard = False
        self._silent_s = 0.0
        """Seconds without a sign of life, over consecutive checks."""
        self._steps = 0

    @property
    def load(self) -> int:
        """Number of jobs of the worker, including those being cancelled."""
        return len(self.jobs) + len(self._leaving)

    def begin(self, job: WorkerJob) -> None:
        """Send a job."""
        # Before the job is sent: an answer may arrive while this side is still sending.
        self.jobs[job.number] = job
        job.worker = self
        self.process.channel.send(Frame(FrameKind.JOB, job.number, payload=job.payload))
        job.payload = b""  # it may be large, and the job long
        if job.timeout_s is not None:
            late = RunnerLost(f"took longer than {job.timeout_s:g} s", culprit=True, timed_out=True)
            job.limit = asyncio.get_running_loop().call_later(job.timeout_s, job.end, None, late)
        if job.on_begin is not None:
            try:
                job.on_begin()
            except Exception as error:
                job.end(error=error)

    def leave(self, job: WorkerJob) -> None:
        """End a job before it ends by itself."""
        if self.jobs.pop(job.number, None) is None:
            return
        # Before the process is killed: an abandoned job must not count as one whose worker was lost.
        job.end(error=RunnerLost("was left"))
        if self._note is None:
            self.kill()
        else:
            self._leaving.add(job.number)
            # Without a limit a job that swallows its cancellation would occupy the worker for ever.
            asyncio.get_running_loop().call_later(LEAVES_S, self._overstayed, job.number)
            self.process.channel.send(Frame(FrameKind.CANCEL, job.number))

    def _overstayed(self, number: int) -> None:
        """End the process of a job that still runs long after it was cancelled."""
        if number not in self._leaving or self.dying:
            return
        text = f"its {self._name} was lost: another job went on for {LEAVES_S:g} s after it was cancelled"
        self.lose(lambda _: RunnerLost(text, end="SIGKILL", culprit=False))
        self.process.kill(shown_first=True)

    def kill(self) -> None:
        """End the process. Its jobs fail when it has ended, unless they end before."""
        self.dying = True
        self.process.kill()

    def lose(self, error_of: Callable[[int], RunnerLost]) -> None:
        """Fail all jobs, each with its error."""
        self.dying = True
        jobs, self.jobs, self._leaving = self.jobs, {}, set()
        for number, job in jobs.items():
            job.end(error=error_of(number))

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame from the process."""
        self._heard = True
        job = self.jobs.get(frame.number)
        match frame.kind:
            case FrameKind.ASK if job is not None:
                job.asks[frame.detail] = asyncio.create_task(self._answer(job, frame))
            case FrameKind.WITHDRAWN if job is not None and (ask := job.asks.pop(frame.detail, None)) is not None:
                ask.cancel()
            case FrameKind.RESULT | FrameKind.ERROR:
                self.failed = frame.kind == FrameKind.ERROR
                self._leaving.discard(frame.number)
                if job is not None:
                    del self.jobs[frame.number]
                    self._end(job, frame)
                self._on_room(self)
            case _:
                pass

    def _end(self, job: WorkerJob, frame: Frame) -> None:
        try:
            if frame.kind == FrameKind.ERROR:
                raise raised(frame.payload)
            job.end(unpickled(frame.payload, "the result"))
        except HeadwayError as error:
            job.end(error=error)

    async def _answer(self, job: WorkerJob, ask: Frame) -> None:
        try:
            if job.on_ask is None:
                raise RunError("there is nobody to ask for this job")
            answer = await job.on_ask(unpickled(ask.payload, "what was asked"))
            # Pickled inside the try: an answer that does not pickle ends only its own job.
            reply = Frame(FrameKind.ANSWER, job.number, ask.detail, pickle.dumps(answer))
        except HeadwayError as error:
            reply = Frame(FrameKind.REFUSAL, job.number, ask.detail, pickle.dumps(error))
        except (Exception, asyncio.CancelledError) as error:
            # A defect of the host, not of the job; unless the ask was withdrawn, or its job is over.
            if job.asks.pop(ask.detail, None) is not None:
                job.end(error=error if isinstance(error, Exception) else RunError("an answer to the job was cancelled"))
            return
        # Withdrawn or over meanwhile: the worker has forgotten the number.
        if job.asks.pop(ask.detail, None) is not None:
            self.process.channel.send(reply)

    # ------------------------------------------------------------------------------------------ ends

    def on_end(self, end: str) -> None:
        """Fail the worker's jobs after its process has ended."""
        # Read before the note is closed, and before the jobs are removed.
        whose = self._note.whose if self._note is not None else 0

        def error_of(number: int) -> RunnerLost:
            culprit = end != WITH_FORK_SERVER if self._note is None else number == whose if whose else None
            text = f"its {self._name} {'was lost: it ' if culprit is False else ''}ended with {end}"
            if self.process.was_stopped:
                text = f"{text}, after it was stopped for {STOPPED_S:g} s (SIGSTOP)"
            timed_out = culprit is True and end == signal.SIGALRM.name
            return RunnerLost(text, end=end, culprit=culprit, timed_out=timed_out)

        self.lose(error_of)
        if self._note is not None:
            self._note.close()

    def look(self, every_s: float, stall_s: float | None) -> None:
        """Check a process with jobs for signs of life. End it after ``stall_s`` without one, or if it was stopped. Call
        this every ``every_s`` seconds.

        Signs of life are any message, such as an answer to a ping, and steps of its loop: a loop with a thousand jobs
        answers late. Checks are counted, not seconds, and messages are read between two checks. So a host that was
        itself suspended has made one check, and then finds the signs that arrived meanwhile.
        """
        self.dying |= bool(self.load) and self.process.look(every_s)
        if self._note is None or stall_s is None:
            return
        steps = self._note.steps
        if self.dying or not self.load or self._heard or steps != self._steps:
            self._heard, self._silent_s, self._steps = False, 0.0, steps
            return
        # Only one ping at a time: more would queue up in a blocked process, and wake it for nothing later.
        if self._silent_s == 0.0:
            self.process.channel.send(Frame(FrameKind.PING))
        self._silent_s += every_s
        if self._silent_s > stall_s:
            self._stall(stall_s, self._note.whose)

    def _stall(self, stall_s: float, whose: int) -> None:
        held = f"its {self._name}'s event loop was held for more than {stall_s:g} s (agent.stall_s)"

        def error_of(number: int) -> RunnerLost:
            culprit = number == whose if whose else None
            by = "; import at the top of the file, and do what blocks in a thread" if culprit else " by another job"
            return RunnerLost(held + (by if whose else ""), end="SIGKILL", culprit=culprit, timed_out=bool(culprit))

        self.lose(error_of)
        self.process.kill(shown_first=True)
