"""A policy that says what a test has written, and the episodes that it is asked in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_chat import Program
from headway.agents.interface.program_messages import (
    CallProblem,
    EpisodeEnd,
    EpisodeStart,
    ToolCall,
    TurnAnswer,
    TurnRequest,
    calls_made,
    said,
)
from headway.errors import EpisodeOver


def text(content: str) -> TurnAnswer:
    """An answer without calls."""
    return TurnAnswer(content, content, said("assistant", content))


def calling(*calls: tuple[str, dict[str, Any]] | ToolCall) -> TurnAnswer:
    """An answer that calls tools."""
    made = tuple(
        call if isinstance(call, ToolCall) else ToolCall(f"call{n}", call[0], call[1]) for n, call in enumerate(calls)
    )
    message = calls_made("", [(call.id, call.name, call.arguments) for call in made])
    return TurnAnswer("(calls)", "", message, made)


def unknown(name: str) -> ToolCall:
    """A call of a tool that is not there, as the episode worker's parser tells of it."""
    return ToolCall("call9", name, {}, CallProblem.UNKNOWN_TOOL, f"Error: there is no tool {name!r}")


Says = str | TurnAnswer | Callable[[TurnRequest], Any]


class Script:
    """Answers one request after the other; after the last answer the episode is over for ``limit``."""

    def __init__(self, *answers: Says, limit: str = "turns") -> None:
        self._answers, self._limit = list(answers), limit
        self.requests: list[TurnRequest] = []

    async def __call__(self, request: TurnRequest) -> TurnAnswer:
        self.requests.append(request)
        if not self._answers:
            raise EpisodeOver(self._limit)
        answer = self._answers.pop(0)
        said_now = answer(request) if callable(answer) else answer
        return text(said_now) if isinstance(said_now, str) else said_now

    @property
    def last(self) -> list[tuple[str, Any]]:
        """Role and content of each message of the last request."""
        return [(message["role"], message.get("content")) for message in self.requests[-1].messages]


def start(prompt: str | Sequence[Any] = "Play.", seed: int = 7, **row: Any) -> EpisodeStart:
    """An episode of a prompt and the columns of its row."""
    messages = [said("user", prompt)] if isinstance(prompt, str) else list(prompt)
    return EpisodeStart("epoch 0, row 3, attempt 0, k 1", messages, {"answer": "42", **row}, seed)


async def play(program: Program | ProgramSpec, ask: Script, begin: EpisodeStart | None = None) -> EpisodeEnd:
    """Make one episode; a synchronous program has no event loop, as in a worker, and awaits nothing but ``ask``."""
    loaded = program.load() if isinstance(program, ProgramSpec) else program
    if loaded.is_async:
        return await loaded.serve(begin or start(), ask)
    return await asyncio.to_thread(_alone, loaded.serve(begin or start(), ask))


def _alone(episode: Coroutine[Any, Any, EpisodeEnd]) -> EpisodeEnd:
    try:
        episode.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the episode has awaited something else than the policy")
