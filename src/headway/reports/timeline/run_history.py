"""Learning curves of a run, and one line for each of its groups, for pages with the timeline.

rows of metrics ─▶ `CurveLog` (a row sink) ─▶ `to_json`: charts with at most `MOST_POINTS` points a curve
                                           └▶ `points`: every value of one metric, with its place on each axis
events of groups ─▶ `GroupLog` ─▶ lines: the newest groups, and those whose samples are kept
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from headway import events
from headway.reports.metrics.group_tally import IN_FLIGHT, GroupRecord, GroupTally
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.run_sums import thinned
from headway.reports.samples.samples_file import Sample, mean_of

MOST_POINTS = 600
"""Most points of one curve on a page."""
MOST_CURVES = 16
"""Largest number of curves in a chart. Of more sources the first are drawn, and the page shows the number left out."""
DIGITS = 5
ACCURACY = "validation/accuracy"


@dataclass(frozen=True, slots=True)
class ChartKind:
    """One chart: metrics by name, each with its curve's name, and a family of metrics, one for each source.

    Metrics of the family begin with ``family[0]`` and end with ``family[1]``; the part in between is the curve's name.
    ``entered``: True if values belong to the weights at a version's beginning, not to events during it.
    """

    name: str
    unit: str
    metrics: tuple[tuple[str, str], ...] = ()
    family: tuple[str, str] | None = None
    entered: bool = False


KINDS = (
    ChartKind("reward", "mean of trained answers", (("reward/mean", "all"),), ("reward/source/", "/mean")),
    ChartKind(
        "validation",
        "mean reward of held-out problems",
        ((ACCURACY, "all"),),
        ("validation/source/", "/accuracy"),
        True,
    ),
    ChartKind("reward by part", "mean", (), ("reward/", "/mean")),
    ChartKind("answer length", "tokens, mean", (("response_length/mean", "trained"),)),
    ChartKind("answers cut off", "share", (("response_length/clip_ratio", "trained"),)),
    ChartKind("entropy", "nats a token", (("actor/entropy", "policy"),)),
    ChartKind(
        "KL",
        "nats a token",
        (
            ("offpolicy/kl", "engine to trainer"),
            ("actor/approx_kl", "within a version"),
            ("actor/ref_kl", "to the reference"),
        ),
    ),
    ChartKind("effective sample size", "share; 1 is on policy", (("offpolicy/ess", "all tokens"),)),
    ChartKind("lag", "versions", (("lag/mean", "mean"), ("lag/max", "most"))),
    ChartKind(
        "clip share",
        "share of tokens",
        (("actor/clip_fraction", "by the loss"), ("offpolicy/clip_fraction", "outside the range")),
    ),
    ChartKind("gradient norm", "before clipping", (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"))),
    ChartKind("turns", "of an episode", (("num_turns/mean", "mean"), ("num_turns/max", "most"))),
)
_PLAIN = {metric: kind for kind in KINDS for metric, _ in kind.metrics}


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A place on every axis: the version, seconds since the run's start, trained groups and tokens until then."""

    version: int
    seconds: float
    groups: float
    tokens: float


PLACED = ("time/since_start", "time/seconds", "throughput/trained_tokens_per_s", "groups/trained")
"""Metrics from which a version's place on the axes is computed."""


