"""Where finished groups wait for the trainer.

    Reward (or RefLogProb) ──put──▶ [ finished groups ] ──take(n) in order──▶ ActorTrain

It needs no capacity setting: admission lets at most ⌈(1 + η)·B⌉ groups exist behind Generate, and the queue asserts it.
Nothing is ever dropped to make room.
"""

from __future__ import annotations

from math import ceil

from headway.data.types import Group
from headway.errors import LedgerImbalance
from headway.pipeline.signal import Signal
from headway.pipeline.staleness import Staleness, takeable


class MessageQueue:
    def __init__(self, staleness: Staleness) -> None:
        self.name = "MessageQueue"
        self._staleness = staleness
        self._finished: dict[int, Group] = {}
        """In order of completion."""
        self._gone: set[int] = set()
        """Numbers ≥ head that were taken or discarded."""
        self._head = 0
        self._closed = False
        self._abandoned = False
        self._signal = Signal()

    def __len__(self) -> int:
        return len(self._finished)

    async def send(self, group: Group) -> bool:
        capacity = ceil((1 + self._staleness.eta) * self._staleness.groups_per_version)
        if len(self._finished) >= capacity:
            raise LedgerImbalance(f"the queue holds {len(self._finished)} groups, more than ⌈(1+η)·B⌉ = {capacity}")
        if group.number < self._head or group.number in self._gone or group.number in self._finished:
            raise LedgerImbalance(f"group {group.number} came to the queue a second time, or after it was discarded")
        self._finished[group.number] = group
        self._signal.changed()
        return True

    def discard(self, number: int) -> None:
        """The group ended before it got here; younger ones need not wait for it."""
        self._pass(number)
        self._signal.changed()

    async def take(self, count: int) -> list[Group]:
        """The next ``count`` groups in the order of consumption, as they become takeable.

        Fewer only when the producer closed and nothing is left. Empty when abandoned meanwhile.
        """
        taken: list[Group] = []
        while len(taken) < count:
            await self._signal.until(lambda: bool(self._next()) or self._closed or self._abandoned)
            if self._abandoned:
                return []
            if not (eligible := self._next()):
                break
            taken.append(self._finished.pop(eligible[0]))
            self._pass(eligible[0])
        return taken

    def close(self) -> None:
        """Nothing more will be put."""
        self._closed = True
        self._signal.changed()

    def abandon(self) -> None:
        """The trainer wants no more: whoever waits in `take` gets nothing."""
        self._abandoned = True
        self._signal.changed()

    def _next(self) -> list[int]:
        return takeable(self._finished, self._head, self._staleness.window)

    def _pass(self, number: int) -> None:
        self._gone.add(number)
        while self._head in self._gone:
            self._gone.remove(self._head)
            self._head += 1
