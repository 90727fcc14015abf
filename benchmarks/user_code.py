"""Functions of users that benchmarks' runs name: rewards, and the program of ``python -m benchmarks.episodes``."""

from __future__ import annotations

import asyncio
from typing import Any


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
