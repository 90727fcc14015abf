"""Limits of an episode, and the time that its program takes.

    begin ─▶ step ─▶ end (a turn is asked for) ─▶ … ─▶ begin (it is answered) ─▶ step ─▶ end
    └────────────────────────── the episode's time ──────────────────────────────────────┘

Both time limits pause with the worker's `EpisodeClock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.events import Span


@dataclass(slots=True, eq=False)
class Deadline:
    """Callback at a time on a clock, unless it is cancelled."""

    due: float
    """Time on the clock."""
    callback: Callable[[], object]
    timer: asyncio.TimerHandle | None = None


class EpisodeClock:
    """Clock of a worker's episodes. It runs from the start; `stop` pauses and `go_on` resumes it with all deadlines.

    Example:
        >>> async def late() -> list[str]:
        ...     clock, said = EpisodeClock(), []
        ...     clock.deadline(0.01, lambda: said.append("late"))
        ...     clock.stop()                    # the trainer has the devices
        ...     await asyncio.sleep(0.05)
        ...     before = [*said]
        ...     clock.go_on()                   # the deadline has as many seconds left as before
        ...     await asyncio.sleep(0.05)
        ...     return [*before, "then", *said]
        >>> asyncio.run(late())
        ['then', 'late']
    """

    def __init__(self) -> None:
        self._deadlines: dict[Deadline, None] = {}
        self._stood = 0.0
        """Seconds of earlier pauses."""
        self._stopped: float | None = None
        """Time of the last stop on the loop's clock; None while the clock runs."""

    def time(self) -> float:
        """Return the seconds on this clock, which pauses between `stop` and `go_on`."""
        now = asyncio.get_running_loop().time() if self._stopped is None else self._stopped
        return now - self._stood

    def deadline(self, seconds: float, callback: Callable[[], object]) -> Deadline:
        """Make a deadline that calls ``callback`` on the loop in ``seconds`` of this clock."""
        deadline = Deadline(self.time() + seconds, callback)
        self._deadlines[deadline] = None
        self._run(deadline)
        return deadline

    def cancel(self, deadline: Deadline) -> None:
        """Cancel a deadline. No effect if it is over, or was cancelled."""
        self._deadlines.pop(deadline, None)
        if deadline.timer is not None:
            deadline.timer.cancel()

    def stop(self) -> None:
        """Pause the clock. No effect if it is paused."""
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().time()
            for deadline in self._deadlines:
                if deadline.timer is not None:
                    deadline.timer.cancel()

    def go_on(self) -> None:
        """Resume the clock."""
        if self._stopped is not None:
            self._stood += asyncio.get_running_loop().time() - self._stopped
            self._stopped = None
            for deadline in self._deadlines:
                self._run(deadline)

    def _run(self, deadline: Deadline) -> None:
        if self._stopped is None:
            loop = asyncio.get_running_loop()
            # The loop's clock goes on while this one stands: it is ahead by so much.
            deadline.timer = loop.call_at(deadline.due + self._stood, self._over, deadline)

    def _over(self, deadline: Deadline) -> None:
        self._deadlines.pop(deadline, None)
        deadline.callback()


MOST_STEPS = 32
"""Maximum number of spans of steps in an episode's events, however many turns it has."""
SHORTEST_WAIT_S = 1e-3
"""Minimum seconds of a recorded wait: handing a program to its worker takes less."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode, as ``agent``'s keys describe them.

    Example:
        >>> limits = EpisodeLimits(max_length=400, max_turns=5, side_effects=("send_mail",))
        >>> limits.repeated(["look_up", "send_mail"]), limits.text("turns")
        ('send_mail', 'agent.max_turns=5 was reached')
    """

    max_length: int
    """Maximum number of tokens of a conversation, its prompt included."""
    max_turns: int
    max_turn_tokens: int | None = None
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    train_on: tuple[str, ...] = ("turns", "tokens")
    """Limits after which an episode is still trained on."""
    retries: int = 2
    """Number of times that a program is run again because something it needs was temporarily away."""
    side_effects: tuple[str, ...] = ()
    """Names of tools that must not be called twice for one answer; ``*`` for everything that a program does."""

    def repeated(self, calls: Iterable[str]) -> str | None:
        """Return the first of ``calls``, earlier tool calls of a program, that must not be repeated; None if there is
        none.
        """
        once = set(self.side_effects)
        return next((name for name in calls if name in once), "its program" if "*" in once else None)

    def text(self, limit: str) -> str:
        """Return a text for messages: ``limit`` has ended an episode."""
        match limit:
            case "turns":
                return f"agent.max_turns={self.max_turns} was reached"
            case "tokens":
                return f"its conversation has the {self.max_length} tokens that there may be"
            case "step":
                return f"a step took longer than agent.step_timeout_s={self.step_timeout_s:g}"
            case _:
                return f"it took longer than agent.episode_timeout_s={self.episode_timeout_s:g}"


