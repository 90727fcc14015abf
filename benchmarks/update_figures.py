"""A run's events as the figures of its updates.

versions   1 … warm-up │ measured │ the last ones        each from the optimizer step that made it to the next one's
transfer   ├ gather ┤ send ║ recv ▶ register ┤           what decoding is compared beside, and outside of
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.update_runs import AT_THE_END, WARM_UP
from headway.events import (
    Event,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaHalted,
    Span,
    TrainerBusy,
    UpdateFinished,
    UpdatePhase,
)
from headway.reports.record.events_file import read_events

PHASES = ("gather", "send", "recv", "register", "load")
BESIDE = 0.5
"""Share of a report's busy time from which on it counts as beside a transfer."""
FEWEST_STEPS = 5
"""Decode steps beside transfers, and outside, for a comparison."""

Steps = Sequence[tuple[int, int, float]]
"""Active sequences, number of decode steps, their seconds."""


class Figures(defaultdict[str, list[Any]]):
    """Figures of all updates that were measured, by name; those of several runs can be added up.

    ``window_s``: seconds of the measured versions together. A name of `PHASES`: seconds. ``trainer_stall`` (without
    gather), ``rollout_stall``, ``steps`` (the optimizer's): seconds. ``sent``, ``full``: bytes. ``changed``: share of
    the weights. ``beside``, ``outside``: `Steps` of reports beside a transfer, and outside. ``interrupted``: requests.
    ``again``: tokens and seconds of the step that prefilled what an update had interrupted. ``probe``: nats.
    """

    def __init__(self) -> None:
        super().__init__(list)
        self.window_s, self.versions = 0.0, 0

    def extend(self, other: Figures) -> None:
        """Add those of another run."""
        self.window_s += other.window_s
        self.versions += other.versions
        for name, values in other.items():
            self[name] += values

    def middle(self, name: str) -> float | None:
        """Median; None where nothing was measured."""
        return median(self[name]) if self[name] else None

    @property
    def version_s(self) -> float:
        return self.window_s / self.versions

    @property
    def trainer_share(self) -> float:
        """Of the time: trainer stall."""
        return sum(self["trainer_stall"]) / self.window_s

    @property
    def rollout_share(self) -> float:
        return sum(self["rollout_stall"]) / self.window_s

    @property
    def sent_share(self) -> float:
        """Of the full bytes."""
        return sum(self["sent"]) / (len(self["sent"]) * max(self["full"]))

    @property
    def send_bytes_per_s(self) -> float | None:
        rates = [nbytes / seconds for nbytes, seconds in zip(self["sent"], self["send"], strict=True) if seconds]
        return median(rates) if rates else None

    @property
    def decode_slowdown(self) -> float | None:
        """Seconds of a decode step beside a transfer ÷ outside, with as many sequences."""
        beside, outside = _by_active(self["beside"]), _by_active(self["outside"])
        both = beside.keys() & outside.keys()
        if min(sum(side[active][0] for active in both) for side in (beside, outside)) < FEWEST_STEPS:
            return None
        expected = sum(beside[a][0] * outside[a][1] / outside[a][0] for a in both)
        return sum(beside[active][1] for active in both) / expected


def _by_active(steps: Steps) -> dict[int, tuple[int, float]]:
    found: dict[int, tuple[int, float]] = {}
    for active, count, seconds in steps:
        before = found.get(active, (0, 0.0))
        found[active] = before[0] + count, before[1] + seconds
    return found


def read_figures(run_dir: Path, *, warm_up: int = WARM_UP, at_the_end: int = AT_THE_END) -> Figures:
    """Raises ValueError when the run has too few versions."""
    return figures(list(read_events(run_dir / "events.jsonl")), warm_up=warm_up, at_the_end=at_the_end)


def figures(events: Sequence[Event], *, warm_up: int, at_the_end: int) -> Figures:
    # Version → when the optimizer step that made it was over.
    made = {event.version + 1: event.time for event in events if isinstance(event, OptimizerStepped)}
    first, last = warm_up + 1, max(made, default=0) - at_the_end
    if last < first:
        raise ValueError(f"{len(made)} versions were made, which leaves none between {warm_up} and {at_the_end}")
    # Of the last one until the next was made; where none follows, until its own update was over.
    end = made.get(last + 1) or max(e.time for e in events if isinstance(e, UpdateFinished))
    found, window = Figures(), (made[first], end)
    found.window_s, found.versions = end - made[first], last - first + 1
    sent: dict[int, int] = Counter()
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        match event:
            case UpdatePhase(version=version, phase=phase) if first <= version <= last:
                seconds[phase, version] += event.seconds
                if phase == "send":
                    sent[version] += event.nbytes
                found["probe"].append(event.probe_difference or 0.0)
            case UpdateFinished(version=version) if first <= version <= last:
                found["trainer_stall"].append(event.trainer_stall_s - event.validation_stall_s)
                found["rollout_stall"].append(event.rollout_stall_s)
                found["interrupted"].append(event.interrupted)
                found["full"].append(event.full_nbytes)
                found["changed"] += [event.changed] if event.changed is not None else []
            case TrainerBusy(what="step", span=(start, stop)) if made[first] <= start and stop <= end:
                found["steps"].append(stop - start)
    for (phase, _), total in sorted(seconds.items(), key=lambda item: item[0][1]):
        found[phase].append(total)
    found["sent"] = [sent[version] for version in sorted(sent)]
    _compare_decoding(found, events, window)
    found["again"] = list(_prefilled_again(events, window))
    return found


def transfers(events: Sequence[Event]) -> list[Span]:
    """From the beginning of gather to the end of register, version by version."""
    began = {e.version: e.span[0] for e in events if isinstance(e, TrainerBusy) and e.what == "gather"}
    ended = {e.version: e.time for e in events if isinstance(e, UpdatePhase) and e.phase == "register"}
    return [(began[version], ended[version]) for version in sorted(began.keys() & ended.keys())]


def _compare_decoding(found: Figures, events: Sequence[Event], window: Span) -> None:
    during = transfers(events)
    for event in events:
        if not isinstance(event, ReplicaActivity) or not window[0] <= event.time <= window[1]:
            continue
        busy = sum(stop - start for start, stop in event.busy)
        beside = sum(_overlap(span, transfer) for span in event.busy for transfer in during)
        steps = [(active, count, total) for active, (count, total, _) in event.decode_steps.items()]
        if beside == 0:
            found["outside"] += steps
        elif beside >= BESIDE * busy:
            found["beside"] += steps


def _prefilled_again(events: Iterable[Event], window: Span) -> Iterator[tuple[int, float]]:
    """Mean of the largest prefills in the first report with one after each halt that cut something."""
    cut: float | None = None
    for event in events:
        match event:
            case ReplicaHalted(reason="load", interrupted=interrupted, span=(_, end)) if interrupted:
                cut = end
            case ReplicaActivity(prefill_steps=steps, busy=busy) if steps and cut is not None and busy[-1][1] > cut:
                count, _, tokens, seconds, _ = steps[max(steps)]
                if window[0] <= cut <= window[1]:
                    yield tokens // count, seconds / count
                cut = None


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
