"""The part of `RolloutEngine` that every engine shares: its calls are answered on another thread, where its core lives.

any event loop                                   the core's thread
──────────────                                   ─────────────────
submit, pause, activate … ──work──▶ _run ──────▶ work(core)
answers ◀────────────────────────────────────────┘
finished ◀── ClientInbox of each client ◀───────── deliver
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.rollout import Capabilities, Completion, EngineStats, GenerateRequest, OnUpdate, Paused
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import TrajectoryId
from headway.engines.weights.served_weights import WeightUpdates, outcome
from headway.errors import ClientGone, HeadwayError, RunError, StallError, UpdateFailed, boundary

T = TypeVar("T")

Work = Callable[[Any], Any]
"""Work that is given the core; its result may be awaitable where the core's thread runs an event loop."""


@dataclass(slots=True, eq=False)
class ClientInbox:
    """The inbox of one client: batches of its finished calls, or the engine's end.

    Made and read on the client's event loop, ``loop``; filled from any thread.
    """

    client: str
    loop: asyncio.AbstractEventLoop
    batches: asyncio.Queue[Sequence[Completion] | HeadwayError] = field(default_factory=asyncio.Queue)
    is_read: bool = False
    """True while a `finished` iterates over it."""

    def __str__(self) -> str:
        return self.client

    def put(self, batch: Sequence[Completion] | HeadwayError) -> None:
        """Add a batch. Does nothing if the client's loop is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.batches.put_nowait, batch)

    async def next(self) -> Sequence[Completion]:
        """All calls that are done by now, one at least. Raises what the engine ended with, once they are returned."""
        done: list[Completion] = []
        while not done or not self.batches.empty():
            batch = await self.batches.get()
            if isinstance(batch, HeadwayError):
                if not done:
                    raise batch
                self.batches.put_nowait(batch)  # the last thing in the inbox, for the next time
                break
            done += batch
        return done


class EngineBase(ABC):
    """Calls of `RolloutEngine`, as work for a core on its own thread. The core's methods have the calls' names.

    The core knows a client by its inbox: one that comes again under its name is another.

    A version arrives by ``_updates``; an engine without a weight transport has none.
    """

    capabilities: Capabilities

    def __init__(self, name: str, slots: int, close_s: float) -> None:
        """``close_s``: longest wait for the core's thread to end."""
        self.name = self.copy = name
        self.slots = slots
        self._close_s = close_s
        self._closing = False
        self._updates: WeightUpdates | None = None
        self._inboxes: dict[str, ClientInbox] = {}
        """Inboxes by client, from its first call until it leaves."""
        self._dropped: set[str] = set()

    @abstractmethod
    def _run(self, work: Work) -> Future[Any]:
        """Have ``work`` run on the core's thread. Raises what the engine has ended with."""

    def _check_open(self) -> None:
        """Raise what the engine has ended with, if it has."""
        if self._closing:
            raise self._closed_error()

    async def _join(self, thread: threading.Thread) -> None:
        """Wait for the core's thread to end. Raises `StallError` after the time limit."""
        await asyncio.to_thread(thread.join, self._close_s)
        if thread.is_alive():
            raise StallError(f"close() waited {self._close_s:.0f} s for rollout engine {self.name}'s thread to end")

    def _closed_error(self) -> RunError:
        return RunError(f"rollout engine {self.name} is closed")

    async def _ask(self, work: Callable[[Any], T]) -> T:
        """Return the result of ``work``. It runs to its end also if the caller is cancelled."""
        result: T = await outcome(self._run(work))
        return result

    # ------------------------------------------------------------------------------------- calls

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Take all of ``calls`` in one step, or none.

        Raises `DataError` for a context that does not fit, parameters that make no sense, or a number that is in use.
        """
        inbox = self._inbox(client)
        await self._ask(lambda core: core.submit(inbox, calls))

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        """Yield the finished calls of ``client``, in batches. Leaving it drops the client's other calls.

        Raises `RunError` where another iterator of this client is open: each batch comes once.
        """
        inbox = self._inbox(client)
        if inbox.is_read:
            raise RunError(f"rollout engine {self.name}: finished({client!r}) is iterated over already")
        inbox.is_read = True
        try:
            await self.submit(client, ())  # no calls: raises what the engine has ended with
            while True:
                yield await inbox.next()
        finally:
            with suppress(HeadwayError):  # an engine that has ended has nothing to drop
                self._run(lambda core: core.forget(inbox))
            self._inboxes.pop(client, None)

    async def drop(self, client: str) -> None:
        """Drop all calls of a client that is gone, and end its `finished`. Should it come back, it is refused."""
        self._dropped.add(client)  # first: what it asks for meanwhile is refused
        if (inbox := self._inboxes.pop(client, None)) is not None:
            inbox.batches.put_nowait(ClientGone(f"rollout engine {self.name}: {client!r} is gone"))
            await self._ask(lambda core: core.forget(inbox))

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are; unknown numbers are ignored."""
        inbox = self._inboxes.get(client)
        await self._ask(lambda core: core.abort(inbox, numbers))

    async def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls with a token of an older version."""
        await self._ask(lambda core: core.abort_older_than(version))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for further calls of these episodes."""
        await self._ask(lambda core: core.release(trajectories))

    # ------------------------------------------------------------------------------------- pauses and weights

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``; soon, if the engine is paused already."""
        return await self._ask(lambda core: core.pause(policy))

    async def resume(self) -> None:
        """Resume decoding. Raises `RunError` while asleep, and while no whole version is active."""
        await self._ask(lambda core: core.resume())

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive ``version``. Raises `UpdateFailed` if that fails, or while another version is received or loaded.

        With a back buffer the engine decodes meanwhile; after an error it serves the old version with nothing staged.
        Without one it has to be paused or asleep; after an error half-way it serves nothing until a version has come.
        """
        updates = self._transport(f"stage version {version}")
        self._check_open()
        if self.capabilities.double_buffered:
            filling = updates.start(version)
        else:
            # On the core's thread, so that nothing can resume between the check and the writing.
            filling = await self._ask(lambda core: core.start_writing(version, updates.start))
        with boundary(f"rollout engine {self.name} receiving version {version}", UpdateFailed):
            return await outcome(filling)

    async def activate(self, version: int) -> float:
        """Serve the staged ``version`` from the next step on. Returns the seconds taken. Raises `UpdateFailed`.

        A version that is only loaded in part leaves nothing that is served, until another one is activated.
        """
        load = partial(self._transport(f"activate version {version}").load, version)
        return await self._ask(lambda core: core.activate(version, load))

    async def probe(self) -> NDArray[np.float32] | None:
        """The log-probs [8] of `headway.models.logprobs` by the paths that sampling takes.

        None where a context is too short for them. Raises `RunError` while there is no whole version to compute with.
        """
        return await self._ask(lambda core: core.probe())

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache, and the device's memory of the weights, where `capabilities` says so.

        The weights are kept in host memory, where those of a CPU are anyway. Without ``keep_weights`` they are lost,
        and the next version that is activated brings them back. Raises `RunError` unless paused, while weights are
        written in place, and on an engine that cannot sleep.
        """
        await self._ask(lambda core: core.sleep(keep_weights=keep_weights))

    async def wake(self) -> None:
        """Take the memory again, and the weights that were kept; needed before `resume`."""
        await self._ask(lambda core: core.wake())

    async def stats(self) -> EngineStats:
        """Activity since the last call."""
        return await self._ask(lambda core: core.stats())

    def _transport(self, doing: str) -> WeightUpdates:
        if self._updates is None:
            raise RunError(f"rollout engine {self.name} was made without a weight transport; it cannot {doing}")
        return self._updates

    # ------------------------------------------------------------------------------------- on the core's thread

    def _tell_clients(self, error: HeadwayError) -> None:
        """Tell all clients what the engine has ended with."""
        for inbox in self._inboxes.copy().values():  # clients come and leave on other threads
            inbox.put(error)

    def _inbox(self, client: str) -> ClientInbox:
        if client in self._dropped:
            raise ClientGone(f"rollout engine {self.name}: {client!r} was given up; another one has its place")
        if client not in self._inboxes:
            self._inboxes[client] = ClientInbox(client, asyncio.get_running_loop())
        return self._inboxes[client]
