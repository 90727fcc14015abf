"""Limits of time that stand still while the policy does: the clock of episodes and of their steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """A callback that comes when its seconds are over, unless it is cancelled."""

    def __init__(self, clock: EpisodeClock, seconds: float, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._left = seconds
        self._callback = callback
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Count the seconds that are left, from now on."""
        self._timer = asyncio.get_running_loop().call_later(self._left, self._over)

    def hold(self, now: float) -> None:
        """Stop counting, at ``now`` on the loop's clock."""
        if self._timer is not None:
            self._left = max(0.0, self._timer.when() - now)
            self._timer.cancel()
            self._timer = None

    def cancel(self) -> None:
        """Forget the deadline. One that is over, or was cancelled, stays so."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._clock.forget(self)

    def _over(self) -> None:
        self._timer = None
        self._clock.forget(self)
        self._callback()


class EpisodeClock:
    """The clock of a keeper's episodes. It runs from the start; `stop` and `go_on` hold all deadlines and let them run.

    clock = Clock()
    step = clock.deadline(60, on_timeout)
    clock.stop()            # the trainer has the devices
    clock.go_on()           # the step has as many seconds left as before
    step.cancel()
    """

    def __init__(self) -> None:
        self._deadlines: dict[Deadline, None] = {}
        self._running = True
        self._stood = 0.0
        """Seconds for which the clock stood still before."""
        self._stopped = 0.0
        """Time on the loop's clock of the last stop."""

    def time(self) -> float:
        """Seconds on this clock, which stands still between `stop` and `go_on`."""
        return (asyncio.get_running_loop().time() if self._running else self._stopped) - self._stood

    def deadline(self, seconds: float, callback: Callable[[], object]) -> Deadline:
        """Make a deadline that calls ``callback`` on the loop in ``seconds`` of this clock."""
        deadline = Deadline(self, seconds, callback)
        self._deadlines[deadline] = None
        if self._running:
            deadline.run()
        return deadline

    def forget(self, deadline: Deadline) -> None:
        """Keep ``deadline`` no more."""
        self._deadlines.pop(deadline, None)

    def stop(self) -> None:
        """Let time stand still. A clock that stands still stays so."""
        if self._running:
            self._running, self._stopped = False, asyncio.get_running_loop().time()
            for deadline in self._deadlines:
                deadline.hold(self._stopped)

    def go_on(self) -> None:
        """Let time run again."""
        if not self._running:
            self._running = True
            self._stood += asyncio.get_running_loop().time() - self._stopped
            for deadline in self._deadlines:
                deadline.run()
