"""Liveness of workers: their heartbeats, and the operating system's view of a process that does not answer.

    it answers                              it lives; `RunMonitor` and `RankRestarts` judge its progress
    no answer, and it is stopped            given up after `STOPPED_S`: a stopped process is a fact
    no answer, and all its threads sleep    given up after `SLOWER` times its longest answer so far: its machine would
                                            let it compute, and it hangs
    no answer, and it computes, waits for   given up after `Timeouts.unanswered_s`: a step, a compiler or the system may
    a core, a disk or memory, or no look    keep a healthy process from answering

Silence counts only while the driver runs: a driver that was stopped itself gives no worker up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.config.sizing.timeouts import ASLEEP_S, HEARTBEAT_S
from headway.errors import HeadwayError, WorkerDied
from headway.pipeline.admission.pipeline_state import now
from headway.runtime.process_tree import STOPPED_S
from headway.runtime.progress import Heartbeat, Living
from headway.runtime.task_groups import concurrently

ASK_AGAIN_S = 3.0
"""Seconds from an answer to the next heartbeat."""
LOOK_S = 1.0
"""Seconds between two checks of a process that has not answered yet."""
SLOWER = 8.0
"""Time that a sleeping process may be silent, as a multiple of its slowest answer."""
SLEEPS = 0.1
"""Largest use of a core, as a share, of a process that counts as asleep: Ray's threads wake up many times a second."""


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """State of a process, as its operating system reports it."""

    threads: str
    """State of each thread, as the letters of ``/proc``."""
    cpu_s: float
    """CPU seconds of the process so far."""


def look_at(pid: int) -> ProcessLook | None:
    """Return the state of a process on this machine; None if the system does not report it."""
    letters, ticks = "", 0
    with suppress(OSError, ValueError):  # the process has ended, or this is not Linux
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - numbers, not paths
            with suppress(OSError):  # the thread has ended
                # Fields after the last bracket, since a thread's name may contain blanks: state, utime and stime of
                # proc(5).
                fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
                letters, ticks = letters + fields[0], ticks + int(fields[11]) + int(fields[12])
    return ProcessLook(letters, ticks / os.sysconf("SC_CLK_TCK")) if letters else None


class Silence:
    """Decides when a silent process is given up.

    Example:
        >>> silence = Silence(60.0)
        >>> silence.verdict(1.0, ProcessLook("TT", 7.0)), silence.verdict(1.0, ProcessLook("TT", 7.0))
        (None, 'has been stopped for 2 s (SIGSTOP)')
        >>> silence.answered(0.5)
        >>> [silence.verdict(1.0, ProcessLook("SS", 7.0)) is None for _ in range(11)].index(False)
        10
    """

    def __init__(self, unanswered_s: float) -> None:
        """Begin at an answer. ``unanswered_s``: longest time without an answer, in seconds, in any state of the
        process.
        """
        self._unanswered_s = unanswered_s
        self._longest_s = 0.0
        """Seconds that the slowest answer took."""
        self._silent_s = self._stopped_s = self._asleep_s = 0.0
        self._cpu_s: float | None = None

    def answered(self, took_s: float) -> None:
        self._longest_s = max(self._longest_s, took_s)
        self._silent_s = self._stopped_s = self._asleep_s = 0.0
        self._cpu_s = None

    def verdict(self, passed_s: float, look: ProcessLook | None) -> str | None:
        """Return why the process is given up, or None. ``passed_s``: seconds without an answer since the last call."""
        self._silent_s += passed_s
        stopped = look is not None and set(look.threads) == {"T"}
        self._stopped_s = self._stopped_s + passed_s if stopped else 0.0
        # Sleeping threads alone prove nothing, since a process may be between two steps: its CPU time counts, too.
        asleep = (
            look is not None
            and self._cpu_s is not None
            and set(look.threads) <= {"S", "T"}  # a thread in R computes, and one in D waits for a disk
            and look.cpu_s - self._cpu_s <= SLEEPS * passed_s
        )
        self._asleep_s = self._asleep_s + passed_s if asleep else 0.0
        self._cpu_s = None if look is None else look.cpu_s
        if self._stopped_s >= STOPPED_S:
            return f"has been stopped for {self._stopped_s:.0f} s (SIGSTOP)"
        if self._asleep_s >= min(max(ASLEEP_S, SLOWER * self._longest_s), self._unanswered_s):
            return f"hangs: it answers no heartbeat, and all its threads have slept for {self._asleep_s:.0f} s"
        if self._silent_s >= self._unanswered_s:
            return f"gave no answer to its heartbeat for {self._silent_s:.0f} s"
        return None


