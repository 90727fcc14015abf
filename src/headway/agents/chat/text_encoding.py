"""Text to token ids in bounded time, for texts of any length.

A megabyte takes a second or more. So a text that is far too long for an episode is encoded in part: enough to know
that it is too long. A long text that may fit is encoded in a thread (`runtime.task_groups.off_loop`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError, boundary, cut, writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG = 8
"""Characters for each token that may be there from which on a text is looked at in pieces; ordinary text has 2 to 5."""
MOST_CUTS = 64
"""Tokens that the pieces of a text may have more than the whole, beside an eighth of those that fit."""


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, most_tokens: int | None) -> NDArray[np.int32]:
    """The ids [N] of ``text``, with no special tokens added; what UTF-8 has no bytes for is spelled out.

    Of text with clearly more than ``most_tokens`` they may be those of its beginning, more than ``most_tokens``.

    Raises:
        DataError: the tokenizer has no tokens for the text.
    """
    if most_tokens is None or len(text) <= LONG * most_tokens:
        return _all(tokenizer, text)
    pieces: list[NDArray[np.int32]] = []
    tokens, length = 0, LONG * most_tokens // 2
    for start in range(0, len(text), length):
        pieces.append(_all(tokenizer, text[start : start + length]))
        tokens += len(pieces[-1])
        if tokens > most_tokens + most_tokens // 8 + MOST_CUTS:
            return np.concatenate(pieces)
    return _all(tokenizer, text)


def _all(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[np.int32]:
    with boundary(f"the tokenizer cannot encode {cut(repr(text[:120]), 120)}", DataError):
        return np.asarray(tokenizer.encode(writable(text), add_special_tokens=False), np.int32)
