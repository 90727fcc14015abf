"""Scoring of responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Conversation, Prompt
from headway.runtime.pickling import pickled_by_fields


@pickled_by_fields
@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of one group's n responses, in order."""

    rewards: NDArray[np.float32]
    """Rewards [n], all finite: Σ weight · value over the parts that apply to the response."""
    parts: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Values [n] that each part gave, by its name, before its weight, and further numbers that parts told, by theirs.
    None: the part does not apply to the response, or told nothing of it."""


def means_of_parts(groups: Iterable[Mapping[str, Sequence[float | None]]]) -> dict[str, float]:
    """Means of what the parts of a reward gave to groups, where they apply; empty unless there are several."""
    found: dict[str, list[float]] = {}
    for parts in groups:
        for name, values in parts.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {name: fmean(given) for name, given in found.items() if given} if len(found) > 1 else {}


class RewardFn(Protocol):
    """Reward function that scores responses in other processes.

    scores = await reward.score(prompt, ["4", "5"])
    scores.rewards                      # array([1., 0.], dtype=float32)
    await reward.close()
    """

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        """Return the rewards of the responses, and what each part of the reward gave.

        ``conversations``: those whose last answers the responses are, where a program made these.

        Raises `ScoringFailed` after the retry budget: an exception, a time-out, or a value that is not a finite number.
        """

    async def close(self) -> None: ...
