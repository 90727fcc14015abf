"""The processes that score: what they return, how each failure reads, and that no process survives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.agents.rewards import reward_workers
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardPart, RewardSpec
from headway.config.schema import TaskConfig
from headway.data.interfaces.episode_groups import Scores
from headway.data.tasks import make_task
from headway.data.types import Prompt
from headway.errors import ScoringFailed
from tests.agents.rewards.parts import part_of
from tests.tiers import mostly_slow

USER_FILE = '''
import asyncio, os, re, signal, subprocess, sys, time
import numpy as np

calls = 0

def right(response, answer):
    return response == answer

def pids(responses):
    return [os.getpid()] * len(responses)

def does(response, answer):
    """Call the function that the answer names."""
    return globals()[answer](response)

def raises(response):
    raise ValueError("no\\nverdict")

class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def raises_unpicklable(response):
    raise Unpicklable("odd", lambda: 0)

def raises_what_utf8_lacks(response):
    raise ValueError("half \\ud800")

class Unreadable(Exception):
    def __str__(self):
        raise TypeError

def raises_unreadable(response):
    raise Unreadable

def interrupts(response):
    raise KeyboardInterrupt

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
    if response == "take the alarm":
        signal.alarm(0)
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    return 1.0

def talks(response):
    print("x" * 300_000)
    os.write(1, b"straight to the descriptor\\n")
    return 1.0

def closes_its_output(response):
    os.close(1)
    os.close(2)
    print("nowhere", flush=True)
    return 1.0

def closes_and_raises(response):
    os.close(1)
    os.close(2)
    raise ValueError("no descriptor")

def forks(response):
    os.fork()
    return float(len(response))

def starts_a_process(response, pid_file):
    child = subprocess.Popen(["sleep", "600"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    if response == "waits":
        child.wait()
    return 1.0

def for_trl(prompts, completions, solution, **kwargs):
    return [None if s is None else float(c == s) for c, s in zip(completions, solution)]

def for_verl(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    return {"score": scale * (solution_str == ground_truth), "source": data_source}

def forgets_to_return(responses):
    [float(len(text)) for text in responses]

def text(response):
    return "1.0"

async def cancels(response):
    raise asyncio.CancelledError

def raises_on_some(response):
    if response == "b":
        raise KeyError("b")
    return 1.0

def killed_the_first_time(response, marker):
    if response == "a" and not os.path.exists(marker):
        open(marker, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def hungry(response):
    return len(bytearray(1 << 50))

def light(responses):
    heavy = {"torch", "transformers", "ray", "pydantic", "reasoning_gym", "sympy"}
    return [len(heavy & set(sys.modules))] * len(responses)
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    return file


def prompt(answer: object = "yes", **extra: object) -> Prompt:
    return Prompt(0, 0, 0, "test", "question", np.zeros(1, np.int32), answer, extra)


@contextlib.asynccontextmanager
async def reward_of(
    function: str,
    *,
    task: TaskConfig | None = None,
    workers: int = 1,
    timeout_s: float = 10.0,
    retries: int = 0,
    log_path: Path | None = None,
    params: Any = None,
    on_timeout: Any = None,
) -> AsyncIterator[RewardWorkers]:
    spec = RewardSpec((part_of(function, **(params or {})),), timeout_s, *((task.name, task.params) if task else ()))
    reward = RewardWorkers(spec, workers=workers, retries=retries, log_path=log_path, on_timeout=on_timeout)
    try:
        await reward.start()
        yield reward
    finally:
        await reward.close()


async def test_a_group_is_scored_in_order(user_file: Path) -> None:
    async with reward_of(f"{user_file}:right") as reward:
        rewards = (await reward.score(prompt(), ["yes", "no", "yes"])).rewards
        nothing = (await reward.score(prompt(), [])).rewards
    assert rewards.tolist() == [1.0, 0.0, 1.0]
    assert rewards.dtype == nothing.dtype == np.float32
    assert nothing.shape == (0,)


async def test_exact_match_compares_with_the_answer() -> None:
    async with reward_of("exact_match") as reward:
        assert (await reward.score(prompt(42), ["42 ", "43"])).rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "task"), [("exact_match", None), ("task", TaskConfig(name="sort", size=10, val_size=1))]
)
async def test_a_reward_that_compares_two_texts_starts_no_process(
    function: str, task: TaskConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    async with reward_of(function, task=task) as reward:
        assert (await reward.score(prompt("12"), ["12", "21"])).rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("function", ["regex", "format", "math_verify", "code", "mine.py:score"])
def test_a_reward_that_may_take_long_or_is_foreign_needs_a_process(function: str) -> None:
    parts = part_of("exact_match"), part_of(function)
    assert RewardSpec(parts, 10.0).needs_process
    assert RewardSpec((part_of("task"),), 10.0, "reasoning_gym/countdown").needs_process


@pytest.mark.slow
async def test_a_tasks_own_verifier_scores() -> None:
    """Starts workers that import the tasks of another library."""
    config = TaskConfig(name="reasoning_gym/countdown", size=10, val_size=1)
    problem = make_task(config.name, config.params, seed=0, problems=10).problem(3)
    async with reward_of("task", task=config) as reward:
        scores = await reward.score(
            prompt(problem.answer, **problem.extra), [f"<answer>{problem.answer}</answer>", "no idea"]
        )
    assert scores.rewards[0] == 1.0
    assert scores.rewards[1] < 1.0


async def test_a_built_in_reward_is_killed_over_what_never_ends(tmp_path: Path) -> None:
    """A pattern that backtracks never gives the interpreter back."""
    log = tmp_path / "reward.log"
    async with reward_of("regex", params={"pattern": "(a+)+$"}, timeout_s=0.3, log_path=log) as reward:
        assert (await reward.score(prompt("a"), ["a", "b"])).rewards.tolist() == [1.0, 0.0]
        with pytest.raises(ScoringFailed, match=r"timeout after 0.3 s"):
            await reward.score(prompt("a"), ["a" * 60 + "b"])
        assert (await reward.score(prompt("a"), ["a"])).rewards.tolist() == [1.0]
    assert "worker=reward" in log.read_text()


WRONG = {
    "raises": "exception: ValueError: no verdict",
    "raises_unpicklable": "exception: Unpicklable: odd",
    "raises_what_utf8_lacks": "exception: ValueError: half \\ud800",
    "raises_unreadable": "exception: Unreadable: (its message cannot be read)",
    "raises_on_some": "exception: KeyError: 'b'",
    "interrupts": "exception: KeyboardInterrupt",
    "exits": "exception: SystemExit: 4",
    "text": "returned '1.0' for response 0, expected a finite number",
    "hungry": "exception: MemoryError",
}
"""Function of a response → how its group fails. Of values that no process changes, most are in `test_user_function`."""


async def test_what_a_function_does_wrong_is_the_reason_and_its_worker_goes_on(user_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "reward.log"
    async with reward_of(f"{user_file}:does", log_path=log) as reward:
        for function, reason in WRONG.items():
            with pytest.raises(ScoringFailed) as error:
                await reward.score(prompt(function), ["a", "b"])
            assert str(error.value).startswith(reason)
    assert "in raises\n" in log.read_text()
    assert log.read_text().count("reward worker runs") == 1


OTHERS = [
    ("cancels", "exception: CancelledError"),
    ("nan", "returned nan for response 0"),
    ("too_few", "returned 1 values for 2 responses"),
    ("forgets_to_return", "returned None for 2 responses, expected a list of 2 numbers"),
    ("for_trl", "no reward applies to response 0: None was returned for it"),
]


@mostly_slow(("function", "reason"), OTHERS, quick=[])
async def test_what_functions_of_other_forms_do_wrong_is_the_reason(
    user_file: Path, function: str, reason: str
) -> None:
    async with reward_of(f"{user_file}:{function}") as reward:
        with pytest.raises(ScoringFailed) as error:
            await reward.score(prompt(solution=None), ["a", "b"])
    assert str(error.value).startswith(reason)


async def test_a_failure_is_tried_again_within_the_budget(user_file: Path) -> None:
    async with reward_of(f"{user_file}:succeeds_the_second_time", retries=1) as reward:
        assert (await reward.score(prompt(), ["a"])).rewards.tolist() == [1.0]


ENDLESS = {
    "backtrack": "timeout after 0.3 s",
    "take the alarm": "timeout after 0.3 s",
    "die": "worker ended with exit code 3",
}


@mostly_slow("responses", [["take the alarm"], [*ENDLESS]], quick=[["take the alarm"]])
async def test_endless_and_dying_calls_fail_their_group_and_the_others_go_on(
    user_file: Path, responses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for time-outs, and for workers that start in the place of dead ones. A call that takes the alarm for itself
    ends by its group's limit.
    """
    timeouts: list[int] = []
    monkeypatch.setattr(reward_workers, "GRACE_S", 60.0)  # a new worker may have to wait for a core
    async with reward_of(f"{user_file}:moody", timeout_s=0.3, on_timeout=timeouts.append) as reward:
        for response in responses:
            with monkeypatch.context() as short:
                short.setattr(reward_workers, "GRACE_S", 0.2)
                with pytest.raises(ScoringFailed, match=ENDLESS[response]):
                    await reward.score(prompt(), ["fine", response])
            assert (await reward.score(prompt(), ["fine"])).rewards.tolist() == [1.0]
    assert timeouts == ([1] if len(responses) == 1 else [1, 2])