class CurveLog:
    """Row sink that keeps the drawn metrics of every version. A second row of a version adds to the first."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}
        self._names: dict[str, None] = {}
        """Names of all metrics in the rows, in the order in which they came."""

    def on_row(self, row: dict[str, Any]) -> None:
        kept = self._rows.setdefault(row["version"], {})
        for name, value in row.items():
            drawn = name in PLACED or _kind_of(name) is not None
            if drawn and value is not None and math.isfinite(value):
                kept[name], self._names[name] = value, None

    @property
    def versions(self) -> int:
        """Number of versions."""
        return len(self._rows)

    def places(self, *, entered: bool = False) -> list[CurvePoint]:
        """Places of all versions, ascending: of their ends, or with ``entered`` of the instants at which they began.

        A row without a time, and a version without a row, take the place of the one before.
        """
        began = [row["time/since_start"] - row["time/seconds"] for row in self._rows.values() if PLACED[0] in row]
        last = CurvePoint(0, min(began, default=0.0), 0.0, 0.0)
        found = []
        for version, row in sorted(self._rows.items()):
            seconds = max(row.get("time/since_start", last.seconds), last.seconds)
            groups = max(row.get("groups/trained", last.groups), last.groups)
            trained = row.get("throughput/trained_tokens_per_s", 0.0) * row.get("time/seconds", 0.0)
            before, last = last, CurvePoint(version, seconds, groups, last.tokens + trained)
            found.append(replace(before, version=version) if entered else last)
        return found

    def points(self, metric: str) -> list[tuple[CurvePoint, float]]:
        """All values of a metric, by version, with their places."""
        kind = _kind_of(metric)
        places = self.places(entered=kind is not None and kind.entered)
        where, values = self.series(metric)
        return [(places[place], value) for place, value in zip(where, values, strict=True)]

    def metrics_of(self, kind: ChartKind) -> list[tuple[str, str]]:
        """The metrics that a chart of ``kind`` draws and that have data, each with its curve's name."""
        there = [name for name in self._names if _kind_of(name) is kind]
        named = [(metric, name) for metric, name in kind.metrics if metric in there]
        if kind.family is not None:
            head, tail = kind.family
            of_family = [metric for metric in there if metric not in _PLAIN]
            named += [(metric, metric.removeprefix(head).removesuffix(tail)) for metric in of_family]
        return named

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return a metric's places, as indices of `places`, and its values there."""
        rows = [row for _, row in sorted(self._rows.items())]
        where = [place for place, row in enumerate(rows) if metric in row]
        return where, [rows[place][metric] for place in where]


def to_json(log: CurveLog) -> dict[str, Any]:
    """The charts that have data as the page's script reads them, in the order of `KINDS`.

    ``tables`` has places, and curves with at most `MOST_POINTS` points are indices into one of them. ``i`` is absent
    where a curve has a value at every place of its table, in order. ``left_out``: number of curves beyond
    `MOST_CURVES`.
    """
    tables: dict[str, dict[str, list[float]]] = {}
    charts: dict[str, dict[str, Any]] = {}
    for table, entered in (("trained", False), ("entered", True)):
        curves: list[tuple[dict[str, Any], list[int]]] = []
        for kind in (kind for kind in KINDS if kind.entered is entered):
            metrics, drawn = log.metrics_of(kind), len(curves)
            for metric, name in metrics[:MOST_CURVES]:
                where, values = log.series(metric)
                kept = thinned(values, MOST_POINTS)
                y = [float(f"{values[place]:.{DIGITS}g}") for place in kept]
                curves.append(({"name": name, "metric": metric, "table": table, "y": y}, [where[at] for at in kept]))
            if metrics:
                left_out = max(len(metrics) - MOST_CURVES, 0)
                chart = {"name": kind.name, "unit": kind.unit, "left_out": left_out}
                charts[kind.name] = chart | {"curves": [curve for curve, _ in curves[drawn:]]}
        used = sorted({place for _, where in curves for place in where})
        index = {place: new for new, place in enumerate(used)}
        for curve, where in curves:
            if len(where) < len(used):
                curve["i"] = [index[place] for place in where]
        if used:
            all_places = log.places(entered=entered)
            places = [all_places[place] for place in used]
            tables[table] = {
                "version": [place.version for place in places],
                "seconds": [round(place.seconds, 3) for place in places],
                "tokens": [round(place.tokens) for place in places],
            }
    return {"tables": tables, "charts": [charts[kind.name] for kind in KINDS if kind.name in charts]}


@lru_cache(1024)
def _kind_of(name: str) -> ChartKind | None:
    """Return the kind of chart that draws the metric ``name``; None for none."""
    if name in _PLAIN:
        return _PLAIN[name]
    return next((kind for kind in KINDS if kind.family is not None and _is_of(name, kind.family)), None)


