"""What travels to a reward worker: which reward it runs, and one group to score. Plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Which reward a worker runs. Raises nothing; the worker finds out whether it exists."""

    function: str
    """``exact_match``, ``task`` or ``file.py:function`` (absolute path)."""
    timeout_s: float
    """For one call of the function."""
    task_name: str | None = None
    task_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One group: a prompt and its n responses."""

    prompt: str
    responses: list[str]
    answer: Any
    source: str
    extra: Mapping[str, Any]
