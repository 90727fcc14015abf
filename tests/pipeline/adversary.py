"""A small world in which an adversary schedules everything that the pipeline leaves open, explored by exhaustion.

The world has the code's own admission limit and order of consumption, and nothing else: no engines, no time, no
asyncio. The adversary decides who is admitted and when, who finishes with tokens of which version, who is discarded,
which replica loads which version, who dies and who joins. A group's first token, its reward and its way to the queue
are not moves of their own: all that matters is which version the oldest token has, and when the group may be taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from headway.pipeline.admission.message_queue import takeable
from headway.pipeline.admission.staleness import admission_limit


class Live(NamedTuple):
    """An admitted group that is neither taken nor discarded."""

    age: int
    """Trainer's version minus that of its oldest token; until it is finished, minus the version that was served when it
    was admitted, which is all that is known by then."""
    finished: bool = False


class State(NamedTuple):
    """Versions are counted back from the trainer's, so that equal situations at different versions are one state."""

    taken: int
    """Groups taken since the trainer's version began; B of them make the next."""
    behind: tuple[int, ...]
    """For each serving replica, how many versions it is behind the trainer; the furthest first."""
    line: tuple[Live | None, ...]
    """By number, from the head on; None for a group that was taken or discarded."""

    @property
    def live(self) -> list[Live]:
        return [group for group in self.line if group is not None]

    @property
    def oldest(self) -> int:
        """The largest lag that any live group would have if it were taken now."""
        return max((group.age for group in self.live), default=0)


@dataclass(frozen=True, slots=True)
class World:
    b: int
    eta: Fraction
    window: int | None
    """W; None for completion order."""
    replicas: int = 1
    synchronous: bool = False
    """The trainer takes nothing until every replica has loaded its version."""
    max_lag: int | None = None
    in_time: Callable[[World, State, Live], bool] | None = None
    """With ``max_lag``, whether a group may be taken now for the sake of those that are due."""
    joins_below: bool = False
    """A late replica may join with a version older than the one that is served."""

    @property
    def start(self) -> State:
        return State(0, (0,) * self.replicas, ())

    @property
    def longest_line(self) -> int:
        """The adversary may put any number of discards behind a stuck head; past the window they change nothing."""
        return admission_limit(0, self.eta, self.b) + (self.window or 1)

    def room(self, state: State) -> int:
        """What the inequality allows. Admitted − discarded is what was taken and what is live."""
        return admission_limit(-state.behind[0], self.eta, self.b) - state.taken - len(state.live)

    def moves(self, state: State) -> Iterator[State]:
        if self.room(state) > 0 and len(state.line) < self.longest_line:
            yield self._normal(state._replace(line=(*state.line, Live(state.behind[0]))))
        for place, group in enumerate(state.line):
            if group is not None:
                yield from self._finish(state, place, group)
                yield self._put(state, place, None)
        for place in self._takeable(state):
            yield self._take(state, place)
        yield from self._change_replicas(state)

    def may_take(self, state: State, group: Live) -> bool:
        return self.in_time is None or self.in_time(self, state, group)

    def _takeable(self, state: State) -> list[int]:
        if self.synchronous and state.behind[0] > 0:
            return []
        finished = {place: group for place, group in enumerate(state.line) if group is not None and group.finished}
        if self.window is not None:
            return takeable(finished, 0, self.window)[:1]
        # Any of them may have been the first to finish.
        return [place for place, group in finished.items() if self.may_take(state, group)]

    def _finish(self, state: State, place: int, group: Live) -> Iterator[State]:
        """Its first token came when it was admitted, or at any time since, from any replica that served then."""
        if not group.finished:
            for age in {*range(group.age + 1), *state.behind}:
                yield self._put(state, place, Live(age, finished=True))

    def _take(self, state: State, place: int) -> State:
        after = self._put(state, place, None)
        if after.taken + 1 < self.b:
            return after._replace(taken=after.taken + 1)
        line = tuple(group and group._replace(age=group.age + 1) for group in after.line)
        return State(0, tuple(behind + 1 for behind in after.behind), line)

    def _change_replicas(self, state: State) -> Iterator[State]:
        """Load any newer version, published ones in between left out or not; die, unless it is the last; join."""
        for index, behind in enumerate(state.behind):
            others = state.behind[:index] + state.behind[index + 1 :]
            for newer in range(behind):
                yield state._replace(behind=_furthest_first(*others, newer))
            if others:
                yield state._replace(behind=others)
        if len(state.behind) < self.replicas:
            for behind in range(state.behind[0] + 1 + self.joins_below):
                yield state._replace(behind=_furthest_first(*state.behind, behind))

    def _put(self, state: State, place: int, group: Live | None) -> State:
        return self._normal(state._replace(line=(*state.line[:place], group, *state.line[place + 1 :])))

    def _normal(self, state: State) -> State:
        """The line begins with the head; in completion order places mean nothing, and it is kept sorted."""
        if self.window is None:
            return state._replace(line=tuple(sorted(state.live)))
        first = next((place for place, group in enumerate(state.line) if group is not None), len(state.line))
        return state._replace(line=state.line[first:])


def _furthest_first(*behind: int) -> tuple[int, ...]:
    return tuple(sorted(behind, reverse=True))


def reachable(world: World) -> Iterator[State]:
    """Every state that the adversary can bring about, once each, nearest first."""
    seen, frontier = {world.start}, deque([world.start])
    while frontier:
        state = frontier.popleft()
        yield state
        for following in world.moves(state):
            if following not in seen:
                seen.add(following)
                frontier.append(following)


@dataclass(slots=True)
class Worst:
    """The largest of each figure over all reachable states."""

    lag: int = 0
    apart: int = 0
    """Versions between two serving replicas."""
    unconsumed: int = 0
    """Groups admitted, not discarded, and not part of a completed version."""
    behind: int = 0
    """Versions that the served one is behind the trainer's when a group is admitted."""


@cache
def worst(world: World) -> Worst:
    found = Worst()
    for state in reachable(world):
        found.lag = max(found.lag, state.oldest)
        found.apart = max(found.apart, state.behind[0] - state.behind[-1])
        found.unconsumed = max(found.unconsumed, state.taken + len(state.live))
        if world.room(state) > 0:
            found.behind = max(found.behind, state.behind[0])
    return found


def exceeds(world: World, lag: int) -> bool:
    return any(state.oldest > lag for state in reachable(world))
