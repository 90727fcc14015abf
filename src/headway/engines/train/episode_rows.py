"""Rows joined to episodes, and what was computed for episodes cut into rows again.

    rows ─▶ join ─▶ one array [L] per episode ─▶ an estimator ─▶ one array [L] per episode ─▶ cut ─▶ rows

An episode of one row is that row as it is, holes included. One of several rows has the tokens that they train, in the
order of its turns: so it is defined what comes before what, also where turns fork.

Shape suffixes: T response tokens of a row, L tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.collate import CollatedRow

Get = Callable[[CollatedRow], NDArray[Any]]
"""Function that returns an array [T] of a row."""


class Episodes:
    """The episodes of a fetch's rows."""

    def __init__(self, rows: Sequence[CollatedRow], episode_of: NDArray[np.int64]) -> None:
        """``episode_of`` [S] has the index of each row's episode, ascending from 0.

        Raises:
            ValueError: they are not one index for each row, ascending without gaps.
        """
        steps = np.diff(episode_of, prepend=-1)
        if len(episode_of) != len(rows) or not ((steps == 0) | (steps == 1)).all() or (steps[:1] == 0).any():
            raise ValueError(f"{len(rows)} rows are of the episodes {episode_of}; expected 0, 1, … in order, one each")
        starts = np.flatnonzero(steps)
        self.rows = rows
        self._places = [range(a, b) for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
        self._orders = {episode: self._order(of) for episode, of in enumerate(self._places) if len(of) > 1}
        """Episode of several rows → indices into what they train, one row after the other, in the order of turns."""

    def join(self, get: Get) -> list[NDArray[Any]]:
        """The arrays [L] of the episodes, from those [T] that ``get`` returns of their rows."""
        if not self._orders:
            return [get(row) for row in self.rows]
        joined = []
        for episode, place in enumerate(self._places):
            rows = self.rows[place.start : place.stop]
            if (order := self._orders.get(episode)) is None:
                joined.append(get(rows[0]))
            else:
                joined.append(np.concatenate([get(row)[row.loss_mask] for row in rows])[order])
        return joined

    def cut(self, arrays: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """The arrays [T] of the rows, from those [L] of their episodes; 0 in the holes of rows that were joined."""
        result: list[NDArray[np.float32]] = []
        for episode, (place, array) in enumerate(zip(self._places, arrays, strict=True)):
            if (order := self._orders.get(episode)) is None:
                result.append(array)
                continue
            trained = np.empty_like(array)
            trained[order] = array
            rows = self.rows[place.start : place.stop]
            ends = np.cumsum([row.loss_mask.sum() for row in rows])[:-1]
            for row, values in zip(rows, np.split(trained, ends), strict=True):
                result.append(np.zeros(len(row.loss_mask), np.float32))
                result[-1][row.loss_mask] = values
        return result

    def _order(self, place: range) -> NDArray[np.int64]:
        rows = self.rows[place.start : place.stop]
        return np.argsort(np.concatenate([turn_numbers(row)[row.loss_mask] for row in rows]), kind="stable")


def turn_numbers(row: CollatedRow) -> NDArray[np.int64]:
    """The number [T] of the turn that each response token of ``row`` is of; a hole has that of the turn before it."""
    return _of_turns(row, [turn.number for turn in row.turns])


def turn_states(row: CollatedRow) -> NDArray[np.int64]:
    """The state [T] of the turn that each response token of ``row`` is of; a hole has that of the turn before it."""
    return _of_turns(row, [turn.state for turn in row.turns])


def _of_turns(row: CollatedRow, values: Sequence[int]) -> NDArray[np.int64]:
    if not row.turns:
        return np.zeros(len(row.loss_mask), np.int64)
    starts = [0, *(turn.start for turn in row.turns[1:]), len(row.loss_mask)]
    return np.repeat(np.array(values, np.int64), np.diff(starts))
