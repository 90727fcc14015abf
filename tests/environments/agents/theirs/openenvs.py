"""Environments as OpenEnv's authors write them, each served by its package's own ``create_fastapi_app``."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class GuessAction(Action):
    guess: str = Field(min_length=1, max_length=3)


class GuessObservation(Observation):
    hint: str = ""


class Guess(Environment):
    """Find a number below 100."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, low: int = 0) -> GuessObservation:
        self.number = low + (seed or 0) % 100
        self._state = State(episode_id=episode_id)
        return GuessObservation(hint="Guess a number.", metadata={"low": low})

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        self._state.step_count += 1
        guess = int(action.guess)  # raises for what is no number, as such environments do
        hint = "=" if guess == self.number else "<" if guess < self.number else ">"
        return GuessObservation(hint=hint, reward=float(hint == "="), done=hint == "=")

    @property
    def state(self) -> State:
        return self._state


class MoveAction(Action):
    dx: int
    dy: int


class MoveObservation(Observation):
    at: list[int] = Field(default_factory=lambda: [0, 0])


class Walk(Environment):
    """Walk to (2, 1)."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at = [0, 0]

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> MoveObservation:
        self.at = [0, 0]
        return MoveObservation(at=self.at)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> MoveObservation:
        raise AssertionError("its asynchronous form is used")

    def step(self, action: MoveAction, timeout_s: float | None = None, **_: Any) -> MoveObservation:
        self.at = [self.at[0] + action.dx, self.at[1] + action.dy]
        return MoveObservation(at=self.at, reward=1.0 if self.at == [2, 1] else None, done=self.at == [2, 1])

    @property
    def state(self) -> State:
        return State()


def guess() -> Any:
    return create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=2)


def walk() -> Any:
    return create_fastapi_app(Walk, MoveAction, MoveObservation, max_concurrent_envs=2)
