"""What tests of a group share and what computes beside them: made for the first that wants it, ended after the last.

A fixture of a session would live on beside all later tests: ranks look for work a hundred times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")

_ends = ExitStack()
_made: dict[str, Any] = {}


def shared(name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
    """Return what ``make`` gives, entered once for all tests of a group."""
    if name not in _made:
        _made[name] = _ends.enter_context(make())
    made: T = _made[name]
    return made


def end_shared() -> None:
    _made.clear()
    _ends.close()
