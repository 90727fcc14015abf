"""WorkerPool: jobs and asks, how each failure reads, and that no process survives them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, RunError, RunnerLost, UserCodeError, UserCodeFailed, WorkerDied
from headway.runtime import frames
from headway.runtime.process_tree import descendants
from headway.runtime.workers import user_code_worker as process_module
from headway.runtime.workers.worker_pool import WorkerPool
from tests.runtime.user_code.code import CodeSpec
from tests.tiers import crossed, mostly_slow

KINDS: dict[str, dict[str, Any]] = {
    "spawned": {"at_once": 1},
    "forked": {"at_once": 1, "forked": True},
    "shared": {"at_once": None},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
alone = pytest.mark.parametrize("kind", ["spawned", "forked"])


@contextlib.asynccontextmanager
async def workers_of(kind: str, *, processes: int = 1, loading: str = "", **others: Any) -> AsyncIterator[WorkerPool]:
    workers = WorkerPool(
        "worker", CodeSpec(loading), processes=processes, **{"log_path": None, **KINDS[kind], **others}
    )
    try:
        yield workers
    finally:
        await workers.close()


def unread(connection: socket.socket) -> int:
    """Number of bytes that have come and were not read."""
    (number,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    return int(number)


async def answered(message: Any) -> Any:
    return ("answer", message)


@mostly_slow("kind", KINDS, quick=["shared", "forked"])
async def test_a_job_asks_and_returns(kind: str) -> None:
    begun = []
    async with workers_of(kind) as workers:
        described = await workers.start()
        assert (described["pid"] != os.getpid(), described["torch"]) == (True, False)
        result = await workers.run(("asks", 3), answered, on_begin=lambda: begun.append(1))
        assert result == [("answer", 0), ("answer", 1), ("answer", 2)]
        big = b"x" * 3_000_000
        assert await workers.run(("echo", big)) == big
    assert begun == [1]


async def test_several_asks_of_a_job_are_open_at_once() -> None:
    """Each is answered only when all have been asked."""
    asked: list[int] = []
    all_asked = asyncio.Event()

    async def on_ask(k: int) -> int:
        asked.append(k)
        if len(asked) == 5:
            all_asked.set()
        await all_asked.wait()
        return k * k

    async with workers_of("shared") as workers:
        assert await workers.run(("asks_together", 5), on_ask) == [0, 1, 4, 9, 16]


async def test_an_ask_that_is_given_up_is_withdrawn() -> None:
    ended = asyncio.Event()

    async def on_ask(message: str) -> str:
        if message == "never":
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
        await asyncio.wait_for(ended.wait(), 60)
        return "it was"

    async with workers_of("shared") as workers:
        assert await workers.run(("gives_up_asking",), on_ask) == "it was"


@mostly_slow("kind", ["spawned", "shared"], quick=["shared"])
async def test_an_error_of_the_host_reaches_the_job_as_it_is_and_a_defect_ends_it(kind: str) -> None:
    async def refuses(_: Any) -> None:
        raise RunnerLost("no more of that", end="limit")

    async def is_wrong(_: Any) -> None:
        raise ZeroDivisionError

    async def is_cancelled(_: Any) -> None:
        raise asyncio.CancelledError

    async with workers_of(kind) as workers:
        assert await workers.run(("asks_in_vain",), refuses) == "RunnerLost: no more of that"
        assert "nobody to ask" in await workers.run(("asks_in_vain",))
        with pytest.raises(ZeroDivisionError):
            await workers.run(("asks", 1), is_wrong)
        with pytest.raises(RunError, match="was cancelled"):
            await workers.run(("asks", 1), is_cancelled)
        assert await workers.run(("echo", 1)) == 1


FAILURES = {
    ("raises", "no\nverdict"): (UserCodeFailed, "NotOurs: no verdict"),
    ("raises", "half \ud800"): (UserCodeFailed, "NotOurs: half \\ud800"),
    ("raises_ours", "no such thing"): (ConfigError, "no such thing"),
    ("exits",): (UserCodeFailed, ("SystemExit: 4", "Left: SystemExit: 4")),
    ("interrupts",): (UserCodeFailed, ("KeyboardInterrupt", "Left: KeyboardInterrupt")),
    ("function",): (UserCodeFailed, "pickle"),
    ("not_here",): (UserCodeFailed, "the result cannot be read by another process: ModuleNotFoundError"),
}


@pytest.mark.parametrize("kind", ["spawned", "shared"])
async def test_what_user_code_does_wrong_ends_its_job_alone(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "worker.log"
    async with workers_of(kind, log_path=log) as workers:
        before = await workers.run(("pid",))
        for job, (error, text) in FAILURES.items():
            with pytest.raises(error) as raised:
                await workers.run(job)
            assert any(one in str(raised.value) for one in ([text] if isinstance(text, str) else text)), job
        with pytest.raises(UserCodeFailed, match="cannot be read by another process"):
            await workers.run(("asks_not_here",), answered)
        assert await workers.run(("pid",)) == before
    assert "in raises" in log.read_text()


async def test_what_leaves_the_process_in_a_task_of_user_code_ends_its_job_alone() -> None:
    async with workers_of("shared") as workers:
        other = asyncio.create_task(workers.run(("sleeps", 0.3)))
        with pytest.raises(UserCodeFailed, match="SystemExit: 4"):
            await workers.run(("exits_in_a_task",))
        assert await other == "slept"


async def test_a_forked_process_serves_on_and_is_a_new_one_after_a_failure() -> None:
    async with workers_of("forked") as workers:
        first = await workers.run(("pid",))
        assert [await workers.run(("count",)) for _ in range(2)] == [2, 3]
        with pytest.raises(UserCodeFailed):
            await workers.run(("raises", "x"))
        assert await workers.run(("count",)) == 1
        assert await workers.run(("pid",)) != first


async def test_forked_processes_have_random_numbers_of_their_own() -> None:
    async with workers_of("forked", processes=3) as workers:
        drawn = await asyncio.gather(*(workers.run(("random",)) for _ in range(3)))
    assert len(set(drawn)) == 3


@alone
async def test_synchronous_code_has_no_event_loop_around_it_and_may_run_its_own(kind: str) -> None:
    async with workers_of(kind) as workers:
        assert await workers.run(("own_loop",)) == "ran"
        with pytest.raises((UserCodeFailed, RunError), match="event loop"):
            await workers.run(("awaits",))


@crossed(
    ("kind", "case"), KINDS, [("dies", "exit code 3"), ("killed", "SIGKILL"), ("closes_everything", "exit code 1")]
)
async def test_a_process_that_ends_fails_its_job_with_how_and_is_replaced(kind: str, case: tuple[str, str]) -> None:
    job, end = case
    async with workers_of(kind) as workers:
        before = await workers.run(("pid",))
        with pytest.raises(RunnerLost, match=f"worker ended with {end}") as lost:
            await workers.run((job,))
        assert (lost.value.end, lost.value.timed_out) == (end, False)
        # An event loop that finds its own descriptors closed ends between two steps, which are nobody's.
        assert lost.value.culprit is (None if (kind, job) == ("shared", "closes_everything") else True)
        assert await workers.run(("pid",)) != before


async def test_what_a_process_said_before_it_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is seen when only a part of its last message has been read."""
    monkeypatch.setattr(frames, "CHUNK", 64)
    async with workers_of("spawned") as workers:
        pid = await workers.run(("pid",))
        job = asyncio.create_task(workers.run(("echo", "x" * 10_000)))
        await asyncio.sleep(0)
        said, until = workers._workers[0].process.channel._sock, time.monotonic() + 60
        while unread(said) < 10_000:
            assert time.monotonic() < until, "it says nothing"
            time.sleep(0.005)  # noqa: ASYNC251 - this loop is to read nothing of it yet
        with ended(pid):
            os.kill(pid, signal.SIGKILL)
        assert await job == "x" * 10_000


