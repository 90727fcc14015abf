"""Stop strings: an answer ends with the token that completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 4
"""Further tokens to look at: at the start of a piece, a tokenizer may drop a space or have half a character."""


def window(stop: Sequence[str]) -> int:
    """Tokens at the end of an answer that can have a part of one of ``stop``: each has a byte of it, at least."""
    return max(len(text.encode()) for text in stop) + MARGIN


def completed(tail: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Tell whether the last of ``tail``, an answer's last `window` tokens, completed one of ``stop``."""
    now, before = decode(tail), decode(tail[:-1])
    old = len(before.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character that was half there is new
    return any(text in now[max(0, old - len(text) + 1) :] for text in stop)
