"""Draws: which groups, and which held-out problems, leave a sample of what was said.

They are pure functions of the run's seed. So a resumed run draws the same, and whoever reads its files can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash


def share_of(samples: int, groups_per_version: int) -> float:
    """Return the share of groups to draw, in [0, 1], by which ``samples`` of each version's groups are expected."""
    return min(1.0, samples / groups_per_version)


def place_of_group(seed: int, number: int) -> float:
    """Return the place of group ``number`` in [0, 1). Places are spread evenly; a group is drawn below the share."""
    return _place(f"{seed} group {number}")


def drawn_problems(seed: int, rows: Sequence[int], samples: int) -> frozenset[int]:
    """Return the indices of the held-out problems to show at each validation, ``samples`` of them or all there are.

    ``rows``: the problems' rows in the data, by which they are drawn.
    """
    first = sorted(range(len(rows)), key=lambda index: (_place(f"{seed} problem {rows[index]}"), index))
    return frozenset(first[:samples])


def _place(what: str) -> float:
    return (xxhash.xxh3_64_intdigest(what.encode()) >> 11) / 2**53
