"""Random rows that begin alike, and what each token of a line of them may see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.data.packing import Segments

Seen = NDArray[np.bool_]
"""Mask [Q, K]: True where token Q sees token K."""


@st.composite
def rows_and_prompt(draw: st.DrawFn) -> tuple[list[NDArray[np.int32]], int]:
    """Rows behind a prompt; some go on where another one is at, so that they fork, and some are there twice."""
    token = st.integers(1, draw(st.sampled_from([1, 2, 60])))
    prompt = draw(st.lists(token, min_size=1, max_size=8))
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        begins = prompt
        if rows and draw(st.booleans()):
            other = rows[draw(st.integers(0, len(rows) - 1))]
            begins = other[: draw(st.integers(len(prompt), len(other)))]
        rows.append(begins + draw(st.lists(token, max_size=9)))
    return [np.array(row, np.int32) for row in rows], len(prompt)


def seen_by_parents(segments: Segments, tokens: int) -> Seen:
    """What each token sees: its own segment up to itself, and all of its parents."""
    starts, stops = segments.starts, np.append(segments.starts[1:], tokens)
    seen = np.zeros((tokens, tokens), np.bool_)
    for segment, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        for token in range(start, stop):
            seen[token, start : token + 1] = True
            above = segments.parents[segment]
            while above >= 0:
                seen[token, starts[above] : stops[above]] = True
                above = segments.parents[above]
    return seen


def seen_by_rows(places: Sequence[NDArray[np.int64]], tokens: int) -> Seen:
    """What each token sees: the tokens before it in the rows that have it."""
    seen = np.zeros((tokens, tokens), np.bool_)
    for row in places:
        for at, token in enumerate(row):
            seen[token, row[: at + 1]] = True
    return seen
