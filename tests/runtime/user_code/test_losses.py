"""WorkerPool that are lost: event loops that stand still, what the host may not take for that, and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import RunnerLost
from headway.runtime.process_tree import descendants
from headway.runtime.workers import user_code_worker as process
from headway.runtime.workers import worker_pool
from headway.runtime.workers.user_code_worker import UserCodeWorker, WorkerJob
from headway.runtime.workers.worker_pool import WorkerPool
from tests.runtime.user_code.test_workers import ended, workers_of
from tests.tiers import mostly_slow

STALL_S = 0.4
PATIENT_S = 0.8
"""The limit where no loop is to be taken for held, on a busy machine either."""


def sleeps(worker: UserCodeWorker, jobs: int) -> bool:
    """Whether a worker's ``jobs`` have all gone on from their first ask, and none of them is in a step."""
    assert worker._note is not None
    return worker._note.steps >= 2 * jobs and worker._note.whose == 0


async def patiently(workers: WorkerPool, *job: Any, on_ask: Any = None, tries: int = 5) -> Any:
    """Run a job, and again as long as it was lost by no fault of its own."""
    for tries_left in range(tries, -1, -1):
        try:
            return await workers.run(job, on_ask)
        except RunnerLost as lost:
            if lost.culprit is not False or not tries_left:
                raise
    raise AssertionError("unreachable")


@mostly_slow("job", ["holds_the_loop", "holds_the_loop_in_a_task"], quick=["holds_the_loop"])
async def test_a_job_that_holds_its_event_loop_is_named_and_the_others_of_its_worker_are_not(job: str) -> None:
    """Starts two processes of user code, and waits for one to be taken for lost."""
    async with workers_of("shared", stall_s=STALL_S) as workers:
        before = await workers.run(("pid",))
        other = asyncio.create_task(workers.run(("sleeps", 60)))
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(RunnerLost, match=rf"event loop .*more than {STALL_S} s .agent\.stall_s") as lost:
            await workers.run((job, 60))
        assert STALL_S <= time.monotonic() - began < 30
        assert (lost.value.culprit, lost.value.timed_out) == (True, True)
        with pytest.raises(RunnerLost, match=r"event loop .*by another job") as lost:
            await other
        assert (lost.value.culprit, lost.value.timed_out) == (False, False)
        assert await workers.run(("pid",)) != before


@mostly_slow("job", ["backtracks", "keeps_the_lock", "stops"], quick=["keeps_the_lock"])
async def test_a_loop_that_nothing_of_python_can_interrupt_is_replaced(job: str) -> None:
    async with workers_of("shared", stall_s=STALL_S) as workers:
        with pytest.raises(RunnerLost, match="event loop was held"):
            await workers.run((job,))
        assert await workers.run(("echo", 1)) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "ended with SIGKILL"),
        pytest.param(signal.SIGSTOP, "event loop was held", marks=pytest.mark.slow),
    ],
)
async def test_of_a_worker_that_somebody_else_kills_or_stops_no_job_is_to_blame(number: int, text: str) -> None:
    """Starts four processes of user code, and waits for three limits."""
    asked: list[int] = []
    all_asked = asyncio.Event()

    async def count_up(k: int) -> int:
        asked.append(k)
        if len(asked) == 6:
            all_asked.set()
        return k

    async with workers_of("shared", processes=2, stall_s=STALL_S) as workers:
        await workers.start()
        jobs = [asyncio.create_task(workers.run(("asks", 1, 4 * STALL_S), count_up)) for _ in range(6)]
        await all_asked.wait()
        async with asyncio.timeout(60):
            while not all(sleeps(worker, jobs=3) for worker in workers._workers):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)
        os.kill(descendants(workers._workers[0].process.pid)[0], number)
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        lost = [end for end in ends if isinstance(end, RunnerLost)]
        assert [end for end in ends if not isinstance(end, RunnerLost)] == [[0]] * 3
        assert [(text in str(end), end.culprit) for end in lost] == [(True, None)] * 3