async def test_the_others_in_a_process_that_ends_are_told_that_it_was_not_they() -> None:
    async with workers_of("shared") as workers:
        others = [asyncio.create_task(workers.run(("sleeps", 60))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RunnerLost, match="ended with exit code 3"):
            await workers.run(("dies",))
        for lost in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(lost, RunnerLost)
            assert (str(lost), lost.culprit) == ("its worker was lost: it ended with exit code 3", False)


@mostly_slow("kind", ["spawned", "forked"], quick=["forked"])
async def test_a_time_limit_of_the_kernels_or_of_the_hosts_ends_the_process(kind: str) -> None:
    async with workers_of(kind) as workers:
        before = await workers.run(("pid",))
        with pytest.raises(RunnerLost, match="SIGALRM") as lost:
            await workers.run(("overdue",))
        assert lost.value.timed_out
        with pytest.raises(RunnerLost, match=r"took longer than 0.2 s") as lost:
            await workers.run(("backtracks",), timeout_s=0.2)
        assert lost.value.timed_out
        assert await workers.run(("pid",)) != before


async def test_a_time_limit_ends_the_job_alone_where_others_share_its_process() -> None:
    async with workers_of("shared") as workers:
        other = asyncio.create_task(workers.run(("sleeps", 0.4)))
        with pytest.raises(RunnerLost, match=r"took longer than 0.1 s"):
            await workers.run(("sleeps", 60), timeout_s=0.1)
        assert await other == "slept"


@mostly_slow("kind", KINDS, quick=["forked", "shared"])
async def test_cancelling_ends_the_job(kind: str) -> None:
    job = ("sleeps", 60) if kind == "shared" else ("holds_the_loop", 60)
    async with workers_of(kind) as workers:
        before = await workers.run(("pid",))
        begun = asyncio.Event()
        running = asyncio.create_task(workers.run(job, on_begin=begun.set))
        waiting = asyncio.create_task(workers.run(("echo", 1)))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await waiting == 1
        assert (await workers.run(("pid",)) == before) == (kind == "shared")
        assert [worker.load for worker in workers._workers] == [0]


async def test_jobs_wait_in_order_and_one_that_is_cancelled_leaves_its_place() -> None:
    order: list[int] = []
    async with workers_of("forked") as workers:
        jobs = [
            asyncio.create_task(workers.run(("echo", k), on_begin=lambda k=k: order.append(k)))  # type: ignore[misc]
            for k in range(6)
        ]
        await asyncio.sleep(0)
        jobs[3].cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    assert order == [0, 1, 2, 4, 5]


@mostly_slow(("kind", "at_once"), [("spawned", 1), ("forked", 1), ("shared", 2)], quick=[("shared", 2)])
async def test_there_are_never_more_processes_and_jobs_in_them_than_allowed(kind: str, at_once: int) -> None:
    running = most = 0
    full = asyncio.Event()

    async def on_ask(k: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2 * at_once:
            full.set()
        await full.wait()
        await asyncio.sleep(0.02)
        running -= 1

    async with workers_of(kind, processes=2, at_once=at_once) as workers:
        await workers.start()
        pids = await asyncio.gather(*(workers.run(("asks", 1), on_ask) for _ in range(12)))
        assert len(pids) == 12
    assert most == 2 * at_once


async def test_shared_jobs_spread_over_the_processes() -> None:
    async with workers_of("shared", processes=2) as workers:
        await workers.start()
        waiting = [asyncio.create_task(workers.run(("sleeps", 60))) for _ in range(10)]
        await asyncio.sleep(0)
        assert [worker.load for worker in workers._workers] == [5, 5]
        for task in waiting:
            task.cancel()


@mostly_slow("kind", ["spawned", "shared"], quick=["shared"])
async def test_a_child_that_user_code_forks_ends_where_the_worker_goes_on(kind: str) -> None:
    async with workers_of(kind) as workers:
        for _ in range(3):
            assert await workers.run(("forks",)) == "once"
            assert await workers.run(("forks_and_asks",), answered) == "('answer', 'whom')"
            with pytest.raises(UserCodeFailed, match="NotOurs: once"):
                await workers.run(("forks_and_raises",))


async def test_a_child_that_user_code_forks_does_not_go_on_with_jobs_of_an_event_loop(tmp_path: Path) -> None:
    async with workers_of("shared") as workers:
        await workers.run(("forks_and_goes_on", str(tmp_path / "notes")))
        await workers.run(("sleeps", 0.3))
    assert (tmp_path / "notes").read_text() == "went on\n"


@pytest.mark.slow
async def test_a_child_that_user_code_forks_says_nothing_as_it_ends(tmp_path: Path) -> None:
    async with workers_of("spawned", log_path=tmp_path / "log") as workers:
        assert await workers.run(("forks",)) == "once"
        assert await workers.run(("forks",)) == "once"
    assert "Traceback" not in (tmp_path / "log").read_text()


@crossed(
    ("kind", "case"),
    KINDS,
    [
        ("fails", UserCodeError, r"^code.py:Code cannot be loaded: NotOurs: odd thing$"),
        ("refuses", ConfigError, "^there is no such code$"),
        ("dies", WorkerDied, r"^a worker ended while it loaded code.py:Code$"),
    ],
)
async def test_code_that_does_not_load_is_told_at_the_start(kind: str, case: tuple[str, Any, str]) -> None:
    loading, error, text = case
    async with workers_of(kind, loading=loading, processes=2) as workers:
        with pytest.raises(error, match=text):
            await workers.start()


@mostly_slow("kind", ["spawned", "forked"], quick=["forked"])
async def test_code_that_never_loads_is_told_at_the_start(kind: str) -> None:
    async with workers_of(kind, loading="hangs", start_timeout_s=0.5) as workers:
        with pytest.raises(WorkerDied, match=r"within 0\.5 s .*loaded code\.py:Code"):
            await workers.start()


async def test_jobs_that_wait_for_code_that_does_not_load_fail_with_its_error() -> None:
    async with workers_of("spawned", loading="refuses") as workers:
        ends = await asyncio.gather(*(workers.run(("pid",)) for _ in range(3)), return_exceptions=True)
    assert [str(end) for end in ends] == ["there is no such code"] * 3


@mostly_slow("kind", KINDS, quick=["shared"])
async def test_closing_leaves_no_process_descriptor_or_task_and_fails_what_is_awaited(kind: str) -> None:
    gc.collect()  # what nobody holds any more is closed now, and not meanwhile
    descriptors = open_descriptors()
    busy = ("sleeps", 60) if kind == "shared" else ("backtracks",)
    async with workers_of(kind, processes=2, at_once=2 if kind == "shared" else 1) as workers:
        pid = await workers.run(("pid",))
        started = await workers.run(("starts_a_process",))
        jobs = [asyncio.create_task(workers.run(busy)) for _ in range(5)]
        await asyncio.sleep(0.3)
        pids = [process.pid for process in workers._alive]
        pids += descendants(*pids)
        assert pid in pids
        with ended(started):
            await workers.close()
        for lost in await asyncio.gather(*jobs, return_exceptions=True):
            assert (type(lost), str(lost)) == (RunnerLost, "the worker was closed")
        for one in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(one, 0)
        with pytest.raises(RunnerLost, match="the worker is closed"):
            await workers.run(("pid",))
    left = open_descriptors()
    assert left == descriptors, targets(left - descriptors)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@mostly_slow("kind", KINDS, quick=["spawned"])
async def test_a_start_that_is_given_up_leaves_no_process(kind: str) -> None:
    async with workers_of(kind, loading="hangs") as workers:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workers.start(), 0.5)
        pids = [process.pid for process in workers._alive]
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@mostly_slow("kind", KINDS, quick=["forked"])
async def test_a_worker_leads_a_session_of_its_own_and_ignores_ctrl_c(kind: str) -> None:
    async with workers_of(kind) as workers:
        pid = await workers.run(("pid",))
        assert await workers.run(("session",)) == (pid, True)


async def test_no_signal_of_a_terminal_reaches_a_process_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes begin with the mask of the thread that starts them, in this one's group until they lead their own."""
    monkeypatch.setattr(process_module, "BOOT", "print(open('/proc/self/status').read())")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(WorkerDied):
        async with workers_of("spawned", log_path=tmp_path / "log") as workers:
            await workers.start()
    (blocked,) = (line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("SigBlk"))
    of_a_terminal = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGHUP))
    assert int(blocked, 16) & of_a_terminal == of_a_terminal
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@mostly_slow("kind", ["spawned", "forked"], quick=["forked"])
async def test_processes_that_user_code_starts_end_with_their_worker(kind: str) -> None:
    """Takes seconds where processes are spawned: each imports Headway anew."""
    async with workers_of(kind) as workers:
        pid = await workers.run(("starts_a_process",))
        with ended(pid), pytest.raises(RunnerLost):
            await workers.run(("killed",))


