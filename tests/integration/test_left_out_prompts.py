"""Prompts that are too long are told of at a run's end, whatever the end is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.support import make_job, run_here, summary

RAISES = "def score(response, answer):\n    raise ValueError('boom')\n"


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "code"), [("reward.py", 0), ("raises.py", 3)])
def test_training_prompts_that_were_too_long_are_told_of_where_the_run_fails_too(
    tmp_path: Path, reward: str, code: int
) -> None:
    """Makes a whole run, with processes that score."""
    recipe = make_job(tmp_path)
    (tmp_path / "raises.py").write_text(RAISES)
    prompts = ["sort:31=", "sort:52=", *["sort:" + "3" * 40 + "="] * 3]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "13"}) + "\n" for p in prompts))
    settings = (f"data.train={tmp_path}/rows.jsonl", "data.val_size=0", f"reward.function={tmp_path}/{reward}:score")
    done = run_here("train", str(recipe), "cluster.backend=inline", *settings, f"run.dir={tmp_path}/run")
    assert done.exit_code == code, done.output
    assert summary(tmp_path / "run")["left_out"] == {"training": {"rows": {"too_long": 3}}}
    assert "3 training prompts were left out" in done.output
