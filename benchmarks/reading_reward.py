"""Rewards of the sick runs in docs/reading-a-run.md: each pays for something else than what is wanted."""

from __future__ import annotations


def letters(response: str, answer: str) -> float:
    """Share of the answer's letters that the response has, wherever."""
    return len(set(answer) & set(response)) / len(set(answer))


def agreement(responses: list[str], **_: object) -> list[float]:
    """Share of the group's responses that are the same: what most say is taken for right."""
    return [responses.count(response) / len(responses) for response in responses]
