"""Lanes of the environments: when programs of episodes worked between turns, and when episodes waited to begin.

Episodes tell of both when they have finished, so those that are under way when the record ends are not in the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.events import Span, TrajectoryFinished
from headway.reports.metrics.counters import Overlapping
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind, idle, lay_out

ENVIRONMENTS = "Environments"
NO_STEP = "no episode is in a step"
WAITED_FOR = "episodes wait for an environment"


@dataclass(slots=True)
class Environments:
    """Accumulates the steps and waits of episodes that programs made."""

    _steps: Overlapping = field(default_factory=Overlapping)
    _waits: Overlapping = field(default_factory=Overlapping)
    _any: bool = False

    def finish(self, event: TrajectoryFinished) -> None:
        """Note the steps of an episode that has ended."""
        for start, end in event.steps:
            self._steps.add(start, end)
        for start, end in event.waits:
            self._waits.add(start, end)
        self._any |= bool(event.steps or event.waits)

    def busy(self) -> list[Span]:
        """Spans in which any episode was in a step, as a union."""
        return [span for span, _ in _stretches(self._steps)]

    def lanes(self, life: Span) -> Iterator[Lane]:
        """The lane of steps, and below it that of waits; none where no program makes the episodes."""
        if not self._any:
            return
        steps = [
            LaneSpan(*span, SpanKind.ENVIRONMENT, _many(most, "episode in a step", "episodes in steps"))
            for span, most in _stretches(self._steps)
        ]
        yield Lane(ENVIRONMENTS, "steps", lay_out(steps, [[idle(life, NO_STEP)]], life))
        waits = [
            idle(span, WAITED_FOR, _many(most, "episode waits", "episodes wait") + " for an environment")
            for span, most in _stretches(self._waits)
        ]
        if waits:
            yield Lane(ENVIRONMENTS, "steps: waited for", tuple(waits), annotates=True)


def _many(most: int, one: str, several: str) -> str:
    return f"1 {one}" if most == 1 else f"up to {most} {several} at once"


def _stretches(spans: Overlapping) -> list[tuple[Span, int]]:
    """The union of ``spans``, each of its intervals with the most spans that overlap in it."""
    found: list[tuple[Span, int]] = []
    since, most = 0.0, 0
    for time, level in zip(*spans.levels(), strict=True):
        if level and not most:
            since = time
        most = max(most, int(level)) if level else most
        if not level and most:
            found.append(((since, time), most))
            most = 0
    return found
