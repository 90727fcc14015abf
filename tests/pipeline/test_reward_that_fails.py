"""A reward that never works ends the run soon, with one message of what it raised and where to look."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from headway.data.types import Prompt
from headway.errors import NothingToTrain
from headway.events import Note, ValidationFinished
from headway.pipeline.admission.ledger import (
    EPISODE_FAILED,
    FAILED_AT_FIRST,
    FAILED_AT_VALIDATION,
    Fate,
    all_discarded,
    cannot_be_scored,
)
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Scenario
from tests.tiers import mostly_slow

BOOM = "exception: ValueError: boom"


def held_out(prompt: Prompt) -> bool:
    return prompt.epoch == -1


@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial", "colocate_async"])
def test_a_first_validation_of_which_nothing_can_be_scored_ends_the_run(mode: str):
    reward = FakeReward(lambda _: fails(BOOM))
    run = Scenario(mode, problems=FAILED_AT_VALIDATION, reward=reward).run()
    run.assert_clean()
    assert isinstance(run.error, NothingToTrain)
    assert str(run.error).startswith(
        f"the reward failed for all of the 8 held-out problems at version 0 (8× {BOOM}). What it raised and "
        "printed is in logs/reward.log"
    )
    assert run.groups["trained"] == 0
    assert run.of(ValidationFinished) == []


@mostly_slow(
    ("mode", "seconds"),
    product(MODES, [0.25, 60.0]),
    quick=[("on_policy", 0.25), ("async_partial", 60.0), ("overlapped", 60.0), ("colocate_sync", 0.25)],
)
def test_it_does_so_although_training_prompts_can_be_scored_whatever_was_trained_meanwhile(mode: str, seconds: float):
    """Also where scores come in long after the answers. How far the run has come by then depends on the mode."""
    reward = FakeReward(
        lambda prompt: fails(BOOM) if held_out(prompt) else [0.0, 1.0],
        seconds=lambda prompt: seconds if held_out(prompt) else 0.25,
    )
    run = Scenario(mode, problems=8, reward=reward).run()
    assert isinstance(run.error, NothingToTrain)
    assert str(run.error).startswith("the reward failed for all of the 8 held-out problems at version 0")
    assert run.of(ValidationFinished) == []
    if mode == "async_partial":
        assert run.groups["trained"] > 0


SLOW = "timeout after 10 s"


def test_a_first_validation_that_only_times_out_ends_with_its_first_problems():
    """Each of the others would take as long again."""
    reward = FakeReward(lambda _: fails(SLOW), seconds=lambda prompt: 20.0 * (prompt.row + 1))
    run = Scenario("on_policy", problems=500, reward=reward).run()
    assert isinstance(run.error, NothingToTrain)
    assert str(run.error).startswith(
        f"the reward failed for all of the first 8 of 500 held-out problems at version 0 (8× {SLOW}). "
    )
    assert "raise reward.timeout_s" in str(run.error)
    assert run.ended < 20.0 * 9


@pytest.mark.parametrize("other", [[1.0, 1.0], BOOM])
def test_one_score_or_failure_of_another_kind_lets_the_whole_first_validation_decide(other: list[float] | str):
    def rewards(prompt: Prompt) -> list[float]:
        if not held_out(prompt):
            return [0.0, 1.0]
        if prompt.row:
            return list(fails(SLOW))
        return list(fails(other)) if isinstance(other, str) else other

    run = Scenario("on_policy", problems=20, reward=FakeReward(rewards)).run()
    if other == BOOM:
        assert str(run.error).startswith("the reward failed for all of the 20 held-out problems at version 0")
    else:
        assert [event.failed for event in run.assert_completed().of(ValidationFinished)] == [19] * 7


def test_one_held_out_answer_that_can_be_scored_is_enough_to_go_on():
    reward = FakeReward(lambda prompt: fails(BOOM) if held_out(prompt) and prompt.row else [0.0, 1.0])
    run = Scenario("on_policy", problems=8, reward=reward).run().assert_completed()
    assert {event.failed for event in run.of(ValidationFinished)} == {7}
    assert run.of(Note) == []


def test_a_handful_of_held_out_problems_that_fail_is_a_warning():
    reward = FakeReward(lambda prompt: fails(BOOM) if held_out(prompt) else [0.0, 1.0])
    run = Scenario("on_policy", problems=7, reward=reward).run().assert_completed()
    texts = [note.text for note in run.of(Note) if note.level == "warning"]
    assert len(texts) == len(run.of(ValidationFinished)) == 7
    assert texts[3].startswith(f"the reward failed for all of the 7 held-out problems at version 3 (7× {BOOM}). ")


def test_a_later_validation_that_fails_does_not_end_the_run():
    validated: Counter[int] = Counter()

    def rewards(prompt: Prompt) -> list[float]:
        validated[prompt.row] += held_out(prompt)
        return list(fails(BOOM)) if held_out(prompt) and validated[prompt.row] > 1 else [0.0, 1.0]

    run = Scenario("on_policy", problems=8, reward=FakeReward(rewards)).run().assert_completed()
    assert [event.failed for event in run.of(ValidationFinished)] == [0, 8, 8, 8, 8, 8, 8]


def test_without_validation_the_first_groups_decide():
    run = Scenario("async_partial", total=96, reward=FakeReward(lambda _: fails(BOOM))).run()
    run.assert_clean()
    assert str(run.error).startswith(f"the reward failed for all of the first 32 groups (32× {BOOM}). ")
    assert run.groups["failed"] == FAILED_AT_FIRST < 10 * Scenario("async_partial").config.groups_per_version


@mostly_slow("works", [[0.0, 1.0], [1.0, 1.0]], quick=[[1.0, 1.0]])
def test_a_reward_that_worked_once_is_given_its_ten_versions(works: list[float]):
    """Also where the filter took that group out: that the reward works was seen."""
    reward = FakeReward(lambda prompt: works if prompt.row == 5 else fails(BOOM))
    run = Scenario("async_partial", reward=reward, filters=True).run()
    assert "160 groups in a row were discarded" in str(run.error)


def test_few_groups_per_version_end_it_at_ten_versions_where_that_is_sooner():
    run = Scenario("on_policy", mini_batch=2, total=8, reward=FakeReward(lambda _: fails(BOOM))).run()
    assert str(run.error).startswith(
        f"20 groups in a row were discarded, nothing is left to train on (20× failed: {BOOM})"
    )


def advice(**ends: int) -> str:
    """``failed=3``: three groups of that fate."""
    counts = Counter({(Fate(fate), f"{fate} for a reason"): times for fate, times in ends.items()})
    return str(all_discarded(counts))


def test_the_advice_is_of_failures_where_groups_failed_and_of_equal_rewards_where_they_were_filtered():
    failed, filtered, both = advice(failed=9), advice(filtered=9), advice(failed=5, filtered=4)
    assert "logs/reward.log" in failed and "same reward" not in failed
    assert "same reward" in filtered and "logs/reward.log" not in filtered
    assert "actor.optim.lr" in filtered, "a run that is resumed as it is ends there again"
    assert "same reward" in both and "logs/reward.log" in both
    assert "logs/reward.log" not in advice(failed=1, filtered=99), "one in a hundred is not why"
    assert "async_training.max_lag" in advice(dropped=9)


def test_reasons_of_many_kinds_are_counted_and_the_rest_added_up():
    ends = Counter({(Fate.FAILED, f"exception: KeyError: {k}"): 10 - k for k in range(7)})
    text = str(all_discarded(ends))
    assert text.startswith("49 groups in a row were discarded")
    assert "(10× failed: exception: KeyError: 0; " in text
    assert "6× failed: exception: KeyError: 4; 9× something else)" in text


def test_reasons_that_quote_the_prompt_are_counted_as_one_by_their_line():
    said = [f"exception: ValueError: no {k} in 'prompt {k}' (own.py:2, in score)" for k in range(9)]
    other = "exception: ValueError: no 1 (own.py:3, in score)"
    text = str(all_discarded(Counter((Fate.FAILED, why) for why in [*said, other])))
    assert f"(9× failed: {said[0]} and alike; 1× failed: {other})" in text


def test_the_advice_names_the_log_of_what_failed():
    episodes, scores = f"{EPISODE_FAILED}: environment e.py:E: step() raised KeyError: 'a'", BOOM
    of_both, of_episodes = (cannot_be_scored("2", whys) for whys in ([episodes, scores], [episodes]))
    assert "logs/*-programs.log" in of_both and "logs/reward.log" in of_both
    assert "raise the limit that is named" in of_episodes and "reward" not in of_episodes
    assert "programs.log" not in cannot_be_scored("2", [scores])
