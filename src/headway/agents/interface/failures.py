"""Errors of user code in an episode: it raises, what it needs is away for a time, its reward is no number."""

from __future__ import annotations

import asyncio
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.errors import EpisodeOver, HeadwayError, ProgramAway, ProgramFailed, Unavailable, raised_by, shown


class Insisted(BaseException):
    """Ends a program that keeps asking after its episode is over. `except Exception` does not catch it."""


AWAY_BY_NAME = frozenset(
    {"ConnectionError", "Timeout", "TransportError", "ClientConnectionError", "ConnectionClosed", "APIConnectionError"}
)
"""Names of exceptions for a peer that is away: ``requests``, ``httpx``, ``aiohttp``, ``websockets``, ``openai``."""


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn what user code raises in the block into `ProgramFailed`, or `ProgramAway` where a peer is away for a time.

    The traceback goes to standard error, which is the runner's log. `EpisodeOver` passes, also out of a group of
    exceptions or as the cause of another one; so do Headway's own errors, cancellation and interrupts.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, Insisted):
        raise
    # Some packages raise what is no Exception (func_timeout, panics of Rust), and sys.exit() ends no process of ours.
    except BaseException as cause:
        if isinstance(cause, HeadwayError) and not isinstance(cause, Unavailable):
            raise
        if isinstance(cause, asyncio.CancelledError) and _is_cancelled():
            raise
        if (over := _ended_by(cause)) is not None:
            raise over from cause
        traceback.print_exception(cause, file=sys.stderr)
        error = ProgramAway if is_away(cause) else ProgramFailed
        raise error(f"{doing} raised {raised_by(cause)}") from cause


def is_away(cause: BaseException) -> bool:
    """Tell whether ``cause``, or what it was raised from, says that a peer is away for a time."""
    one: BaseException | None = cause
    while one is not None:
        names = {kind.__name__ for kind in type(one).__mro__}
        # urllib derives its error for a peer that has answered, HTTPError, from that for one that is away.
        by_urllib = "URLError" in names and "HTTPError" not in names
        if isinstance(one, ConnectionError | TimeoutError) or names & AWAY_BY_NAME or by_urllib:
            return True
        if isinstance(one, BaseExceptionGroup):
            return any(is_away(part) for part in one.exceptions)
        one = one.__cause__
    return False


def number(value: Any, what: str) -> float:
    """Return ``value`` as a float; ``what`` names it in the message.

    Numbers of numpy and bool are numbers.

    Raises:
        ProgramFailed: it is no finite number.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(plain, str | bytes) and hasattr(plain, "__float__"):
        try:
            found = float(plain)
        except Exception:
            found = math.nan
        if math.isfinite(found):
            return found
    raise ProgramFailed(f"{what} is {shown(value)}, expected a finite number")


def _ended_by(cause: BaseException) -> EpisodeOver | None:
    """The `EpisodeOver` that ``cause`` was raised from, or that is all there is in a group of exceptions."""
    one: BaseException | None = cause
    while one is not None:
        if isinstance(one, EpisodeOver):
            return one
        if isinstance(one, BaseExceptionGroup):
            ends = [_ended_by(part) for part in one.exceptions]
            return ends[0] if all(ends) else None
        one = one.__cause__
    return None


def _is_cancelled() -> bool:
    """Tell whether this task is being cancelled from outside; user code may raise `CancelledError` by itself."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no event loop, and nobody who could cancel
        return False
    return task is None or task.cancelling() > 0
