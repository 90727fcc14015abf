"""The part of `RolloutEngine` that every engine shares: the core runs on its own thread and answers the calls there.

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
"""Function of the core. Its result may be awaitable if the core's thread runs an event loop."""


@dataclass(slots=True, eq=False)
class ClientInbox:
    """Inbox of one client: batches of its finished calls, or the error with which the engine ended.

    It is made and read on the client's event loop, ``loop``, and filled from any thread.
    """

    client: str
    loop: asyncio.AbstractEventLoop
    batches: asyncio.Queue[Sequence[Completion] | HeadwayError] = field(default_factory=asyncio.Queue)
    is_read: bool = False
    """True while an iterator of `finished` reads it."""

    def __str__(self) -> str:
        return self.client

    def put(self, batch: Sequence[Completion] | HeadwayError) -> None:
        """Add a batch. Does nothing if the client's loop is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.batches.put_nowait, batch)

    async def next(self) -> Sequence[Completion]:
        """Return all calls finished by now; wait for at least one. After the last, raises the engine's final error."""
        done: list[Completion] = []
        while not done or not self.batches.empty():
            batch = await self.batches.get()
            if isinstance(batch, HeadwayError):
                if not done:
                    raise batch
                self.batches.put_nowait(batch)  # an error is the last item in the inbox: kept for the next read
                break
            done += batch
        return done


class EngineBase(ABC):
    """Passes the calls of `RolloutEngine` to a core on its own thread, whose methods have the same names.

    The core identifies a client by its inbox: a client that comes back under the same name is a new one.

    ``_updates`` receives versions; it is None in an engine without a weight transport.
    """

    capabilities: Capabilities

    def __init__(self, name: str, slots: int, close_s: float) -> None:
        """Set up. ``close_s``: most seconds to wait for the core's thread to end."""
        self.name = self.copy = name
        self.slots = slots
        self._close_s = close_s
        self._closing = False
        self._updates: WeightUpdates | None = None
        self._inboxes: dict[str, ClientInbox] = {}
        """Client -> inbox, from the client's first call until it leaves."""
        self._dropped: set[str] = set()

    @abstractmethod
    def _run(self, work: Work) -> Future[Any]:
        """Run ``work`` on the core's thread. Raises the engine's final error if it has ended."""

    def _check_open(self) -> None:
        """Raise the engine's final error if it has ended."""
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
        """Return the result of ``work``, which runs to its end even if the caller is cancelled."""
        result: T = await outcome(self._run(work))
        return result

    # ------------------------------------------------------------------------------------- calls

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Accept all of ``calls`` together, or none.

        Raises `DataError` for a context that does not fit, invalid parameters, or a call number that is in use.
        """
        inbox = self._inbox(client)
        await self._ask(lambda core: core.submit(inbox, calls))

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        """Yield the finished calls of ``client``, in batches. Closing the iterator drops the client's other calls.

        Raises `RunError` if another iterator of this client is open: each batch is delivered once.
        """
        inbox = self._inbox(client)
        if inbox.is_read:
            raise RunError(f"rollout engine {self.name}: finished({client!r}) is iterated over already")
        inbox.is_read = True
        try:
            await self.submit(client, ())  # no calls: only raises if the engine has ended
            while True:
                yield await inbox.next()
        finally:
            with suppress(HeadwayError):  # an engine that has ended has nothing to drop
                self._run(lambda core: core.forget(inbox))
            self._inboxes.pop(client, None)

    async def drop(self, client: str) -> None:
        """Drop all calls of a client that is gone, and end its `finished`. Later calls of it are refused."""
        self._dropped.add(client)  # first, so that its calls are refused from now on
        if (inbox := self._inboxes.pop(client, None)) is not None:
            inbox.batches.put_nowait(ClientGone(f"rollout engine {self.name}: {client!r} is gone"))
            await self._ask(lambda core: core.forget(inbox))

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` with the tokens they have; unknown numbers are ignored."""
        inbox = self._inboxes.get(client)
        await self._ask(lambda core: core.abort(inbox, numbers))

    async def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls that have a token of a version older than ``version``."""
        await self._ask(lambda core: core.abort_older_than(version))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Free the contexts kept for further calls of these episodes."""
        await self._ask(lambda core: core.release(trajectories))

    # ------------------------------------------------------------------------------------- pauses and weights

    async def pause(self, policy: OnUpdate) -> Paused:
        """Pause under ``policy``. Returns when nothing decodes any more; soon if the engine is paused already."""
        return await self._ask(lambda core: core.pause(policy))

    async def resume(self) -> None:
        """Resume decoding. Raises `RunError` while asleep, and while no complete version is active."""
        await self._ask(lambda core: core.resume())

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive ``version``. Raises `UpdateFailed` if that fails, or while another version is received or loaded.

        With a back buffer the engine decodes meanwhile; after an error it serves the old version, and none is staged.
        Without one it has to be paused or asleep; after an error half-way it serves nothing until the next version.
        """
        updates = self._transport(f"stage version {version}")
        self._check_open()
        if self.capabilities.double_buffered:
            filling = updates.start(version)
        else:
            # On the core's thread, so that decoding cannot resume between the check and the write.
            filling = await self._ask(lambda core: core.start_writing(version, updates.start))
        with boundary(f"rollout engine {self.name} receiving version {version}", UpdateFailed):
            return await outcome(filling)

    async def activate(self, version: int) -> float:
        """Serve the staged ``version`` from the next step on. Returns the seconds taken. Raises `UpdateFailed`.

        If a version is loaded only in part, nothing is served until another version is activated.
        """
        load = partial(self._transport(f"activate version {version}").load, version)
        return await self._ask(lambda core: core.activate(version, load))

    async def probe(self) -> NDArray[np.float32] | None:
        """Return the probe's log-probs [8] (see `headway.models.logprobs`), computed by the same code as sampling.

        None if the longest context is too short for the probe. Raises `RunError` while no complete version is served.
        """
        return await self._ask(lambda core: core.probe())

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache and, if `capabilities` says so, the weights' memory on the device.

        The weights are kept in host memory. Without ``keep_weights`` they are lost until the next version is activated.
        Raises `RunError` unless paused, while weights are written in place, and on an engine that cannot sleep.
        """
        await self._ask(lambda core: core.sleep(keep_weights=keep_weights))

    async def wake(self) -> None:
        """Allocate the memory again, and restore the weights that were kept; needed before `resume`."""
        await self._ask(lambda core: core.wake())

    async def stats(self) -> EngineStats:
        """Return the activity since the last call of this method."""
        return await self._ask(lambda core: core.stats())

    def _transport(self, doing: str) -> WeightUpdates:
        if self._updates is None:
            raise RunError(f"rollout engine {self.name} was made without a weight transport; it cannot {doing}")
        return self._updates

    # ------------------------------------------------------------------------------------- on the core's thread

    def _tell_clients(self, error: HeadwayError) -> None:
        """Send the engine's final error to all clients."""
        for inbox in self._inboxes.copy().values():  # clients come and leave on other threads
            inbox.put(error)

    def _inbox(self, client: str) -> ClientInbox:
        if client in self._dropped:
            raise ClientGone(f"rollout engine {self.name}: {client!r} was given up; another one has its place")
        if client not in self._inboxes:
            self._inboxes[client] = ClientInbox(client, asyncio.get_running_loop())
        return self._inboxes[client]
