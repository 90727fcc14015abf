"""One inequality: what it admits, what it bounds, and in which order groups may be taken."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.schema import Admission, Config
from headway.errors import StalenessExceeded
from headway.pipeline.admission.message_queue import takeable
from headway.pipeline.admission.staleness import Staleness, admission_limit, lag_bound, wave_size

ETAS = st.fractions(min_value=0, max_value=3, max_denominator=20)


def staleness(
    eta: Fraction = Fraction(1, 2), b: int = 8, window: int | None = 1, total: int | None = None
) -> Staleness:
    return Staleness(eta, b, window, total, loaded={"rollout-0": 0, "rollout-1": 0})


# ---------------------------------------------------------------------------------------------- the limit


@pytest.mark.parametrize(
    ("version", "eta", "b", "limit"),
    [
        (0, Fraction(3, 10), 10, 13),
        (0, Fraction(0), 10, 10),
        (4, Fraction(3, 10), 10, 53),
        (0, Fraction(1, 3), 3, 4),
        (0, Fraction(1, 2), 3, 4),
        (2, Fraction(7, 2), 4, 26),
    ],
)
def test_the_limit_is_exact(version: int, eta: Fraction, b: int, limit: int):
    assert admission_limit(version, eta, b) == limit


@pytest.mark.parametrize("tenths", range(31))
def test_a_decimal_from_the_configuration_is_taken_as_it_is_written(tenths: int):
    """In floating point ⌊(1 + 0.3)·10⌋ may come out as 12; here η is the decimal that the user typed."""
    config = Config.model_validate({"async_training": {"staleness_threshold": tenths / 10}})
    assert admission_limit(0, config.async_training.staleness_threshold, 10) == 10 + tenths


@given(st.integers(0, 50), ETAS, st.integers(1, 64))
def test_every_version_adds_exactly_b(version: int, eta: Fraction, b: int):
    assert admission_limit(version + 1, eta, b) - admission_limit(version, eta, b) == b


@given(st.integers(0, 50), ETAS, st.integers(1, 64))
def test_a_version_can_always_be_completed(version: int, eta: Fraction, b: int):
    """η = 0 makes progress: at least B more groups than were consumed may be admitted."""
    assert admission_limit(version, eta, b) >= (version + 1) * b


# ---------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize(
    ("eta", "b", "window", "bound"),
    [
        (Fraction(0), 8, 1, 0),
        (Fraction(0), 8, None, 0),
        (Fraction(1), 8, 1, 1),
        (Fraction(1, 2), 8, 1, 1),
        (Fraction(1, 10), 8, 1, 0),
        (Fraction(1, 2), 8, 8, 2),
        (Fraction(1, 2), 8, 5, 1),
        (Fraction(1, 2), 8, None, None),
        (Fraction(2), 1, 1, 2),
    ],
)
def test_the_bound_on_lag(eta: Fraction, b: int, window: int | None, bound: int | None):
    assert lag_bound(eta, b, window) == bound


@given(st.integers(0, 20), ETAS, st.integers(1, 32), st.integers(1, 64))
def test_the_bound_is_the_worst_lag_that_the_inequality_and_the_window_allow(
    version: int, eta: Fraction, b: int, w: int
):
    """Taken as late as a window of W lets it: after everything before it and W − 1 younger groups."""
    last = admission_limit(version, eta, b) - 1
    overtaken_by = (w - 1) if eta * b >= 1 else 0
    consumed_before_its_fetch = last + overtaken_by
    lag = consumed_before_its_fetch // b - version
    bound = lag_bound(eta, b, w)
    assert bound is not None
    assert lag <= bound


# ---------------------------------------------------------------------------------------------- the counters


def test_room_shrinks_with_admissions_and_grows_with_discards_and_versions():
    s = staleness()
    assert s.room == 12
    for _ in range(12):
        s.admit()
    assert s.room == 0
    s.discard()
    assert s.room == 1
    s.load("rollout-0", 1)
    assert s.room == 1, "the slowest replica counts"
    s.load("rollout-1", 1)
    assert s.room == 9


def test_the_total_bounds_admission_and_discards_are_refilled():
    s = staleness(total=8)
    for _ in range(8):
        s.admit()
    assert s.room == 0
    s.discard()
    assert s.room == 1
    for replica in s.loaded:
        s.load(replica, 5)
    assert s.room == 1


def test_room_is_never_negative():
    s = staleness()
    for _ in range(20):
        s.admit()
    assert s.room == 0
    s.total = 3
    assert s.room == 0


def test_a_replica_never_goes_back():
    s = staleness()
    s.load("rollout-0", 2)
    with pytest.raises(StalenessExceeded, match=r"rollout-0 .*back from version 2 to 1"):
        s.load("rollout-0", 1)


def test_capacity_after_a_resume_is_that_of_the_version_not_more():
    """A run that goes on at version k with k·B groups consumed has room for ⌊(1 + η)·B⌋ groups."""
    s = Staleness(Fraction(1, 2), 8, 1, None, loaded={"rollout-0": 5}, admitted=40 + 3, discarded=3)
    assert s.room == 12
    assert s.limit == 52


@given(st.permutations(range(12)), st.integers(0, 12))
def test_the_budget_does_not_depend_on_the_order_in_which_groups_finish(order: list[int], discarded: int):
    s = staleness()
    for _ in order:
        s.admit()
    for number in order:
        if number < discarded:
            s.discard()
    assert s.room == discarded


def test_check_returns_the_lag_within_the_bound():
    s = staleness()
    assert s.bound == 1
    assert s.check(7, oldest_version=3, trained_at=3) == 0
    assert s.check(7, oldest_version=3, trained_at=4) == 1


def test_check_names_every_number_when_the_bound_is_broken():
    with pytest.raises(StalenessExceeded) as caught:
        staleness().check(7, oldest_version=1, trained_at=4)
    for number in ("group 7", "lag 3", "version 4", "version 1", "[0, 1]", "η=1/2", "B=8", "W=1", "rollout-0"):
        assert number in str(caught.value)


def test_a_token_from_the_future_is_an_error_too():
    with pytest.raises(StalenessExceeded, match="lag -1"):
        staleness().check(0, oldest_version=2, trained_at=1)


# ---------------------------------------------------------------------------------------------- waves


@pytest.mark.parametrize("room", [0, 1, 5])
def test_admission_by_group_takes_whatever_there_is_room_for(room: int):
    size = wave_size(Admission.GROUP, room=room, unrewarded=3, validation_runs=True, groups_per_version=4)
    assert size == room


@pytest.mark.parametrize(
    ("room", "unrewarded", "taken", "size"),
    [(9, 0, False, 4), (3, 0, False, 3), (0, 0, False, 0), (9, 1, False, 0), (9, 0, True, 0)],
)
def test_admission_by_batch_takes_a_wave_of_at_most_b_when_everything_is_rewarded(
    room: int, unrewarded: int, taken: bool, size: int
):
    waved = wave_size(Admission.BATCH, room=room, unrewarded=unrewarded, validation_runs=taken, groups_per_version=4)
    assert waved == size


# ---------------------------------------------------------------------------------------------- orders


def test_fifo_takes_the_head_alone():
    assert takeable([3, 1, 2], head=1, window=1) == [1]
    assert takeable([3, 2], head=1, window=1) == []


def test_a_window_takes_by_number_what_lies_within_w_of_the_head():
    assert takeable([9, 4, 6, 5], head=4, window=3) == [4, 5, 6]
    assert takeable([9, 6], head=4, window=3) == [6]
    assert takeable([7], head=4, window=3) == []


def test_ready_takes_in_order_of_completion():
    assert takeable([9, 4, 6, 5], head=4, window=None) == [9, 4, 6, 5]


@given(st.sets(st.integers(0, 60), max_size=30), st.integers(1, 20))
def test_a_window_of_one_is_fifo_and_wider_windows_only_add(finished: set[int], window: int):
    head = min(finished, default=0)
    narrow, wide = takeable(finished, head, window), takeable(finished, head, window + 1)
    assert set(narrow) <= set(wide)
    assert takeable(finished, head, 1) == ([head] if finished else [])
    assert all(number < head + window for number in narrow)