@mostly_slow(("retries", "lost"), [(0, ["worker ended with SIGKILL"]), (1, [])], quick=[(1, [])])
async def test_a_worker_that_is_killed_while_it_scores_costs_one_try_of_its_own_group_alone(
    user_file: Path, tmp_path: Path, retries: int, lost: list[str]
) -> None:
    params = {"marker": str(tmp_path / "killed")}
    async with reward_of(f"{user_file}:killed_the_first_time", retries=retries, params=params) as reward:
        scored = await asyncio.gather(
            *(reward.score(prompt(), [response]) for response in "abc"), return_exceptions=True
        )
    assert [str(failure) for failure in scored if isinstance(failure, ScoringFailed)] == lost
    assert [one.rewards.tolist() for one in scored if isinstance(one, Scores)] == [[1.0]] * (3 - len(lost))


@pytest.mark.slow
async def test_a_function_that_forks_is_answered_by_its_worker(user_file: Path) -> None:
    async with reward_of(f"{user_file}:forks") as reward:
        for responses in (["a"], ["bb", "ccc"], ["dddd"]):
            assert (await reward.score(prompt(), responses)).rewards.tolist() == [len(text) for text in responses]


@mostly_slow("response", ["waits", "leaves it"], quick=[])
async def test_what_a_function_starts_ends_with_its_worker(user_file: Path, tmp_path: Path, response: str) -> None:
    """Whether the worker is killed over it, or closed later on."""
    pid_file = tmp_path / "pid"
    async with reward_of(f"{user_file}:starts_a_process", timeout_s=1, params={"pid_file": str(pid_file)}) as reward:
        scored = asyncio.create_task(reward.score(prompt(), [response]))
        await asyncio.wait([scored])
        assert isinstance(scored.exception(), ScoringFailed if response == "waits" else type(None))
    with contextlib.suppress(ProcessLookupError), ended(int(pid_file.read_text())):
        pass


