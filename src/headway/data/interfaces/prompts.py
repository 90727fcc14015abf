"""Source of a run's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headway.data.types import Prompt


class PromptSource(Protocol):
    """Source of prompts in a seeded order, epoch after epoch; its position can be saved and restored.

    A cursor leads back to what came after it, and each prompt is found by its place:

        first, cursor = source.next(), source.state()
        second = source.next()
        source.restore(cursor)
        assert source.next() == second == source.find(second.epoch, second.row)
    """

    def next(self) -> Prompt | None:
        """Return the next prompt, or None when all epochs are over (never None if epochs are unlimited)."""

    def again(self, prompt: Prompt) -> Prompt:
        """Return the prompt of the same row as a new attempt, with its own random numbers."""

    def state(self) -> dict[str, Any]:
        """Return the cursor: JSON values that `restore` takes."""

    def find(self, epoch: int, row: int) -> Prompt | None:
        """Return the prompt that was handed out in ``epoch`` for ``row``; None where the data do not have it now."""

    def restore(self, state: Mapping[str, Any]) -> None: ...
