"""How long a run will go on: exact where it is steady, and not long wrong where it slows down."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from headway.reports.metrics.run_sums import Pace
from tests.tiers import searched


def paced(intervals: list[float], groups: int = 4, per_version: int = 16) -> tuple[Pace, float]:
    """Fetches so many seconds apart; and when the last one was taken."""
    pace, now = Pace(), 0.0
    pace.begin(now)
    for seconds in intervals:
        now += seconds
        pace.took(now, groups, per_version)
    return pace, now


@searched(100, st.integers(1, 60), st.integers(1, 8), st.floats(0.01, 1000), st.integers(1, 40), st.floats(0, 1))
def test_at_a_steady_pace_the_time_left_is_exact(
    fetches: int, groups: int, seconds: float, more: int, since: float
) -> None:
    """The last batch of the run takes as long to train as it took to come."""
    pace, now = paced([seconds] * fetches, groups)
    left = pace.seconds_left(now + since * seconds, (fetches + more) * groups)
    assert left == pytest.approx((more + 1 - since) * seconds, rel=1e-6, abs=1e-6 * seconds)


def test_nothing_is_said_before_the_first_batch() -> None:
    assert paced([])[0].seconds_left(1.0, 100) is None
    assert paced([2.0])[0].seconds_left(2.0, 100) == 50.0
    assert Pace().seconds_left(1.0, 100) is None


def test_early_versions_are_forgotten() -> None:
    """40 quick fetches, then ones that take a hundred times as long: two versions of them set the pace."""
    pace, now = paced([1.0] * 40 + [100.0] * 8)
    assert pace.seconds_left(now, 4 * 48 + 40) == pytest.approx(11 * 100.0)


@pytest.mark.parametrize("per_version", [4, 16, 128])
def test_the_pace_is_that_of_two_versions_and_eight_batches_at_least(per_version: int) -> None:
    """Each version's first batch comes late, behind an update: any whole number of versions has the true mean."""
    fetches = per_version // 4
    pace, now = paced(([9.0] + [1.0] * (fetches - 1)) * 20, per_version=per_version)
    mean = (8 + fetches) / fetches
    assert pace.seconds_left(now, 4 * (20 * fetches + 10)) == pytest.approx(11 * mean)


def test_a_batch_that_does_not_come_makes_the_time_left_longer_and_never_nothing() -> None:
    """The bound: the next one comes at once, and all that follow come as it did, on the mean."""
    pace, now = paced([1.0] * 20)
    waits = [pace.seconds_left(now + waited, 4 * 30) for waited in (1.0, 5.0, 60.0, 600.0)]
    assert waits[0] == pytest.approx(10.0)
    for waited, left in zip((5.0, 60.0, 600.0), waits[1:], strict=True):
        assert left == pytest.approx(10 * (8 + waited) / 9)
    last = [pace.seconds_left(now + waited, 4 * 21) for waited in (60.0, 600.0)]
    assert last[0] is not None and last[1] is not None and 0 < last[0] < last[1]


def test_when_all_is_taken_what_is_left_runs_out() -> None:
    pace, now = paced([2.0] * 10)
    assert [pace.seconds_left(now + waited, 40) for waited in (0.0, 1.5, 60.0)] == [2.0, 0.5, 0.0]
