"""Training and generation on one machine: each side computes more slowly while the other one does.

trainer begins or ends ─▶ every replica's steps get longer or shorter, from that moment on
first replica begins, last one ends ─▶ so does what is left of the trainer's work
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.planner.profiles.job_profile import ContentionProfile


class Contention:
    """The sides that compute on one machine at a moment, and how they slow each other. Sides begin and stop between two
    moments only, so that work is a sum of stretches at constant speed.
    """

    def __init__(self, profile: ContentionProfile) -> None:
        self._profile = profile
        self._slow_replicas: list[Callable[[float], None]] = []
        self._computing: set[str] = set()
        """Names of the replicas that compute now."""
        self._changed = asyncio.Event()
        """Event that is set when replicas begin or stop computing, so that training looks again. Replaced each time."""

    def add_replica(self, slow_down: Callable[[float], None]) -> None:
        """Add a replica. ``slow_down`` is called with the factor by which everything takes longer from now on."""
        self._slow_replicas.append(slow_down)

    def replica_computes(self, name: str, computing: bool) -> None:
        """Note that the replica ``name`` begins or stops computing."""
        before = bool(self._computing)
        if computing:
            self._computing.add(name)
        else:
            self._computing.discard(name)
        if bool(self._computing) != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def train(self, seconds: float) -> None:
        """Wait until the trainer has done what would take it ``seconds`` alone."""
        loop = asyncio.get_running_loop()
        self._slow_down(self._profile.rollout)
        try:
            while True:
                factor = self._profile.train if self._computing else 1.0
                began, changed = loop.time(), self._changed
                try:
                    async with asyncio.timeout(seconds * factor):
                        await changed.wait()
                except TimeoutError:
                    return
                seconds -= (loop.time() - began) / factor
        finally:
            self._slow_down(1.0)

    def _slow_down(self, factor: float) -> None:
        for slow_down in self._slow_replicas:
            slow_down(factor)
