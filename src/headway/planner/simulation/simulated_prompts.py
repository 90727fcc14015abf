"""Simulated prompts, which have a length and nothing else, as ids and as a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.data.types import Prompt, TrajectoryId
from headway.planner.profiles.lengths import FilterSampler, LengthSampler
from headway.planner.simulation.simulated_contexts import said_in_tokens
from headway.planner.simulation.zeros import zero_ids

HELD_OUT = -1
"""Epoch number of held-out prompts, which training never reaches."""


class SimulatedSource:
    """A `PromptSource`: ``rows`` prompts an epoch, in order; without ``rows`` one epoch that never ends.

    A row's length is the same in every epoch.

    A prompt's ``answer`` is what ``filtered`` says of its group: True, False, or None where nothing is known.
    """

    def __init__(
        self,
        lengths: LengthSampler,
        *,
        filtered: FilterSampler | None = None,
        rows: int | None = None,
        epochs: int | None = None,
    ) -> None:
        self._lengths = lengths
        self._filtered = filtered
        self._rows = rows
        self._epochs = epochs
        self._given = 0

    def next(self) -> Prompt | None:
        epoch, row = (0, self._given) if self._rows is None else divmod(self._given, self._rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        self._given += 1
        return self.find(epoch, row)

    def again(self, prompt: Prompt) -> Prompt:
        return self._with_fate(replace(prompt, attempt=prompt.attempt + 1))

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def find(self, epoch: int, row: int) -> Prompt | None:
        if self._rows is not None and row >= self._rows:
            return None
        return self._with_fate(_prompt(epoch, row, self._lengths(TrajectoryId(0, row, 0, 0))))

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]

    def _with_fate(self, prompt: Prompt) -> Prompt:
        if self._filtered is None:
            return prompt
        return replace(prompt, answer=self._filtered(prompt.trajectory_id(0)))


def held_out_prompts(count: int, lengths: LengthSampler) -> list[Prompt]:
    """The held-out prompts, for validation."""
    return [_prompt(HELD_OUT, row, lengths(TrajectoryId(HELD_OUT, row, 0, 0))) for row in range(count)]


def _prompt(epoch: int, row: int, length: int) -> Prompt:
    messages = [said_in_tokens("user", "", length)]
    return Prompt(epoch, row, 0, source="simulated", text="", token_ids=zero_ids(length), messages=messages)
