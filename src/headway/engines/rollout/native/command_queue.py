"""The way between event loops and the decoding thread: commands there, answers and finished calls back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.errors import HeadwayError


def always() -> bool:
    """Tell that there is nothing to wait for."""
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """Function for the decoding thread to run. ``answer``, if any, gets its result once ``answerable``."""

    run: Callable[[], Any]
    answerable: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any] | None


class Deliveries:
    """Deliveries to event loops, which `send` crosses to once for all that there is. Belongs to one thread."""

    def __init__(self) -> None:
        self._of: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[], Any]) -> None:
        """Let ``loop`` call ``deliver``."""
        self._of[loop].append(deliver)

    def answer(self, command: Command, result: Any) -> None:
        """Answer a command."""
        self.put(command.loop, partial(_fulfil, command.answer, result))

    def fail(self, command: Command, error: HeadwayError) -> None:
        """Answer a command with an error."""
        self.put(command.loop, partial(_fail, command.answer, error))

    def send(self) -> None:
        """Deliver everything."""
        if not self._of:
            return
        for loop, deliveries in self._of.items():
            try:
                loop.call_soon_threadsafe(_run_all, deliveries)
            except RuntimeError:
                # The loop was closed: nobody there waits any more.
                continue
        self._of = defaultdict(list)


def _run_all(deliveries: list[Callable[[], Any]]) -> None:
    for deliver in deliveries:
        deliver()


def _fulfil(answer: asyncio.Future[Any] | None, result: Any) -> None:
    if answer is not None and not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any] | None, error: HeadwayError) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)
