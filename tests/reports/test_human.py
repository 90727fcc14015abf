from __future__ import annotations

import math

import pytest

from headway.reports import human


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4s"), (9.96, "10s"), (42, "42s"), (59.7, "1m 00s"), (92, "1m 32s"), (5400, "1h 30m"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert human.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0%"), (0.001, "<1%"), (0.123, "12%"), (0.999, ">99%"), (1.0, "100%"), (None, "-"), (math.nan, "-")],
)
def test_shares(value: float | None, text: str) -> None:
    assert human.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1e-4, "1e-4"),
        (-0.000123, "-1.23e-4"),
        (1234.5, "1,234"),
        (999.4, "999"),
        (999.7, "1,000"),
        (-999.7, "-1,000"),
        (99.96, "100"),
        (999_999.4, "999,999"),
        (999_999.7, "1e6"),
        (0.00099949, "9.99e-4"),
        (0.00099951, "0.001"),
        (-0.0, "0"),
        (math.inf, "-"),
        (-3e38, "-3e38"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert human.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500"),
        (-1234.5678, "-1234.568"),
        (999_999.0, "999999.000"),
        (999_999.9999, "1e6"),
        (3e38, "3e38"),
        (-3.4028235e38, "-3.4e38"),
    ],
)
def test_scores_have_three_decimals_unless_they_are_large(value: float, text: str) -> None:
    assert human.score(value) == text


def test_a_score_that_is_not_known_is_a_dash() -> None:
    assert [human.score(value) for value in (None, math.nan, math.inf)] == ["-"] * 3


def test_a_sparkline_spans_its_own_range_and_all_of_the_values() -> None:
    assert human.sparkline([0.0, 2.0, 7.0], 10) == "▁▃█"
    assert human.sparkline([0.0, 0.0, 9.0, 1.0], 2) == "▁█"
    assert human.sparkline([float(i) for i in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert human.sparkline([0.5, 0.5], 10) == "▁▁"
    assert human.sparkline([], 10) == ""
    assert human.sparkline([math.nan, 1.0, 2.0], 10) == "▁█"
    assert human.sparkline([1.0], 10) == ""
