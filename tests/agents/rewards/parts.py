"""Rewards of one part."""

from __future__ import annotations

from typing import Any

from headway.agents.rewards.scorers import RewardPart


def part_of(function: str, **params: Any) -> RewardPart:
    """A part of weight 1 under the function's own name."""
    return RewardPart(function, function.rpartition(":")[2], params=params)
