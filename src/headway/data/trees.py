"""Rows behind their common prefixes: what several rows begin with is one piece of a line of tokens, and is there once.

    prompt · answer 0                       prompt │ answer 0 │ answer 1, first half │ second half │ another second half
    prompt · answer 1        ─▶ grow ─▶        0        0                0                    2             2
    prompt · answer 1 with another end                  (segments, in depth-first order, and each one's parent)

A token sees its own segment up to itself, and all of the segments above. What follows a segment in the line up to the
end of its subtree is what stands behind it: so "which token sees which" is, for each segment, where its subtree ends.

Shape suffixes: L tokens of a line, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_SHARED = 4
"""Least number of tokens for which a segment of their own is made: each costs attention a part of its own."""

Ids = NDArray[np.int32]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a line, in depth-first order: a parent stands before its children. All arrays are [S]."""

    starts: Places
    """Place of each segment's first token."""
    parents: Places
    """Index of the segment that each one stands behind; -1 for a root."""
    ends: Places
    """Place behind the last token of each one's subtree."""

    @classmethod
    def join(cls, parts: Sequence[Segments]) -> Segments:
        """Put several lines one behind the other."""
        if len(parts) == 1:
            return parts[0]
        tokens = np.cumsum([0] + [int(part.ends.max()) for part in parts])
        segments = np.cumsum([0] + [len(part.starts) for part in parts])
        return cls(
            np.concatenate([part.starts + token for part, token in zip(parts, tokens, strict=False)]),
            np.concatenate(
                [
                    np.where(part.parents < 0, -1, part.parents + segment)
                    for part, segment in zip(parts, segments, strict=False)
                ]
            ),
            np.concatenate([part.ends + token for part, token in zip(parts, tokens, strict=False)]),
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """Several rows as one line of tokens."""

    ids: Ids
    """Token ids, [L]."""
    positions: Places
    """Position of each token in its rows, from 0, [L]."""
    segments: Segments
    places: tuple[Places, ...]
    """For each row, in the order in which they were given, the place in the line of each of its tokens."""

    @property
    def pairs(self) -> int:
        """Number of (token, token that it sees), which is what attention costs."""
        return int(self.positions.sum()) + len(self.positions)


def grow(rows: Sequence[Ids], prompt: int | None = None) -> Tree:
    """Make one line of ``rows`` [T]. ``prompt``: number of tokens of the prompt in front of them; None: nothing is
    shared.

    What rows have in common is shared up to the prompt's end, or that of what is shared already, and beyond where that
    is `LEAST_SHARED` tokens more, or a whole row. A pure function: the same rows give the same line.
    """
    order = list(range(len(rows)))
    if prompt is not None:
        order.sort(key=lambda i: rows[i].astype(">u4").tobytes())  # stable, and neighbours have most in common
    places: list[Places] = [np.empty(0, np.int64)] * len(rows)
    parts: list[Ids] = []
    positions: list[Places] = []
    branches: list[tuple[int, int]] = []  # where a row's own tokens begin, and behind which place
    length = 0
    depths = [0]  # where branches are on the path of the row before, ascending
    before, path = np.empty(0, np.int32), np.empty(0, np.int64)
    for i in order:
        row = rows[i]
        common = 0
        if prompt is not None and len(before):
            common = _shared(before, row, [*depths, prompt])
        while depths[-1] > common:
            depths.pop()
        own = np.arange(length, length + len(row) - common)
        if len(own):
            branches.append((length, int(path[common - 1]) if common else -1))
            if common > depths[-1]:
                depths.append(common)
        parts.append(row[common:])
        positions.append(np.arange(common, len(row)))
        path = places[i] = np.concatenate([path[:common], own])
        before = row
        length += len(own)
    return Tree(np.concatenate(parts), np.concatenate(positions), _segments(branches, length), tuple(places))


def _shared(before: Ids, row: Ids, depths: Sequence[int]) -> int:
    """Number of tokens at the beginning of ``row`` that it shares with the row ``before``. See `grow`."""
    most = min(len(before), len(row))
    differ = np.flatnonzero(before[:most] != row[:most])
    common = int(differ[0]) if len(differ) else most
    known = max(depth for depth in depths if depth <= common)
    return common if common == len(row) or common - known >= LEAST_SHARED else known


def _segments(branches: Sequence[tuple[int, int]], length: int) -> Segments:
    """The segments of a line of ``length`` tokens: it is cut where a row branches off, and behind where it does."""
    behind = dict(branches)
    for _, place in branches:
        if place >= 0 and place + 1 < length:
            behind.setdefault(place + 1, place)
    starts = np.array(sorted(behind), np.int64)
    above = np.array([behind[start] for start in starts.tolist()], np.int64)
    parents = np.where(above < 0, -1, np.searchsorted(starts, above, side="right") - 1)
    ends = np.append(starts[1:], length)
    for segment in range(len(starts) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and ends[parent] < ends[segment]:
            ends[parent] = ends[segment]
    return Segments(starts, parents, ends)
