"""The episode workers of a run: assigns groups to workers, and tells workers which replicas to call.

    ReplicaPool, PauseController ──join, leave, route──▶ orders ──one after the other──▶ every episode worker
    Generate ──a wave, in shares──▶ generate ◀── what a lost episode worker had not handed on, to be made again
    an episode worker ──a replica failed──▶ Supervision ─▶ ReplicaPool.lose

    join() ──▶ JOINING ──knows replicas, route, hold──▶ SERVING ──lose()──▶ gone; others make its groups

Orders are given in one step of the loop and carried out by a task for each episode worker, in the order in which they
came. An episode worker that died, or does not answer, is left out. Another one makes its groups again, and samples the
same tokens under the same weights, since the ids are the same. If no worker is left, groups wait for a replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol, Group
from headway.data.interfaces.rollout import RolloutEngine
from headway.errors import HeadwayError, RunError, WorkerDied
from headway.events import EpisodeWorkerLost
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.remote_workers import RemoteWorker, WorkerUnavailable
from headway.pipeline.stage import Channel, Signal
from headway.runtime.task_groups import Tasks, concurrently

Call = Callable[[EpisodeWorkerProtocol], Coroutine[Any, Any, None]]
OnFailed = Callable[[str, HeadwayError], Coroutine[Any, Any, None]]
"""Coroutine function that is called with the name of a replica that failed, and why."""


class EpisodeWorkerClient(RemoteWorker):
    """Client of an episode worker. Its calls raise `WorkerUnavailable` once the episode worker is gone."""

    def __init__(self, worker: EpisodeWorkerProtocol, timeout_s: float) -> None:
        super().__init__(worker.name, timeout_s, "param_update.timeout_s = {:g} s".format)
        self.worker = worker
        self.load = 0
        """Number of unfinished groups of the episode worker. Groups bound to one replica are not counted."""
        self._orders: asyncio.Queue[tuple[str, Call]] = asyncio.Queue()
        self._open_orders = 0

    def order(self, what: str, call: Call) -> None:
        """Queue an order behind all earlier ones. ``what`` describes it in messages."""
        self._open_orders += 1
        self._orders.put_nowait((what, call))

    async def carry_out(self) -> None:
        """Carry out orders until cancelled. Raises `WorkerUnavailable` once the episode worker is gone."""
        while True:
            what, call = await self._while_here(self._orders.get())
            await self._while_here(call(self.worker), self._timeout_s, what)
            self._open_orders -= 1
            self._orders.task_done()

    async def orders_done(self) -> None:
        """Wait until all orders so far are carried out."""
        if self._open_orders:
            await self._ask(self._orders.join())

    async def call(self, call: Call) -> None:
        """Call the episode worker outside the queue of orders, without a time limit."""
        await self._ask(call(self.worker))

    async def generate(self, requests: Sequence[Group], *, on: str | None = None) -> AsyncGenerator[Group, None]:
        """Yield groups as `EpisodeWorkerProtocol.generate` does. The request is sent after all orders so far, and has
        no time limit but the stall detector's.
        """
        await self.orders_done()
        # Without open orders nothing has checked yet that the worker is there.
        if self.why is not None:
            raise WorkerUnavailable(self, self.why)
        async with aclosing(self.worker.generate(requests, on=on)) as groups:
            while (finished := await self._while_here(anext(groups, None))) is not None:
                yield finished

    async def report_failures(self, on_failed: OnFailed) -> None:
        """Call ``on_failed`` for each replica that failed, until cancelled."""
        async with aclosing(self.worker.failures()) as failures:
            while (failure := await self._while_here(anext(failures, None))) is not None:
                await on_failed(*failure)

    async def close(self) -> None:
        """Disconnect the episode worker from all replicas. Does nothing if it is gone."""
        with suppress(WorkerUnavailable, HeadwayError):
            await self._while_here(self.worker.close(), self._timeout_s, "leave all replicas")


Share = tuple[EpisodeWorkerClient | None, list[Group]]
"""Episode worker and its groups of a wave. None: the first episode worker that becomes available."""


class EpisodeWorkers:
    """Every episode worker of one run. `ReplicaPool` tells it which replicas serve."""

    kind = "episode worker"
    then = "makes its groups again"

    def __init__(self, episode_workers: Sequence[EpisodeWorkerProtocol], state: RunState, *, timeout_s: float) -> None:
        """Set up at least one episode worker. ``timeout_s``: time limit of short calls, in seconds."""
        self.lost: Channel[tuple[str, RunError]] = Channel("EpisodeWorkers")
        """Names of episode workers that are gone, and why. Supervision starts replacements for them."""
        self._state = state
        self._timeout_s = timeout_s
        self._serving = {worker.name: EpisodeWorkerClient(worker, timeout_s) for worker in episode_workers}
        self._joining: dict[str, EpisodeWorkerClient] = {}
        """Episode workers that do not know the replicas, the route and the holds yet."""
        self._replicas: dict[str, RolloutEngine] = {}
        """Replicas that episode workers are connected to."""
        self._route: tuple[list[str], bool] = [], False
        """Arguments of the last `route`."""
        self._holds = 0
        self._changed = Signal()
        self._on_failed: OnFailed | None = None
        self._tasks: Tasks | None = None
        self._started: dict[asyncio.Task[Any], None] = {}

    def start(self, tasks: Tasks, on_failed: OnFailed) -> None:
        """Begin to carry out orders and to report failed replicas."""
        self._tasks, self._on_failed = tasks, on_failed
        for worker in self._serving.values():
            self._attend(worker)

    def stop(self) -> None:
        """Carry out no more orders."""
        self._tasks = None  # first, so that `go_on` and `lose` start no more tasks
        for task in self._started:
            task.cancel()

    async def close(self) -> None:
        """Disconnect every episode worker from all replicas."""
        await concurrently(worker.close() for worker in [*self._serving.values(), *self._joining.values()])

    # ------------------------------------------------------------------------------------- replicas

    def joined(self, replica: RolloutEngine) -> None:
        """Order every episode worker to connect to ``replica``."""
        self._replicas[replica.name] = replica
        self._order(f"connect to {replica.name}", lambda worker: worker.join(replica))

    def left(self, replica: str) -> None:
        """Order every episode worker to send the calls of ``replica`` to others."""
        self._replicas.pop(replica, None)
        self._order(f"leave {replica}", lambda worker: worker.leave(replica))
        self._changed.changed()

    def route(self, replicas: Iterable[str], *, halted: bool = False) -> None:
        """Order every worker to send new calls only to ``replicas``. If these are ``halted``, calls wait there."""
        names = list(replicas)
        self._route = names, halted  # for workers that join later
        self._order(f"call {', '.join(names)}", lambda worker: worker.route(names, halted))

    async def hold(self) -> None:
        """Stop episode workers from starting training groups, and wait until the started ones are done. Each `hold` is
        ended by one `go_on`."""
        self._holds += 1
        await self._all(lambda worker: worker.hold())

    def go_on(self) -> None:
        """End one `hold`. Episode workers start groups again when no hold is left."""
        self._holds -= 1
        if not self._holds and self._tasks is not None:
            self._tasks.start(self._go_on())

    async def _go_on(self) -> None:
        if not self._holds:  # else they were held again before the order reached them
            await self._all(lambda worker: worker.go_on())

    async def abort_older_than(self, version: int) -> None:
        """End the training groups that have a token of an older version in a finished call."""
        await self._all(lambda worker: worker.abort_older_than(version))

    # ------------------------------------------------------------------------------------- groups

    def assign(self, wave: Sequence[Group]) -> list[Share]:
        """Split a wave over the episode workers: each group goes to the one with the fewest unfinished groups."""
        if not self._serving:
            return [(None, list(wave))] if wave else []
        shares: dict[EpisodeWorkerClient, list[Group]] = {}
        for request in wave:
            worker = self._lightest()
            worker.load += 1
            # The load is counted above at once, so that the next group of the wave goes to another worker.
            shares.setdefault(worker, []).append(request)
        return [(worker, shares[worker]) for worker in self._serving.values() if worker in shares]

    async def generate(self, share: Share, *, on: str | None = None) -> AsyncGenerator[Group, None]:
        """Yield each group of the share when it is done. If the worker is lost, another one makes the remaining groups.

        ``on``: replica for all calls, which the first serving worker makes. Raises `WorkerDied` when that replica
        leaves.
        """
        worker, requests = share
        left = {request.number: request for request in requests}
        while left:
            await self._changed.until(lambda: bool(self._serving) or (on is not None and on not in self._replicas))
            if on is not None:
                if on not in self._replicas:
                    raise WorkerDied(f"{on} is gone")
                worker = next(iter(self._serving.values()))
            elif worker is None:
                worker = self._lightest()
                worker.load += len(left)
            try:
                async with aclosing(worker.generate(list(left.values()), on=on)) as groups:
                    async for finished in groups:
                        # Before the yield: a finished group must not be made again if the worker is lost after this
                        # line.
                        worker.load -= on is None
                        del left[finished.number]
                        yield finished
            except WorkerUnavailable as gone:
                if on is not None and on not in self._replicas:  # a worker reports this like its own end
                    raise gone.why from gone
                await self.lose(gone)
                # `again`: the other worker looks into the journal for calls that the lost one has finished.
                worker, left = None, {number: replace(request, again=True) for number, request in left.items()}

    # ------------------------------------------------------------------------------------- coming and going

    @property
    def present(self) -> list[EpisodeWorkerProtocol]:
        """Episode workers that serve or join."""
        return [client.worker for client in [*self._serving.values(), *self._joining.values()]]

    def join(self, worker: EpisodeWorkerProtocol) -> None:
        """Add a worker in place of a lost one. It makes groups once it knows replicas, route and holds."""
        client = self._joining[worker.name] = EpisodeWorkerClient(worker, self._timeout_s)
        for replica in self._replicas.values():
            # A default argument: the closure alone would see the last replica of the loop.
            client.order(f"connect to {replica.name}", lambda worker, replica=replica: worker.join(replica))  # type: ignore[misc]
        names, halted = self._route
        client.order(f"call {', '.join(names)}", lambda worker: worker.route(names, halted))
        self._attend(client)
        if self._tasks is not None:
            self._tasks.start(self._serve(client), among=self._started)

    async def died(self, worker: EpisodeWorkerProtocol, death: WorkerDied) -> None:
        """Forget ``worker``, whose process has ended."""
        client = self._serving.get(worker.name) or self._joining.get(worker.name)
        if client is not None:
            await self.lose(WorkerUnavailable(client, death))

    async def lose(self, gone: WorkerUnavailable) -> None:
        """Forget a lost episode worker: others make its groups, and replicas drop its calls."""
        # First: calls that wait for the worker end, and no new ones are made.
        gone.remote.leave(gone.why)
        name = gone.remote.name
        if self._serving.pop(name, None) is None and self._joining.pop(name, None) is None:
            return
        self._state.emit(EpisodeWorkerLost(time=now(), worker=name, reason=str(gone.why)))
        for replica in self._replicas.values():
            if self._tasks is not None:
                self._tasks.start(self._dropped_at(replica, name), among=self._started)
        await self.lost.send((name, gone.why))

    async def _serve(self, client: EpisodeWorkerClient) -> None:
        """Tell ``client`` the replicas, the route and the holds, then let it make groups."""
        try:
            await client.orders_done()
            held = False
            # Repeat until both agree: a hold may begin or end while the worker answers.
            while held != bool(self._holds):
                held = bool(self._holds)
                await client.call(lambda worker: worker.hold() if held else worker.go_on())  # noqa: B023 - awaited here
        except WorkerUnavailable as gone:
            await self.lose(gone)
        # No await since the holds were read: from this line on every new hold includes this episode worker.
        if self._joining.pop(client.name, None) is not None:
            self._serving[client.name] = client
            self._changed.changed()

    async def _dropped_at(self, replica: RolloutEngine, worker: str) -> None:
        """Tell ``replica`` to drop the calls of a lost episode worker. Errors are left to the replica's supervision."""
        with suppress(HeadwayError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await replica.drop(worker)

    def _lightest(self) -> EpisodeWorkerClient:
        return min(self._serving.values(), key=lambda worker: worker.load)

    def _order(self, what: str, call: Call) -> None:
        for worker in [*self._serving.values(), *self._joining.values()]:
            worker.order(what, call)

    async def _all(self, call: Call) -> None:
        """Call every serving episode worker. Lost ones are left out."""
        await concurrently(self._unless_gone(partial(worker.call, call)) for worker in list(self._serving.values()))

    async def _unless_gone(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except WorkerUnavailable as gone:
            await self.lose(gone)

    def _attend(self, worker: EpisodeWorkerClient) -> None:
        """Carry out the orders of ``worker`` and listen for failed replicas, until the worker is gone."""
        assert self._tasks is not None and self._on_failed is not None, "start comes first"
        for work in (worker.carry_out, partial(worker.report_failures, self._on_failed)):
            self._tasks.start(self._unless_gone(work), among=self._started)