async def test_functions_for_trl_and_verl_score_in_a_process(user_file: Path) -> None:
    async with reward_of(f"{user_file}:for_trl") as reward:
        assert (await reward.score(prompt(solution="a"), ["a", "b"])).rewards.tolist() == [1.0, 0.0]
    async with reward_of(f"{user_file}:for_verl", params={"scale": 0.5}) as reward:
        assert (await reward.score(prompt(), ["yes", "b"])).rewards.tolist() == [0.5, 0.0]


async def test_the_parts_of_a_sum_come_with_it_from_a_worker_that_stays_light(user_file: Path) -> None:
    parts = (part_of(f"{user_file}:right"), RewardPart("exact_match", "exact", 0.5), part_of("task"))
    task = TaskConfig(name="sort", size=10, val_size=1)
    spec = RewardSpec((*parts, part_of(f"{user_file}:light")), 10.0, task.name, task.params)
    reward = RewardWorkers(spec, workers=1, retries=0, log_path=None)
    try:
        scores = await reward.score(prompt(), ["yes", " yes"])
        nothing = await reward.score(prompt(), [])
    finally:
        await reward.close()
    assert scores.rewards.tolist() == [2.5, 1.5]
    assert scores.parts == {"right": [1.0, 0.0], "exact": [1.0, 1.0], "task": [1.0, 1.0], "light": [0.0, 0.0]}
    assert (nothing.rewards.tolist(), nothing.parts) == ([], {name: [] for name in scores.parts})


