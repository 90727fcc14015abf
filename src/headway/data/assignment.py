"""Assignment of a batch to data ranks: who trains on which groups, once for everything that is done with the batch.

mini-batches of samples ─▶ assign ─▶ episode → rank ─▶ split ─▶ one list of samples per rank and call

A data rank owns whole groups, so it reads their tokens alone, once, and computes a group's prompt once. Groups are
spread over ranks where that shortens the work of the rank that works longest. Pure functions of metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from math import inf
from operator import attrgetter

from headway.data.types import TrainSample, TrajectoryId

WORTH = 0.01
"""Least share by which cutting groups must shorten the longest rank's work: each piece computes the prompt again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a row's work, in tokens: their number, and the pairs of tokens that attention looks at, weighed.

    A transformer of L layers of width h has about 12·L·h² parameters, each of which costs 2 FLOPs per token; attention
    costs 4·L·h per pair. So a pair costs 1/(6·h) of a token.
    """

    hidden_size: int = 1024
    """Width h of the model."""

    def prompt(self, length: int) -> float:
        """Return the cost of a prompt of ``length`` tokens, which rows share."""
        return self._of(length, 0)

    def response(self, prompt_length: int, length: int) -> float:
        """Return the cost of a response of ``length`` tokens behind its prompt, without that."""
        return self._of(length, prompt_length)

    def _of(self, tokens: int, before: int) -> float:
        return tokens + (tokens * before + tokens * (tokens + 1) / 2) / (6 * self.hidden_size)


GroupId = tuple[int, int, int]
"""Identity of a group: what the ids of its episodes begin with."""


def group_of(sample: TrainSample) -> GroupId:
    """Return the identity of the group that the sample is of."""
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
    all_prompts: float = 0.0
    """Cost of the prompts."""

    @property
    def cost(self) -> float:
        return self.responses + self.all_prompts

    def add(self, other: _Work) -> None:
        self.episodes += other.episodes
        self.responses += other.responses
        if not self.prompts.keys() >= other.prompts.keys():
            self.prompts |= other.prompts
            self.all_prompts = sum(self.prompts.values())


@dataclass(frozen=True, slots=True)
class _Placed:
    """Work on bins, which are not ranks yet."""

    loads: list[float]
    bins: list[list[_Work]]

    @property
    def longest(self) -> float:
        return max(self.loads)


def assign(mini_batches: Sequence[Sequence[TrainSample]], ranks: int, cost: Cost) -> dict[TrajectoryId, int]:
    """Assign the episodes of a batch to data ranks, whole groups where possible; a function of its arguments alone.

    Each mini-batch is balanced by ``cost``, since ranks wait for each other at each optimizer step; so is the batch as
    a whole, which is computed on at once before its first step. A group is cut into pieces, never an episode, where the
    longest rank's work becomes shorter: when groups are fewer than ranks, or one is larger than a rank's share.
    """
    if ranks == 1:
        return {sample.episode: 0 for samples in mini_batches for sample in samples}
    owners: dict[TrajectoryId, int] = {}
    totals = [0.0] * ranks
    for samples in mini_batches:
        placed = _best(_groups(samples, cost), ranks)
        # Any bin may be any rank's: the heaviest one goes to the rank that has least of the batch so far.
        heaviest_first = sorted(range(ranks), key=lambda bin: (-placed.loads[bin], bin))
        for bin, rank in zip(heaviest_first, sorted(range(ranks), key=lambda r: (totals[r], r)), strict=True):
            totals[rank] += placed.loads[bin]
            owners.update((episode, rank) for work in placed.bins[bin] for episode in work.episodes)
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
    """The work of each episode, by group; the costliest group first."""
    groups: dict[GroupId, dict[TrajectoryId, _Work]] = {}
    for sample in samples:
        group, episode = group_of(sample), sample.episode
        episodes = groups.setdefault(group, {})
        if (work := episodes.get(episode)) is None:
            work = episodes[episode] = _Work(group, [episode])
        length = sample.prompt_length
        work.responses += cost.response(length, sample.length)
        if length not in work.prompts:
            work.prompts[length] = cost.prompt(length)
            work.all_prompts = sum(work.prompts.values())
    found = [list(episodes.values()) for episodes in groups.values()]
    return sorted(found, key=lambda group: -_whole(group).cost)


def _best(groups: Sequence[Sequence[_Work]], ranks: int) -> _Placed:
    """Place ``groups`` whole, or some of the costliest in pieces where that is worth it."""
    whole = [_whole(group) for group in groups]
    undivided = _place(whole, ranks)
    least = max([sum(work.cost for work in whole) / ranks, *(one.cost for group in groups for one in group)])
    if undivided.longest <= (1 + WORTH) * least:  # nothing can gain more than that
        return undivided
    best = undivided
    most_episodes = max(map(len, groups))
    for pieces in _doubling(2, ranks):
        parts: list[_Work] = []
        done = 0
        for cut in _doubling(1, min(len(groups), 2 * ranks)):
            parts += [part for group in groups[done:cut] for part in _pieces(group, pieces)]
            done = cut
            placed = _place([*parts, *whole[cut:]], ranks, best.longest)
            if placed.longest < best.longest:
                best = placed
        if pieces >= most_episodes:  # no group has more pieces
            break
    return best if best.longest < (1 - WORTH) * undivided.longest else undivided


def _place(units: Sequence[_Work], ranks: int, below: float = inf) -> _Placed:
    """Place the costliest unit first, each where the work is then least; a prompt that is there costs nothing again.

    Ends as soon as the work of a rank is not ``below`` that: the rest is then not placed.
    """
    loads = [0.0] * ranks
    bins: list[list[_Work]] = [[] for _ in range(ranks)]
    there: dict[GroupId, dict[int, set[int]]] = {}
    """Group → bin → lengths of its prompts that are computed there."""
    lightest = [(0.0, bin) for bin in range(ranks)]
    """Heap of the bins by load. Loads only grow, so an entry with another load than the bin's is out of date."""
    for unit in sorted(units, key=attrgetter("cost"), reverse=True):
        while lightest[0][0] != loads[lightest[0][1]]:
            heappop(lightest)
        bin = lightest[0][1]
        own = there.setdefault(unit.group, {})
        after = inf if bin in own else loads[bin] + unit.responses + unit.all_prompts
        for other, lengths in own.items():
            if (load := loads[other] + unit.responses) <= after:
                load += sum(cost for length, cost in unit.prompts.items() if length not in lengths)
                if (load, other) < (after, bin):
                    after, bin = load, other
        loads[bin] = after
        bins[bin].append(unit)
        if after >= below:
            break
        own.setdefault(bin, set()).update(unit.prompts)
        heappush(lightest, (after, bin))
    return _Placed(loads, bins)


def _whole(group: Sequence[_Work]) -> _Work:
    work = _Work(group[0].group)
    for episode in group:
        work.add(episode)
    return work


def _pieces(group: Sequence[_Work], most: int) -> list[_Work]:
    """Cut a group into up to ``most`` pieces of about the same cost, each of them whole episodes."""
    pieces = [_Work(group[0].group) for _ in range(min(most, len(group)))]
    least = [(0.0, at) for at in range(len(pieces))]
    for episode in sorted(group, key=attrgetter("responses"), reverse=True):
        at = least[0][1]
        pieces[at].add(episode)
        heapreplace(least, (pieces[at].responses, at))
    return pieces


def _doubling(first: int, last: int) -> Iterator[int]:
    """Yield ``first``, twice that, and so on, and ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last
