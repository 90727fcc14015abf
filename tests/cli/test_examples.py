"""The examples work together, as the README says."""

import json
import subprocess
import sys
from pathlib import Path

from headway.data.files import read_records
from headway.rewards.request import RewardSpec, ScoreRequest
from headway.rewards.scorers import make_scorer

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_reward_scores_the_examples_data(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    subprocess.run([sys.executable, EXAMPLES / "make_data.py", path, "--rows", "20"], check=True, timeout=60)
    records = read_records(str(path), prompt_key="prompt", answer_key="answer")
    assert len(records) == 20
    score = make_scorer(RewardSpec(f"{EXAMPLES / 'reward.py'}:score", timeout_s=10))
    for record in records:
        a, b = map(int, record.prompt.removesuffix("=").split("+"))
        right, wrong = str(a + b), str(a + b + 1)
        request = ScoreRequest(record.prompt, [right, f" {right}\n", wrong, "?"], record.answer, record.source, {})
        assert score(request) == [1.0, 1.0, 0.1, 0.0]


def test_the_examples_prompts_may_be_worded_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    wording = ["--rows", "1", "--prompt", "{a} plus {b}?"]
    subprocess.run([sys.executable, EXAMPLES / "make_data.py", path, *wording], check=True, timeout=60)
    assert " plus " in json.loads(path.read_text())["prompt"]
