"""The record of when the engine computed, and how much: the source of idle ratios, slot utilisation and step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headway.engines.rollout.engine_activity import Counts
from headway.events import Span


@dataclass(slots=True)
class DecodeStep:
    """The record of one step; filled in while it runs."""

    active: int = 0
    """Rows that were given a token."""
    prefilled: int = 0
    """Tokens that were prefilled."""
    found: int = 0
    """Tokens of contexts that need no prefill: they were found, or a call that started beside them brought them."""
    cached: int = 0
    """Tokens in the KV cache."""
    preempted: int = 0
    """Rows that were parked before it for want of memory."""


class NativeActivity(Counts):
    """Measures the native engine's steps, each of which is timed where it is made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._lost = 0
        self._open: Span | None = None

    @contextmanager
    def step(self) -> Iterator[DecodeStep]:
        """Time one step. Consecutive steps without a `stop` in between count as one busy span."""
        step, start = DecodeStep(), self._clock()
        yield step
        end = self._clock()
        opened, before = self._open or (start, start)
        self._open = (opened, end)
        self._slot_seconds += step.active * (end - start)
        self._generated += step.active
        self._found += step.found
        self._preempted += step.preempted
        self._count(active=step.active, prefilled=step.prefilled, seconds=end - before, cached=step.cached)

    def lost(self, total: int) -> None:
        """Note how often, since the beginning, an open episode has lost what was kept for it."""
        self._unpinned, self._lost = total - self._lost, total

    def stop(self) -> None:
        """End the busy span: the engine computes nothing until its next step."""
        if self._open:
            self._busy.append(self._open)
            self._open = None

    def _close(self) -> None:
        self.stop()
