"""A reward that cannot be computed."""

from __future__ import annotations


async def broken(trace: object) -> float:
    """Fail."""
    return 1 / 0