def _is_of(name: str, family: tuple[str, str]) -> bool:
    head, tail = family
    return name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)


def point_at(points: Sequence[tuple[CurvePoint, float]], axis: str, at: float) -> tuple[CurvePoint, float] | None:
    """Return the last of ``points`` at ``at`` or before on ``axis``, a field of `CurvePoint`; None for none."""
    # Places are sums of floats: a value that is `at` itself must count as reached.
    places = [getattr(place, axis) for place, _ in points]
    found = bisect_left(places, math.nextafter(at, math.inf)) - 1
    return points[found] if found >= 0 else None


MOST_GROUPS = 4_000
"""Most groups that are kept of a run, and beside them most sampled ones."""

GroupLine = list[Any]
"""One group as JSON: number, version, source, fate, reason, mean reward, mean length in tokens, lag.

The version is the trainer's when the group was taken or settled, and before that the one with which it was admitted.
"""


@dataclass(slots=True)
class GroupLog:
    """Accumulates a line for each group. Of more than ``most`` that ended the oldest are forgotten, ``sampled`` ones
    later.
    """

    sampled: Container[int] = frozenset()
    version: int = 0
    """The trainer's version."""
    most: int = MOST_GROUPS
    _tally: GroupTally = field(default_factory=GroupTally)
    _ended: dict[int, GroupLine] = field(default_factory=dict)
    _kept: dict[int, GroupLine] = field(default_factory=dict)
    """Lines of sampled groups older than those in ``_ended``."""

    def on_event(self, event: events.Event) -> None:
        record = self._tally.on_event(event)
        if isinstance(event, events.UpdateFinished):
            self.version = max(self.version, event.version)
        elif isinstance(event, events.GroupSettled) and record is not None:
            version = None if event.fate == "trained" else self.version
            self._ended[event.number] = _line(record, version, event.fate, event.reason, event.lag)
            if len(self._ended) > self.most:
                oldest = self._ended.pop(next(iter(self._ended)))
                if oldest[0] in self.sampled:
                    self._kept[oldest[0]] = oldest
            if len(self._kept) > self.most:
                del self._kept[next(iter(self._kept))]

    def add_sampled(self, sample: Sample) -> None:
        """Add the line of a sampled group. It counts if the group is older than the events read."""
        number, version, reason, lag = (sample[name] for name in ("group", "version", "reason", "lag"))
        reward = mean_of(sample["episodes"], "reward")
        length = round(fmean(episode["length"] for episode in sample["episodes"]), 1)
        line = [number, version, sample["source"], sample["fate"], reason, reward and round(reward, 4), length, lag]
        self._kept.setdefault(number, line)

    def lines(self) -> list[GroupLine]:
        """The lines of all groups that are kept, and of those under way."""
        under_way = {record.number: _line(record, None, IN_FLIGHT) for record in self._tally.under_way()}
        return sorted((self._kept | self._ended | under_way).values(), key=lambda line: line[0])


def _line(
    group: GroupRecord, version: int | None, fate: str, reason: str | None = None, lag: int | None = None
) -> GroupLine:
    if version is None:
        version = group.version if group.taken_at is None else group.taken_at
    reward = round(fmean(group.rewards), 4) if group.rewards else None
    length = round(fmean(group.lengths), 1) if group.lengths else None
    return [group.number, version, group.source, fate, reason, reward, length, lag]


def ledger(metrics: RunMetrics) -> dict[str, Any]:
    """Return the numbers of groups and episodes by fate and reason, and whether each has exactly one fate."""
    finished = metrics.finished
    return {
        "groups": metrics.tally.counts(),
        "episodes": metrics.tally.episode_counts(),
        "reasons": {fate: dict(reasons.most_common(20)) for fate, reasons in metrics.tally.reasons.items()},
        "failures": dict(metrics.tally.failures.most_common(20)),
        "where": metrics.tally.whereabouts(),
        "balanced": metrics.tally.balances(
            finished.groups if finished else None, finished.episodes if finished else None
        ),
    }
