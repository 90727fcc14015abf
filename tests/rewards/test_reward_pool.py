"""The pool of reward processes: what it returns, how each failure reads, and that no process survives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from headway.config.schema import TaskConfig
from headway.data.tasks import make_task
from headway.data.types import Prompt
from headway.errors import ConfigError, ScoringFailed, UserCodeError, WorkerDied
from headway.rewards.pool import RewardPool
from headway.rewards.request import RewardSpec

USER_FILE = '''
import asyncio, os, re, sys
import numpy as np

calls = 0

def right(response, answer):
    return response == answer

def pids(responses):
    return [os.getpid()] * len(responses)

async def awaited(response, answer):
    await asyncio.sleep(0)
    return float(response == answer)

def raises(response):
    raise ValueError("no\\nverdict")

class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def raises_unpicklable(response):
    raise Unpicklable("odd", lambda: 0)

def exits(response):
    sys.exit(4)

def succeeds_the_second_time(response):
    global calls
    calls += 1
    if calls == 1:
        raise OSError("network down")
    return 1.0

def nan(responses):
    return [float("nan")] * len(responses)

def too_few(responses):
    return [1.0]

def moody(response):
    """The response says what happens."""
    if response in ("loop", "backtrack"):
        print("busy", flush=True)
    if response == "loop":
        while True:
            pass
    if response == "backtrack":
        re.match("(a+)+$", "a" * 60 + "b")  # never gives the interpreter back
    if response == "die":
        os._exit(3)
    return 1.0

def talks(response):
    print("x" * 3_000_000)
    os.write(1, b"straight to the descriptor\\n")
    return 1.0

def light(responses):
    heavy = [name for name in ("torch", "transformers", "ray", "pydantic", "reasoning_gym") if name in sys.modules]
    return [len(heavy)] * len(responses)
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    return file


def prompt(answer: object = "yes", **extra: object) -> Prompt:
    return Prompt(0, 0, 0, "test", "question", np.zeros(1, np.int32), answer, extra)


@contextlib.asynccontextmanager
async def pool_of(
    function: str,
    *,
    task: TaskConfig | None = None,
    workers: int = 1,
    timeout_s: float = 10.0,
    retries: int = 0,
    log_path: Path | None = None,
) -> AsyncIterator[RewardPool]:
    spec = RewardSpec(function, timeout_s, *((task.name, task.params) if task else ()))
    pool = RewardPool(spec, workers=workers, retries=retries, log_path=log_path)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_a_group_is_scored_in_order(user_file: Path) -> None:
    async with pool_of(f"{user_file}:right") as pool:
        rewards = await pool.score(prompt(), ["yes", "no", "yes"])
        nothing = await pool.score(prompt(), [])
    assert rewards.tolist() == [1.0, 0.0, 1.0]
    assert rewards.dtype == nothing.dtype == np.float32
    assert nothing.shape == (0,)


async def test_an_asynchronous_function_scores_in_the_pool(user_file: Path) -> None:
    async with pool_of(f"{user_file}:awaited") as pool:
        assert (await pool.score(prompt(), ["no", "yes"])).tolist() == [0.0, 1.0]


async def test_exact_match_compares_with_the_answer() -> None:
    async with pool_of("exact_match") as pool:
        assert (await pool.score(prompt(42), ["42 ", "43"])).tolist() == [1.0, 0.0]


async def test_a_tasks_own_verifier_scores() -> None:
    config = TaskConfig(name="reasoning_gym/countdown", size=10, val_size=1)
    problem = make_task(config.name, config.params, seed=0, problems=10).problem(3)
    async with pool_of("task", task=config) as pool:
        rewards = await pool.score(
            prompt(problem.answer, **problem.extra), [f"<answer>{problem.answer}</answer>", "no idea"]
        )
    assert rewards[0] == 1.0
    assert rewards[1] < 1.0


async def test_workers_stay_light(user_file: Path) -> None:
    async with pool_of(f"{user_file}:light") as pool:
        assert (await pool.score(prompt(), ["a"])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "exception: ValueError: no verdict"),
        ("raises_unpicklable", "exception: Unpicklable: odd"),
        ("exits", "exception: SystemExit: 4"),
        ("nan", "returned nan for response 0"),
        ("too_few", "returned 1 values for 2 responses"),
    ],
)
async def test_what_a_function_does_wrong_is_the_reason(
    user_file: Path, tmp_path: Path, function: str, reason: str
) -> None:
    async with pool_of(f"{user_file}:{function}", log_path=tmp_path / "logs" / "reward.log") as pool:
        with pytest.raises(ScoringFailed) as error:
            await pool.score(prompt(), ["a", "b"])
    assert str(error.value).startswith(reason)


async def test_a_traceback_goes_to_the_log(user_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    async with pool_of(f"{user_file}:raises", log_path=log) as pool:
        with pytest.raises(ScoringFailed):
            await pool.score(prompt(), ["a"])
    assert "in raises" in log.read_text()


async def test_a_failure_is_tried_again_within_the_budget(user_file: Path) -> None:
    async with pool_of(f"{user_file}:succeeds_the_second_time", retries=1) as pool:
        assert (await pool.score(prompt(), ["a"])).tolist() == [1.0]


async def test_endless_and_dying_calls_fail_their_group_and_the_pool_goes_on(user_file: Path) -> None:
    async with pool_of(f"{user_file}:moody", timeout_s=0.3) as pool:
        for response, reason in [
            ("loop", "timeout after 0.3 s"),
            ("backtrack", "timeout after 0.3 s"),
            ("die", "worker ended with exit code 3"),
        ]:
            with pytest.raises(ScoringFailed, match=reason):
                await pool.score(prompt(), ["fine", response])
            assert (await pool.score(prompt(), ["fine"])).tolist() == [1.0]


async def test_one_groups_endless_call_does_not_hold_up_the_others(user_file: Path) -> None:
    async with pool_of(f"{user_file}:moody", timeout_s=5, workers=2) as pool:
        endless = asyncio.create_task(pool.score(prompt(), ["loop"]))
        others = await asyncio.gather(*(pool.score(prompt(), ["fine"]) for _ in range(20)))
        assert not endless.done()
        assert np.concatenate(others).tolist() == [1.0] * 20
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def test_what_workers_print_goes_to_the_log_only(user_file: Path, tmp_path: Path, capfd) -> None:
    log = tmp_path / "reward.log"
    async with pool_of(f"{user_file}:talks", log_path=log) as pool:
        assert (await pool.score(prompt(), ["a", "b"])).tolist() == [1.0, 1.0]
    assert log.stat().st_size > 6_000_000
    assert b"straight to the descriptor" in log.read_bytes()
    assert capfd.readouterr() == ("", "")


async def test_closing_leaves_no_process_and_fails_what_is_still_awaited(user_file: Path) -> None:
    pool = RewardPool(RewardSpec(f"{user_file}:moody", timeout_s=60), workers=2, retries=3, log_path=None)
    await pool.start()
    workers = list(pool._pool._pool_manager.worker_manager.workers)
    endless = [asyncio.create_task(pool.score(prompt(), ["loop"])) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    for result in await asyncio.gather(*endless, return_exceptions=True):
        assert isinstance(result, ScoringFailed)
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ScoringFailed, match="closed"):
        await pool.score(prompt(), ["fine"])
    await pool.close()


async def test_a_killed_idle_worker_is_replaced(user_file: Path) -> None:
    async with pool_of(f"{user_file}:pids") as pool:
        before = int((await pool.score(prompt(), ["a"]))[0])
        with ended(before):
            os.kill(before, signal.SIGKILL)
        rewards = None
        for _ in range(5):  # the pool may lose a try while it finds out
            with contextlib.suppress(ScoringFailed):
                rewards = await pool.score(prompt(), ["a"])
                break
        assert rewards is not None
        assert int(rewards[0]) != before


@pytest.mark.parametrize(
    ("content", "function", "message"),
    [
        ("def score(:", "score", "does not import: SyntaxError"),
        ("def other(response): return 1", "score", "has no function 'score'"),
        ("def score(text): return 1", "score", "a reward has a parameter response"),
    ],
)
async def test_a_file_that_cannot_score_is_found_at_the_start(
    tmp_path: Path, content: str, function: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserCodeError, match=message):
        async with pool_of(f"{tmp_path}/mine.py:{function}"):
            pass


async def test_a_file_that_ends_its_process_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os; os._exit(7)")
    with pytest.raises(WorkerDied, match="ended while it loaded"):
        async with pool_of(f"{tmp_path}/mine.py:score"):
            pass


@pytest.mark.parametrize(("function", "message"), [("exact", "known: exact_match, task"), ("task", "needs data.task")])
async def test_an_unknown_reward_is_a_config_error(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with pool_of(function):
            pass


PARENT = """
import asyncio, sys
import numpy as np
from headway.data.types import Prompt
from headway.rewards.pool import RewardPool
from headway.rewards.request import RewardSpec

async def main():
    pool = RewardPool(RewardSpec(sys.argv[1], timeout_s=600), workers=1, retries=0, log_path=None)
    await pool.start()
    # Before the worker says that it is busy, on the same pipe.
    print(next(iter(pool._pool._pool_manager.worker_manager.workers)), flush=True)
    await pool.score(Prompt(0, 0, 0, "", "", np.zeros(1, np.int32)), [sys.argv[2]])

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through pidfd")
@pytest.mark.parametrize("busy_with", ["loop", "backtrack"])
def test_a_busy_worker_dies_with_its_parent(user_file: Path, tmp_path: Path, busy_with: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), f"{user_file}:moody", busy_with],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "busy\n"
        with ended(pid):
            parent.kill()


@contextlib.contextmanager
def ended(pid: int, within_s: float = 10.0):
    """The process ``pid`` ends after the block, in time."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert select.select([descriptor], [], [], within_s)[0], f"process {pid} outlives its parent"
    finally:
        os.close(descriptor)
