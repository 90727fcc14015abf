"""When vLLM computed, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

from headway.events import Span
from headway.interfaces import EngineStats


class Activity:
    """Counts between two calls of `take`. vLLM steps for as long as it has a trajectory and is not paused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy: list[Span] = []
        self._since: float | None = None
        """Where the open span starts, …"""
        self._counted = 0.0
        """… and up to where its slots are counted."""
        self._running = 0
        self._slot_seconds = 0.0
        self._generated = 0
        self._prefilled = 0

    def running(self, trajectories: int) -> None:
        """So many compute from now on."""
        now = self._clock()
        self._count(now)
        self._running = trajectories
        if trajectories and self._since is None:
            self._since = now
        elif not trajectories and self._since is not None:
            self._busy.append((self._since, now))
            self._since = None

    def step(self, generated: int, prefilled: int) -> None:
        """Tokens of one step of vLLM's."""
        self._generated += generated
        self._prefilled += prefilled

    def take(self, running: int, waiting: int, version: int) -> EngineStats:
        """Everything since the last call."""
        now = self._clock()
        self._count(now)
        if self._since is not None:
            self._busy.append((self._since, now))
            self._since = now
        stats = EngineStats(
            busy=self._busy,
            slot_seconds=self._slot_seconds,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            running=running,
            waiting=waiting,
            version=version,
        )
        self._busy, self._slot_seconds, self._generated, self._prefilled = [], 0.0, 0, 0
        return stats

    def _count(self, now: float) -> None:
        if self._running:
            self._slot_seconds += self._running * (now - self._counted)
        self._counted = now
