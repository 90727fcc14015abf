"""When the engine computed, and how much of it: the source of idle ratios, slot utilisation and step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headway.events import DecodeSteps, PrefillStep, Span
from headway.interfaces import EngineStats


@dataclass(slots=True)
class Step:
    """What one step did; filled in while it runs."""

    active: int = 0
    """Rows that were given a token."""
    prefilled: int = 0
    """Tokens that were prefilled."""
    cached: int = 0
    """Tokens in the KV cache."""


class Activity:
    """Collects busy spans and counts between two calls of `take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy: list[Span] = []
        self._open: Span | None = None
        self._slot_seconds = 0.0
        self._generated = 0
        self._prefilled = 0
        self._decode_steps: dict[int, DecodeSteps] = {}
        self._prefill_steps: list[PrefillStep] = []

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Time one step. Steps that follow each other without `stop` in between make one span."""
        step, start = Step(), self._clock()
        yield step
        end = self._clock()
        opened, before = self._open or (start, start)
        self._open = (opened, end)
        self._slot_seconds += step.active * (end - start)
        self._generated += step.active
        self._prefilled += step.prefilled
        self._count(step, end - before)

    def stop(self) -> None:
        """The engine computes nothing from here to its next step."""
        if self._open:
            self._busy.append(self._open)
            self._open = None

    def take(self, running: int, waiting: int, version: int) -> EngineStats:
        """Everything since the last call."""
        self.stop()
        stats = EngineStats(
            busy=self._busy,
            slot_seconds=self._slot_seconds,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            running=running,
            waiting=waiting,
            version=version,
            decode_steps=self._decode_steps,
            prefill_steps=self._prefill_steps,
        )
        self._busy, self._slot_seconds, self._generated, self._prefilled = [], 0.0, 0, 0
        self._decode_steps, self._prefill_steps = {}, []
        return stats

    def _count(self, step: Step, seconds: float) -> None:
        if step.prefilled:
            self._prefill_steps.append((step.active, step.prefilled, seconds, step.cached))
        else:
            steps, total, cached = self._decode_steps.get(step.active, (0, 0.0, 0))
            self._decode_steps[step.active] = (steps + 1, total + seconds, cached + step.cached)
