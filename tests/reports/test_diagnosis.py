from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import strategies as st

from headway.reports.metrics.summary import TimeShares, bottleneck
from tests.tiers import searched

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
    # Replicas are idle, too, where all that they may make waits to be scored.
    (TimeShares(trainer_waited=0.95, waited_for_reward=0.9, rollout_idle=0.92), "The reward was the bottleneck", "90%"),
    (TimeShares(trainer_waited=0.0, rollout_idle=0.5, rollout_stalled=0.45), "The parameter update", "45%"),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "The filter was the bottleneck", "90%"),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "95% of those that were generated were filtered", "90%"),
    (TimeShares(trainer_waited=0.5, rollout_idle=0.2, filtered=0.95), "The filter was the bottleneck", "50%"),
    (TimeShares(trainer_waited=0.3, rollout_idle=0.5, filtered=0.95), "The filter was the bottleneck", "30%"),
    (TimeShares(trainer_waited=0.9, filtered=0.4), "Generation was the bottleneck", "90%"),
    (TimeShares(trainer_waited=0.05, rollout_idle=0.3, filtered=0.95), "Training was the bottleneck", "30%"),
    (TimeShares(trainer_waited=0.6, waited_for_reward=0.5, filtered=0.95), "The reward was the bottleneck", "50%"),
    (
        TimeShares(trainer_waited=0.01, trained=0.26, saving=0.47, rollout_idle=0.64, idle_while_saving=0.17),
        "Saving checkpoints was the bottleneck",
        "47%",
    ),
    # Generation waits longer than checkpoints are saved, but that takes longer than training does.
    (
        TimeShares(trainer_waited=0, trained=0.26, saving=0.3, rollout_idle=0.6, idle_while_saving=0.2),
        "Saving checkpoints was the bottleneck",
        "30%",
    ),
    (
        TimeShares(trainer_waited=0, trained=0.7, saving=0.2, rollout_idle=0.6, idle_while_saving=0.2),
        "Training was the bottleneck",
        "40%",
    ),
    (TimeShares(trainer_waited=0.5, trained=0.2, saving=0.3), "Generation was the bottleneck", "50%"),
    (TimeShares(trainer_waited=0.2, trained=0.5, between_steps=0.27), "Work between the trainer's steps", "27%"),
    # Generation waits longer than the trainer is between steps, but that takes longer than training does.
    (TimeShares(trainer_waited=0, trained=0.3, between_steps=0.5, rollout_idle=0.6), "Work between the", "50%"),
    (TimeShares(trainer_waited=0, trained=0.6, between_steps=0.3, rollout_idle=0.5), "Training was the", "50%"),
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
    (
        TimeShares(trainer_waited=0.38, slot_utilization=0.2, in_environments=0.6),
        "as episodes were in their environments 60% of their time; raise async_training.staleness_threshold",
    ),
    (TimeShares(trainer_waited=0.38, slot_utilization=0.2, in_environments=0.1), "give the rollout role more devices"),
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
    (TimeShares(trainer_waited=0, saving=0.3), "trainer.save_freq"),
    (TimeShares(trainer_waited=0, rollout_idle=0.3, one_process=True), "cluster.backend=ray gives each its own"),
    (TimeShares(trainer_waited=0.3, one_process=True), "cluster.backend=ray gives each its own"),
    (
        TimeShares(trainer_waited=0.38, slot_utilization=0.2, one_process=True),
        "cluster.backend=ray gives each its own",
    ),
    (TimeShares(trainer_waited=0.9, filtered=0.95), "prompts of another difficulty or a larger rollout.n"),
    (
        TimeShares(trainer_waited=0.1, trainer_stalled=0.5, filtered=0.95, moving_weights=0.02, drains=True),
        "async_training.on_update=interrupt",
    ),
]


@pytest.mark.parametrize(("shares", "advice"), ADVICE)
def test_the_sentence_says_what_to_change(shares: TimeShares, advice: str) -> None:
    assert advice in bottleneck(shares)


def test_advice_about_devices_names_no_backend_where_workers_are_known_to_be_apart() -> None:
    for shares in (TimeShares(trainer_waited=0, rollout_idle=0.3), TimeShares(trainer_waited=0.3)):
        assert "devices" in bottleneck(shares)
        assert "cluster.backend" not in bottleneck(shares)


def test_a_run_in_which_nobody_waited_needs_no_change() -> None:
    assert "change nothing" in bottleneck(TimeShares(trainer_waited=0))


FLAGS = ("drains", "one_process")
SHARES = {field.name: st.floats(0, 1) for field in fields(TimeShares) if field.name not in FLAGS}


@searched(100, st.builds(TimeShares, **SHARES, **dict.fromkeys(FLAGS, st.booleans())))
def test_any_shares_give_one_sentence(shares: TimeShares) -> None:
    sentence = bottleneck(shares)
    assert sentence.endswith(".")
    assert "\n" not in sentence
