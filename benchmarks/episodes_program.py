"""The program of ``python -m benchmarks.episodes``: turns, and steps that sleep as long as its row says."""

from __future__ import annotations

import asyncio
from typing import Any


async def run(row: dict[str, Any], chat: Any) -> float:
    """Take a turn and sleep, for each of ``row["steps"]``."""
    messages = row["prompt"]
    for seconds in row["steps"]:
        answer = await chat.turn(messages)
        await asyncio.sleep(seconds)
        messages = [*messages, answer.message, {"role": "user", "content": "the hidden number is larger"}]
    return 1.0
