"""Attention mask of packed lines, and the parts in which attention computes it.

A line's segments stand behind each other as `headway.data.packing` says. Attention takes them in parts, each of
which is a batch of queries with keys of their own:

    causal   a segment's tokens, or a whole row's, among themselves; results that another row also has are dropped
    view     a segment's tokens, or a piece of them, and the keys of their whole path, under a mask
    subtree  all tokens below a segment, and the segment's keys: no copies, no mask

A tree is computed as whole rows, as views, or as segments and subtrees, whose results are merged by their log-sum-exps:
whichever costs least.

Ranks may divide a line: see `headway.models.attention.sequence_ranks`.

Shape suffixes: L tokens of the line, S segments, B items of a part, Q queries and K keys of each (padded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headway.data.packing import Places, Segments, Tree
from headway.models.attention.sequence_ranks import SequenceRanks

COPY = 8
"""Cost of a key that is copied into a view, in pairs of a query and a key."""
BLOCK = 32
"""Number of queries that kernels take at once."""
MERGE = 12
"""Cost of merging a query's results of two parts, in pairs."""
CALL = 6_000
"""Cost of one more part, in pairs."""
MOST_PAIRS = 1 << 22
"""Most pairs of one view: their mask is held as numbers."""
PIECE = 256
"""Number of queries per piece of a segment that is longer than a layer's window."""


class AttentionKind(Enum):
    # The order counts: `PackedLayout.parts` sorts by it, and subtrees are merged with what others have put.
    CAUSAL = auto()
    VIEW = auto()
    SUBTREE = auto()


@dataclass(frozen=True, slots=True)
class Item:
    """Queries and the keys that they attend to."""

    kind: AttentionKind
    queries: Places
    """Places of the queries in the line."""
    keys: Places
    """Places of the keys."""
    dropped: int = 0
    """Number of leading queries whose results are dropped because another item also has them."""
    before: int = 0
    """Number of keys before the first query's own, in a view; 0 in other kinds."""
    level: int = 0
    """Depth of a subtree's segment: the number of segments above it; 0 in other kinds."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Index that sums a part's key values by place in the line. N: number of keys, of B · K, that are no padding."""

    order: Int[Tensor, " N"]
    """Indices of the keys, those of one place behind each other."""
    offsets: Int[Tensor, " U"]
    """Index into ``order`` of the first key of each place."""
    places: Int[Tensor, " U"] | slice
    """The places, ascending."""


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Items that are computed in one call. Padding repeats an item's last token, and is dropped."""

    kind: AttentionKind
    items: int
    queries: Int[Tensor, " BQ"] | slice
    """Places of the queries in the line, B times Q; a slice where they lie one behind the other."""
    keys: Int[Tensor, " BK"] | slice
    """Places of the keys, B times K."""
    mask: Float[Tensor, "B 1 Q K"] | None
    """Numbers added to the scores, 0 or -inf; None if all keys are seen or, for ``causal``, all that are not later."""
    kept: Int[Tensor, " M"] | None
    """Indices into ``queries`` of the queries whose results are kept; None if none is dropped."""
    dropped: Int[Tensor, " R"] | None
    """Indices into ``queries`` of the queries whose results are dropped; None if none is."""
    places: Int[Tensor, " M"] | slice
    """Places in the line of the queries that are kept, each once."""
    sums: Sums | None
    """Index that sums gradients of keys; None if ``keys`` is a slice, which has each place once."""


