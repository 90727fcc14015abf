"""When an episode's program worked, in a bounded number of spans on the event clock."""

from __future__ import annotations

from headway.events import Span

MOST_STEPS = 32
"""Most spans that an episode has: its record stays small, however many turns it has."""
SHORTEST_WAIT_S = 1e-3
"""Shortest wait that is one: a program is handed to its runner faster than that."""


class StepTimes:
    """Spans of one episode: its program's steps, and its waits for a place to run or for what was away.

    Where there are more than `MOST_STEPS`, those with the shortest pause between them become one. The first start and
    the last end stay as they were.
    """

    def __init__(self) -> None:
        self.steps: list[Span] = []
        self.waits: list[Span] = []
        self.until = 0.0
        """End of the last step; before the first one, when the episode was to begin."""
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Begin a step."""
        self._since = now

    def end(self, now: float) -> None:
        """End the step."""
        self.until = now
        self.steps.append((self._since, now))
        if len(self.steps) > MOST_STEPS:
            at = min(range(1, len(self.steps)), key=lambda i: self.steps[i][0] - self.steps[i - 1][1])
            self.steps[at - 1 : at + 1] = [(self.steps[at - 1][0], self.steps[at][1])]

    def began(self, now: float) -> None:
        """Note that the program, which waited since then, has begun to run."""
        if now - self.until >= SHORTEST_WAIT_S:
            self.waits.append((self.until, now))
