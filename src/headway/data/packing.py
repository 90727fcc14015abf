"""Packing: which rows of a rank are computed together, and what of them is computed once.

    rows ─▶ one tree for each group ─▶ micro-batches of at most `token_budget` tokens, longest trees first
            (cut where it is more than the budget)

A pure function of the rows. A micro-batch is one line of tokens, without padding; only models whose attention Headway
does not know keep padded rows. Ranks go through their micro-batches in step, each from the one with most pairs of
tokens for attention to the one with fewest: so those that meet cost about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.config.schema import Config
from headway.data.collate import CollatedRow, by_episode, token_budget_batches
from headway.data.trees import Tree, grow


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
    """Most tokens of a micro-batch: those that are computed. A row that is longer is one of its own."""
    packed: bool = True
    """Put rows into one line; False: pad them to the longest of their micro-batch."""
    shared: bool = True
    """Compute once what the rows of a group have in common."""

    @classmethod
    def of(cls, config: Config) -> Packing:
        """Return the packing that is configured."""
        kind, ranks = config.model.packing, config.actor.parallel.cp
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
        """Indices of the rows of episodes that no micro-batch holds whole."""
        home = {row: number for number, pack in enumerate(packs) for row in pack.rows}
        return [i for episode in by_episode(rows) if len({home[i] for i in episode}) > 1 for i in episode]

    def _groups(self, rows: Sequence[CollatedRow]) -> list[list[int]]:
        """Indices of the rows of each group, or of each episode, which has its rows in one place anyway."""
        groups: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            of = row.episode
            groups.setdefault(index if of is None else of[:-1] if self.shared else of, []).append(index)
        return list(groups.values())

    def _cut(
        self, rows: Sequence[CollatedRow], group: list[int], prompt: int | None, whole_episodes: bool
    ) -> list[list[int]]:
        """Cut a group into pieces that fit into a micro-batch, as far as single rows do."""
        lengths = {i: len(rows[i].input_ids) for i in group}
        if len(group) == 1 or sum(lengths.values()) <= self.token_budget:
            return [group]
        if len(grow([rows[i].input_ids for i in group], prompt).ids) <= self.token_budget:
            return [group]
        atoms = [[i] for i in group]
        if whole_episodes:
            episodes = [[group[i] for i in own] for own in by_episode([rows[i] for i in group])]
            if len(episodes) > 1:
                atoms = [piece for own in episodes for piece in self._cut(rows, own, prompt, whole_episodes)]
        prefix = prompt or 0
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