class PackedLayout:
    """Layout of one packed line of L tokens."""

    # Not a dataclass: FSDP2 copies every dataclass, list and dict among a layer's arguments, to cast the tensors in it,
    # and each layer then made the parts, and on GPUs the masks, of its own copy again (4% of a step on an H200).
    __slots__ = ("ends_L", "masks", "positions", "positions_L", "ranks", "segments", "windows")

    def __init__(self, segments: Segments, positions: Places, ranks: SequenceRanks | None = None) -> None:
        """Set up. ``positions``: position [L] of each token in its rows. ``ranks``: any that divide the line."""
        self.segments, self.positions, self.ranks = segments, positions, ranks
        self.positions_L: Int[Tensor, " L"] = torch.from_numpy(positions)
        """The positions, on the device that attention computes on; see `at`."""
        tokens = np.diff(np.append(segments.starts, len(positions)))
        self.ends_L: Int[Tensor, " L"] = torch.from_numpy(np.repeat(segments.ends, tokens))
        """End of the subtree of each token's segment, as a place in the line, on the same device."""
        self.windows: dict[int | None, list[AttentionPart]] = {}
        """Window of the layers → the parts made so far."""
        self.masks: dict[int | None, Any] = {}
        """Window of the layers → FlexAttention's mask, if made so far."""

    @classmethod
    def of(cls, trees: Sequence[Tree], ranks: SequenceRanks | None = None) -> PackedLayout:
        """Make the layout of a line of ``trees``, one behind the other."""
        positions = np.concatenate([tree.positions for tree in trees])
        return cls(Segments.join([tree.segments for tree in trees]), positions, ranks)

    def at(self, positions_L: Int[Tensor, " L"], ends_L: Int[Tensor, " L"]) -> PackedLayout:
        """Use these copies of `positions_L` and `ends_L`, and their device; returns the layout itself."""
        self.positions_L, self.ends_L = positions_L, ends_L
        return self

    @property
    def device(self) -> torch.device:
        return self.positions_L.device

    def parts(self, window: int | None) -> list[AttentionPart]:
        """Parts of attention. With a sliding ``window`` w a token sees tokens less than w positions before it.

        The parts that cover each token, ``causal`` or ``view``, come before the subtrees.
        """
        if window is not None and window > self.positions.max():
            window = None  # the window is at least as long as every row
        if window not in self.windows:
            # Subtrees of one level are disjoint. A query is in subtrees of several levels, whose results are merged one
            # after the other: within one part only one of them would be kept.
            levels: dict[tuple[int, int], list[Item]] = {}
            for item in _items(self.segments, self.positions, window):
                levels.setdefault((item.kind.value, item.level), []).append(item)
            self.windows[window] = [
                _part(items[0].kind, batch, window, self.device)
                for _, items in sorted(levels.items(), key=lambda level: level[0])
                for batch in _batches(items)
            ]
        return self.windows[window]


def _items(segments: Segments, positions: Places, window: int | None) -> list[Item]:
    """Return the queries and keys of a whole line. Each tree is divided in the way that costs least."""
    starts, parents, ends = segments.starts, segments.parents, segments.ends
    stops = np.append(starts[1:], len(positions))
    roots = np.flatnonzero(parents < 0)
    items: list[Item] = []
    for root, following in pairwise([*roots.tolist(), len(starts)]):
        of = slice(root, following)
        lengths = stops[of] - starts[of]
        depths = positions[starts[of]]
        behind = ends[of] - stops[of]
        paths = (depths + lengths)[behind == 0]
        pairs = lengths * (depths + lengths)
        as_rows = int(_causal(paths).sum() + COPY * paths.sum())
        as_views = int((pairs + COPY * (depths + lengths)).sum())
        as_segments = int(_causal(lengths).sum() + (behind * (lengths + MERGE)).sum()) + CALL * int(len(paths) > 1)
        windowed = window is not None and window <= positions[starts[root] : ends[root]].max()
        if windowed or (as_views < min(as_rows, as_segments) and pairs.max() <= MOST_PAIRS):
            items += _views(root, following, segments, stops, window)
        # Trees that share little stay whole rows: computed as segments, they changed the bits of runs.
        elif as_rows <= as_segments:
            items += _rows(root, following, segments, stops)
        else:
            items += _segments(root, following, segments, stops)
    return items


def _causal(lengths: Places) -> Places:
    """Number of pairs that causal attention computes: kernels leave out blocks in which no token is seen."""
    return lengths * (lengths + BLOCK) // 2


def _paths(root: int, following: int, segments: Segments, stops: Places) -> Iterator[tuple[int, Places, Places]]:
    """Yield segments of a tree: (segment, its tokens' places, places of all tokens on its path, also its own)."""
    paths: dict[int, Places] = {-1: np.empty(0, np.int64)}
    for segment in range(root, following):
        own = np.arange(segments.starts[segment], stops[segment])
        path = paths[segment] = np.concatenate([paths[int(segments.parents[segment])], own])
        yield segment, own, path


def _rows(root: int, following: int, segments: Segments, stops: Places) -> list[Item]:
    """Return an item for each row of a tree. Tokens shared with an earlier row are computed again, and dropped."""
    items = []
    done = int(segments.starts[root])  # tokens before it are some row's already
    for segment, _, path in _paths(root, following, segments, stops):
        if segments.ends[segment] == stops[segment]:
            items.append(Item(AttentionKind.CAUSAL, path, path, dropped=int(np.searchsorted(path, done))))
            done = int(stops[segment])
    return items


def _segments(root: int, following: int, segments: Segments, stops: Places) -> list[Item]:
    """Return an item for each segment of a tree, and one for its subtree with the segment's keys."""
    levels = {-1: -1}
    items = []
    for segment in range(root, following):
        levels[segment] = level = levels[int(segments.parents[segment])] + 1
        stop, end = int(stops[segment]), int(segments.ends[segment])
        own = np.arange(segments.starts[segment], stop)
        items.append(Item(AttentionKind.CAUSAL, own, own))
        if end > stop:
            items.append(Item(AttentionKind.SUBTREE, np.arange(stop, end), own, level=level))
    return items


