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
from headway.pipeline.equal_rewards import VERSIONS, EqualRewards
from tests.pipeline.fakes import FakeReward, validation_prompts, without_variance
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
    assert warnings(run) == [
        f"in {VERSIONS * B} groups in a row all answers got the same reward ({VERSIONS * B}× all 0.5): there is "
        "nothing to learn from them. Check the reward on a few samples, or make the task easier or harder"
    ]
    told = [event for event in run.events if isinstance(event, Note | GroupRewarded)]
    assert isinstance(told[VERSIONS * B], Note)


def test_a_filter_tells_of_equal_rewards_itself():
    reward = FakeReward(lambda p: [0.5] if p.row < VERSIONS * B + 1 else [0.0, 1.0])
    run = Scenario("on_policy", reward=reward, group_filter=without_variance).run().assert_completed()
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


GROUPS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2), max_size=40)


@given(GROUPS, st.integers(1, 6), st.booleans())
def test_the_warning_comes_with_the_first_group_that_ends_a_row_of_so_many(
    groups: list[list[float]], limit: int, within_groups: bool
):
    """Against every window of ``limit`` groups."""
    equal = EqualRewards(limit, within_groups=within_groups)
    warned = [i for i, rewards in enumerate(groups) if equal.look(np.array(rewards, np.float32)) is not None]

    def teaches_nothing(window: list[list[float]]) -> bool:
        return all(len(set(rewards)) == 1 for rewards in window) and (
            within_groups or len({reward for rewards in window for reward in rewards}) == 1
        )

    ends = [end for end in range(limit, len(groups) + 1) if teaches_nothing(groups[end - limit : end])]
    assert warned == [end - 1 for end in ends[:1]]