@crossed(("kind", "to"), KINDS, ["stdout", "stderr", "process"])
async def test_secrets_are_hidden_in_the_log_and_in_errors(kind: str, to: str, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    secret = "hunter2-hunter2"
    async with workers_of(kind, log_path=log, env={"PASSWORD": secret}) as workers:
        assert await workers.run(("environment", "PASSWORD")) == secret
        await workers.run(("prints", f"it is {secret}, really", to))
        with pytest.raises(UserCodeFailed) as raised:
            await workers.run(("raises_the_environment", "PASSWORD"))
    assert "hunter2" not in str(raised.value)
    assert "it is ***, really\n" in log.read_text()
    assert "hunter2" not in log.read_text().replace("environ[name]", "")


@mostly_slow("kind", KINDS, quick=["shared"])
async def test_user_code_gets_no_secret_of_the_host_and_is_told_how_it_gets_a_variable(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "t-123456789")
    async with workers_of(kind, log_path=tmp_path / "log") as workers:
        assert await workers.run(("environment", "JUDGE_TOKEN")) is None
        await workers.run(("prints", "it is t-123456789, really", "stdout"))
        with pytest.raises(UserCodeFailed, match=r"agent\.env={JUDGE_TOKEN: JUDGE_TOKEN}"):
            await workers.run(("raises_the_environment", "JUDGE_TOKEN"))
    assert "it is ***, really\n" in (tmp_path / "log").read_text()


def targets(descriptors: set[str]) -> list[str]:
    """What of this process's ``descriptors`` is open now, and leads where."""
    found = []
    for name in descriptors:
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/self/fd/{name}").readlink()))
    return found


def open_descriptors() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


@contextlib.contextmanager
def ended(pid: int, within_s: float = 60.0):
    """The process ``pid`` ends by the end of the block, or soon after it."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert select.select([descriptor], [], [], within_s)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)
