"""A reward that cannot be loaded is found at the start, with what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.agents.rewards import reward_workers
from headway.errors import ConfigError, UserCodeError, WorkerDied
from tests.agents.rewards.test_reward_workers import reward_of


@pytest.mark.parametrize(
    ("content", "function", "message"),
    [
        pytest.param("def score(:", "score", "does not import: SyntaxError", marks=pytest.mark.slow),
        pytest.param("def other(response): return 1", "score", "has no 'score'", marks=pytest.mark.slow),
        ("def score(text): return 1", "score", r"takes \(text\)"),
    ],
)
async def test_a_file_that_cannot_score_is_found_at_the_start(
    tmp_path: Path, content: str, function: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserCodeError, match=message):
        async with reward_of(f"{tmp_path}/mine.py:{function}"):
            pass


async def test_a_file_that_ends_its_process_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os; os._exit(7)")
    with pytest.raises(WorkerDied, match="ended while it loaded"):
        async with reward_of(f"{tmp_path}/mine.py:score"):
            pass


@pytest.mark.parametrize(
    ("start_s", "call_s"),
    [pytest.param(0.5, 0.25, marks=pytest.mark.slow), (0.25, 0.5)],
    ids=["as long as a start may take", "or a call, if longer"],
)
async def test_a_file_whose_import_never_ends_is_found_at_the_start(
    monkeypatch, tmp_path: Path, start_s: float, call_s: float
) -> None:
    monkeypatch.setattr(reward_workers, "START_TIMEOUT_S", start_s)
    (tmp_path / "mine.py").write_text("import time; time.sleep(600)")
    with pytest.raises(WorkerDied, match=r"within 0\.5 s .*loaded .*mine\.py:score"):
        async with reward_of(f"{tmp_path}/mine.py:score", timeout_s=call_s):
            pass


async def test_whatever_is_raised_while_a_worker_loads_the_reward_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Odd(Exception):\n    def __init__(self, a, b): super().__init__(a)\n"
        "def __getattr__(name): raise Odd(f'no {name} in\\nhere', lambda: 0)\n"
    )
    log = tmp_path / "reward.log"
    with pytest.raises(UserCodeError, match=r"mine\.py:score cannot be loaded: Odd: no score in here$"):
        async with reward_of(f"{tmp_path}/mine.py:score", log_path=log):
            pass
    assert "in __getattr__" in log.read_text()


@pytest.mark.parametrize(
    ("function", "message"),
    [("exact", "known: code, exact_match, format"), pytest.param("task", "needs data.task", marks=pytest.mark.slow)],
)
async def test_an_unknown_reward_is_a_config_error(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with reward_of(function):
            pass
