"""The amount that an engine computed between two reports; what a busy span is, each engine knows for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from headway.data.interfaces.rollout import EngineStats
from headway.events import DecodeSteps, PrefillSteps, Span, add_prefill


class Counts(ABC):
    """Busy spans, tokens and steps since the last `take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reset()

    def take(self, running: int, waiting: int, version: int) -> EngineStats:
        """Everything since the last call."""
        self._close()
        stats = EngineStats(
            busy=self._busy,
            slot_seconds=self._slot_seconds,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._found,
            preempted=self._preempted,
            unpinned=self._unpinned,
            running=running,
            waiting=waiting,
            version=version,
            decode_steps=self._decode_steps,
            prefill_steps=self._prefill_steps,
        )
        self._reset()
        return stats

    @abstractmethod
    def _close(self) -> None:
        """Bring spans and slot time up to date; later activity begins a new span."""

    def _count(self, *, active: int, prefilled: int, seconds: float, cached: int) -> None:
        """One step, as `PrefillSteps` describes several."""
        self._prefilled += prefilled
        if prefilled:
            add_prefill(self._prefill_steps, active, prefilled, seconds, cached)
        else:
            steps, total, before = self._decode_steps.get(active, (0, 0.0, 0))
            self._decode_steps[active] = (steps + 1, total + seconds, before + cached)

    def _reset(self) -> None:
        self._busy: list[Span] = []
        self._slot_seconds = 0.0
        self._generated = 0
        self._prefilled = 0
        self._found = 0
        """Tokens of contexts that were found in the prefix cache."""
        self._preempted = 0
        self._unpinned = 0
        self._decode_steps: dict[int, DecodeSteps] = {}
        self._prefill_steps: dict[int, PrefillSteps] = {}
