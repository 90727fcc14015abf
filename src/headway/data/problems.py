"""The protocol of procedural tasks: problems, and how their answers are scored. Imports no tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

REASONING_GYM = "reasoning_gym/"
"""Prefix of the names of reasoning-gym's datasets."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the ``prompt`` for the model, a right ``answer``, and further data for its verifier.

    Some tasks of reasoning-gym have no answer, only a verifier: ``answer`` is then empty.
    """

    prompt: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Source of problems. A problem depends only on (seed, index)."""

    name: str

    def problem(self, index: int) -> Problem: ...

    def score(self, response: str, answer: str, extra: Mapping[str, Any]) -> float:
        """Return how right ``response`` is, from 0 to 1."""
