"""The examples' own functions train: a run each, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.support import events, make_job, train

EXAMPLES = Path(__file__).parents[2] / "examples"
DECOUPLED = ("async_training.use_rollout_log_probs=false", "async_training.staleness_threshold=1")


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        ((f"algorithm.adv_estimator={EXAMPLES}/advantage.py:by_rank",), "policy_loss"),
        ((f"algorithm.policy_loss.loss_mode={EXAMPLES}/loss.py:soft_trust_region",), "penalty"),
        ((f"algorithm.rollout_correction.name={EXAMPLES}/correction.py:fading", *DECOUPLED), "correction/weight"),
    ],
    ids=["advantage", "loss", "correction"],
)
def test_an_example_trains(tmp_path: Path, overrides: tuple[str, ...], metric: str) -> None:
    recipe = make_job(tmp_path)
    train(recipe, tmp_path / "run", "cluster.backend=inline", "mode=one_step_off", *overrides)
    steps = events(tmp_path / "run", "optimizer.stepped")
    assert all(step["metrics"][metric] is not None and not step["skipped"] for step in steps)
