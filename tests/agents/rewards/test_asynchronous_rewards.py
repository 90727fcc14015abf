"""Rewards that are asynchronous functions: calls of all groups share the event loop of a process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.agents.rewards import reward_workers
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardSpec
from headway.data.interfaces.episode_groups import Scores
from tests.agents.rewards.parts import part_of
from tests.agents.rewards.test_reward_workers import prompt, reward_of

USER_FILE = '''
import asyncio, os, time

async def awaited(response, answer):
    await asyncio.sleep(0)
    return float(response == answer)

met = asyncio.Barrier(32)

async def meets(response):
    """Wait until 32 responses are being scored."""
    await met.wait()
    return float(response)

async def moody_async(response):
    """The response says what happens."""
    match response:
        case "block":
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "late" | "beside it":
            await asyncio.sleep(1000 if response == "late" else 0.25)
        case "raise":
            raise ValueError("no verdict")
    return float(os.getpid())

async def computes(response):
    """Compute for 20 ms between two waits."""
    await asyncio.sleep(0.05)
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    await asyncio.sleep(0.05)
    return 1.0
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    return file


async def test_responses_and_groups_of_an_asynchronous_function_are_scored_side_by_side(user_file: Path) -> None:
    """Neither of the two groups can end without the other one."""
    texts = [str(number) for number in range(16)]
    async with reward_of(f"{user_file}:meets", timeout_s=60) as reward:
        for scores in await asyncio.gather(*(reward.score(prompt(), texts) for _ in range(2))):
            assert scores.rewards.tolist() == list(range(16))


async def test_an_asynchronous_call_that_is_late_or_raises_fails_its_group_and_leaves_its_process(
    user_file: Path, tmp_path: Path
) -> None:
    timeouts: list[int] = []
    log = tmp_path / "reward.log"
    async with reward_of(f"{user_file}:moody_async", timeout_s=1, on_timeout=timeouts.append, log_path=log) as reward:
        groups = (["first", "late"], ["raise", "beside it"], ["beside it"])
        late, raised, beside = await asyncio.gather(
            *(reward.score(prompt(), group) for group in groups), return_exceptions=True
        )
        after = await reward.score(prompt(), ["fine"])
    assert str(late) == "timeout after 1 s for response 1"
    assert str(raised).startswith("exception: ValueError: no verdict (mine.py:")
    assert isinstance(beside, Scores)
    assert beside.rewards.tolist() == after.rewards.tolist()
    assert timeouts == [1]
    assert "in moody_async" in log.read_text()


@pytest.mark.slow
async def test_asynchronous_calls_that_compute_do_not_use_up_the_time_of_other_groups(user_file: Path) -> None:
    """The 80 calls compute for 1.6 s together, each of them a fiftieth of its limit."""
    async with reward_of(f"{user_file}:computes", timeout_s=1) as reward:
        groups = await asyncio.gather(*(reward.score(prompt(), ["answer"] * 16) for _ in range(5)))
    assert [scores.rewards.sum() for scores in groups] == [16.0] * 5


@pytest.mark.slow
async def test_loading_an_asynchronous_reward_to_check_it_starts_one_process(user_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    spec = RewardSpec((part_of(f"{user_file}:awaited"),), 10.0)
    reward = RewardWorkers(spec, workers=1, retries=0, log_path=log)
    try:
        await reward.load()
        assert log.read_text().count("reward worker runs") == 1
        assert (await reward.score(prompt(), ["no", "yes"])).rewards.tolist() == [0.0, 1.0]
        assert log.read_text().count("reward worker runs") == 2
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("response", "reason"),
    [pytest.param("block", "timeout after 1 s", marks=pytest.mark.slow), ("die", "worker ended with exit code 3")],
)
async def test_an_asynchronous_call_that_ends_its_process_costs_no_try_of_other_groups(
    user_file: Path, response: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits until an event loop that stands still is ended."""
    monkeypatch.setattr(reward_workers, "GRACE_S", 0.2)
    async with reward_of(f"{user_file}:moody_async", timeout_s=1) as reward:
        bad, *good = await asyncio.gather(
            *(reward.score(prompt(), [text]) for text in (response, "fine", "fine")), return_exceptions=True
        )
    assert str(bad) == reason
    assert all(isinstance(scores, Scores) for scores in good)
