"""Group in the form that rewards get: a prompt and its responses. Plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.data.thoughts import end_of_thought, opened_thought
from headway.records import record

if TYPE_CHECKING:
    from headway.data.types import Conversation


@record
class ScoreRequest:
    """One group: a prompt and its n responses."""

    prompt: str
    """The text that the model read, with its chat template applied."""
    responses: list[str]
    answer: Any
    source: str
    extra: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, if the row has these."""
    conversations: list[Conversation] | None = None
    """The n conversations whose last answers are the responses, if a program made them."""

    def response(self, k: int) -> Response:
        """Return response ``k``, with its thought split from its answer."""
        opened = opened_thought(self.prompt)
        if self.conversations is not None:
            opened = self.conversations[k].opened or opened
        return Response(self.responses[k], opened, end_of_thought(self.responses[k], opened=bool(opened)))


@record
class Response:
    """One response of a group, with its thought split from its answer."""

    text: str
    opened: str
    """Tag of a thought, such as ``<think>``, with which its prompt ends; empty if it ends with none."""
    begin: int | None
    """Position in ``text`` at which the answer begins, after a thought; None if a thought has no end."""

    @property
    def answer(self) -> str:
        return self.text[self.begin or 0 :]
