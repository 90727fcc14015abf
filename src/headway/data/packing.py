"""Collation and packing of a rank's samples: rows, micro-batches, and prefixes that rows share.

    samples ─▶ assign ─▶ one list per data rank                        (driver: metadata only; see `assignment`)
    samples ─▶ a rank's batch cache ─▶ rows ─▶ trees ─▶ micro-batches  (worker: arrays)

    rows ─▶ one tree for each group ─▶ micro-batches of at most `token_budget` tokens, longest trees first
            (cut if it exceeds the budget)

A pure function of the rows. A micro-batch is one line of tokens, without padding; only models whose attention Headway
does not know keep padded rows. Ranks go through their micro-batches in step, each from the most token pairs for
attention to the fewest, so that simultaneous micro-batches cost about the same.

A common beginning of several rows is one segment of a line, and is there once:

    prompt · answer 0                       prompt │ answer 0 │ answer 1, first half │ second half │ another second half
    prompt · answer 1        ─▶ grow ─▶        0        0                0                    2             2
    prompt · answer 1 with another end                  (segments, in depth-first order, and each one's parent)

A token sees its own segment up to itself, and all segments above. A segment's subtree follows it in the line without
gaps. So "which token sees which" is given, for each segment, by the end of its subtree.

Shape suffixes: L tokens of a line, S segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import Config
from headway.data.types import TrajectoryId, TurnSpan

LEAST_SHARED = 4
"""Minimum number of tokens of a shared segment: attention computes each segment separately."""

Ids = NDArray[np.int32]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a line, in depth-first order: a parent stands before its children. All arrays are [S]."""

    starts: Places
    """Place of the first token of each segment."""
    parents: Places
    """Index of each segment's parent; -1 for a root."""
    ends: Places
    """Place after the last token of each segment's subtree."""

    @classmethod
    def join(cls, parts: Sequence[Segments]) -> Segments:
        """Concatenate several lines."""
        if len(parts) == 1:
            return parts[0]
        # One more cumulative sum than there are parts, the total: hence strict=False below.
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
    """For each row, in the given order, the place in the line of each of its tokens."""

    @property
    def pairs(self) -> int:
        """Number of pairs (token, token that it sees): the cost of attention."""
        return int(self.positions.sum()) + len(self.positions)  # at position p a token sees p before it, and itself


def grow(rows: Sequence[Ids], prompt: int | None = None) -> Tree:
    """Make one line of ``rows`` [T]. ``prompt``: number of prompt tokens that they begin with; None: share nothing.

    A common beginning of rows is shared up to the prompt's end, or the end of an existing shared segment; further if
    that gives `LEAST_SHARED` more tokens, or a whole row. A pure function: equal rows give equal lines.
    """
    order = list(range(len(rows)))
    if prompt is not None:
        # Big-endian, so that bytes sort as their numbers do
        order.sort(key=lambda i: rows[i].astype(">u4").tobytes())  # stable; neighbours share the longest beginnings
    places: list[Places] = [np.empty(0, np.int64)] * len(rows)
    parts: list[Ids] = []
    positions: list[Places] = []
    branches: list[tuple[int, int]] = []  # where a row's own tokens begin, and after which place
    length = 0
    depths = [0]  # of branches on the path of the previous row, in tokens of that row, ascending
    before, path = np.empty(0, np.int32), np.empty(0, np.int64)
    for i in order:
        row = rows[i]
        common = 0
        if prompt is not None and len(before):
            common = _shared(before, row, [*depths, prompt])
        # Branches deeper than this row's shared beginning are not on its path.
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
    """Return the number of first tokens that ``row`` shares with the previous row, ``before``. See `grow`."""
    most = min(len(before), len(row))
    differ = np.flatnonzero(before[:most] != row[:most])
    common = int(differ[0]) if len(differ) else most
    known = max(depth for depth in depths if depth <= common)
    return common if common == len(row) or common - known >= LEAST_SHARED else known


