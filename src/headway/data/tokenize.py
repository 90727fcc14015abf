"""Tokenisation of records: chat templates, then the tokenizer, then the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from headway.data.files import Messages, Record
from headway.errors import DataError, boundary, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplate = Literal["auto", "always", "never"]


class PromptTokenizer:
    """Renders and tokenises prompts of at most ``max_length`` tokens.

    With a chat template the text is the template's, generation prompt included, and the tokenizer adds nothing to it;
    plain text gets whatever special tokens the tokenizer puts before a text of its model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.max_length = max_length

    def __call__(self, records: Sequence[Record]) -> list[tuple[str, NDArray[np.int32]] | None]:
        """The text and token ids [P] of each record, or None where it has more than ``max_length`` tokens.

        Raises:
            DataError: messages without a template to render them, a template that fails, or a prompt of no tokens.
        """
        chats = [self._as_messages(record) for record in records]
        texts = [
            self._render(chat, record) if chat is not None else str(record.prompt)
            for chat, record in zip(chats, records, strict=True)
        ]
        ids: list[list[int]] = [[] for _ in records]
        for templated in (False, True):
            indices = [i for i, chat in enumerate(chats) if (chat is not None) is templated]
            if not indices:
                continue
            try:
                encoded = self._tokenizer([texts[i] for i in indices], add_special_tokens=not templated)
            except Exception:  # of which prompt, the batch does not say
                for i in indices:
                    doing = f"the model's tokenizer cannot read a prompt of {_named(records[i])}: {shown(texts[i])}"
                    with boundary(doing, DataError):
                        self._tokenizer([texts[i]], add_special_tokens=not templated)
                raise
            for i, token_ids in zip(indices, encoded["input_ids"], strict=True):
                ids[i] = token_ids
        return [
            self._checked(record, text, token_ids) for record, text, token_ids in zip(records, texts, ids, strict=True)
        ]

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

    def _render(self, messages: Messages, record: Record) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"prompts of {_named(record)} need a chat template (data.chat_template={self._chat_template}), and the "
                "model's tokenizer has none; use an instruct model, or text prompts with data.chat_template=auto"
            )
        with boundary(f"the tokenizer's chat template fails on a prompt of {_named(record)}", DataError):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _checked(self, record: Record, text: str, ids: list[int]) -> tuple[str, NDArray[np.int32]] | None:
        if not ids:
            raise DataError(f"a prompt of {_named(record)} has no tokens: {text!r}; leave such rows out")
        return (text, np.asarray(ids, dtype=np.int32)) if len(ids) <= self.max_length else None


def _named(record: Record) -> str:
    """A name for a record: its source, and the row where it is known."""
    return f"{record.source} ({record.where})" if record.where else record.source
