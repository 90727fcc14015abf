"""A run's events as the figures of its updates.

versions   1 … warm-up │ measured │ the last ones        each from the optimizer step that made it to the next one's
transfer   ├ gather ┤ send ║ recv ▶ register ┤           what decoding is compared beside, and outside of
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median

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
    UpdateSuperseded,
)
from headway.reports.record.events_file import read_events

PHASES = ("gather", "send", "recv", "register", "load")
BESIDE = 0.5
"""Share of a report's busy time from which on it counts as beside a transfer."""
FEWEST_STEPS = 5
"""Decode steps beside transfers, and outside, for a comparison."""

Steps = list[tuple[int, int, float]]
"""Active sequences, number of decode steps, their seconds."""


@dataclass(slots=True)
class Figures:
    """Of all updates that were measured; those of several runs can be added up."""

    window_s: float = 0.0
    """Of the measured versions together."""
    versions: int = 0
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """Seconds of each."""
    trainer_stall: list[float] = field(default_factory=list)
    """Seconds; gather is not among them."""
    rollout_stall: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Bytes."""
    full_nbytes: list[int] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Seconds of optimizer steps."""
    beside: Steps = field(default_factory=list)
    """Reports of decoding beside a transfer."""
    outside: Steps = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    again: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of the step that prefilled what an update had interrupted."""
    superseded: int = 0
    probe_differences: list[float] = field(default_factory=list)
    """In nats."""

    def add(self, other: Figures) -> None:
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name == "phases":
                for phase in PHASES:
                    mine[phase] += theirs[phase]
            else:
                setattr(self, one.name, mine + theirs)

    @property
    def version_s(self) -> float:
        return self.window_s / self.versions

    def phase(self, name: str) -> float | None:
        """Median, in seconds."""
        return median(self.phases[name]) if self.phases[name] else None

    @property
    def trainer_share(self) -> float:
        """Of the time: trainer stall."""
        return sum(self.trainer_stall) / self.window_s

    @property
    def rollout_share(self) -> float:
        return sum(self.rollout_stall) / self.window_s

    @property
    def sent_share(self) -> float:
        """Of the full bytes."""
        return sum(self.sent) / (len(self.sent) * max(self.full_nbytes))

    @property
    def send_bytes_per_s(self) -> float | None:
        rates = [nbytes / seconds for nbytes, seconds in zip(self.sent, self.phases["send"], strict=True) if seconds]
        return median(rates) if rates else None

    @property
    def decode_slowdown(self) -> float | None:
        """Seconds of a decode step beside a transfer ÷ outside, with as many sequences."""
        beside, outside = _by_active(self.beside), _by_active(self.outside)
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
    found = Figures(window_s=end - made[first], versions=last - first + 1)
    sent: dict[int, int] = Counter()
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        match event:
            case UpdatePhase(version=version, phase=phase) if first <= version <= last:
                seconds[phase, version] += event.seconds
                if phase == "send":
                    sent[version] += event.nbytes
                found.probe_differences += [event.probe_difference] if event.probe_difference else []
            case UpdateFinished(version=version) if first <= version <= last:
                found.trainer_stall.append(event.trainer_stall_s - event.validation_stall_s)
                found.rollout_stall.append(event.rollout_stall_s)
                found.interrupted.append(event.interrupted)
                found.full_nbytes += [event.full_nbytes] if event.full_nbytes else []
                found.changed += [event.changed] if event.changed is not None else []
            case TrainerBusy(what="step", span=(start, stop)) if made[first] <= start and stop <= end:
                found.steps.append(stop - start)
            case UpdateSuperseded(version=version) if first <= version <= last:
                found.superseded += 1
    for (phase, _), total in sorted(seconds.items(), key=lambda item: item[0][1]):
        found.phases[phase].append(total)
    found.sent = [sent[version] for version in sorted(sent)]
    _compare_decoding(found, events, (made[first], end))
    found.again = _prefilled_again(events, (made[first], end))
    return found


def transfers(events: Iterable[Event]) -> list[Span]:
    """From the beginning of gather to the end of register, version by version."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for event in events:
        match event:
            case TrainerBusy(what="gather", version=version, span=(start, _)):
                began[version] = start
            case UpdatePhase(phase="register", version=version, time=time):
                ended[version] = time
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
            found.outside += steps
        elif beside >= BESIDE * busy:
            found.beside += steps


def _prefilled_again(events: Iterable[Event], window: Span) -> list[tuple[int, float]]:
    """Of the first report with a prefill after each halt that cut something: the mean of its largest prefills."""
    again: list[tuple[int, float]] = []
    cut: float | None = None
    for event in events:
        match event:
            case ReplicaHalted(reason="load", interrupted=interrupted, span=(_, end)) if interrupted:
                cut = end
            case ReplicaActivity(prefill_steps=steps, busy=busy) if steps and cut is not None and busy[-1][1] > cut:
                count, _, tokens, seconds, _ = steps[max(steps)]
                if window[0] <= cut <= window[1]:
                    again.append((tokens // count, seconds / count))
                cut = None
    return again


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
