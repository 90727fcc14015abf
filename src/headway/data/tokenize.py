"""Tokenisation of records: chat templates, then the tokenizer, then the length limit.

A row that cannot be tokenised is left out, with the reason. What would be wrong with every row is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from headway.data.files import Messages, Record
from headway.data.left_out import LeftOut, Reason
from headway.errors import DataError, boundary, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplate = Literal["auto", "always", "never"]
Tokenised = tuple[str, NDArray[np.int32]]
"""The text of a prompt as the model reads it, and its token ids [P]."""
_NONE = np.empty(0, np.int32)


class PromptTokenizer:
    """Renders and tokenises prompts of at most ``max_length`` tokens.

    With a chat template the text is the template's, generation prompt included, and the tokenizer adds nothing to it;
    plain text gets whatever special tokens the tokenizer puts before a text of its model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.max_length = max_length

    def __call__(self, records: Sequence[Record]) -> list[Tokenised | LeftOut]:
        """The text and token ids [P] of each record, or why it has none.

        Raises:
            DataError: messages without a template to render them.
        """
        texts = [self._text(record) for record in records]
        results: list[Tokenised | LeftOut] = [text if isinstance(text, LeftOut) else ("", _NONE) for text in texts]
        for templated in (False, True):
            rows = [i for i, text in enumerate(texts) if not isinstance(text, LeftOut) and text[1] is templated]
            encoded = self._encoded([records[i] for i in rows], [texts[i][0] for i in rows], templated=templated)  # type: ignore[index]
            for i, one in zip(rows, encoded, strict=True):
                results[i] = one
        return results

    def _text(self, record: Record) -> tuple[str, bool] | LeftOut:
        """The text of a record, and whether the template wrote it."""
        if (chat := self._as_messages(record)) is None:
            return str(record.prompt), False
        if not self._tokenizer.chat_template:
            raise DataError(
                f"prompts of {_named(record)} need a chat template (data.chat_template={self._chat_template}), and the "
                "model's tokenizer has none; use an instruct model, or text prompts with data.chat_template=auto"
            )
        try:
            with boundary(f"the tokenizer's chat template fails on a prompt of {_named(record)}", DataError):
                return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)), True
        except DataError as refused:
            return LeftOut(Reason.TEMPLATE, record.source, str(refused))

    def _encoded(
        self, records: Sequence[Record], texts: Sequence[str], *, templated: bool
    ) -> list[Tokenised | LeftOut]:
        if not texts:
            return []
        doing = f"the model's tokenizer cannot read a prompt of {_named(records[0])}: {shown(texts[0])}"
        try:
            with boundary(doing, DataError):
                ids = self._tokenizer(list(texts), add_special_tokens=not templated)["input_ids"]
        except DataError as refused:
            if len(texts) == 1:
                return [LeftOut(Reason.TOKENIZER, records[0].source, str(refused))]
            pairs = zip(records, texts, strict=True)  # of which prompt, the batch does not say
            return [self._encoded([record], [text], templated=templated)[0] for record, text in pairs]
        return [self._checked(record, text, one) for record, text, one in zip(records, texts, ids, strict=True)]

    def _as_messages(self, record: Record) -> Messages | None:
        """The record as a chat to render, or None for plain text."""
        if isinstance(record.prompt, str):
            return [{"role": "user", "content": record.prompt}] if self._chat_template == "always" else None
        if self._chat_template == "never":
            raise DataError(
                f"prompts of {_named(record)} are chat messages, and data.chat_template=never renders none; "
                "use auto, or give the prompts as text"
            )
        return record.prompt

    def _checked(self, record: Record, text: str, ids: list[int]) -> Tokenised | LeftOut:
        if not ids:
            return LeftOut(Reason.EMPTY, record.source, f"a prompt of {_named(record)} has no tokens: {text!r}")
        if len(ids) > self.max_length:
            return LeftOut(Reason.TOO_LONG, record.source)
        return text, np.asarray(ids, dtype=np.int32)


def _named(record: Record) -> str:
    """A name for a record: its source, and the row where it is known."""
    return f"{record.source} ({record.where})" if record.where else record.source
