"""The examples' own functions train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.support import events, make_job, train

EXAMPLES = Path(__file__).parents[2] / "examples"
DECOUPLED = ("async_training.use_rollout_log_probs=false", "async_training.staleness_threshold=1")


@pytest.mark.slow
def test_the_examples_train_together(tmp_path: Path) -> None:
    """One run with all three; the functions' files are tried in processes of their own first."""
    recipe = make_job(tmp_path)
    train(
        recipe,
        tmp_path / "run",
        "cluster.backend=inline",
        "mode=one_step_off",
        "rollout.test_freq=-1",
        f"algorithm.adv_estimator={EXAMPLES}/advantage.py:by_rank",
        f"algorithm.policy_loss.loss_mode={EXAMPLES}/loss.py:soft_trust_region",
        f"algorithm.rollout_correction.name={EXAMPLES}/correction.py:fading",
        *DECOUPLED,
    )
    steps = events(tmp_path / "run", "optimizer.stepped")
    for metric in ("policy_loss", "penalty", "correction/weight"):
        assert all(step["metrics"][metric] is not None and not step["skipped"] for step in steps), metric
