"""Limits of an episode that a program makes, and the time that its program takes.

    begin ─▶ step ─▶ end (a turn is asked for) ─▶ … ─▶ begin (it is answered) ─▶ step ─▶ end
    └────────────────────────── the episode's time ──────────────────────────────────────┘

Both limits of time stand still with the worker's `EpisodeClock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headway.events import Span


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
    """The clock of an episode worker's episodes. It runs from the start; `stop` and `go_on` hold all deadlines and let
    them run.

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


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode, as ``rollout``'s keys describe them."""

    max_length: int
    """Most tokens of a conversation, its prompt included."""
    max_turns: int
    max_turn_tokens: int | None = None
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    train_on: tuple[str, ...] = ("turns", "tokens")
    """Limits that leave an episode trained on."""
    retries: int = 2
    """Number of times that a program is run again for what is away for a time."""

    def text(self, limit: str) -> str:
        """Say for people that ``limit`` has ended an episode."""
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
    """The time of one episode, over all attempts of its program."""

    def __init__(self, clock: EpisodeClock, limits: EpisodeLimits) -> None:
        self.clock = clock
        self.limits = limits
        self.spans = StepTimes()
        self.started = self.spans.until = asyncio.get_running_loop().time()
        """Time on the event clock."""
        self.environment_s = 0.0
        """Seconds that the program took in its steps."""
        self.is_over = False
        """``episode_timeout_s`` is over: the turn that the program waits for is its last."""
        self._whole: Deadline | None = None

    def begin(self) -> None:
        """Note that the program begins to run. The episode's limit counts from the first time."""
        self.spans.began(asyncio.get_running_loop().time())
        if self._whole is None:
            self._whole = self.clock.deadline(self.limits.episode_timeout_s, self._end)

    def close(self) -> None:
        """Forget the episode's limit."""
        if self._whole is not None:
            self._whole.cancel()

    def _end(self) -> None:
        self.is_over = True


class ProgramSteps:
    """Steps of one try: what its program does while it waits for no turn. At most one is under way."""

    def __init__(self, time: EpisodeTime, on_timeout: Callable[[], object]) -> None:
        """``on_timeout`` is called when a step takes too long."""
        self.refused = 0
        """Turns that were refused."""
        self._time = time
        self._on_timeout = on_timeout
        self._deadline: Deadline | None = None
        self._began = 0.0
        """Time on the clock at which the step began."""
        self._left_s: float | None = None
        """Seconds that the program has to end, once a turn was refused; None before."""

    def begin(self) -> None:
        """Begin a step: the program has all that it asked for."""
        clock, limits = self._time.clock, self._time.limits
        self._began = clock.time()
        self._time.spans.begin(asyncio.get_running_loop().time())
        seconds = limits.step_timeout_s if self._left_s is None else self._left_s
        self._deadline = clock.deadline(seconds, self._on_timeout)

    def end(self) -> None:
        """End the step, if one is under way."""
        if self._deadline is None:
            return
        self._deadline.cancel()
        self._deadline = None
        spent = self._time.clock.time() - self._began
        self._time.environment_s += spent
        if self._left_s is not None:
            self._left_s = max(0.0, self._left_s - spent)
        self._time.spans.end(asyncio.get_running_loop().time())

    def forgive(self) -> None:
        """Reset the count of refused turns, after a turn that was accepted."""
        self.refused, self._left_s = 0, None

    def refuse(self) -> None:
        """Count a turn that is refused. From the first one on the program has the time of one step in all, to end."""
        self.refused += 1
        if self._left_s is None:
            self._left_s = self._time.limits.step_timeout_s