@pytest.mark.slow
async def test_one_groups_endless_call_does_not_hold_up_the_others(user_file: Path) -> None:
    async with reward_of(f"{user_file}:moody", timeout_s=5, workers=2) as reward:
        endless = asyncio.create_task(reward.score(prompt(), ["loop"]))
        others = await asyncio.gather(*(reward.score(prompt(), ["fine"]) for _ in range(20)))
        assert not endless.done()
        assert [scores.rewards.tolist() for scores in others] == [[1.0]] * 20
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def test_what_workers_print_goes_to_the_log_only(user_file: Path, tmp_path: Path, capfd) -> None:
    log = tmp_path / "reward.log"
    async with reward_of(f"{user_file}:talks", log_path=log) as reward:
        assert (await reward.score(prompt(), ["a", "b"])).rewards.tolist() == [1.0, 1.0]
    assert log.stat().st_size > 600_000
    assert b"straight to the descriptor" in log.read_bytes()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
async def test_closing_leaves_no_process_and_fails_what_is_still_awaited(user_file: Path) -> None:
    reward = RewardWorkers(
        RewardSpec((part_of(f"{user_file}:moody"),), timeout_s=60), workers=2, retries=3, log_path=None
    )
    await reward.start()
    endless = [asyncio.create_task(reward.score(prompt(), ["loop"])) for _ in range(3)]
    await asyncio.sleep(0)
    workers = [process.pid for process in reward._pool._alive]
    await reward.close()
    for result in await asyncio.gather(*endless, return_exceptions=True):
        assert isinstance(result, ScoringFailed)
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ScoringFailed, match="closed"):
        await reward.score(prompt(), ["fine"])
    await reward.close()


CLOSE = [("closes_its_output", "Bad file descriptor"), ("closes_and_raises", "no descriptor")]


@mostly_slow(("function", "reason"), CLOSE, quick=CLOSE[:1])
async def test_a_reward_that_closes_its_output_costs_its_own_group_alone(
    user_file: Path, function: str, reason: str
) -> None:
    async with reward_of(f"{user_file}:{function}") as reward:
        with pytest.raises(ScoringFailed, match=reason):
            await reward.score(prompt(), ["a"])


@pytest.mark.slow
async def test_a_killed_idle_worker_is_replaced(user_file: Path) -> None:
    async with reward_of(f"{user_file}:pids") as reward:
        before = int((await reward.score(prompt(), ["a"])).rewards[0])
        with ended(before):
            os.kill(before, signal.SIGKILL)
        scores = None
        for _ in range(5):  # a try may be lost until its end is seen
            with contextlib.suppress(ScoringFailed):
                scores = await reward.score(prompt(), ["a"])
                break
        assert scores is not None
        assert int(scores.rewards[0]) != before


async def test_a_function_for_trl_gets_messages_where_the_row_has_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(prompts, completions):\n"
        "    return [float(p[0]['content'] == c[0]['content']) for p, c in zip(prompts, completions)]"
    )
    chat = replace(prompt(), messages=[{"role": "user", "content": "echo"}])
    async with reward_of(f"{tmp_path}/mine.py:score") as reward:
        assert (await reward.score(chat, ["echo", "question"])).rewards.tolist() == [1.0, 0.0]


PARENT = """
import asyncio, sys
import numpy as np
from headway.data.types import Prompt
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardPart, RewardSpec

async def main():
    spec = RewardSpec((RewardPart(sys.argv[1], "mine"),), timeout_s=600)
    reward = RewardWorkers(spec, workers=1, retries=0, log_path=None)
    await reward.start()
    print(reward._pool._workers[0].process.pid, flush=True)
    await reward.score(Prompt(0, 0, 0, "", "", np.zeros(1, np.int32)), [sys.argv[2]])

if __name__ == "__main__":
    asyncio.run(main())
"""


@mostly_slow("busy_with", ["loop", "backtrack"], quick=[])
def test_a_busy_worker_prints_to_its_parents_stderr_and_dies_with_it(
    user_file: Path, tmp_path: Path, busy_with: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), f"{user_file}:moody", busy_with],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline())
        assert parent.stderr.readline() == "busy\n"
        with ended(pid):
            parent.kill()


@contextlib.contextmanager
def ended(pid: int, within_s: float = 60.0):
    """The process ``pid`` ends after the block, in time."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert select.select([descriptor], [], [], within_s)[0], f"process {pid} outlives its parent"
    finally:
        os.close(descriptor)
