"""What is told of a group's scores: their parts, their source, and rewards from which nothing can be learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.types import Prompt
from headway.events import GroupAdmitted, GroupRewarded, Note, TrajectoryFinished, ValidationFinished
from headway.pipeline.admission.group_warnings import VERSIONS, EqualRewards, fewest
from tests.pipeline.fakes import FakeReward, validation_prompts
from tests.pipeline.scenario import Run, Scenario

B = 4
"""Groups per version in mode on_policy."""


def warnings(run: Run) -> list[str]:
    return [note.text for note in run.of(Note) if note.level == "warning"]


def test_the_parts_of_a_reward_are_told_with_it():
    parts = {"right": [1.0, 0.0], "short": [None, 0.5]}
    run = Scenario("on_policy", reward=FakeReward(parts=parts)).run().assert_completed()
    assert [event.parts for event in run.of(GroupRewarded)] == [parts] * 24


def test_a_reward_of_one_part_is_told_without_it():
    run = Scenario("on_policy", reward=FakeReward(parts={"right": [1.0, 0.0]})).run().assert_completed()
    assert all(event.parts == {} and event.rewards == [0.0, 1.0] for event in run.of(GroupRewarded))


def test_a_baselines_answer_is_in_no_part():
    reward = FakeReward(lambda _: [1.0, 0.0, 1.0], parts={"right": [1.0, 0.0, 0.5], "short": [None, 0.5, 0.5]})
    run = Scenario("on_policy", reward=reward, greedy_baseline=True).run().assert_completed()
    assert sum(event.baseline for event in run.of(TrajectoryFinished)) == 24
    for event in run.of(GroupRewarded):
        assert (event.rewards, event.parts) == ([1.0, 0.0], {"right": [1.0, 0.0], "short": [None, 0.5]})


def test_an_admitted_group_tells_its_prompts_source():
    run = Scenario("on_policy").run().assert_completed()
    assert {event.source for event in run.of(GroupAdmitted)} == {"fake"}


def problems_of(sources: Sequence[str], monkeypatch) -> None:
    monkeypatch.setattr(
        "tests.pipeline.scenario.validation_prompts",
        lambda count: [replace(p, source=name) for p, name in zip(validation_prompts(count), sources, strict=True)],
    )


def test_a_validation_tells_each_sources_accuracy(monkeypatch):
    def rewards(prompt: Prompt) -> list[float]:
        return [{"a": 1.0, "b": 0.25}.get(prompt.source, float(prompt.row % 2))]

    problems_of("baab", monkeypatch)
    run = Scenario("on_policy", problems=4, reward=FakeReward(rewards)).run().assert_completed()
    for event in run.of(ValidationFinished):
        assert event.by_source == {"a": 1.0, "b": 0.25}
        assert event.accuracy == 2.5 / 4


def test_a_validation_of_one_source_tells_none():
    run = Scenario("on_policy", problems=3).run().assert_completed()
    assert [event.by_source for event in run.of(ValidationFinished)] == [{}] * 7


# ---------------------------------------------------------------------------------------------- equal rewards


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_rewards_that_are_all_equal_are_warned_of_once(estimator: str):
    reward = FakeReward(lambda _: [0.5])
    run = Scenario("on_policy", reward=reward, sections={"algorithm": {"adv_estimator": estimator}}).run()
    run.assert_completed()
    (text,) = warnings(run)
    assert text.startswith(
        f"in {VERSIONS * B} of the last {VERSIONS * B} groups (100%) all answers got the same reward "
        f"({VERSIONS * B}× all 0.5): there is nothing to learn from them. All at the lowest reward: "
    )
    told = [event for event in run.events if isinstance(event, Note | GroupRewarded)]
    assert isinstance(told[VERSIONS * B], Note)


def test_a_filter_tells_of_equal_rewards_itself():
    reward = FakeReward(lambda p: [0.5] if p.row < VERSIONS * B + 1 else [0.0, 1.0])
    run = Scenario("on_policy", reward=reward, filters=True).run().assert_completed()
    assert warnings(run) == []


@pytest.mark.parametrize(("estimator", "warned"), [("grpo", 1), ("gae", 0), ("reinforce_plus_plus", 0), ("remax", 0)])
def test_rewards_that_differ_between_groups_alone_teach_some_estimators(estimator: str, warned: int):
    reward = FakeReward(lambda prompt: [float(prompt.row % 2)])
    sections = {"algorithm": {"adv_estimator": estimator}}
    assert len(warnings(Scenario("on_policy", reward=reward, sections=sections).run().assert_completed())) == warned


def test_a_greedy_answer_that_is_better_makes_a_difference():
    reward = FakeReward(lambda _: [0.0, 0.0, 1.0])
    sections = {"algorithm": {"adv_estimator": "remax"}}
    run = Scenario("on_policy", reward=reward, greedy_baseline=True, sections=sections).run().assert_completed()
    assert warnings(run) == []


def equal_rewards(groups: list[list[float]], groups_per_version: int, *, within_groups: bool = True) -> dict[int, str]:
    """By the group that it came with, what was warned of."""
    equal = EqualRewards(groups_per_version, within_groups=within_groups)
    looks = [equal.look(np.array(rewards, np.float32)) for rewards in groups]
    return {index: text for index, text in enumerate(looks) if text is not None}


def test_groups_that_teach_something_now_and_then_do_not_hide_that_nearly_all_teach_nothing():
    """313 of 320 groups without variance once went by in silence, as there were never 256 of them in a row."""
    groups = [[0.0, 1.0] if index % 46 == 45 else [0.0, 0.0] for index in range(320)]
    ((index, text),) = equal_rewards(groups, 64).items()
    assert index == VERSIONS * 64 - 1
    assert "in 251 of the last 256 groups (98%) all answers got the same reward (251× all 0)" in text
    assert "algorithm.filter_groups.enable=true" in text


def test_a_share_that_is_usual_late_in_a_run_is_nothing_to_warn_of():
    groups = [[0.0, 1.0] if index % 10 < 3 else [1.0, 1.0] for index in range(2000)]
    assert equal_rewards(groups, 64) == {}


def test_what_a_few_groups_show_has_to_be_clearer():
    assert [fewest(window) for window in (4, 16, 64, 128, 256, 4096)] == [4, 16, 55, 104, 205, 3277]


GROUPS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2), max_size=60)


@given(GROUPS, st.integers(1, 8), st.booleans())
def test_the_warning_comes_with_the_first_window_of_which_nearly_all_teaches_nothing(
    groups: list[list[float]], groups_per_version: int, within_groups: bool
):
    """Against a count over every window."""
    size = VERSIONS * groups_per_version

    def teach_nothing(window: list[list[float]]) -> int:
        equal = [rewards[0] for rewards in window if len(set(rewards)) == 1]
        return len(equal) if within_groups else max(equal.count(0.0), equal.count(1.0))

    ends = [end for end in range(size, len(groups) + 1) if teach_nothing(groups[end - size : end]) >= fewest(size)]
    warned = equal_rewards(groups, groups_per_version, within_groups=within_groups)
    assert list(warned) == [end - 1 for end in ends[:1]]
