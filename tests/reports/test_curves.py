"""Series from rows of metrics: which charts there are, where their points lie, how many there are at the most."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from headway.reports.metrics.run_sums import thinned
from headway.reports.timeline.run_history import (
    ACCURACY,
    MOST_CURVES,
    MOST_POINTS,
    CurveLog,
    CurvePoint,
    point_at,
    to_json,
)
from tests.tiers import searched


def log_of(*rows: dict[str, Any]) -> CurveLog:
    log = CurveLog()
    for row in rows:
        log.on_row(row)
    return log


def row(version: int, **values: Any) -> dict[str, Any]:
    """Version ``version`` lasts from 10·v to 10·v + 10 seconds, and trains 4 groups with 50 tokens."""
    times = {"time/seconds": 10.0, "time/since_start": 10.0 * version + 10, "throughput/trained_tokens_per_s": 5.0}
    return {"version": version, "groups/trained": 4 * version + 4, **times, **values}


def test_a_metric_of_training_lies_where_its_version_ends() -> None:
    log = log_of(row(0, **{"reward/mean": 0.25}), row(1, **{"reward/mean": 0.5}))
    assert log.points("reward/mean") == [(CurvePoint(0, 10.0, 4, 50.0), 0.25), (CurvePoint(1, 20.0, 8, 100.0), 0.5)]


def test_a_validation_lies_where_its_version_begins() -> None:
    log = log_of(row(0, **{ACCURACY: 0.1}), row(1), row(2, **{ACCURACY: 0.3}))
    assert log.points(ACCURACY) == [(CurvePoint(0, 0.0, 0, 0.0), 0.1), (CurvePoint(2, 20.0, 8, 100.0), 0.3)]


def test_a_validation_that_came_late_joins_its_versions_row() -> None:
    log = log_of(row(0), row(1), {"version": 1, ACCURACY: 0.3}, row(2))
    assert log.points(ACCURACY) == [(CurvePoint(1, 10.0, 4, 50.0), 0.3)]
    assert log.versions == 3
    assert [place.seconds for place in log.places()] == [10.0, 20.0, 30.0]


def test_a_version_without_a_row_takes_no_place_and_a_row_without_time_takes_the_last_one() -> None:
    log = log_of(row(0), {"version": 5, ACCURACY: 0.5}, row(3))
    assert [place.version for place in log.places()] == [0, 3, 5]
    assert log.points(ACCURACY) == [(CurvePoint(5, 40.0, 16, 100.0), 0.5)]


def test_a_chart_without_data_is_not_there_and_a_value_that_is_no_number_is_no_point() -> None:
    log = log_of(row(0, **{"actor/entropy": math.nan, "lag/mean": 0.5, "lag/max": None, "lag/histogram": {"0": 1}}))
    (chart,) = to_json(log)["charts"]
    assert (chart["name"], [curve["name"] for curve in chart["curves"]]) == ("lag", ["mean"])


def test_sources_have_a_curve_each_and_parts_of_the_reward_a_chart_of_their_own() -> None:
    rewards = {
        "reward/mean": 0.5,
        "reward/source/maths/mean": 0.4,
        "reward/source/a/b/mean": 0.6,
        "reward/exact/mean": 1.0,
    }
    charts = to_json(log_of(row(0, **rewards, **{"reward/generated_mean": 0.1})))["charts"]
    assert [(chart["name"], [curve["name"] for curve in chart["curves"]]) for chart in charts] == [
        ("reward", ["all", "maths", "a/b"]),
        ("reward by part", ["exact"]),
    ]


def test_more_sources_than_a_chart_can_show_are_counted() -> None:
    log = log_of(row(0, **{"reward/mean": 0.5}, **{f"reward/source/{i}/mean": 0.5 for i in range(40)}))
    (chart,) = to_json(log)["charts"]
    assert (len(chart["curves"]), chart["left_out"]) == (MOST_CURVES, 41 - MOST_CURVES)


@searched(100, st.lists(st.floats(-9, 9), min_size=1, max_size=400), st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes_and_no_more_than_it_may(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert max(values[i] for i in kept) == max(values)
    assert min(values[i] for i in kept) == min(values)


def test_a_peak_of_one_version_among_thousands_is_still_drawn() -> None:
    values = [0.5] * 30_000
    values[17_001], values[17_002] = 9.0, -9.0
    shown = {values[i] for i in thinned(values, MOST_POINTS)}
    assert shown == {0.5, 9.0, -9.0}


def test_the_curves_of_a_week_take_a_bounded_part_of_a_page() -> None:
    names = (
        "reward/mean",
        ACCURACY,
        "actor/entropy",
        "lag/mean",
        "lag/max",
        "offpolicy/ess",
        "offpolicy/kl",
        "actor/grad_norm",
    )
    log = log_of(*(row(v, **{name: math.sin(v * (i + 1)) for i, name in enumerate(names)}) for v in range(5_000)))
    packed = to_json(log)
    assert all(len(curve["y"]) <= MOST_POINTS for chart in packed["charts"] for curve in chart["curves"])
    assert len(json.dumps(packed)) < 40_000 * len(names)


def test_a_packed_curve_names_the_places_of_its_values() -> None:
    packed = to_json(
        log_of(row(0, **{"reward/mean": 0.123456789}), row(1), row(2, **{"reward/mean": 1.0, "lag/mean": 2.0}))
    )
    assert packed["tables"]["trained"] == {"version": [0, 2], "seconds": [10.0, 30.0], "tokens": [50, 150]}
    reward, lag = packed["charts"]
    assert reward["curves"] == [{"name": "all", "metric": "reward/mean", "table": "trained", "y": [0.12346, 1.0]}]
    assert (lag["curves"][0]["i"], lag["curves"][0]["y"]) == ([1], [2.0])


def test_the_value_at_a_place_is_the_last_one_until_there() -> None:
    points = log_of(row(0, **{"reward/mean": 0.25}), row(1, **{"reward/mean": 0.5})).points("reward/mean")
    found = [point_at(points, "groups", groups) for groups in (3, 4, 7, 8, 100)]
    assert [point and point[1] for point in found] == [None, 0.25, 0.25, 0.5, 0.5]
    assert point_at([], "groups", 1) is None
