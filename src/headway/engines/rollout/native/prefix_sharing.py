"""Calls of the same context that start at different times: what the first have prefilled is kept for the last."""

from __future__ import annotations

from dataclasses import dataclass

from headway.engines.rollout.call_run import CallRun
from headway.engines.rollout.native.model_runner import Prefilled


def context_key(run: CallRun) -> bytes:
    """The key of a call's own context."""
    return run.call.input_ids.tobytes()


@dataclass(slots=True)
class _SharedPrefix:
    waiting: int = 0
    """Calls that have not started."""
    kept: Prefilled | None = None


class Siblings:
    """The contexts of calls that have not started, and the prefills kept for these: whole ones, with their logits.

    Calls start in order, so that there is one such prefill for each priority, unless calls of many contexts were
    submitted by turns. The oldest are given up where they take too much.
    """

    def __init__(self, most: int) -> None:
        """``most``: tokens to keep, unless one context alone is longer."""
        self._most = most
        self._contexts: dict[bytes, _SharedPrefix] = {}
        self._kept: dict[bytes, int] = {}
        """Tokens of the prefills that are kept, by context, the oldest first."""

    def expect(self, run: CallRun) -> None:
        """A call will start from its own context."""
        key = context_key(run)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = _SharedPrefix()
        context.waiting += 1

    def started(self, run: CallRun) -> None:
        """A call has started, or never will."""
        key = context_key(run)
        context = self._contexts[key]
        context.waiting -= 1
        if not context.waiting:
            del self._contexts[key]
            self._kept.pop(key, None)

    def of(self, run: CallRun) -> Prefilled | None:
        """The prefill that is kept for ``run``."""
        context = self._contexts.get(context_key(run)) if run.fresh else None
        return None if context is None else context.kept

    def keep(self, run: CallRun, prefilled: Prefilled) -> None:
        """Keep a copy of the prefill from which ``run`` has started, if any that wait have the same context."""
        key = context_key(run)
        if not run.fresh or (context := self._contexts.get(key)) is None or context.kept is not None:
            return
        context.kept = prefilled.copy()
        self._kept[key] = prefilled.length
        while len(self._kept) > 1 and sum(self._kept.values()) > self._most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._contexts[oldest].kept = None

    def drop(self) -> None:
        """Give up all that is kept: its keys and values are not to be used any more."""
        for key in self._kept:
            self._contexts[key].kept = None
        self._kept.clear()
