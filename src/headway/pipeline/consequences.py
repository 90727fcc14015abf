"""Consequences of a failure: one decision for all that a run can lose.

a try is left                  ▶ again, with the same members: nobody is to blame yet
a start is left                ▶ another one takes the place of what was lost
others go on without it        ▶ without it
none of these                  ▶ the end of the run, with the error of the failure
"""

from __future__ import annotations

from enum import Enum, auto

from headway.config.sizing.timeouts import Timeouts
from headway.pipeline.admission.pipeline_state import now


class Consequence(Enum):
    """Consequence of a failure."""

    AGAIN = auto()
    REPLACED = auto()
    WITHOUT = auto()
    END = auto()


def what_follows(*, tries: int = 0, starts: int = 0, others: bool = False) -> Consequence:
    """Return what follows, by the ``tries`` and ``starts`` that are left, and whether ``others`` go on."""
    if tries > 0:
        return Consequence.AGAIN
    if starts > 0:
        return Consequence.REPLACED
    return Consequence.WITHOUT if others else Consequence.END


class Restarts:
    """Starts in the place of what is lost that are left to a run, for members of one kind or of several."""

    def __init__(self, left: int, timeouts: Timeouts) -> None:
        self.left = left
        self.starts_until = 0.0
        """Time on the event clock by which the newest start has ended."""
        self._timeouts = timeouts

    def begin(self) -> None:
        """Count a start, which ends within `Timeouts.start_s`."""
        self.left -= 1
        self.starts_until = now() + self._timeouts.start_s

    @property
    def limit(self) -> str:
        """Description of how long a start may take, for messages."""
        return self._timeouts.start_limit()
