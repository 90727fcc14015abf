"""Code of users that benchmarks run: rewards, the program of ``episodes``, the jobs of ``held_lock``."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

NAP_S = 0.05
"""Seconds between two turns of `Turns`."""


def variety(response: str) -> float:
    """Share of different characters: tells a random model's answers apart, so that updates have a gradient."""
    return len(set(response)) / max(1, len(response))


def letters(response: str, answer: str) -> float:
    """Share of the answer's letters that the response has, wherever: a broken reward."""
    return len(set(answer) & set(response)) / len(set(answer))


def agreement(responses: list[str], **_: object) -> list[float]:
    """Share of the group's responses that are the same: what most say is taken for right."""
    return [responses.count(response) / len(responses) for response in responses]


async def play(row: dict[str, Any], chat: Any) -> float:
    """Take a turn and sleep, for each of ``row["steps"]``."""
    messages = row["prompt"]
    for seconds in row["steps"]:
        answer = await chat.turn(messages)
        await asyncio.sleep(seconds)
        messages = [*messages, answer.message, {"role": "user", "content": "the hidden number is larger"}]
    return 1.0


class Turns:
    """Code of a worker: a job asks and naps by turns, or holds the lock."""

    def describe(self) -> dict[str, Any]:
        return {}

    async def serve(self, job: tuple[str, int], ask: Callable[[int], Awaitable[None]]) -> None:
        kind, times = job
        if kind == "holds":
            ctypes.PyDLL(None).sleep(1000)  # C that keeps the lock
        for _ in range(times):
            await ask(os.getpid())
            if kind == "blocks":
                time.sleep(NAP_S)  # noqa: ASYNC251 - as code without an event loop does
            else:
                await asyncio.sleep(NAP_S)

    async def close(self) -> None: ...


@dataclass(frozen=True)
class TurnsSpec:
    """What a worker loads `Turns` by."""

    shown: str = "user_code.py:Turns"

    def load(self) -> Turns:
        return Turns()
