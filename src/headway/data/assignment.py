"""Assignment of a batch's groups to data ranks, made once for all computations on the batch.

mini-batches of samples ─▶ assign ─▶ episode → rank ─▶ split ─▶ one list of samples per rank and call

A data rank owns whole groups, so it reads only their tokens, once, and computes a group's prompt once. A group is cut
only if that shortens the longest rank's work. Pure functions of metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from headway.data.types import TrainSample, TrajectoryId

WORTH = 0.01
"""Minimum share of the longest rank's work that cutting groups must save: each piece computes the prompt again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a row in tokens: their number, plus the weighted number of token pairs in attention.

    A transformer of L layers of width h has about 12·L·h² parameters, each of which costs 2 FLOPs per token; attention
    costs 4·L·h per pair. So a pair costs 1/(6·h) of a token.
    """

    hidden_size: int = 1024
    """Width h of the model."""

    def prompt(self, length: int) -> float:
        """Return the cost of a prompt of ``length`` tokens, which rows share."""
        return self._of(length, 0)

    def response(self, prompt_length: int, length: int) -> float:
        """Return the cost of a response of ``length`` tokens after its prompt, without the prompt."""
        return self._of(length, prompt_length)

    def _of(self, tokens: int, before: int) -> float:
        return tokens + (tokens * before + tokens * (tokens + 1) / 2) / (6 * self.hidden_size)


GroupId = tuple[int, int, int]
"""Identity of a group: the common beginning of its episodes' ids."""


def group_of(sample: TrainSample) -> GroupId:
    """Return the identity of the sample's group."""
    return sample.episode[:3]


@dataclass(slots=True)
class _Work:
    """Work that stays on one rank: episodes of a group, and the lengths of the prompts that their rows share."""

    group: GroupId
    episodes: list[TrajectoryId] = field(default_factory=list)
    responses: float = 0.0
    """Cost of the responses of their rows."""
    prompts: dict[int, float] = field(default_factory=dict)
    """Length → cost of each prompt. Rows of a group with prompts of one length share the prompt."""

    @property
    def cost(self) -> float:
        return self.responses + sum(self.prompts.values())

    def add(self, other: _Work) -> None:
        self.episodes += other.episodes
        self.responses += other.responses
        self.prompts |= other.prompts


_Placed = tuple[list[float], list[list[_Work]]]
"""Load and work of each bin. A bin is not assigned to a rank yet."""


def assign(mini_batches: Sequence[Sequence[TrainSample]], ranks: int, cost: Cost) -> dict[TrajectoryId, int]:
    """Assign the episodes of a batch to data ranks, if possible in whole groups. Depends only on its arguments.

    Each mini-batch is balanced by ``cost``, since ranks wait for each other at each optimizer step; so is the whole
    batch, which is computed on before its first step. A group, never an episode, is cut if that shortens the longest
    rank's work: when there are fewer groups than ranks, or a group is larger than a rank's share.
    """
    if ranks == 1:
        return {sample.episode: 0 for samples in mini_batches for sample in samples}
    owners: dict[TrajectoryId, int] = {}
    totals = [0.0] * ranks
    for samples in mini_batches:
        loads, bins = _best(_groups(samples, cost), ranks)
        # Any bin may go to any rank: the heaviest one goes to the rank with the least work of the batch so far.
        heaviest_first = sorted(range(ranks), key=lambda bin: (-loads[bin], bin))
        for bin, rank in zip(heaviest_first, sorted(range(ranks), key=lambda r: (totals[r], r)), strict=True):
            totals[rank] += loads[bin]
            owners.update((episode, rank) for work in bins[bin] for episode in work.episodes)
    return owners


