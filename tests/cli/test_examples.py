"""The examples work together, as the README says."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import RewardPart, RewardSpec, Scorer
from headway.data.files import Columns, read_records
from tests.agents.rewards.parts import part_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_reward_scores_the_examples_data(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    subprocess.run([sys.executable, EXAMPLES / "make_data.py", path, "--rows", "20"], check=True, timeout=240)
    records = read_records(str(path), Columns("prompt", "answer"))
    assert len(records) == 20
    scorer = Scorer(RewardSpec((part_of(f"{EXAMPLES / 'reward.py'}:score"),), timeout_s=10))
    for record in records:
        a, b = map(int, record.prompt.removesuffix("=").split("+"))
        right, wrong = str(a + b), str(a + b + 1)
        request = ScoreRequest(record.prompt, [right, f" {right}\n", wrong, "?"], record.answer, record.source, {})
        assert asyncio.run(scorer.serve(request)).rewards.tolist() == pytest.approx([1.0, 1.0, 0.1, 0.0])


def test_the_examples_prompts_may_be_worded_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    wording = ["--rows", "1", "--prompt", "{a} plus {b}?"]
    subprocess.run([sys.executable, EXAMPLES / "make_data.py", path, *wording], check=True, timeout=240)
    assert " plus " in json.loads(path.read_text())["prompt"]


def test_the_rewards_for_trl_score_text_and_chats_and_leave_out_what_they_do_not_judge() -> None:
    path = EXAMPLES / "reward_trl.py"
    parts = (
        part_of(f"{path}:accuracy"),
        RewardPart(f"{path}:brevity", "brevity", 0.1, {"limit": 5}),
    )
    scorer = Scorer(RewardSpec(parts, timeout_s=10))
    for messages in (None, [{"role": "user", "content": "2+2="}]):
        request = ScoreRequest("2+2=", ["4", "it is 4", "5", ""], "4", "sums", {}, messages)
        scores = asyncio.run(scorer.serve(request))
        assert scores.parts == {"accuracy": [1.0, 1.0, 0.0, 0.0], "brevity": [1.0, 0.0, 1.0, None]}
        assert scores.rewards.tolist() == pytest.approx([1.1, 1.0, 0.1, 0.0])


def test_the_reward_for_verl_returns_its_score() -> None:
    part = part_of(f"{EXAMPLES / 'reward_verl.py'}:compute_score", hint=0.25)
    request = ScoreRequest("?", ["#### 1,072", "#### 7", "1072"], "1072", "openai/gsm8k", {"extra_info": {"index": 0}})
    scorer = Scorer(RewardSpec((part,), timeout_s=10))
    assert asyncio.run(scorer.serve(request)).rewards.tolist() == [1.0, 0.25, 0.0]