class EpisodeTime:
    """Time of one episode over all attempts of its program: its limit, and its steps, at most one at a time.

    A step is a time in which the program waits for no turn. If there are more than `MOST_STEPS`, the two with the
    shortest pause between them are merged.
    """

    def __init__(self, clock: EpisodeClock, limits: EpisodeLimits) -> None:
        self._clock, self._limits = clock, limits
        self.started = self._until = asyncio.get_running_loop().time()
        """Time on the event clock at which the episode began."""
        self.steps: list[Span] = []
        self.waits: list[Span] = []
        """Spans of waits for a place to run, or for something that was away."""
        self.environment_s = 0.0
        """Seconds that the program spent in its steps."""
        self.is_over = False
        """True once ``episode_timeout_s`` has passed: the turn that the program waits for is its last."""
        self.refused = 0
        """Number of consecutive refused turns."""
        self._left_s: float | None = None
        """Seconds left for the program to end, after a turn was refused; None before."""
        self._whole: Deadline | None = None
        self._step: Deadline | None = None
        self._began = self._began_at = 0.0
        """Time on the event clock, and on the episode's, at which the step began."""

    def begin(self) -> None:
        """Note that the program begins to run. The episode's limit counts from the first time."""
        if (now := asyncio.get_running_loop().time()) - self._until >= SHORTEST_WAIT_S:
            self.waits.append((self._until, now))
        if self._whole is None:
            self._whole = self._clock.deadline(self._limits.episode_timeout_s, self._end)

    def begin_step(self, on_timeout: Callable[[], object]) -> None:
        """Begin a step: the program waits for no turn now. ``on_timeout`` is called when the step takes too long."""
        self._began, self._began_at = asyncio.get_running_loop().time(), self._clock.time()
        seconds = self._limits.step_timeout_s if self._left_s is None else self._left_s
        self._step = self._clock.deadline(seconds, on_timeout)

    def end_step(self) -> None:
        """End the step, if one is under way."""
        if self._step is None:
            return
        self._clock.cancel(self._step)
        self._step = None
        spent = self._clock.time() - self._began_at
        self.environment_s += spent
        if self._left_s is not None:
            self._left_s = max(0.0, self._left_s - spent)
        self._until = asyncio.get_running_loop().time()
        self.steps.append((self._began, self._until))
        if len(self.steps) > MOST_STEPS:
            # The two spans with the shortest gap between them are merged.
            at = min(range(1, len(self.steps)), key=lambda i: self.steps[i][0] - self.steps[i - 1][1])
            self.steps[at - 1 : at + 1] = [(self.steps[at - 1][0], self.steps[at][1])]

    def forgive(self) -> None:
        """Reset the count of refused turns, after a turn that was accepted, or for another attempt."""
        self.refused, self._left_s = 0, None

    def refuse(self) -> None:
        """Count a refused turn. From the first one on, the program has the time of one step in all to end."""
        self.refused += 1
        if self._left_s is None:
            self._left_s = self._limits.step_timeout_s

    def close(self) -> None:
        """Cancel the episode's limit."""
        if self._whole is not None:
            self._clock.cancel(self._whole)

    def _end(self) -> None:
        self.is_over = True
