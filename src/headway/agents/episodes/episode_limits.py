"""Limits of an episode that a program makes, and the time that its program takes.

    begin ─▶ step ─▶ end (a turn is asked for) ─▶ … ─▶ begin (it is answered) ─▶ step ─▶ end
    └────────────────────────── the episode's time ──────────────────────────────────────┘

Both limits of time stand still with the keeper's `headway.agents.episodes.deadlines.EpisodeClock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headway.agents.episodes.deadlines import Deadline, EpisodeClock
from headway.agents.episodes.step_times import StepTimes


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
                return f"rollout.max_turns={self.max_turns} was reached"
            case "tokens":
                return f"its conversation has the {self.max_length} tokens that there may be"
            case "step":
                return f"a step took longer than rollout.step_timeout_s={self.step_timeout_s:g}"
            case _:
                return f"it took longer than rollout.episode_timeout_s={self.episode_timeout_s:g}"


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