def _views(root: int, following: int, segments: Segments, stops: Places, window: int | None) -> list[Item]:
    """Return an item for each segment of a tree with its whole path, or for each piece with its keys in the window."""
    items = []
    for _, own, path in _paths(root, following, segments, stops):
        depth = len(path) - len(own)
        step = len(own) if window is None else min(len(own), PIECE)
        for first in range(0, len(own), step):
            queries = own[first : first + step]
            oldest = 0 if window is None else max(0, depth + first - window + 1)
            keys = path[oldest : depth + first + len(queries)]
            items.append(Item(AttentionKind.VIEW, queries, keys, before=depth + first - oldest))
    return items


def _batches(items: Sequence[Item]) -> list[list[Item]]:
    """Partition items into batches of about the same size, so that padding costs less than a call of their own."""
    batches: list[list[Item]] = []
    longest = shortest = used = 0
    for item in sorted(items, key=lambda item: (-len(item.keys), -len(item.queries), int(item.queries[0]))):
        queries, keys = len(item.queries), len(item.keys)
        if batches:
            wide = max(longest, queries)
            padded = (len(batches[-1]) + 1) * wide * shortest
            # Masks of many pairs are held as one for all items, which have to be alike for that.
            unlike = padded > MOST_PAIRS and _shape(item) != _shape(batches[-1][0])
            if not unlike and padded - used - queries * keys <= max(CALL, padded // 4):
                batches[-1].append(item)
                longest, used = wide, used + queries * keys
                continue
        batches.append([item])
        longest, shortest, used = queries, keys, queries * keys
    return batches


def _shape(item: Item) -> tuple[int, int, int]:
    return len(item.queries), len(item.keys), item.before


def _part(kind: AttentionKind, items: Sequence[Item], window: int | None, device: torch.device) -> AttentionPart:
    query_lengths = np.array([len(item.queries) for item in items])
    key_lengths = np.array([len(item.keys) for item in items])
    queries_BQ, keys_BK = _padded([item.queries for item in items]), _padded([item.keys for item in items])
    wide, long = queries_BQ.shape[1], keys_BK.shape[1]
    column = np.arange(wide)
    kept_BQ = (column < query_lengths[:, None]) & (column >= np.array([[item.dropped] for item in items]))
    seen = None
    if kind is AttentionKind.VIEW:
        # Padding sees the same keys as the item's last query, whose place it has.
        last = np.minimum(column, query_lengths[:, None] - 1)
        at_BQ1 = (last + np.array([[item.before] for item in items]))[..., None]
        seen = np.arange(long) <= at_BQ1
        if window is not None:
            seen &= np.arange(long) > at_BQ1 - window
    elif kind is AttentionKind.SUBTREE and (key_lengths < long).any():
        seen = np.broadcast_to((np.arange(long) < key_lengths[:, None])[:, None], (len(items), wide, long))

    dropping = not kept_BQ.all()
    keys = _places(keys_BK.reshape(-1), device)
    return AttentionPart(
        kind=kind,
        items=len(items),
        queries=_places(queries_BQ.reshape(-1), device),
        keys=keys,
        mask=None if seen is None else _mask(seen, device),
        kept=_tensor(np.flatnonzero(kept_BQ), device) if dropping else None,
        dropped=_tensor(np.flatnonzero(~kept_BQ), device) if dropping else None,
        places=_places(queries_BQ[kept_BQ], device),
        sums=None if isinstance(keys, slice) else _sums(keys_BK, key_lengths, device),
    )


def _sums(keys_BK: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> Sums:
    real = np.flatnonzero(np.arange(keys_BK.shape[1]) < lengths[:, None])
    places = keys_BK.reshape(-1)[real]
    order = np.argsort(places, kind="stable")  # the same sums, to the bit, each time
    unique, offsets = np.unique(places[order], return_index=True)
    return Sums(_tensor(real[order], device), _tensor(offsets, device), _places(unique, device))


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _places(array: NDArray[np.int64], device: torch.device) -> Tensor | slice:
    start, stop = int(array[0]), int(array[0]) + len(array)
    return slice(start, stop) if np.array_equal(array, np.arange(start, stop)) else _tensor(array, device)


def _padded(arrays: Sequence[Places]) -> NDArray[np.int64]:
    """Stack arrays as rows, each padded with its last element."""
    lengths = np.array([len(array) for array in arrays])
    ends = np.cumsum(lengths)
    columns = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    result: NDArray[np.int64] = np.concatenate(arrays)[columns + (ends - lengths)[:, None]]
    return result


def _mask(seen: NDArray[np.bool_], device: torch.device) -> Float[Tensor, "B 1 Q K"]:
    """Return the numbers that are added to scores: a single mask for all items if they are equal."""
    items = len(seen)
    if items > 1 and seen.size > MOST_PAIRS and (seen == seen[:1]).all():
        seen = seen[:1]
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(mask).to(device)[:, None].expand(items, -1, -1, -1)
