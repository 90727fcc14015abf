"""Collation and packing of a rank's samples: rows, micro-batches, and prefixes that rows share.

    samples ─▶ assign ─▶ one list per data rank                        (driver: metadata only; see `assignment`)
    samples ─▶ a rank's batch cache ─▶ rows ─▶ trees ─▶ micro-batches  (worker: arrays)

    rows ─▶ one tree for each group ─▶ micro-batches of at most `token_budget` tokens, longest trees first
            (cut where it is more than the budget)

A pure function of the rows. A micro-batch is one line of tokens, without padding; only models whose attention Headway
does not know keep padded rows. Ranks go through their micro-batches in step, each from the one with most pairs of
tokens for attention to the one with fewest: so those that meet cost about the same.

What several rows begin with is one piece of a line of tokens, and is there once:

    prompt · answer 0                       prompt │ answer 0 │ answer 1, first half │ second half │ another second half
    prompt · answer 1        ─▶ grow ─▶        0        0                0                    2             2
    prompt · answer 1 with another end                  (segments, in depth-first order, and each one's parent)

A token sees its own segment up to itself, and all of the segments above. What follows a segment in the line up to the
end of its subtree is what stands behind it: so "which token sees which" is, for each segment, where its subtree ends.

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
"""Minimum number of tokens of a shared segment: each segment costs attention a separate part."""

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
        # One sum more than there are parts, that of all: hence strict=False below.
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
        return int(self.positions.sum()) + len(self.positions)  # at position p a token sees p before it, and itself


def grow(rows: Sequence[Ids], prompt: int | None = None) -> Tree:
    """Make one line of ``rows`` [T]. ``prompt``: number of tokens of the prompt in front of them; None: nothing is
    shared.

    What rows have in common is shared up to the prompt's end, or that of what is shared already, and beyond where that
    is `LEAST_SHARED` tokens more, or a whole row. A pure function: the same rows give the same line.
    """
    order = list(range(len(rows)))
    if prompt is not None:
        # Big-endian, so that bytes sort as their numbers do
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
        # Branches deeper than what this row shares are not on its path.
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
    """Return the number of tokens at the beginning of ``row`` that it shares with the row ``before``. See `grow`."""
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
            # What follows the branching place is a segment, too, unless a row's own tokens begin right there.
            behind.setdefault(place + 1, place)
    starts = np.array(sorted(behind), np.int64)
    above = np.array([behind[start] for start in starts.tolist()], np.int64)
    # The segment that holds the place: the last one that begins there or before.
    parents = np.where(above < 0, -1, np.searchsorted(starts, above, side="right") - 1)
    ends = np.append(starts[1:], length)
    # From the end: children stand behind their parents, so each subtree is complete when it is added
    for segment in range(len(starts) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and ends[parent] < ends[segment]:
            ends[parent] = ends[segment]
    return Segments(starts, parents, ends)


@dataclass(frozen=True, slots=True)
class CollatedRow:
    """One sample with its arrays at hand: P prompt tokens, T response tokens."""

    input_ids: NDArray[np.int32]
    """Token ids of prompt and response, [P + T]."""
    prompt_length: int
    logprobs: NDArray[np.float32]
    """Log-probs of the response under the behaviour policy, [T]; 0 in holes."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each response token, [T]; -1 in holes."""
    loss_mask: NDArray[np.bool_]
    """True for response tokens that the row trains, [T]."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers for each response token, by name, [T] each. See `headway.data.types.TrainSample`."""
    finished: bool = True
    """False if the episode was cut off."""
    episode: TrajectoryId | None = None
    """The episode that the row is of; None for a row that is a whole one."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns that are trained in the row, in order; empty for one turn, which is the whole response."""


def by_episode(rows: Sequence[CollatedRow]) -> list[list[int]]:
    """Return indices of the rows of each episode, in the order of their first ones. See `CollatedRow.episode`."""
    episodes: dict[TrajectoryId | int, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(index if row.episode is None else row.episode, []).append(index)
    return list(episodes.values())


def token_budget_batches(
    lengths: Sequence[int], budget: int, together: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Partition indices into batches whose padded size (rows × longest) is at most ``budget``, longest first.

    A row longer than the budget is a batch of its own. ``together`` partitions the indices into units that share a
    batch, except for those that exceed the budget by themselves: these are split freely. None: there are no units.
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
    """The lines that they are packed into, one behind the other: those of ``rows``, in order. Empty for padded rows."""
    tokens: int = 0
    """Number of tokens that are computed: those of the lines, or of the rows with their padding."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Rules of micro-batches."""

    token_budget: int
    """Maximum number of tokens of a micro-batch: those that are computed. A row that is longer is one of its own."""
    packed: bool = True
    """True: put rows into one line; False: pad them to the longest of their micro-batch."""
    shared: bool = True
    """True: compute once what the rows of a group have in common."""

    @classmethod
    def of(cls, config: Config) -> Packing:
        """Return the packing that is configured."""
        kind, ranks = config.model.packing, config.actor.parallel.cp
        # The cp ranks divide a line: their budgets add up.
        return cls(ranks * config.actor.ppo_max_token_len_per_gpu, packed=kind != "padded", shared=kind == "shared")

    def __call__(self, rows: Sequence[CollatedRow], *, whole_episodes: bool = False) -> list[Pack]:
        """Split ``rows`` into micro-batches.

        ``whole_episodes``: the rows of an episode share one, unless they alone are more than the budget.
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
        # All ranks gather layers together: each waits for the one whose micro-batch takes longest
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
        """Return indices of the rows of episodes that no micro-batch holds whole."""
        home = {row: number for number, pack in enumerate(packs) for row in pack.rows}
        return [i for episode in by_episode(rows) if len({home[i] for i in episode}) > 1 for i in episode]

    def _groups(self, rows: Sequence[CollatedRow]) -> list[list[int]]:
        """Return indices of the rows of each group, or of each episode, which has its rows in one place anyway."""
        groups: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            of = row.episode
            # Without its last part, k, an episode's id is that of its group.
            groups.setdefault(index if of is None else of[:-1] if self.shared else of, []).append(index)
        return list(groups.values())

    def _cut(
        self, rows: Sequence[CollatedRow], group: list[int], prompt: int | None, whole_episodes: bool
    ) -> list[list[int]]:
        """Cut a group into pieces that fit into a micro-batch, as far as single rows do."""
        lengths = {i: len(rows[i].input_ids) for i in group}
        if len(group) == 1 or sum(lengths.values()) <= self.token_budget:
            return [group]
        # What is shared is known only of the finished line, which may be far shorter than the rows together.
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
    """Number of tokens of the prompt that all ``rows`` begin with; 0 where they begin with different ones."""
    prompt = min(row.prompt_length for row in rows)
    first = rows[0].input_ids[:prompt]
    return prompt if all(np.array_equal(first, row.input_ids[:prompt]) for row in rows[1:]) else 0


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Partition indices into batches whose sizes add up to ``budget`` at most, largest first, each where it fits first.

    What is larger than the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    # Ties by index: a step that is repeated makes the same micro-batches
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
