"""Rewards as they are written for TRL's trainers, used as they are:

    headway train … 'reward.functions=[{function: examples/reward_trl.py:accuracy}, {function: …:brevity, weight: 0.1}]'

Such a function gets a whole group: lists of prompts, completions and the row's columns, by name. It returns a list of
numbers, and None for a completion that it does not apply to.
"""

import re
from typing import Any


def accuracy(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the last number of the completion is the answer."""
    numbers = [re.findall(r"-?\d+", text_of(completion)) for completion in completions]
    return [float(bool(found) and found[-1] == str(a)) for found, a in zip(numbers, answer, strict=True)]


def brevity(completions: list[Any], limit: int = 20, **kwargs: Any) -> list[float | None]:
    """1 for a completion of at most ``limit`` characters (``params: {limit: 40}``); says nothing about empty ones."""
    texts = [text_of(completion) for completion in completions]
    return [float(len(text) <= limit) if text.strip() else None for text in texts]


def text_of(completion: Any) -> str:
    """A completion is text, or a list of one message where the prompts are chat messages."""
    return completion if isinstance(completion, str) else completion[0]["content"]
