"""Queue in which finished groups wait for the trainer.

    Reward (or RefLogProb) ──send──▶ [ finished groups ] ──take(n) in order──▶ TrainBatches

`takeable` defines the order of consumption: by group number within a window, or by completion without one. A resumed
run first takes the batches recorded in its journal (`take_again`).

A group is *live* from its admission until it is taken or discarded. With ``max_lag`` and ``on_overdue: wait``, a group
is taken only if all groups that fall due later still fit after it; the batch waits for groups that must go first. With
``on_overdue: drop``, overdue groups are discarded when they would be taken.

The queue needs no capacity setting: admission allows at most ⌊(1 + η)·B⌋ groups behind Generate, and the queue asserts
it. Groups are never dropped to make room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import floor

from headway.data.interfaces.episode_groups import Group
from headway.errors import LedgerImbalance
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.stage import Signal


class MessageQueue:
    def __init__(self, staleness: Staleness) -> None:
        self.name = "MessageQueue"
        self._staleness = staleness
        self._finished: dict[int, Group] = {}
        """Number -> finished group, in the order of completion."""
        self._live: dict[int, int] = {}
        """Number of each live group -> oldest version that any of its tokens can have."""
        self._admitted = 0
        self._taken = 0
        self._head = 0
        """Number of the oldest live group, or of the next one to be admitted."""
        self._closed = False
        self._abandoned = False
        self._resumed = False
        """True in a resumed run: finished groups may be too old, or of versions that the trainer has yet to reach
        again."""
        self._signal = Signal()

    def __len__(self) -> int:
        return len(self._finished)

    def __contains__(self, number: int) -> bool:
        return number in self._finished

    @property
    def live(self) -> dict[int, int]:
        """Number of each live group -> oldest version that any of its tokens can have."""
        return dict(self._live)

    def restore(self, admitted: int, taken: int, live: Mapping[int, int]) -> None:
        """Begin with an empty queue. ``admitted``, ``taken``: numbers of groups so far. ``live``: the `live` groups."""
        self._admitted, self._taken = admitted, taken
        self._head = min(live, default=admitted)
        self._resumed = True
        self._live |= live

    def expect(self, number: int, version: int) -> None:
        """Note that group ``number`` was admitted while ``version`` was the oldest version served."""
        self._live[number] = version
        self._admitted = number + 1

    async def send(self, group: Group) -> None:
        capacity = floor((1 + self._staleness.eta) * self._staleness.groups_per_version)
        if len(self._finished) >= capacity:
            raise LedgerImbalance(f"the queue holds {len(self._finished)} groups, more than ⌊(1+η)·B⌋ = {capacity}")
        if group.number not in self._live or group.number in self._finished:
            raise LedgerImbalance(f"group {group.number} came to the queue a second time, or after it was discarded")
        self._finished[group.number] = group
        if self._staleness.max_lag is not None:
            # From now on the group is as old as its tokens; until now its age counted from its admission.
            self._live[group.number] = group.oldest_version
        self._signal.changed()

    def discard(self, number: int) -> None:
        """Remove a group that ended before it was taken; younger groups need not wait for it."""
        self._finished.pop(number, None)
        self._pass(number)
        self._signal.changed()

    async def take_again(self, groups: Mapping[int, tuple[int, ...]], version: int) -> list[Group] | None:
        """Wait for the ``groups``, number -> identity, that ``version`` was trained on before the run was resumed.

        Returns an empty list if the queue is abandoned meanwhile. Returns None if the batch cannot be repeated: a group
        has ended otherwise, has another prompt or does not fit, there is no room to admit it, or the queue ends first.
        """

        def there() -> bool:
            return all(number in self._finished for number in groups)

        def missing() -> bool:
            # A number that is not admitted yet is not live either: that group may still come.
            ended = any(number < self._admitted and number not in self._live for number in groups)
            # A full queue is no reason to give up until the version is served: room may still open.
            full = self._is_full and self._staleness.served_version >= version
            return ended or full or self._closed or others()

        def others() -> bool:
            found = [(self._finished[number], of) for number, of in groups.items() if number in self._finished]
            return any(group.prompt.group_id != of or not self._fits(group, version) for group, of in found)

        await self._signal.until(lambda: self._abandoned or there() or missing())
        if self._abandoned:
            return []
        if not there() or others():
            return None
        taken = [self._finished.pop(number) for number in groups]
        for number in groups:
            self._taken += 1
            self._pass(number)
        return taken

    async def take(self, count: int, version: int, drop: Callable[[Group], None]) -> list[Group]:
        """Wait for the next ``count`` groups, in the order of consumption, that ``version`` may be trained on.

        ``drop`` is called with each group that is too old for that version, and must `discard` it. In a resumed run,
        groups that are too new wait for a later version; if no other groups can come, they are dropped, too. Returns
        fewer groups only if the queue is closed and empty, and none if it is abandoned meanwhile.
        """
        taken: list[Group] = []
        while len(taken) < count:
            await self._signal.until(
                lambda: self._closed or self._abandoned or bool(self._next(version) or self._unfit(version))
            )
            if self._abandoned:
                return []
            for group in self._unfit(version):
                drop(group)
            # After the drops, which move the head of the window.
            eligible = self._next(version)
            if not eligible and self._closed:
                break
            for number in eligible[: count - len(taken)]:
                taken.append(self._finished.pop(number))
                self._taken += 1
                self._pass(number)
        return taken

    async def until_full(self) -> None:
        """Wait until all groups that may be admitted are in the queue. Returns at once when closed or abandoned."""
        await self._signal.until(lambda: self._closed or self._abandoned or self._is_full)

    @property
    def _is_full(self) -> bool:
        return self._staleness.room == 0 and len(self._finished) == len(self._live)

    def look_again(self) -> None:
        """Note that a version was loaded, so that further groups may be admitted."""
        self._signal.changed()

    def close(self) -> None:
        """Close the queue: no more groups will be sent."""
        self._closed = True
        self._signal.changed()

    def abandon(self) -> None:
        """Note that the trainer takes no more groups; a pending `take` returns nothing."""
        self._abandoned = True
        self._signal.changed()

    def _unfit(self, version: int) -> list[Group]:
        """Return the finished groups to drop: neither ``version`` nor a later one can be trained on them in time."""
        if self._resumed:
            too_new = self._too_new(version)
            waiting = self._finished.items()
            unfit = [group for number, group in waiting if number not in too_new and not self._fits(group, version)]
            if unfit or not too_new or self._next(version):
                return unfit
            if self._closed:
                return [self._finished[number] for number in too_new]
            # A full queue is no reason to drop until replicas serve the version: then there may be room for other
            # groups.
            full = self._is_full and self._staleness.served_version >= version
            # Drop the youngest alone: the room of one group may be enough for the missing ones.
            return [self._finished[max(too_new)]] if full else []
        if (oldest := self._staleness.oldest_trainable(version)) is None:
            return []
        return [group for number, group in self._finished.items() if self._live[number] < oldest]

    def _fits(self, group: Group, version: int) -> bool:
        """Return True if ``version`` may be trained on a group of a resumed run. A group that is made again may be
        admitted at an earlier version than before, and then be too old for its batch.
        """
        lag, bound = version - group.oldest_version, self._staleness.bound
        return lag >= 0 and (bound is None or lag <= bound)

    def _too_new(self, version: int) -> set[int]:
        """Return the numbers of the finished groups whose tokens are of later versions than ``version``."""
        return {number for number, group in self._finished.items() if group.oldest_version > version}

    def _next(self, version: int) -> list[int]:
        """Return the numbers of the groups that may be taken now, first choice first."""
        finished, head = self._finished, self._head
        if self._resumed:
            # Groups of a later version wait, and others go before them: none is dropped for being the head.
            too_new = self._too_new(version)
            finished = {number: group for number, group in finished.items() if self._fits(group, version)}
            head = min((number for number in self._live if number not in too_new), default=head)
        if self._staleness.max_lag is None:
            return takeable(finished, head, self._staleness.window)
        room = (version + 1) * self._staleness.groups_per_version - self._taken
        due = self._staleness.must_go_first(Counter(self._live.values()), version, room)
        # One at a time: each group taken leaves less room for the groups that are due.
        return [number for number in finished if due is None or self._live[number] <= due][:1]

    def _pass(self, number: int) -> None:
        del self._live[number]
        # Skip all groups that are gone: a window anchored at a discarded group would never move.
        while self._head < self._admitted and self._head not in self._live:
            self._head += 1


def takeable(finished: Collection[int], head: int, window: int | None) -> list[int]:
    """Return the numbers that may be taken now, first choice first. ``finished`` is in order of completion.

    ``head`` is the oldest group neither taken nor discarded. The window is anchored there: anchored at the newest taken
    group instead, a slow group could be overtaken for ever.
    """
    if window is None:
        return list(finished)
    # Both ways give the same result: the first scans the window, the second all finished groups.
    if window < len(finished):
        return [number for number in range(head, head + window) if number in finished]
    return sorted(number for number in finished if number < head + window)