def split(samples: Sequence[TrainSample], owners: Mapping[TrajectoryId, int], ranks: int) -> list[list[int]]:
    """Return the indices of each rank's ``samples``, ascending. Raises `KeyError` for an episode without an owner."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index, sample in enumerate(samples):
        shares[owners[sample.episode]].append(index)
    return shares


def by_group(samples: Sequence[TrainSample]) -> list[list[int]]:
    """Return the indices of each group's ``samples``, in the order of their first ones."""
    groups: dict[GroupId, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(group_of(sample), []).append(index)
    return list(groups.values())


def _groups(samples: Sequence[TrainSample], cost: Cost) -> list[list[_Work]]:
    """Return the work of each episode, by group; the costliest group first."""
    groups: dict[GroupId, dict[TrajectoryId, _Work]] = {}
    for sample in samples:
        group, episode, length = group_of(sample), sample.episode, sample.prompt_length
        work = groups.setdefault(group, {}).setdefault(episode, _Work(group, [episode]))
        work.responses += cost.response(length, sample.length)
        work.prompts[length] = cost.prompt(length)
    found = [list(episodes.values()) for episodes in groups.values()]
    return sorted(found, key=lambda group: -_whole(group).cost)


def _best(groups: Sequence[Sequence[_Work]], ranks: int) -> _Placed:
    """Place ``groups`` whole, or some of the costliest in pieces if that is worth it."""
    whole = [_whole(group) for group in groups]
    best = undivided = _place(whole, ranks)
    longest = max(undivided[0])
    # The longest rank has at least the mean, and at least the costliest episode, which is never cut.
    least = max([sum(work.cost for work in whole) / ranks, *(one.cost for group in groups for one in group)])
    if longest <= (1 + WORTH) * least:  # no other placement can gain more than that
        return undivided
    most_episodes = max(map(len, groups))
    for pieces in _doubling(2, ranks):
        for cut in _doubling(1, min(len(groups), 2 * ranks)):
            parts = [part for group in groups[:cut] for part in _pieces(group, pieces)]
            placed = _place([*parts, *whole[cut:]], ranks)
            best = min(best, placed, key=lambda one: max(one[0]))
        if pieces >= most_episodes:  # no group has more pieces
            break
    return best if max(best[0]) < (1 - WORTH) * longest else undivided


def _place(units: Sequence[_Work], ranks: int) -> _Placed:
    """Place the costliest unit first, each in the bin with the least work then. A prompt costs a bin only once."""
    loads = [0.0] * ranks
    bins: list[list[_Work]] = [[] for _ in range(ranks)]
    there: dict[GroupId, dict[int, set[int]]] = {}
    """Group → bin → lengths of the group's prompts that the bin computes."""
    for unit in sorted(units, key=attrgetter("cost"), reverse=True):
        own = there.setdefault(unit.group, {})
        after = {}
        # Only the emptiest bin, and bins with a prompt of the group: no other bin can be better.
        for bin in {loads.index(min(loads)), *own}:
            new = sum(cost for length, cost in unit.prompts.items() if length not in own.get(bin, ()))
            after[bin] = loads[bin] + unit.responses + new
        # Ties go by number: the assignment depends on the batch alone, in any process
        bin = min(after, key=lambda bin: (after[bin], bin))
        loads[bin] = after[bin]
        bins[bin].append(unit)
        own.setdefault(bin, set()).update(unit.prompts)
    return loads, bins


def _whole(group: Sequence[_Work]) -> _Work:
    work = _Work(group[0].group)
    for episode in group:
        work.add(episode)
    return work


def _pieces(group: Sequence[_Work], most: int) -> list[_Work]:
    """Cut a group into at most ``most`` pieces of whole episodes and about the same cost."""
    pieces = [_Work(group[0].group) for _ in range(min(most, len(group)))]
    for episode in sorted(group, key=attrgetter("responses"), reverse=True):
        min(pieces, key=attrgetter("responses")).add(episode)
    return pieces


def _doubling(first: int, last: int) -> Iterator[int]:
    """Yield ``first``, its doubles below ``last``, and ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last