def _segments(branches: Sequence[tuple[int, int]], length: int) -> Segments:
    """Return the segments of a line of ``length`` tokens, cut where rows' own tokens begin and where they branch
    off.
    """
    behind = dict(branches)
    for _, place in branches:
        if place >= 0 and place + 1 < length:
            # The part after the branching place is a segment, too, unless a row's own tokens begin right there.
            behind.setdefault(place + 1, place)
    starts = np.array(sorted(behind), np.int64)
    above = np.array([behind[start] for start in starts.tolist()], np.int64)
    # The segment with the place: the last one that begins at it or before.
    parents = np.where(above < 0, -1, np.searchsorted(starts, above, side="right") - 1)
    ends = np.append(starts[1:], length)
    # From the end: children stand after their parents, so each subtree is complete when it is added
    for segment in range(len(starts) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and ends[parent] < ends[segment]:
            ends[parent] = ends[segment]
    return Segments(starts, parents, ends)


@dataclass(frozen=True, slots=True)
class CollatedRow:
    """One sample with its arrays: P prompt tokens, T response tokens."""

    input_ids: NDArray[np.int32]
    """Token ids of prompt and response, [P + T]."""
    prompt_length: int
    logprobs: NDArray[np.float32]
    """Log-probs of the response under the behaviour policy, [T]; 0 in holes."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each response token, [T]; -1 in holes."""
    loss_mask: NDArray[np.bool_]
    """True for the response tokens that are trained in the row, [T]."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers for each response token, by name, [T] each. See `headway.data.types.TrainSample`."""
    finished: bool = True
    """False if the episode was cut off."""
    episode: TrajectoryId | None = None
    """Episode of the row; None if the row is a whole episode."""
    turns: tuple[TurnSpan, ...] = ()
    """Turns that are trained in the row, in order; empty if the whole response is one turn."""


def by_episode(rows: Sequence[CollatedRow]) -> list[list[int]]:
    """Return the row indices of each episode, in the order of their first rows. See `CollatedRow.episode`."""
    episodes: dict[TrajectoryId | int, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(index if row.episode is None else row.episode, []).append(index)
    return list(episodes.values())


def token_budget_batches(
    lengths: Sequence[int], budget: int, together: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Partition indices into batches whose padded size (rows × longest) is at most ``budget``, longest first.

    A row longer than the budget is a batch of its own. ``together`` partitions the indices into units that share a
    batch, except units larger than the budget: these are split freely. None: there are no units.
    """
    units: list[list[int]] = []
    for unit in together if together is not None else [[i] for i in range(len(lengths))]:
        fits = len(unit) * max(lengths[i] for i in unit) <= budget
        units += [sorted(unit, key=lambda i: (-lengths[i], i))] if fits else [[i] for i in unit]
    batches: list[list[int]] = []
    for unit in sorted(units, key=lambda unit: (-lengths[unit[0]], unit[0])):
        if not batches or (len(batches[-1]) + len(unit)) * lengths[batches[-1][0]] > budget:
            batches.append(unit)
        else:
            batches[-1] += unit
    return batches


@dataclass(frozen=True, slots=True)
class Pack:
    """The rows of one micro-batch."""

    rows: tuple[int, ...] = ()
    """Indices of the rows."""
    trees: tuple[Tree, ...] = ()
    """Lines into which ``rows`` are packed, in the order of the rows. Empty for padded rows."""
    tokens: int = 0
    """Number of computed tokens: of the lines, or of the rows with padding."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Rules for making micro-batches."""

    token_budget: int
    """Maximum number of computed tokens of a micro-batch. A longer row is a micro-batch of its own."""
    packed: bool = True
    """True: put rows into one line; False: pad them to the longest row of their micro-batch."""
    shared: bool = True
    """True: compute common beginnings of a group's rows once."""

    @classmethod
    def of(cls, config: Config) -> Packing:
        """Return the packing of ``config``."""
        kind, ranks = config.model.packing, config.actor.parallel.cp
        # The cp ranks divide a line: their budgets add up.
        return cls(ranks * config.actor.ppo_max_token_len_per_gpu, packed=kind != "padded", shared=kind == "shared")

    def __call__(self, rows: Sequence[CollatedRow], *, whole_episodes: bool = False) -> list[Pack]:
        """Split ``rows`` into micro-batches.

        ``whole_episodes``: the rows of an episode share a micro-batch, unless they exceed the budget by themselves.
        """
        if not self.packed:
            lengths = [len(row.input_ids) for row in rows]
            units = by_episode(rows) if whole_episodes else None
            return [
                Pack(tuple(batch), tokens=len(batch) * max(lengths[i] for i in batch))
                for batch in token_budget_batches(lengths, self.token_budget, units)
            ]
        pieces: list[list[int]] = []
        trees: list[Tree] = []
        for group in self._groups(rows):
            prompt = _prompt([rows[i] for i in group]) if self.shared else None
            for piece in self._cut(rows, group, prompt, whole_episodes):
                pieces.append(piece)
                trees.append(grow([rows[i].input_ids for i in piece], prompt))
        sizes = [len(tree.ids) for tree in trees]
        batches = first_fit(sizes, self.token_budget)
        # All ranks gather layers together: each waits for the rank whose micro-batch takes longest
        batches.sort(key=lambda batch: -sum(trees[i].pairs for i in batch))
        return [
            Pack(
                tuple(row for i in batch for row in pieces[i]),
                tuple(trees[i] for i in batch),
                sum(sizes[i] for i in batch),
            )
            for batch in batches
        ]

    def apart(self, rows: Sequence[CollatedRow], packs: Sequence[Pack]) -> list[int]:
        """Return the indices of the rows of episodes that no micro-batch contains completely."""
        home = {row: number for number, pack in enumerate(packs) for row in pack.rows}
        return [i for episode in by_episode(rows) if len({home[i] for i in episode}) > 1 for i in episode]

    def _groups(self, rows: Sequence[CollatedRow]) -> list[list[int]]:
        """Return the row indices of each group, or of each episode if rows are not shared."""
        groups: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            of = row.episode
            # An episode's id without its last part, k, is that of its group.
            groups.setdefault(index if of is None else of[:-1] if self.shared else of, []).append(index)
        return list(groups.values())

    def _cut(
        self, rows: Sequence[CollatedRow], group: list[int], prompt: int | None, whole_episodes: bool
    ) -> list[list[int]]:
        """Cut a group into pieces that fit into a micro-batch, unless a single row does not fit."""
        lengths = {i: len(rows[i].input_ids) for i in group}
        if len(group) == 1 or sum(lengths.values()) <= self.token_budget:
            return [group]
        # The shared length is known only from the finished line, which may be far shorter than the sum of the rows.
        if len(grow([rows[i].input_ids for i in group], prompt).ids) <= self.token_budget:
            return [group]
        atoms = [[i] for i in group]
        if whole_episodes:
            episodes = [[group[i] for i in own] for own in by_episode([rows[i] for i in group])]
            if len(episodes) > 1:
                atoms = [piece for own in episodes for piece in self._cut(rows, own, prompt, whole_episodes)]
        prefix = prompt or 0
        # A piece computes the prompt once: it is subtracted from each row, and once from the budget.
        sizes = [sum(lengths[i] - prefix for i in atom) for atom in atoms]
        return [
            sorted(i for atom in batch for i in atoms[atom]) for batch in first_fit(sizes, self.token_budget - prefix)
        ]


def _prompt(rows: Sequence[CollatedRow]) -> int:
    """Return the number of tokens of the prompt that all ``rows`` begin with; 0 if their prompts differ."""
    prompt = min(row.prompt_length for row in rows)
    first = rows[0].input_ids[:prompt]
    return prompt if all(np.array_equal(first, row.input_ids[:prompt]) for row in rows[1:]) else 0


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Partition indices into batches of at most ``budget`` total size: largest first, each into the first that fits.

    An item larger than the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    # Ties by index: a repeated step makes the same micro-batches
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        place = next((i for i, left in enumerate(room) if size <= left), None)
        if place is None:
            batches.append([index])
            room.append(budget - size)
        else:
            batches[place].append(index)
            room[place] -= size
    return batches
