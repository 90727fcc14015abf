"""Lanes: what one party did at every instant, as spans side by side, and why it did nothing where it did nothing.

    work spans ──────────────┐
    claims, most telling first ┼─▶ lay_out() ─▶ spans of a lane: sorted, disjoint, without a gap
    the lane's life ─────────┘

Idle time is what is left of a lane's life when the union of its work is taken out. Claims only say why: each one names
the part of that remainder that it covers and that no earlier one named. So the idle spans of a lane add up to its idle
time, whatever was claimed how often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from headway.events import Span
from headway.reports.metrics.intervals import complement

NOTHING_REPORTED = "nothing reported"


class SpanKind(StrEnum):
    """The kind of thing that a span shows."""

    STEP = "step"
    """An optimizer step."""
    FORWARD = "forward"
    """A forward pass: log-probs, reference or values of a fetch."""
    GATHER = "gather"
    """Gathering: the trainer assembles weights for an update."""
    DECODE = "decode"
    """Prefill or decoding by a replica."""
    PROCESS = "process"
    """Work of a stage: it has items in processing."""
    ENVIRONMENT = "environment"
    """Work of programs between turns of the policy: steps of environments, tools."""
    TRANSFER = "transfer"
    """Transfer of weights: send, recv, register."""
    LOAD = "load"
    """Loading of new weights by a replica."""
    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"
    SERVE = "serve"
    """Time in which a replica serves one version."""
    TRAIN_LEASE = "train_lease"
    """Time in which training holds the shared devices."""
    GENERATE_LEASE = "generate_lease"
    """Time in which generation holds the shared devices."""
    HALTED = "halted"
    """Pause, in which nothing may be done."""
    IDLE = "idle"
    """Idle time: nothing was done, the party waited."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One interval of a lane: what was done, or why nothing was. Times are on the event clock.

    ``label`` tells this span from others (which version, how many items). ``reason``, given for idle time only, is
    worded the same each time, so that seconds can be added up by it.
    """

    start: float
    end: float
    kind: SpanKind
    label: str
    reason: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline. ``spans`` are sorted and disjoint; a lane of a party's own time has no gaps either."""

    group: str
    name: str
    spans: tuple[LaneSpan, ...] = ()
    annotates: bool = False
    """True if the lane describes the lane above it, and no work of its own."""

    def seconds(self, window: Span) -> float:
        """Seconds of ``window`` that the lane's spans cover."""
        return sum(max(min(span.end, window[1]) - max(span.start, window[0]), 0.0) for span in self.spans)

    def idle_by_reason(self, window: Span) -> dict[str, float]:
        """Seconds of ``window`` in which nothing was done, by reason."""
        totals: dict[str, float] = {}
        for span in self.spans:
            seconds = min(span.end, window[1]) - max(span.start, window[0])
            if span.reason is not None and seconds > 0:
                totals[span.reason] = totals.get(span.reason, 0.0) + seconds
        return totals

    def idle_seconds(self, window: Span) -> float:
        return sum(self.idle_by_reason(window).values())


ROUNDING_S = 1e-9
"""Longest gap, in seconds, that is no time but the rounding of times added up in different orders."""


def idle(span: Span, reason: str, label: str | None = None, kind: SpanKind = SpanKind.IDLE) -> LaneSpan:
    """Make a claim: during ``span`` nothing was done, for ``reason``."""
    return LaneSpan(*span, kind, reason if label is None else label, reason)


def lay_out(work: Iterable[LaneSpan], claims: Sequence[Iterable[LaneSpan]], life: Span) -> tuple[LaneSpan, ...]:
    """A lane's spans: ``work``, and around it idle time by the first of ``claims`` that covers it.

    Together they tile ``life`` exactly; where no claim covers idle time, nothing was reported.
    """
    placed: list[LaneSpan] = []
    free = complement([], life)
    for layer in (work, *claims):
        fitting = _fit(layer, free)
        if fitting:
            placed += fitting
            gaps = complement((span.span for span in placed), life)
            free = [gap for gap in gaps if gap[1] - gap[0] > ROUNDING_S]
    placed += [idle(gap, NOTHING_REPORTED) for gap in free]
    return joined(sorted(placed, key=lambda span: span.start))


def joined(spans: Iterable[LaneSpan]) -> tuple[LaneSpan, ...]:
    """Join sorted spans: neighbours that touch and say the same become one; empty ones are left out."""
    result: list[LaneSpan] = []
    for span in spans:
        if span.end <= span.start:
            continue
        last = result[-1] if result else None
        said = (span.kind, span.label, span.reason)
        if last is not None and span.start <= last.end and said == (last.kind, last.label, last.reason):
            result[-1] = replace(last, end=max(last.end, span.end))
        else:
            result.append(span)
    return tuple(result)


def side_by_side(group: str, name: str, spans: Iterable[LaneSpan]) -> list[Lane]:
    """Make as few lanes as it takes for spans that overlap, at least one: ``name``, ``name (2)``, …

    Spans without length are left out.
    """
    rows: list[list[LaneSpan]] = [[]]
    for span in sorted((span for span in spans if span.end > span.start), key=lambda span: span.start):
        row = next((row for row in rows if not row or row[-1].end <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return [Lane(group, name if i == 0 else f"{name} ({i + 1})", tuple(row)) for i, row in enumerate(rows)]


def clipped(spans: Iterable[LaneSpan], free: Sequence[Span]) -> list[LaneSpan]:
    """The parts of ``spans`` that lie in ``free``, a union; where two overlap the one that starts first goes first."""
    return _fit(spans, free)


def _fit(spans: Iterable[LaneSpan], free: Sequence[Span]) -> list[LaneSpan]:
    fitting: list[LaneSpan] = []
    reached = float("-inf")
    first = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        start = max(span.start, reached)
        while first < len(free) and free[first][1] <= start:
            first += 1
        at = first
        while at < len(free) and free[at][0] < span.end:
            piece = (max(start, free[at][0]), min(span.end, free[at][1]))
            if piece[1] > piece[0]:
                fitting.append(replace(span, start=piece[0], end=piece[1]))
            at += 1
        reached = max(reached, span.end)
    return fitting
