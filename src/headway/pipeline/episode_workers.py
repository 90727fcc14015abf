"""The keepers of a run, driven as one: who makes which group, and which replicas they call.

    ReplicaPool, PauseController ──join, leave, route──▶ orders ──one after the other──▶ every keeper
    Generate ──a wave, in shares──▶ generate ◀── what a lost keeper had not handed on, to be made again
    a keeper ──a replica failed──▶ Supervision ─▶ ReplicaPool.lose

    join() ──▶ JOINING ──knows replicas, route, hold──▶ SERVING ──lose()──▶ gone; others make its groups

Orders are given in one step of the loop and carried out by a task for each keeper, in the order in which they came. A
keeper that died, or does not answer, is left out. What makes its groups again samples the same under the same weights,
by the same ids. While no keeper is there, groups wait for one that is started in the place of the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from headway.data.interfaces.episode_groups import FinishedGroup, GroupRequest, Keeper
from headway.data.interfaces.rollout import RolloutEngine
from headway.errors import HeadwayError, RunError, WorkerDied
from headway.events import KeeperLost
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.channel import Channel
from headway.pipeline.conditions import Signal
from headway.pipeline.weight_receiver import Remote, WorkerUnavailable
from headway.runtime.task_groups import Tasks, concurrently

Call = Callable[[Keeper], Coroutine[Any, Any, None]]
OnFailed = Callable[[str, HeadwayError], Coroutine[Any, Any, None]]
"""Coroutine function that is called with the name of a replica that failed, and why."""


class KeeperClient(Remote):
    """Client of a `Keeper`, whose calls raise `WorkerUnavailable` once the keeper is gone."""

    def __init__(self, keeper: Keeper, timeout_s: float) -> None:
        super().__init__(keeper.name, timeout_s)
        self.keeper = keeper
        self.load = 0
        """Number of groups that the keeper has to make, beside those by one replica alone."""
        self._orders: asyncio.Queue[tuple[str, Call]] = asyncio.Queue()
        self._open_orders = 0

    def order(self, what: str, call: Call) -> None:
        """Give an order, which is carried out after all earlier ones. ``what`` describes it, for messages."""
        self._open_orders += 1
        self._orders.put_nowait((what, call))

    async def carry_out(self) -> None:
        """Carry out orders until cancelled."""
        while True:
            what, call = await self._orders.get()
            await self._while_here(call(self.keeper), self._timeout_s, what)
            self._open_orders -= 1
            self._orders.task_done()

    async def orders_done(self) -> None:
        """Wait until all orders so far are carried out."""
        if self._open_orders:
            await self._ask(self._orders.join())

    async def call(self, call: Call) -> None:
        """Call the keeper, beside its orders. Takes as long as it takes."""
        await self._ask(call(self.keeper))

    async def answer(self) -> None:
        await self._ask_soon(self.keeper.answer(), "answer")

    async def generate(
        self, requests: Sequence[GroupRequest], *, on: str | None = None
    ) -> AsyncGenerator[FinishedGroup, None]:
        """Yield groups as `Keeper.generate` does, asked for after all orders so far. Bounded by the longest answer and
        the stall detector only.
        """
        await self.orders_done()
        if self.why is not None:
            raise WorkerUnavailable(self, self.why)
        async with aclosing(self.keeper.generate(requests, on=on)) as groups:
            while (finished := await self._while_here(anext(groups, None))) is not None:
                yield finished

    async def report_failures(self, on_failed: OnFailed) -> None:
        """Call ``on_failed`` for each replica that failed, until cancelled."""
        async with aclosing(self.keeper.failures()) as failures:
            while (failure := await self._while_here(anext(failures, None))) is not None:
                await on_failed(*failure)

    async def close(self) -> None:
        """Have the keeper leave all replicas. One that is gone has."""
        with suppress(WorkerUnavailable, HeadwayError):
            await self._while_here(self.keeper.close(), self._timeout_s, "leave all replicas")


Share = tuple[KeeperClient | None, list[GroupRequest]]
"""A keeper and its part of a wave; None for any keeper, as soon as there is one."""


class EpisodeWorkers:
    """Every keeper of one run: a `FleetListener`, and `Members` for supervision."""

    def __init__(self, keepers: Sequence[Keeper], state: RunState, *, timeout_s: float) -> None:
        """Set up ``keepers``, one at least. Quick answers may take ``timeout_s``."""
        self.lost: Channel[str] = Channel("lost keepers")
        """Names of keepers that are gone, for whoever starts replacements."""
        self._state = state
        self._timeout_s = timeout_s
        self._serving = {keeper.name: KeeperClient(keeper, timeout_s) for keeper in keepers}
        self._joining: dict[str, KeeperClient] = {}
        """Keepers that do not know yet what the others know."""
        self._reasons: dict[str, RunError] = {}
        """Errors for which keepers were given up, by their names."""
        self._replicas: dict[str, RolloutEngine] = {}
        """Replicas that keepers are connected to."""
        self._route: tuple[list[str], bool] = [], False
        """What the last `route` said."""
        self._holds = 0
        self._changed = Signal()
        self._on_failed: OnFailed | None = None
        self._tasks: Tasks | None = None
        self._started: list[asyncio.Task[None]] = []

    def start(self, tasks: Tasks, on_failed: OnFailed) -> None:
        """Carry out orders from now on, and report the replicas that failed."""
        self._tasks, self._on_failed = tasks, on_failed
        for keeper in self._serving.values():
            self._attend(keeper)

    def stop(self) -> None:
        """Carry out no more orders."""
        self._tasks = None
        for task in self._started:
            task.cancel()

    async def close(self) -> None:
        """Have every keeper leave all replicas."""
        await concurrently(keeper.close() for keeper in [*self._serving.values(), *self._joining.values()])

    # ------------------------------------------------------------------------------------- replicas

    def joined(self, replica: RolloutEngine) -> None:
        """Order every keeper to connect to ``replica``."""
        self._replicas[replica.name] = replica
        self._order(f"connect to {replica.name}", lambda keeper: keeper.join(replica))

    def left(self, replica: str) -> None:
        """Order every keeper to ask the calls of ``replica`` again of others."""
        self._replicas.pop(replica, None)
        self._order(f"leave {replica}", lambda keeper: keeper.leave(replica))
        self._changed.changed()

    def route(self, replicas: Iterable[str], *, halted: bool = False) -> None:
        """Order every keeper to send new calls to ``replicas`` alone, where they wait if these are ``halted``."""
        names = list(replicas)
        self._route = names, halted
        self._order(f"call {', '.join(names)}", lambda keeper: keeper.route(names, halted=halted))

    async def hold(self) -> None:
        """Have keepers start no training group; return when all that were started are done. `go_on` ends it, once for
        each `hold`."""
        self._holds += 1
        await self._all(lambda keeper: keeper.hold())

    def go_on(self) -> None:
        """Let keepers start groups, if no other hold is left."""
        self._holds -= 1
        if not self._holds and self._tasks is not None:
            self._tasks.start(self._go_on())

    async def _go_on(self) -> None:
        if not self._holds:  # else they were held again before they heard of it
            await self._all(lambda keeper: keeper.go_on())

    async def abort_older_than(self, version: int) -> None:
        """End the training groups that have a token of an older version in a finished call."""
        await self._all(lambda keeper: keeper.abort_older_than(version))

    async def check(self) -> None:
        """Have every keeper answer. One that does not is gone."""
        await concurrently(self._unless_gone(keeper.answer) for keeper in list(self._serving.values()))

    # ------------------------------------------------------------------------------------- groups

    def assign(self, wave: Sequence[GroupRequest]) -> list[Share]:
        """Split a wave over the keepers: each group goes to the keeper with the fewest unfinished ones."""
        if not self._serving:
            return [(None, list(wave))]
        shares: dict[KeeperClient, list[GroupRequest]] = {}
        for request in wave:
            keeper = self._lightest()
            keeper.load += 1
            shares.setdefault(keeper, []).append(request)
        return [(keeper, shares[keeper]) for keeper in self._serving.values() if keeper in shares]

    async def generate(self, share: Share) -> AsyncGenerator[FinishedGroup, None]:
        """Yield each group of the share when it is done. What a lost keeper has not handed on is another's to make."""
        keeper, requests = share
        left = {request.number: request for request in requests}
        while left:
            if keeper is None:
                await self._changed.until(lambda: bool(self._serving))
                keeper = self._lightest()
                keeper.load += len(left)
            try:
                async with aclosing(keeper.generate(list(left.values()))) as groups:
                    async for finished in groups:
                        keeper.load -= 1
                        del left[finished.number]
                        yield finished
            except WorkerUnavailable as gone:
                await self.lose(gone)
                keeper = None

    async def generate_on(self, replica: str, requests: Sequence[GroupRequest]) -> AsyncGenerator[FinishedGroup, None]:
        """Have the first keeper make groups with calls to ``replica`` alone. Raises `WorkerDied` when that leaves."""
        left = {request.number: request for request in requests}
        while left:
            await self._changed.until(lambda: bool(self._serving) or replica not in self._replicas)
            if replica not in self._replicas:
                raise WorkerDied(f"{replica} is gone")
            keeper = next(iter(self._serving.values()))
            try:
                async with aclosing(keeper.generate(list(left.values()), on=replica)) as groups:
                    async for finished in groups:
                        del left[finished.number]
                        yield finished
            except WorkerUnavailable as gone:
                if replica not in self._replicas:  # a keeper says so in the same words as of its own end
                    raise gone.why from gone
                await self.lose(gone)

    # ------------------------------------------------------------------------------------- coming and going

    @property
    def present(self) -> list[Keeper]:
        """Keepers that serve, and those that join."""
        return [client.keeper for client in [*self._serving.values(), *self._joining.values()]]

    def join(self, keeper: Keeper) -> None:
        """Add a keeper in the place of one that is gone; it makes groups once it knows what the others know."""
        client = self._joining[keeper.name] = KeeperClient(keeper, self._timeout_s)
        for replica in self._replicas.values():
            client.order(f"connect to {replica.name}", lambda keeper, replica=replica: keeper.join(replica))  # type: ignore[misc]
        names, halted = self._route
        client.order(f"call {', '.join(names)}", lambda keeper: keeper.route(names, halted=halted))
        self._attend(client)
        if self._tasks is not None:
            self._started.append(self._tasks.start(self._serve(client)))

    async def died(self, keeper: Keeper, death: WorkerDied) -> None:
        """Forget ``keeper``, whose process has ended."""
        client = self._serving.get(keeper.name) or self._joining.get(keeper.name)
        if client is not None:
            await self.lose(WorkerUnavailable(client, death))

    async def lose(self, gone: WorkerUnavailable) -> None:
        """Forget a keeper that is gone: others make its groups, and replicas drop its calls."""
        gone.remote.leave(gone.why)
        name = gone.remote.name
        if self._serving.pop(name, None) is None and self._joining.pop(name, None) is None:
            return
        self._reasons[name] = gone.why
        self._state.emit(KeeperLost(time=now(), keeper=name, reason=str(gone.why)))
        for replica in self._replicas.values():
            if self._tasks is not None:
                self._started.append(self._tasks.start(self._dropped_at(replica, name)))
        await self.lost.send(name)

    def reason(self, lost: str) -> RunError:
        """Return the error for which the keeper ``lost`` was given up."""
        return self._reasons[lost]

    async def _serve(self, client: KeeperClient) -> None:
        """Let ``client`` make groups once it knows what the others know."""
        try:
            await client.orders_done()
            held = False
            while held != bool(self._holds):
                held = bool(self._holds)
                await client.call(lambda keeper: keeper.hold() if held else keeper.go_on())  # noqa: B023 - awaited here
        except WorkerUnavailable as gone:
            await self.lose(gone)
        # Without a wait since the look at the holds: from here on each of them asks this keeper, too.
        if self._joining.pop(client.name, None) is not None:
            self._serving[client.name] = client
            self._changed.changed()

    async def _dropped_at(self, replica: RolloutEngine, keeper: str) -> None:
        """Have ``replica`` drop the calls of a lost keeper. Errors are left to the replica's supervision."""
        with suppress(HeadwayError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await replica.drop(keeper)

    def _lightest(self) -> KeeperClient:
        return min(self._serving.values(), key=lambda keeper: keeper.load)

    def _order(self, what: str, call: Call) -> None:
        for keeper in [*self._serving.values(), *self._joining.values()]:
            keeper.order(what, call)

    async def _all(self, call: Call) -> None:
        """Call every keeper that serves. One that is gone is left out."""
        await concurrently(self._unless_gone(partial(keeper.call, call)) for keeper in list(self._serving.values()))

    async def _unless_gone(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except WorkerUnavailable as gone:
            await self.lose(gone)

    def _attend(self, keeper: KeeperClient) -> None:
        """Carry out the orders of ``keeper``, and hear of the replicas that failed, until it is gone."""
        assert self._tasks is not None and self._on_failed is not None, "start comes first"
        for work in (keeper.carry_out, partial(keeper.report_failures, self._on_failed)):
            self._started.append(self._tasks.start(self._unless_gone(work)))
