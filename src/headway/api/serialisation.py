"""Pickling of functions and classes for other processes: by value where they belong to a script or a notebook.

What an importable module defines is pickled as its name, and imported there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from headway.errors import UserCodeError, said_by

DEEPEST = 8
"""Most functions and objects that are looked through, one within another, for what cannot be pickled."""


def pickled(function: Any, name: str) -> bytes:
    """Pickle a function, a class or a callable object that messages call ``name``.

    Raises `UserCodeError` where it holds something that cannot be pickled; the message says what that is.
    """
    import cloudpickle

    try:
        pickle: bytes = cloudpickle.dumps(function)
    except Exception as cause:
        way = _way_to_the_culprit(function, DEEPEST, set())
        uses = "".join(f", which uses {part}" for part in way).removeprefix(", which") or " cannot be pickled"
        raise UserCodeError(
            f"{name}{uses}, and that cannot be sent to the processes that call it ({said_by(cause)}). Make it inside "
            "the function, or put both into a file and give file.py:name"
        ) from cause
    return pickle


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _way_to_the_culprit(value: Any, deepest: int, seen: set[int]) -> list[str]:
    """Return what ``value`` uses that cannot be pickled, and what that uses: each as its name and its type."""
    seen.add(id(value))
    for name, part in _parts(value) if deepest else ():
        if id(part) not in seen and not _pickles(part):
            return [f"{name} ({type(part).__name__})", *_way_to_the_culprit(part, deepest - 1, seen)]
    return []


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with ``value``, by the name that the user's code has for it."""
    match value:
        case MethodType():
            yield "self", value.__self__
            yield from _parts(value.__func__)
        case FunctionType():
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield name, cell.cell_contents
                except ValueError:  # a variable that was never given a value
                    continue
            for name in _names(value.__code__):
                if name in value.__globals__:
                    yield name, value.__globals__[name]
            parameters = inspect.signature(value).parameters.values()
            yield from ((one.name, one.default) for one in parameters if one.default is not one.empty)
            if (wrapped := getattr(value, "__wrapped__", None)) is not None:
                yield wrapped.__qualname__, wrapped
        case type():
            yield from vars(value).items()
        case Mapping():
            yield from ((f"[{key!r}]", inner) for key, inner in value.items())
        case list() | tuple() | set():
            yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
        case _:
            yield from getattr(value, "__dict__", {}).items()
            yield type(value).__name__, type(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
