"""A reward that tells a random model's answers apart, so that updates have a gradient."""

from __future__ import annotations


def score(response: str) -> float:
    """The share of different characters."""
    return len(set(response)) / max(1, len(response))
