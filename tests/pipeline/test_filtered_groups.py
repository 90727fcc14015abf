"""The warning that a filter takes nearly everything out: when it comes, when again, and what it advises."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Note
from headway.pipeline.admission.group_warnings import FILTERED_FROM, LEAST_WINDOW, LONGER, MUCH_WORSE, FilteredGroups
from tests.pipeline.fakes import FakeReward, without_variance
from tests.pipeline.scenario import Run, Scenario

FLAT, MIXED = [0.0, 0.0], [0.0, 1.0]


def warnings(run: Run) -> list[str]:
    return [note.text for note in run.of(Note) if note.level == "warning"]


def told(groups: list[list[float]], filtered: FilteredGroups | None = None) -> list[tuple[int, str]]:
    """(place of the group after which it came, the warning)"""
    filtered = filtered or FilteredGroups(1)
    found = []
    for place, rewards in enumerate(groups):
        reason = None if len(set(rewards)) > 1 else f"all rewards are {rewards[0]:g}"
        if (text := filtered.look(np.array(rewards, np.float32), reason)) is not None:
            found.append((place, text))
    return found


def thinned(every: int, count: int) -> list[list[float]]:
    """One group of ``every`` passes the filter."""
    return [MIXED if place % every == 0 else FLAT for place in range(count)]


def test_a_run_of_which_nearly_all_is_filtered_warns_once_with_share_reasons_and_price():
    reward = FakeReward(lambda prompt: MIXED if prompt.row % 16 == 0 else [1.0, 1.0])
    run = Scenario("on_policy", total=24, reward=reward, group_filter=without_variance).run().assert_completed()
    assert run.groups["filtered"] > 2 * LEAST_WINDOW
    (text,) = warnings(run)
    assert re.match(
        r"of the last 128 groups (119|120) \(9[34]%\) were filtered, as all their answers got the same reward "
        r"\((119|120)× zero variance\): 1[46] are generated for each one that trains\. The task is too easy for the "
        "model",
        text,
    )


def test_a_run_of_which_half_is_filtered_warns_of_nothing():
    reward = FakeReward(lambda prompt: MIXED if prompt.row % 2 else [1.0, 1.0])
    run = Scenario("on_policy", total=200, reward=reward, group_filter=without_variance).run().assert_completed()
    assert run.groups["filtered"] > LEAST_WINDOW
    assert warnings(run) == []


def test_the_share_is_of_two_versions_groups_where_those_are_many():
    assert [FilteredGroups(b).window for b in (1, 64, 65, 512)] == [128, 128, 130, 1024]


@given(st.lists(st.booleans(), min_size=LEAST_WINDOW, max_size=400))
def test_the_first_warning_comes_with_the_first_window_that_is_filtered_so_far(passes: list[bool]):
    """Against a count over every window."""
    found = told([MIXED if passed else FLAT for passed in passes])
    ends = [
        end
        for end in range(LEAST_WINDOW, len(passes) + 1)
        if sum(not passed for passed in passes[end - LEAST_WINDOW : end]) >= FILTERED_FROM * LEAST_WINDOW
    ]
    assert [place for place, _ in found[:1]] == [end - 1 for end in ends[:1]]


def test_reasons_are_kept_for_the_groups_of_the_window_alone():
    """Rewards of many values give as many reasons."""
    filtered = FilteredGroups(1)
    for place in range(5 * filtered.window):
        filtered.look(np.array(MIXED, np.float32), None if place % 2 else f"all rewards are {place}")
    assert len(filtered._groups) == filtered.window


def test_it_is_told_again_only_when_much_fewer_groups_pass():
    filtered = FilteredGroups(1)
    assert len(told(thinned(8, 1000), filtered)) == 1
    assert told(thinned(16, 1000), filtered) == [], f"not {MUCH_WORSE} times fewer"
    ((place, text),) = told(thinned(64, 3000), filtered)
    assert place < LONGER * LEAST_WINDOW and text.startswith("of the last 1024 groups ")
    assert len(told([FLAT] * 20_000, filtered)) == 1


def test_a_warning_looks_at_new_groups_alone():
    """A fall from all to nothing passes every share on its way, and is told at its first and when it is over."""
    places = [place for place, _ in told([MIXED] * 500 + [FLAT] * 10_000)]
    assert places[0] == 500 + int(np.ceil(FILTERED_FROM * LEAST_WINDOW)) - 1
    assert places[1:] == [places[0] + LONGER * LEAST_WINDOW]


@pytest.mark.slow
def test_chance_alone_is_hardly_a_reason_to_tell_again():
    """3% pass, for 50,000 groups. Among as many windows of 128 there is always one of which none does."""
    warned = []
    for seed in range(10):
        passes = np.random.default_rng(seed).random(50_000) < 0.03
        assert not np.convolve(passes, np.ones(LEAST_WINDOW), "valid").round().all()
        warned.append(len(told([MIXED if passed else FLAT for passed in passes])))
    assert max(warned) <= 2 and warned.count(1) >= 9


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        (thinned(8, 200), "too hard"),
        ([MIXED if place % 8 == 0 else [1.0, 1.0] for place in range(200)], "too easy"),
        ([[0.5, 0.5]] * 200, "Check the reward"),
        ([MIXED] * 200 + [FLAT] * 200, "what the model had learned is lost"),
        ([[-3.0, -1.0]] * 200 + [[-3.0, -3.0]] * 200, "The mean reward was -2, and is -2.8"),
        ([[0.0, 0.0, 0.0, 1.0]] * 200 + [[1.0, 1.0, 1.0, 1.0]] * 200, "too easy"),
    ],
)
def test_the_advice_is_that_of_what_happened(groups: list[list[float]], advice: str):
    assert advice in told(groups)[0][1]


def test_the_largest_rewards_that_there_are_do_no_harm():
    groups = [[3e38, 3e38] if place % 8 else [3e38, -3e38] for place in range(200)]
    ((_, text),) = told(groups)
    assert "112× all rewards are 3e+38" in text
