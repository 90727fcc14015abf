"""Profiles of the run's processes."""

from __future__ import annotations

from typing import Protocol


class Profiled(Protocol):
    """A process of the run whose work can be profiled.

    await process.start()                   # whatever it computes from now on is recorded, on all of its threads
    await process.stop()
    trace = await process.take(origin)      # a Chrome trace, compressed
    """

    name: str
    """Names of the workers in the process, joined by ``_``."""

    async def start(self) -> None:
        """Record from now on. Raises `RunError` where that is impossible."""

    async def stop(self) -> None:
        """Record no more. What was recorded is kept for `take`. The process may stand still for seconds meanwhile."""

    async def take(self, origin: float) -> bytes:
        """Return what was recorded as a Chrome trace in gzip, and forget it.

        Its times are microseconds since ``origin``, which is in Unix seconds.
        """
