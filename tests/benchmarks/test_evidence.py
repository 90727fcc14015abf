"""What a run was trained on is what was sampled, and a planted defect is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import evidence
from headway.data.journal import segments
from tests.integration.support import make_job, train

pytestmark = pytest.mark.slow
Sample = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = make_job(tmp_path_factory.mktemp("evidence"))
    train(recipe, recipe.parent / "run", "cluster.backend=inline", "reports.samples=4", "trainer.save_freq=10")
    return recipe.parent / "run"


def test_each_trained_token_is_one_that_was_sampled(run: Path) -> None:
    """Trains a tiny job."""
    found = evidence.examine(run)
    assert (found.groups, found.unproved, found.problems) == (16, 0, [])
    assert found.compared > 300


def a_row(sample: Sample) -> Sample:
    return next(row for episode in sample["episodes"] for row in episode["rows"] if len(row["ids"]) > 3)


def another_id(sample: Sample) -> None:
    a_row(sample)["ids"][2] += 1


def another_version(sample: Sample) -> None:
    a_row(sample)["versions"][0] += 1


def another_logprob(sample: Sample) -> None:
    a_row(sample)["behaviour"][1] += 0.001


def a_row_twice(sample: Sample) -> None:
    next(episode for episode in sample["episodes"] if episode["rows"])["rows"] *= 2


@pytest.mark.parametrize(
    ("defect", "told"),
    [
        (another_id, "were never sampled"),
        (another_version, "were never sampled"),
        (another_logprob, "were never sampled"),
        (a_row_twice, "are trained twice"),
    ],
)
def test_a_token_that_was_changed_or_trained_twice_is_told(
    run: Path, tmp_path: Path, defect: Callable[[Sample], None], told: str
) -> None:
    changed = Path(shutil.copytree(run, tmp_path / "run"))
    lines = (changed / "samples.jsonl").read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith('{"group"'))
    sample = json.loads(lines[place])
    defect(sample)
    (changed / "samples.jsonl").write_text("\n".join([*lines[:place], json.dumps(sample), *lines[place + 1 :]]) + "\n")
    found = evidence.examine(changed)
    assert len(found.problems) == 1
    assert told in found.problems[0]
    evidence.compare(found, changed, run)
    assert f"group {sample['group']} was trained on other tokens than in {run}" in found.problems
    assert found.alike == 15


def test_files_that_were_linked_in_time_prove_what_the_journal_has_no_more(run: Path, tmp_path: Path) -> None:
    pruned = Path(shutil.copytree(run, tmp_path / "run"))
    evidence.keep(pruned, tmp_path / "kept")
    for path in segments(pruned / "journal"):
        path.unlink()
    found = evidence.examine(pruned)
    assert (found.groups, found.unproved, len(found.problems)) == (0, 16, 1)
    assert evidence.examine(pruned, tmp_path / "kept").groups == 16


def test_tokens_between_which_a_tool_spoke_are_runs_of_their_own() -> None:
    row = {"ids": [1, 2, 3, 4], "versions": [0, -1, 1, 1], "behaviour": [-1.0, 0.0, -2.0, -3.0], "mask": [1, 0, 1, 1]}
    first, second = evidence._spans(row)
    assert np.frombuffer(first, np.int32)[:2].tolist() == [1, 0]
    assert len(second) == 2 * evidence.SIZE
    assert evidence._unsampled([first, second], [second, first]) is None
