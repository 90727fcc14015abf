"""The keepers of a run, driven as one: who makes which group, and which replicas they call.

    Fleet, Halts ──join, leave, route──▶ orders ──one after the other──▶ every keeper
    Generate ──a wave, in shares──▶ generate
    a keeper ──a replica failed──▶ Supervision ─▶ Fleet.lose

Orders are given in one step of the loop and carried out by a task for each keeper, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from headway.concurrently import Tasks, concurrently
from headway.errors import HeadwayError
from headway.interfaces import FinishedGroup, GroupRequest, Keeper, RolloutEngine

Order = Callable[[Keeper], Coroutine[Any, Any, None]]


class Keepers:
    """Every keeper of one run, and a `FleetListener`. ``keepers``: one at least."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = tuple(keepers)
        self._orders: dict[str, asyncio.Queue[Order]] = {keeper.name: asyncio.Queue() for keeper in keepers}
        self._load = dict.fromkeys(self._orders, 0)
        """Unfinished groups of each keeper."""
        self._holds = 0

    def start(
        self, tasks: Tasks, on_failed: Callable[[str, HeadwayError], Coroutine[Any, Any, None]]
    ) -> list[asyncio.Task[None]]:
        """Carry out orders, and call ``on_failed`` with the name of each replica that failed and why."""
        started = []
        for keeper in self._keepers:
            started.append(tasks.start(self._carry_out(keeper)))
            started.append(tasks.start(self._report_failures(keeper, on_failed)))
        return started

    def joined(self, replica: RolloutEngine) -> None:
        """Order every keeper to connect to ``replica``."""
        self._order(lambda keeper: keeper.join(replica))

    def left(self, replica: str) -> None:
        """Order every keeper to ask the calls of ``replica`` again of others."""
        self._order(lambda keeper: keeper.leave(replica))

    def route(self, replicas: Iterable[str], *, halted: bool = False) -> None:
        """Order every keeper to send new calls to ``replicas`` alone, where they wait if these are ``halted``."""
        names = list(replicas)
        self._order(lambda keeper: keeper.route(names, halted=halted))

    async def hold(self) -> None:
        """Have keepers start no training group; return when all that were started are done. `go_on` ends it, once for
        each `hold`."""
        self._holds += 1
        await concurrently(keeper.hold() for keeper in self._keepers)

    async def go_on(self) -> None:
        """Have keepers start groups again, if nobody else holds them."""
        self._holds -= 1
        if not self._holds:
            await concurrently(keeper.go_on() for keeper in self._keepers)

    async def abort_older_than(self, version: int) -> None:
        """End the training groups that have a token of an older version in a finished call."""
        await concurrently(keeper.abort_older_than(version) for keeper in self._keepers)

    def assign(self, wave: Sequence[GroupRequest]) -> list[tuple[Keeper, list[GroupRequest]]]:
        """Split a wave over the keepers: each group goes to the keeper with the fewest unfinished ones."""
        shares: dict[str, list[GroupRequest]] = {}
        for request in wave:
            lightest = min(self._load, key=self._load.__getitem__)
            self._load[lightest] += 1
            shares.setdefault(lightest, []).append(request)
        return [(keeper, shares[keeper.name]) for keeper in self._keepers if keeper.name in shares]

    async def generate(self, keeper: Keeper, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Have ``keeper`` make the groups of its share; yield each when it is done."""
        async for finished in keeper.generate(requests):
            self._load[keeper.name] -= 1
            yield finished

    async def generate_on(self, replica: str, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Have the first keeper make groups with calls to ``replica`` alone. Raises `WorkerDied` when that leaves."""
        keeper = self._keepers[0]
        await self._orders[keeper.name].join()
        async for finished in keeper.generate(requests, on=replica):
            yield finished

    async def close(self) -> None:
        """Have every keeper leave all replicas. One that is gone has."""
        await concurrently(_closed(keeper) for keeper in self._keepers)

    def _order(self, order: Order) -> None:
        for orders in self._orders.values():
            orders.put_nowait(order)

    async def _carry_out(self, keeper: Keeper) -> None:
        orders = self._orders[keeper.name]
        while True:
            order = await orders.get()
            await order(keeper)
            orders.task_done()

    async def _report_failures(
        self, keeper: Keeper, on_failed: Callable[[str, HeadwayError], Coroutine[Any, Any, None]]
    ) -> None:
        async for replica, error in keeper.failures():
            await on_failed(replica, error)


async def _closed(keeper: Keeper) -> None:
    with suppress(HeadwayError):
        await keeper.close()