@mostly_slow(("kind", "guard"), product(["spawned", "forked"], ["too", "not"]), quick=[("forked", "not")])
async def test_a_worker_without_a_loop_that_somebody_stops_is_replaced(
    kind: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (process, worker_pool):
        monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(process, "STOPPED_S", 0.25)
    async with workers_of(kind) as workers:
        before = await workers.run(("pid",))
        job = asyncio.create_task(workers.run(("holds_the_loop", 600)))
        await asyncio.sleep(0)
        above = workers._workers[0].process if workers._fork_server is None else workers._fork_server.process
        for pid in (above.pid, *descendants(above.pid)) if guard == "too" else (before,):
            os.kill(pid, signal.SIGSTOP)
        why = r"stopped for 0\.25 s .SIGSTOP."
        if (kind, guard) == ("forked", "too"):  # the process that forked it may be seen to be stopped first
            why += "|the process that forked it"
        with pytest.raises(RunnerLost, match=why):
            await job
        assert await workers.run(("pid",)) != before


async def test_the_log_shows_where_a_loop_was_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the worker may take longer to write than it is given."""
    monkeypatch.setattr(process, "SHOWN_S", 600.0)
    log = tmp_path / "log"
    async with workers_of("shared", stall_s=STALL_S, log_path=log) as workers:
        with pytest.raises(RunnerLost):
            await workers.run(("backtracks",))
        async with asyncio.timeout(60):
            while "in backtracks" not in log.read_text():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)


async def test_a_loop_that_is_slow_is_not_replaced() -> None:
    """Over 1 s: steps without a look at the connection, and single steps that are shorter than the limit."""
    async with workers_of("shared", stall_s=PATIENT_S) as workers:
        before = await workers.run(("pid",))
        assert await workers.run(("steps_for", 2 * PATIENT_S)) == "stepped"
        held = [workers.run(("holds_the_loop", 0.25 * PATIENT_S)) for _ in range(4)]
        assert await asyncio.gather(*held) == ["held"] * 4
        assert await workers.run(("pid",)) == before


def looked_after(note: Any) -> UserCodeWorker:
    """A worker without a process, with a job that never ends."""
    worker = UserCodeWorker("worker", note, lambda _: None)
    process_of: Any = SimpleNamespace(
        look=lambda every_s: False, kill=lambda **_: None, channel=SimpleNamespace(send=lambda frame: None)
    )
    worker.process = process_of
    worker.jobs[1] = WorkerJob(1, b"", None, None, None, asyncio.get_running_loop().create_future())
    return worker


async def test_a_loop_that_makes_steps_is_not_held_though_it_answers_nothing() -> None:
    note = SimpleNamespace(steps=0, whose=0)
    worker = looked_after(note)
    for _ in range(50):
        note.steps += 1
        worker.look(0.1, 0.4)
    assert not worker.dying
    looks = 0
    while not worker.dying and looks < 20:
        worker.look(0.1, 0.4)
        looks += 1
    assert looks == 5, "for more than the limit"


def test_a_process_that_is_stopped_for_a_moment_now_and_then_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, killed = iter([True, True, False] * 10 + [True] * 3), list[bool]()
    monkeypatch.setattr(process, "is_stopped", lambda pid: next(seen))
    one: Any = object.__new__(process.WorkerProcess)
    one._works_as, one._stopped_s, one.kill = 1, 0.0, lambda: killed.append(True)
    assert [one.look(process.STOPPED_S / 2) for _ in range(30)] == [False] * 30
    assert [one.look(process.STOPPED_S / 2) for _ in range(3)] == [False, False, True]
    assert killed == [True]


async def test_a_host_that_stands_still_itself_replaces_nobody() -> None:
    """Takes twice the limit, during which the host's loop is blocked and the worker's is not."""
    async with workers_of("shared", stall_s=PATIENT_S) as workers:
        before = await workers.run(("pid",))
        sleeping = asyncio.create_task(workers.run(("sleeps", 1.5 * PATIENT_S)))
        asking = asyncio.create_task(workers.run(("asks", 3, 0.1), answer))
        await asyncio.sleep(0.1)
        time.sleep(2 * PATIENT_S)  # noqa: ASYNC251
        assert (await sleeping, await asking) == ("slept", [0, 1, 2])
        assert await workers.run(("pid",)) == before


@pytest.mark.slow
async def test_a_machine_that_stands_still_costs_nobody() -> None:
    """Takes longer than the limit, during which neither host nor worker does anything, though a ping is due.

    The limit leaves a worker that goes on, on a busy machine, the time to answer.
    """
    stall_s = 2 * PATIENT_S
    async with workers_of("shared", stall_s=stall_s) as workers:
        pid = await workers.run(("pid",))
        sleeping = asyncio.create_task(workers.run(("sleeps", PATIENT_S)))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stall_s / 5)
        time.sleep(1.5 * stall_s)  # noqa: ASYNC251
        await asyncio.sleep(0)
        await asyncio.sleep(stall_s / 20)
        os.kill(pid, signal.SIGCONT)
        assert await sleeping == "slept"
        assert await workers.run(("pid",)) == pid


@pytest.mark.slow
async def test_a_job_that_was_left_and_holds_its_loop_still_costs_its_worker_alone() -> None:
    """Starts two processes of user code, and waits for one to be taken for lost."""
    async with workers_of("shared", stall_s=STALL_S) as workers:
        before = await workers.run(("pid",))
        begun = asyncio.Event()

        async def begins(_: int) -> None:
            begun.set()

        process = workers._workers[0].process
        left = asyncio.create_task(workers.run(("asks_and_blocks", 1, 60), begins))
        await begun.wait()
        await asyncio.sleep(0.2)  # until it holds the loop
        left.cancel()
        assert await asyncio.wait_for(asyncio.shield(process.ended), 60) == "SIGKILL"
        assert await workers.run(("pid",)) != before


async def test_workers_without_jobs_are_not_looked_after() -> None:
    async with workers_of("shared", stall_s=STALL_S) as workers:
        await workers.run(("echo", 1))
        await asyncio.sleep(STALL_S / 4)
        assert workers._looking is None
        assert await workers.run(("echo", 2)) == 2


class SilentForkServer:
    """A process that does not come up, and is killed at the third look because it is stopped."""

    lost = False

    def __init__(self, _: object) -> None:
        self.process, self.looks = self, 0
        self.loaded, self.ended = asyncio.Future[None](), asyncio.Future[str]()

    def look(self, every_s: float) -> None:
        self.looks += 1
        if self.looks == 3:
            self.kill()

    def kill(self) -> None:
        if not self.ended.done():
            self.loaded.set_exception(RunnerLost("ended with SIGKILL", culprit=False))
            self.ended.set_result("SIGKILL")


async def test_a_fork_server_is_looked_after_while_jobs_wait_for_its_first_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "LOOK_S", 0.001)
    monkeypatch.setattr(worker_pool, "ForkServer", SilentForkServer)
    async with workers_of("forked") as workers, asyncio.timeout(10):
        with pytest.raises(RunnerLost, match="ended with SIGKILL"):
            await workers.run(("echo", 1))


@pytest.mark.slow
async def test_a_killed_fork_server_takes_its_workers_along_and_is_replaced() -> None:
    async with workers_of("forked", processes=3) as workers:
        pids = await asyncio.gather(*(workers.run(("pid",)) for _ in range(3)))
        jobs = [asyncio.create_task(patiently(workers, "asks_and_blocks", 4, 0.05, on_ask=answer)) for _ in range(9)]
        await asyncio.sleep(0.05)
        assert workers._fork_server is not None
        with ended(pids[0]):
            os.kill(workers._fork_server.process.pid, signal.SIGKILL)
        assert await asyncio.gather(*jobs) == [[0, 1, 2, 3]] * 9


async def test_jobs_lost_with_a_fork_server_are_not_to_blame() -> None:
    async with workers_of("forked") as workers:
        begun = asyncio.Event()
        job = asyncio.create_task(workers.run(("holds_the_loop", 60), on_begin=begun.set))
        await begun.wait()
        assert workers._fork_server is not None
        os.kill(workers._fork_server.process.pid, signal.SIGKILL)
        with pytest.raises(RunnerLost, match="ended with the process that forked it") as lost:
            await job
        assert lost.value.culprit is False


async def test_a_fork_server_that_was_killed_while_idle_costs_no_job() -> None:
    async with workers_of("forked") as workers:
        with pytest.raises(RunnerLost):
            await workers.run(("dies",))
        assert workers._fork_server is not None
        fork_server, *_ = descendants(workers._fork_server.process.pid)  # it would fork for a moment
        os.kill(fork_server, signal.SIGKILL)
        assert await workers.run(("echo", 1)) == 1


async def test_an_idle_worker_that_was_killed_costs_no_job_once_its_end_is_seen() -> None:
    async with workers_of("spawned") as workers:
        pid = await workers.run(("pid",))
        seen = workers._workers[0].process.ended
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(seen), 60)
        assert await workers.run(("pid",)) != pid


async def answer(message: Any) -> Any:
    return message


async def test_a_job_that_goes_on_after_it_was_cancelled_costs_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.workers.user_code_worker.LEAVES_S", 0.2)
    async with workers_of("shared") as workers:
        begun = asyncio.Event()

        async def begin(_: str) -> None:
            begun.set()

        before = await workers.run(("pid",))
        other = asyncio.create_task(workers.run(("sleeps", 60)))
        job = asyncio.create_task(workers.run(("swallows",), begin))
        await begun.wait()
        job.cancel()
        with pytest.raises(RunnerLost, match=r"another job .*0\.2 s after it was cancelled") as lost:
            await other
        assert lost.value.culprit is False
        assert await workers.run(("pid",)) != before


async def test_user_code_is_closed_although_a_job_goes_on_when_the_process_is_to_end(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def begin(_: str) -> None:
        begun.set()

    log = tmp_path / "worker.log"
    async with workers_of("shared", loading="waits less", log_path=log, close_s=30) as workers:
        job = asyncio.create_task(workers.run(("swallows",), begin))
        await begun.wait()
    with pytest.raises(RunnerLost, match="was closed"):
        await job
    assert "closed" in log.read_text()


async def test_each_of_many_jobs_may_wait_in_a_thread() -> None:
    async with workers_of("shared") as workers:
        assert await workers.run(("meet_in_threads", 100)) == 100