async def given_up(
    heartbeat: Callable[[], Awaitable[Heartbeat]],
    look: Callable[[], Awaitable[ProcessLook | None]],
    unanswered_s: float,
) -> str:
    """Request a worker's heartbeats until it is given up. Returns the reason."""
    silence = Silence(unanswered_s)
    while True:
        began = last = now()
        beat = asyncio.ensure_future(heartbeat())
        try:
            while not (await asyncio.wait([beat], timeout=LOOK_S))[0]:
                # At most the time of two checks: a driver that was stopped for a minute would give all workers up at
                # once.
                passed_s, last = min(now() - last, 2 * LOOK_S), now()
                if why := silence.verdict(passed_s, await look()):
                    return why
            with suppress(HeadwayError):  # the watch of its process reports its end
                beat.result()
            silence.answered(now() - began)
        finally:
            beat.cancel()
        await asyncio.sleep(ASK_AGAIN_S)


@dataclass(frozen=True, slots=True)
class WorkerAnswers:
    """Heartbeats of the workers at ``time``, on the event clock. None for a worker without an answer in
    ``within_s``.
    """

    time: float
    within_s: float
    by_worker: dict[str, Heartbeat | None]

    def deadline(self, quiet_s: float, with_files_s: Callable[[int], float]) -> float:
        """Return the time, on the event clock, at which all workers will have been quiet for too long.

        A worker may be quiet for ``quiet_s`` seconds. While it works with files, it may be quiet for
        ``with_files_s(bytes)`` if that is longer.
        """

        def limit_s(beat: Heartbeat) -> float:
            return quiet_s if beat.file_nbytes is None else max(quiet_s, with_files_s(beat.file_nbytes))

        beats = (beat for beat in self.by_worker.values() if beat is not None)
        return self.time + max((limit_s(beat) - beat.quiet_s for beat in beats), default=-float("inf"))

    def __str__(self) -> str:
        """Describe all answers: ``actor-0: train_step for 412 s (micro-batch 3 of 8), …; rollout-0: idle``."""
        return "; ".join(f"{name}: {self._said(beat)}" for name, beat in self.by_worker.items())

    def _said(self, beat: Heartbeat | None) -> str:
        if beat is None:
            return f"no answer to its heartbeat within {self.within_s:g} s"
        return beat.doing or "idle"


async def ask(workers: Sequence[Living], within_s: float = HEARTBEAT_S) -> WorkerAnswers:
    """Request all workers' heartbeats. Never raises: supervision handles and reports the death of a worker."""
    beats = await concurrently(_ask(worker, within_s) for worker in workers)
    return WorkerAnswers(now(), within_s, {worker.name: beat for worker, beat in zip(workers, beats, strict=True)})


async def _ask(worker: Living, within_s: float) -> Heartbeat | None:
    try:
        async with asyncio.timeout(within_s):
            return await worker.heartbeat()
    except TimeoutError:
        return None
    except WorkerDied:
        return Heartbeat("its process has ended")
    except HeadwayError as failure:  # a heartbeat must not end the run: callers of the worker get the error
        return Heartbeat(f"it cannot be asked: {failure}")
