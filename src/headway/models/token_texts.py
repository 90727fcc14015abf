"""Text of single tokens, for people who look at what a model said token by token.

Ids are text only together: a tokenizer leaves out the space before a first word, and a token of a byte-level vocabulary
may be a part of a character. So each token is decoded behind another one, whose text is taken off again, and bytes that
are no whole character are spelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHORS = ("a", "0", "1", ".")
"""Texts of which the first one that is a token of its own stands before each token."""
REPLACEMENT = "\ufffd"


class TokenTexts:
    """Text of token ids, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._anchor, self._before = self._find_anchor()
        self._known: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens together."""
        return self._decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Bytes that are no whole character are spelled, as ``<0xE2>``."""
        known = self._known
        for id in ids:
            if id not in known:
                known[id] = self._piece(id)
        return [known[id] for id in ids]

    def _piece(self, id: int) -> str:
        text = self._decode([*self._anchor, id])
        piece = text.removeprefix(self._before) if text.startswith(self._before) else self._decode([id])
        if REPLACEMENT not in piece:
            return piece
        return _bytes_spelled(str(self._tokenizer.convert_ids_to_tokens(id) or piece))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _find_anchor(self) -> tuple[list[int], str]:
        """Return a token behind which others are decoded, and its text; nothing where no token serves."""
        vocabulary = self._tokenizer.get_vocab()
        for text in ANCHORS:
            if (id := vocabulary.get(text)) is not None and self._decode([id, id]) == 2 * text:
                return [id], text
        return [], ""


def _bytes_spelled(token: str) -> str:
    """Spell the bytes of a byte-level ``token``, as ``<0xE2><0x82>``, beside the characters that are whole in it.

    A token of another kind is returned as it is: SentencePiece's vocabularies have such names for bytes.
    """
    table = _byte_of_character()
    if not all(character in table for character in token):
        return token
    text, rest = "", bytes(table[character] for character in token)
    while rest:
        try:
            return text + rest.decode("utf-8")
        except UnicodeDecodeError as cause:
            text += rest[: cause.start].decode("utf-8") + "".join(f"<0x{b:02X}>" for b in rest[cause.start : cause.end])
            rest = rest[cause.end :]
    return text


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2's tokenizer has it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
