"""Lanes of the stages, from their transitions: each state lasts from the event that names it to the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headway.events import Span, StageChanged
from headway.reports.timeline.lanes import NOTHING_REPORTED, Lane, LaneSpan, SpanKind, idle, joined

GROUP = "Stages"
WAITING_INPUT, WAITING_OUTPUT, PROCESSING, PAUSED = "waiting_input", "waiting_output", "processing", "paused"
FIRST_AWAITED = "waits for its first input"
ENDED = ("draining", "stopped", "failed")
"""States of a stage that gets no more input; while draining, items may still be in processing."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Time that a stage spent in one state, ``processing`` whenever an item was; ``active``: most items at once."""

    start: float
    end: float
    state: str
    waiting_for: str | None
    active: int


@dataclass(slots=True)
class StageLog:
    """One stage's stays, in order and without a gap; its last state is open until `close`."""

    name: str
    stays: list[Stay] = field(default_factory=list)
    _state: str | None = None
    _waiting_for: str | None = None
    _since: float = 0.0
    _active: int = 0

    def change(self, event: StageChanged) -> None:
        # Items are in processing; one that waits to be handed on is not, whatever the others do.
        works = event.state == PROCESSING or event.active - (event.state == WAITING_OUTPUT) > 0
        state = PROCESSING if works else event.state
        waiting_for = None if state == PROCESSING else event.waiting_for
        if (state, waiting_for) == (self._state, self._waiting_for):
            self._active = max(self._active, event.active)
            return
        self.close(event.time)
        self._state, self._waiting_for, self._active = state, waiting_for, event.active

    def close(self, end: float) -> None:
        """Record that the present state lasts until ``end`` at least."""
        if self._state is not None and end > self._since:
            self.stays.append(Stay(self._since, end, self._state, self._waiting_for, self._active))
        self._since = end

    def when(self, *states: str) -> list[Span]:
        return [(stay.start, stay.end) for stay in self.stays if stay.state in states]

    def lane(self, life: Span, before: str = FIRST_AWAITED) -> Lane:
        """Return the stage's lane: idle, for the reason ``before``, from ``life``'s start to the first transition.

        It ends when the stage stops.
        """
        first = self.stays[0].start if self.stays else life[1]
        spans = [_span(stay) for stay in self.stays if stay.state not in ENDED]
        return Lane(GROUP, self.name, joined([idle((life[0], first), before), *spans]))


def stage_lanes(
    logs: Iterable[StageLog], life: Span, place_of: Callable[[str], int], *, late: bool = False
) -> list[Lane]:
    """Lanes of the stages, each at the place that ``place_of`` gives for its name."""
    before = NOTHING_REPORTED if late else FIRST_AWAITED
    return [log.lane(life, before) for log in sorted(logs, key=lambda log: place_of(log.name))]


def _span(stay: Stay) -> LaneSpan:
    span = (stay.start, stay.end)
    if stay.state == PROCESSING:
        return LaneSpan(*span, SpanKind.PROCESS, "1 item" if stay.active == 1 else f"up to {stay.active} items at once")
    if stay.state == PAUSED:
        return idle(span, "paused", kind=SpanKind.HALTED)
    return idle(span, f"waits for {stay.waiting_for}" if stay.waiting_for else stay.state)
