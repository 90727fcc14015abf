"""Parts of a value that a file does not say: variables that it does not set, calls that it would have to make.

They stand in a text between two marks, so that they survive whatever is done with the text.
"""

from __future__ import annotations

import re
from typing import Any

_BEGIN, _END = "\ue000", "\ue001"
_MARKED = re.compile(f"{_BEGIN}([^{_END}]*){_END}")


def unresolved(name: str) -> str:
    """Return the text that stands for what ``name``, as it is written in the file, would give."""
    return f"{_BEGIN}{name.replace(_BEGIN, '').replace(_END, '')}{_END}"


def missing(value: Any) -> list[str]:
    """Return what of a value, a list or a mapping is unresolved, in order, as it is written in the file."""
    match value:
        case str():
            return _MARKED.findall(value)
        case dict():
            return [name for one in value.values() for name in missing(one)]
        case list() | tuple():
            return [name for one in value for name in missing(one)]
    return []


def written(value: Any) -> str:
    """Return a value as text, with what is unresolved as the file has it."""
    text = str(value)
    for mark in (_BEGIN, _END):
        text = text.replace(repr(mark)[1:-1], mark)  # as a list or a mapping shows it
    return _MARKED.sub(r"\1", text)
