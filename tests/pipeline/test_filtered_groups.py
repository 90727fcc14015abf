"""The warning that a filter takes nearly everything out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from headway.events import Note
from headway.pipeline.admission.group_warnings import LEAST_FILTERED, EqualRewards
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import Run, Scenario

FLAT, MIXED = [0.0, 0.0], [0.0, 1.0]


def warnings(run: Run) -> list[str]:
    return [note.text for note in run.of(Note) if note.level == "warning"]


def told(groups: list[list[float]], groups_per_version: int = 1) -> list[tuple[int, str]]:
    """(place of the group after which it came, the warning)"""
    equal = EqualRewards(groups_per_version, within_groups=True, filters=True)
    found = []
    for place, rewards in enumerate(groups):
        reason = None if len(set(rewards)) > 1 else f"all rewards are {rewards[0]:g}"
        if (text := equal.look(np.array(rewards, np.float32), reason)) is not None:
            found.append((place, text))
    return found


def test_a_run_of_which_nearly_all_is_filtered_warns_once_with_share_and_reasons():
    reward = FakeReward(lambda prompt: MIXED if prompt.row % 16 == 0 else [1.0, 1.0])
    run = Scenario("on_policy", total=24, reward=reward, filters=True).run().assert_completed()
    assert run.groups["filtered"] > 2 * LEAST_FILTERED
    (text,) = warnings(run)
    assert re.match(
        r"in (119|120) of the last 128 groups \(9[34]%\) all answers got the same reward "
        r"\((119|120)× all rewards are 1\): ",
        text,
    )
    assert "algorithm.filter_groups" not in text


def test_a_run_of_which_half_is_filtered_warns_of_nothing():
    reward = FakeReward(lambda prompt: MIXED if prompt.row % 2 else [1.0, 1.0])
    run = Scenario("on_policy", total=200, reward=reward, filters=True).run().assert_completed()
    assert run.groups["filtered"] > LEAST_FILTERED
    assert warnings(run) == []


@pytest.mark.parametrize(("groups_per_version", "window"), [(1, 128), (64, 256)])
def test_the_warning_is_of_four_versions_groups_where_those_are_many(groups_per_version: int, window: int):
    ((place, text),) = told([FLAT] * 1000, groups_per_version)
    assert place == window - 1 and text.startswith(f"in {window} of the last {window} groups (100%)")


def test_a_fall_from_all_to_nothing_is_told_when_nearly_a_window_is_filtered():
    ((place, text),) = told([MIXED] * 500 + [FLAT] * 1000)
    assert place == 500 + 104 - 1 and "the model has collapsed" in text


def test_the_largest_rewards_that_there_are_do_no_harm():
    groups = [[3e38, 3e38] if place % 8 else [3e38, -3e38] for place in range(200)]
    ((_, text),) = told(groups)
    assert "112× all rewards are 3e+38" in text
