"""When a worker that answers no heartbeat is given up, on the virtual clock, and what a system says of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from headway.config.sizing.timeouts import ASLEEP_S
from headway.errors import WorkerDied
from headway.pipeline.recovery.liveness import ASK_AGAIN_S, SLOWER, ProcessLook, given_up, look_at
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import Heartbeat

UNANSWERED_S = 60.0
SLEEPS = ProcessLook("SSS", 7.0)
STOPPED = ProcessLook("TTT", 7.0)


class Worker:
    """Answers after ``takes_s`` seconds until ``silent_from``, and is seen as ``look`` says, by the time."""

    def __init__(
        self,
        look: Callable[[float], ProcessLook | None],
        *,
        silent_from: float = 10.0,
        silent_to: float = 1e9,
        takes_s: float = 0.1,
    ) -> None:
        self._seen, self._takes_s = look, takes_s
        self._silent = silent_from, silent_to
        self.looks = 0

    async def heartbeat(self) -> Heartbeat:
        await asyncio.sleep(self._takes_s)
        begin, end = self._silent
        if begin <= asyncio.get_running_loop().time() < end:
            await asyncio.sleep(end - asyncio.get_running_loop().time())
        return Heartbeat("")

    async def look(self) -> ProcessLook | None:
        self.looks += 1
        return self._seen(asyncio.get_running_loop().time())


def until(worker: Worker, within_s: float = 1000.0) -> tuple[float, str | None]:
    """Return when the worker was given up, and why; None where it was not."""

    async def watch() -> tuple[float, str | None]:
        why = None
        try:
            async with asyncio.timeout(within_s):
                why = await given_up(worker.heartbeat, worker.look, UNANSWERED_S)
        except TimeoutError:
            pass
        return asyncio.get_running_loop().time(), why

    return run_virtual(watch())


def computes() -> Callable[[float], ProcessLook]:
    return lambda time: ProcessLook("SRS", time)


def test_a_worker_that_answers_is_not_even_looked_at() -> None:
    worker = Worker(lambda _: STOPPED, silent_from=1e9)
    assert until(worker)[1] is None and worker.looks == 0


def test_a_stopped_process_is_given_up_within_seconds() -> None:
    at, why = until(Worker(lambda _: STOPPED))
    assert why == "has been stopped for 2 s (SIGSTOP)"
    assert at - 10.0 <= ASK_AGAIN_S + 3.0


@pytest.mark.parametrize("stands_s", [1.5, 4.0])
def test_a_process_that_is_stopped_for_a_moment_is_not(stands_s: float) -> None:
    """Stopped for no longer than a second of each look, or while nobody asks it."""
    looks = count()
    worker = Worker(lambda _: STOPPED if next(looks) % 2 else SLEEPS, silent_from=10.0, silent_to=10.0 + stands_s)
    assert until(worker)[1] is None


@pytest.mark.parametrize("letters", ["R", "SRS", "SDS", "tSS"])
def test_one_that_waits_for_a_core_or_a_disk_or_is_traced_has_the_whole_time(letters: str) -> None:
    at, why = until(Worker(lambda _: ProcessLook(letters, 7.0)))
    assert why == "gave no answer to its heartbeat for 60 s"
    assert UNANSWERED_S <= at - 10.0 <= UNANSWERED_S + ASK_AGAIN_S + 1.0


@pytest.mark.parametrize("silent_s", [15.0, 55.0])
def test_one_that_computes_may_be_silent_for_as_long_as_a_step_or_a_compiler_takes(silent_s: float) -> None:
    assert until(Worker(computes(), silent_to=10.0 + silent_s))[1] is None


def test_one_of_which_nobody_tells_has_the_whole_time() -> None:
    at, why = until(Worker(lambda _: None))
    assert why is not None and at - 10.0 >= UNANSWERED_S


def test_one_whose_threads_all_sleep_hangs() -> None:
    at, why = until(Worker(lambda _: SLEEPS))
    assert why == "hangs: it answers no heartbeat, and all its threads have slept for 11 s"
    assert ASLEEP_S <= at - 10.0 <= ASLEEP_S + ASK_AGAIN_S + 2.0


def test_one_that_was_slow_to_answer_before_is_given_more_time() -> None:
    slow_s = 3.0
    at, why = until(Worker(lambda _: SLEEPS, takes_s=slow_s))
    assert why is not None and at - 10.0 >= SLOWER * slow_s


def test_time_in_which_the_driver_stood_still_is_nobodys_silence() -> None:
    """The driver comes back from 500 s in which it could look at nothing, and hears the answer a second later."""
    stood: list[float] = []

    class Blocked(Worker):
        async def look(self) -> ProcessLook | None:
            if not stood:
                stood.append(asyncio.get_running_loop().time())
                await asyncio.sleep(500.0)
            return SLEEPS

    worker = Blocked(lambda _: SLEEPS, silent_to=511.0)
    assert until(worker)[1] is None and stood


def test_a_worker_whose_process_ended_is_left_to_those_who_watch_its_process() -> None:
    class Dead(Worker):
        async def heartbeat(self) -> Heartbeat:
            raise WorkerDied("its process ended")

    assert until(Dead(lambda _: STOPPED))[1] is None


# ---------------------------------------------------------------------------------------------- a real process


@contextmanager
def process(program: str) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-S", "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def seen(pid: int, wanted: Callable[[ProcessLook], bool]) -> bool:
    return any(look is not None and wanted(look) for look in (look_at(pid) for _ in range(200_000)))


def test_the_system_tells_of_sleep_of_a_stop_and_of_computing() -> None:
    with process("import time\ntime.sleep(600)") as pid:
        assert seen(pid, lambda look: set(look.threads) == {"S"})
        os.kill(pid, signal.SIGSTOP)
        assert seen(pid, lambda look: set(look.threads) == {"T"})
        before = look_at(pid)
        os.kill(pid, signal.SIGCONT)
        assert seen(pid, lambda look: set(look.threads) == {"S"})
        assert before is not None
    with process("while True: pass") as pid:
        first = look_at(pid)
        assert first is not None and seen(pid, lambda look: look.cpu_s > first.cpu_s)
    assert look_at(pid) is None
