"""Prompts that several decoding rows have in common: their keys are read once for all of these rows.

Each row keeps a copy of its prompt's keys and values, and any of the copies is as good as the others. A call of a group
attends to its prompt and to its own tokens apart, and the two are merged by their log-sum-exp; whether it does depends
on the call alone, never on who decodes beside it, and the prompt's part is always computed for `TOGETHER` rows, some of
which nobody uses. What is sampled is then the same with the whole group in company and alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.engines.rollout.call_run import CallRun

LEAST_TOKENS = 128
"""Tokens of the shortest prompt that is attended to apart: below, another call costs more than is saved."""
LEAST_CALLS = 4
"""Calls of the smallest group whose prompt is attended to apart."""
TOGETHER = 8
"""Rows of one attention call to a prompt."""


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Some of the rows that have one prompt."""

    rows: NDArray[np.int64]
    """[1 … TOGETHER]"""
    length: int
    """Tokens of the prompt."""


class SharedPrompts:
    """The prompt of each row, where that is one to share."""

    def __init__(self, slots: int) -> None:
        self.lengths = np.zeros(slots, np.int64)
        """[slots] tokens of the row's prompt that are attended to apart; 0: none."""
        self._ids = np.zeros(slots, np.int64)
        self._keys: list[tuple[int, bytes] | None] = [None] * slots
        self._known: dict[tuple[int, bytes], int] = {}
        self._rows: Counter[tuple[int, bytes]] = Counter()
        self._generation = 0
        self._next = 0

    def add(self, row: int, run: CallRun) -> None:
        """``run`` has got ``row``, in whose cache its prompt was prefilled under the weights that are served."""
        prompt = len(run.call.input_ids)
        if run.call.together < LEAST_CALLS or prompt < LEAST_TOKENS:
            self.lengths[row], self._keys[row] = 0, None
            return
        key = (self._generation, run.call.input_ids.tobytes())
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        self._rows[key] += 1
        self.lengths[row], self._ids[row], self._keys[row] = prompt, self._known[key], key

    def remove(self, row: int, last: int) -> None:
        """The call in ``row`` has left; that in ``last`` takes its place."""
        key = self._keys[row]
        if key is not None:
            self._rows[key] -= 1
            if not self._rows[key]:
                del self._rows[key], self._known[key]
        self.lengths[row], self._ids[row], self._keys[row] = self.lengths[last], self._ids[last], self._keys[last]

    def renew(self) -> None:
        """New weights are served: what starts from now on has other keys and values of the same prompt."""
        self._generation += 1

    def of(self, active: int) -> list[SharedPrompt]:
        """The prompts of rows 0..active-1 that are attended to apart, each once for every `TOGETHER` rows."""
        rows = np.flatnonzero(self.lengths[:active])
        if not len(rows):
            return []
        ids = self._ids[rows]
        order = np.argsort(ids, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(ids[order])) + 1)
        return [
            SharedPrompt(group[start : start + TOGETHER], int(self.lengths[group[0]]))
            for group in groups
            for start in range(0, len(group), TOGETHER)
        ]
