"""One worker, as its host sees it: its process, and the jobs that it has.

ready ── begin ─▶ has jobs ── result, error ─▶ ready            a job that is left: cancelled, or the process killed
                      └── the process ends, or its loop stands still ─▶ every job fails with `RunnerLost`
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from signal import SIGALRM
from typing import Any

from headway.errors import HeadwayError, RunError, RunnerLost
from headway.runtime.frames import Frame
from headway.runtime.workers.wire import FrameKind, raised, unpickled
from headway.runtime.workers.worker_process import WITH_FORK_SERVER, StepNote, WorkerProcess

OnAsk = Callable[[Any], Awaitable[Any]]
LEAVES_S = 30.0
"""Seconds that a job may go on after it was cancelled."""
TICKS = 20
"""Looks at a silent event loop before it counts as held: `stall_s` of time, if this process is not held up itself."""


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
            self.result.exception()  # it is seen even where nobody waits for it any more

    def overdue(self) -> None:
        """End the job because it took too long."""
        self.end(error=RunnerLost(f"took longer than {self.timeout_s:g} s", culprit=True, timed_out=True))


class UserCodeWorker:
    """A process that serves jobs. ``alone``: one at a time, and it is killed when it is to leave one."""

    def __init__(
        self, name: str, *, alone: bool, note: StepNote | None, on_room: Callable[[UserCodeWorker], object]
    ) -> None:
        """Make one without a process; ``on_room`` is called when it may take a further job."""
        self.process: WorkerProcess
        self.dying = False
        """It takes no more jobs."""
        self.failed = False
        """The user's code has raised in its last job."""
        self.jobs: dict[int, WorkerJob] = {}
        self._name, self._alone, self._note, self._on_room = name, alone, note, on_room
        self._leaving: set[int] = set()
        """Numbers of jobs that were cancelled and have not ended yet."""
        self._heard = False
        self._silent = 0
        """Ticks in a row without a sign of life."""
        self._steps = 0

    @property
    def load(self) -> int:
        """Number of jobs that it has, those included that are being cancelled."""
        return len(self.jobs) + len(self._leaving)

    def begin(self, job: WorkerJob) -> None:
        """Send a job."""
        self.jobs[job.number] = job
        job.worker = self
        self.process.channel.send(Frame(FrameKind.JOB, job.number, payload=job.payload))
        job.payload = b""  # it may be large, and the job long
        if job.timeout_s is not None:
            job.limit = asyncio.get_running_loop().call_later(job.timeout_s, job.overdue)
        if job.on_begin is not None:
            try:
                job.on_begin()
            except Exception as error:
                job.end(error=error)

    def leave(self, job: WorkerJob) -> None:
        """Have a job ended that has not ended by itself."""
        if self.jobs.pop(job.number, None) is None:
            return
        job.end(error=RunnerLost("was left"))
        if self._alone:
            self.kill()
        else:
            self._leaving.add(job.number)
            asyncio.get_running_loop().call_later(LEAVES_S, self._overstayed, job.number)
            self.process.channel.send(Frame(FrameKind.CANCEL, job.number))

    def _overstayed(self, number: int) -> None:
        """End the process whose job still runs long after it was cancelled."""
        if number not in self._leaving or self.dying:
            return
        text = f"its {self._name} was lost: another job went on for {LEAVES_S:g} s after it was cancelled"
        self.lose(lambda _: RunnerLost(text, end="SIGKILL", culprit=False))
        self.process.kill(shown_first=True)

    def kill(self) -> None:
        """End the process. Its jobs fail when it is gone, unless they are ended before."""
        self.dying = True
        self.process.kill()

    def lose(self, error_of: Callable[[int], RunnerLost]) -> None:
        """Fail all jobs, each with its error."""
        self.dying = True
        jobs, self.jobs, self._leaving = self.jobs, {}, set()
        for number, job in jobs.items():
            job.end(error=error_of(number))

    def on_frame(self, frame: Frame) -> None:
        """Handle what the process says."""
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
        if frame.kind == FrameKind.ERROR:
            job.end(error=raised(frame.payload))
            return
        try:
            job.end(unpickled(frame.payload, "the result"))
        except HeadwayError as error:
            job.end(error=error)

    async def _answer(self, job: WorkerJob, ask: Frame) -> None:
        try:
            reply = await self._reply(job, ask)
        except (Exception, asyncio.CancelledError) as error:
            # A defect of the host's, which is no affair of the job's; unless the ask was withdrawn, or its job is over.
            if job.asks.pop(ask.detail, None) is not None:
                job.end(error=error if isinstance(error, Exception) else RunError("an answer to the job was cancelled"))
        else:
            if job.asks.pop(ask.detail, None) is not None:
                self.process.channel.send(reply)

    async def _reply(self, job: WorkerJob, ask: Frame) -> Frame:
        try:
            if job.on_ask is None:
                raise RunError("there is nobody to ask for this job")
            answer = await job.on_ask(unpickled(ask.payload, "what was asked"))
            return Frame(FrameKind.ANSWER, job.number, ask.detail, pickle.dumps(answer))
        except HeadwayError as error:
            return Frame(FrameKind.REFUSAL, job.number, ask.detail, pickle.dumps(error))

    # ------------------------------------------------------------------------------------------ ends

    def on_end(self, end: str) -> None:
        """Fail what it had when its process has ended."""
        whose = self._note.whose if self._note is not None else None
        self.lose(lambda number: self._ended(end, self._blame(number, whose, end)))
        if self._note is not None:
            self._note.close()

    def _blame(self, number: int, whose: int | None, end: str) -> bool | None:
        if self._alone:
            return end != WITH_FORK_SERVER
        return number == whose if whose else None

    def _ended(self, end: str, culprit: bool | None) -> RunnerLost:
        text = f"ended with {end}" if culprit is not False else f"was lost: it ended with {end}"
        timed_out = end == SIGALRM.name and culprit is True
        return RunnerLost(f"its {self._name} {text}", end=end, culprit=culprit, timed_out=timed_out)

    def tick(self, stall_s: float) -> None:
        """Look for a sign of life. After `TICKS` looks in a row without one, end the process.

        Signs are anything that it says, an answer to a ping among them, and steps that its loop makes: one with a
        thousand jobs to step through answers late. Looks are counted rather than seconds, and whatever has arrived is
        read between them: a host that stands still itself has looked once, and finds the signs that came meanwhile.
        """
        steps = self._note.steps if self._note is not None else 0
        if self.dying or not self.load or self._heard or steps != self._steps:
            self._heard, self._silent, self._steps = False, 0, steps
            return
        if self._silent == 0:
            self.process.channel.send(Frame(FrameKind.PING))
        self._silent += 1
        if self._silent > TICKS:
            self._stall(stall_s)

    def _stall(self, stall_s: float) -> None:
        whose = self._note.whose if self._note is not None else 0
        held = f"event loop for more than {stall_s:g} s (agent.stall_s)"

        def error_of(number: int) -> RunnerLost:
            culprit = number == whose if whose else None
            if culprit:
                text = f"held its {self._name}'s {held}; import at the top of the file, and do what blocks in a thread"
            else:
                text = f"its {self._name} was lost: {'another job' if whose else 'something'} held its {held}"
            return RunnerLost(text, end="SIGKILL", culprit=culprit, timed_out=bool(culprit))

        self.lose(error_of)
        self.process.kill(shown_first=True)
