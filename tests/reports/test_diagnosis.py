from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.reports.diagnosis import TimeShares, bottleneck

TABLE = [
    (
        TimeShares(trainer_waited=0.3, trainer_stalled=0.4, moving_weights=0.05, drains=True),
        "Generation was the bottleneck",
        "65%",
    ),
    (TimeShares(trainer_waited=0.03, rollout_idle=0.04), "Balanced", "4%"),
    (TimeShares(trainer_waited=0.38, slot_utilization=0.9), "Generation was the bottleneck", "38%"),
    (TimeShares(trainer_waited=0.02, rollout_idle=0.4), "Training was the bottleneck", "40%"),
    (TimeShares(trainer_waited=0.5, rollout_idle=0.4), "took turns", "50%"),
    (TimeShares(trainer_waited=0.05, trainer_stalled=0.3, moving_weights=0.25), "The parameter update", "30%"),
    (
        TimeShares(trainer_waited=0, trainer_stalled=0.4, waited_for_validation=0.35),
        "Validation was the bottleneck",
        "35%",
    ),
    (TimeShares(trainer_waited=0.4, waited_for_reward=0.35), "The reward was the bottleneck", "35%"),
    (TimeShares(trainer_waited=0.0, rollout_idle=0.5, rollout_stalled=0.45), "The parameter update", "45%"),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "The filter was the bottleneck", "90%"),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "95% of those that were generated were filtered", "90%"),
    (TimeShares(trainer_waited=0.5, rollout_idle=0.2, filtered=0.95), "The filter was the bottleneck", "50%"),
    (TimeShares(trainer_waited=0.3, rollout_idle=0.5, filtered=0.95), "The filter was the bottleneck", "30%"),
    (TimeShares(trainer_waited=0.9, filtered=0.4), "Generation was the bottleneck", "90%"),
    (TimeShares(trainer_waited=0.05, rollout_idle=0.3, filtered=0.95), "Training was the bottleneck", "30%"),
    (TimeShares(trainer_waited=0.6, waited_for_reward=0.5, filtered=0.95), "The reward was the bottleneck", "50%"),
]


@pytest.mark.parametrize(("shares", "who", "how_much"), TABLE)
def test_the_sentence_names_the_side_that_was_waited_for_and_its_share(
    shares: TimeShares, who: str, how_much: str
) -> None:
    sentence = bottleneck(shares)
    assert who in sentence
    assert how_much in sentence


ADVICE = [
    (TimeShares(trainer_waited=0.38, slot_utilization=0.9), "give the rollout role more devices"),
    (TimeShares(trainer_waited=0.38, slot_utilization=0.2), "async_training.staleness_threshold"),
    (TimeShares(trainer_waited=0, rollout_idle=0.3), "give the trainer more devices"),
    (TimeShares(trainer_waited=0.5, rollout_idle=0.4), "async_training.staleness_threshold"),
    (
        TimeShares(trainer_waited=0.1, trainer_stalled=0.3, moving_weights=0.02, drains=True),
        "async_training.on_update=interrupt",
    ),
    (
        TimeShares(trainer_waited=0.1, trainer_stalled=0.3, moving_weights=0.02),
        "async_training.trigger_parameter_sync_step",
    ),
    (TimeShares(trainer_waited=0, trainer_stalled=0.3, waited_for_validation=0.3), "rollout.test_freq"),
    (TimeShares(trainer_waited=0.3, waited_for_reward=0.3), "reward.workers"),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "prompts of another difficulty or a larger rollout.n"),
    (
        TimeShares(trainer_waited=0.1, trainer_stalled=0.5, filtered=0.95, moving_weights=0.02, drains=True),
        "async_training.on_update=interrupt",
    ),
]


@pytest.mark.parametrize(("shares", "advice"), ADVICE)
def test_the_sentence_says_what_to_change(shares: TimeShares, advice: str) -> None:
    assert advice in bottleneck(shares)


def test_a_run_in_which_nobody_waited_needs_no_change() -> None:
    assert "change nothing" in bottleneck(TimeShares(trainer_waited=0))


SHARES = {field.name: st.floats(0, 1) for field in fields(TimeShares) if field.name != "drains"}


@given(st.builds(TimeShares, **SHARES, drains=st.booleans()))
def test_any_shares_give_one_sentence(shares: TimeShares) -> None:
    sentence = bottleneck(shares)
    assert sentence.endswith(".")
    assert "\n" not in sentence
