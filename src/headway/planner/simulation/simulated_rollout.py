"""A replica without computation: `RolloutEngine` over a cost model, on the event loop's clock.

submit, abort, pause, resume ─▶ DecodingReplica ─▶ an outbox for each client ─▶ finished
stage_weights ─▶ the transport's end           activate, sleep, wake: only while the replica stands still
die ─▶ every method's caller, those that wait included
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from headway.data.interfaces.rollout import Capabilities, Completion, EngineStats, GenerateRequest, OnUpdate, Paused
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import TrajectoryId
from headway.errors import ClientGone, RunError, UpdateFailed
from headway.planner.profiles.costs import Contention
from headway.planner.profiles.job_profile import RolloutProfile
from headway.planner.profiles.lengths import LengthSampler
from headway.planner.simulation.simulated_replica import DecodingReplica

T = TypeVar("T")

Receive = Callable[[str, int], Awaitable[ReceiveReport]]
"""(replica's name, version) → the transport's report, once that version is staged."""

Outbox = asyncio.Queue[Sequence[Completion] | BaseException]
"""Queue from which a client takes the calls that were finished at one moment, or the error that ended the engine."""


@dataclass(eq=False, repr=False)
class SimulatedRollout:
    """One replica. The finished calls' ``tokens`` are None."""

    capabilities = Capabilities(on_update=frozenset(OnUpdate), reproducible=True, sleep=True)

    name: str
    """Name of the replica, in results and messages."""
    _: KW_ONLY
    profile: RolloutProfile
    """What decoding and prefilling cost, slots and cache."""
    lengths: LengthSampler
    """Tokens of each answer; what reaches ``sampling.max_tokens`` is cut there (`FinishReason.LENGTH`)."""
    receive: Receive
    """The transport's end."""
    load_s: float
    """Seconds that `activate` takes."""
    sleep_s: float = 0.0
    wake_s: float = 0.0
    delivery_s: float = 0.0
    """Seconds that a finished call is under way; its slot is free meanwhile."""
    resume_s: float = 0.0
    """Seconds until `resume` returns after a load; decoding does not wait for it."""
    contention: Contention | None = None
    """Contention with the trainer, where it slows this replica down."""
    _loaded: bool = False
    """True where a version was loaded since the last `resume`."""
    _staged: int | None = None
    _asleep: bool = False
    _whole: bool = True
    """True while the engine holds a complete version."""
    _busy_with: str | None = None
    """``load``, ``sleep`` or ``wake`` while it is under way."""
    _died: BaseException | None = None
    _outboxes: dict[str, Outbox] = field(default_factory=dict)
    """Outboxes of the clients, from the first call or `finished` to the end of that."""
    _read: set[str] = field(default_factory=set)
    """Clients whose outbox is read."""
    _dropped: set[str] = field(default_factory=set)
    _waiting: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    """Futures that methods under way wait for, but for finished calls and the end of a drain."""

    def __post_init__(self) -> None:
        self.copy, self.slots = self.name, self.profile.slots
        self._replica = DecodingReplica(self.name, self.profile, self.lengths, self._deliver, self.contention)

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        return self._replica.version

    # ---------------------------------------------------------------- calls

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Take all of ``calls`` in one step. Raises `DataError` for a number that an open call of the client has."""
        self._check_alive(client)
        self._outboxes.setdefault(client, asyncio.Queue())
        self._replica.submit(client, calls)

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        """Yield the calls of ``client`` that were finished at one moment; leaving drops the others.

        Raises `RunError` where somebody iterates over them already: each batch comes once.
        """
        self._check_alive(client)
        if client in self._read:
            raise RunError(f"rollout engine {self.name}: finished({client!r}) is iterated over already")
        self._read.add(client)
        outbox = self._outboxes.setdefault(client, asyncio.Queue())
        try:
            while True:
                batch = await outbox.get()
                if isinstance(batch, BaseException):
                    raise batch
                if self.delivery_s:
                    await asyncio.sleep(batch[0].finished + self.delivery_s - asyncio.get_running_loop().time())
                yield batch
        finally:
            del self._outboxes[client]
            self._read.remove(client)
            if self._died is None:
                self._replica.drop(client)

    def _deliver(self, client: str, batch: Sequence[Completion]) -> None:
        self._outboxes[client].put_nowait(batch)

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are; unknown numbers are ignored."""
        self._check_alive()
        self._replica.abort(client, numbers)

    async def drop(self, client: str) -> None:
        """Drop all calls of a client that is gone, and end its `finished`. Should it come back, it is refused."""
        self._check_alive()
        self._dropped.add(client)
        if client in self._read:
            self._outboxes[client].put_nowait(ClientGone(f"rollout engine {self.name}: {client!r} is gone"))
        else:
            self._outboxes.pop(client, None)
        self._replica.drop(client)

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for further calls of these episodes."""
        self._check_alive()
        self._replica.release(trajectories)

    async def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls with a token of an older version."""
        self._check_alive()
        self._replica.abort_older_than(version)

    async def stats(self) -> EngineStats:
        """Activity since the last call."""
        self._check_alive()
        return self._replica.stats()

    # ---------------------------------------------------------------- pause and update

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more. A later pause may be stricter than the one in force, never weaker."""
        self._check_alive()
        interrupted = self._replica.pause(policy)
        # The event of this pause: `resume` sets it, and makes another one for the next.
        stopped = self._replica.stopped
        await stopped.wait()
        self._check_alive()
        if stopped is not self._replica.stopped:
            raise RunError(f"rollout engine {self.name} was resumed before it had drained; nothing may be loaded now")
        return Paused(interrupted)

    async def resume(self) -> None:
        """Go on: first what was cut, in its slots. Raises `RunError` unless paused, while asleep and while loading."""
        self._check_alive()
        if not self._replica.paused:
            raise RunError(f"rollout engine {self.name} was told to resume, but it is not paused; call pause() first")
        if self._asleep or self._busy_with:
            state = f"busy with {self._busy_with}; wait for that" if self._busy_with else "asleep; call wake() first"
            raise RunError(f"rollout engine {self.name} was told to resume while {state}")
        if not self._whole:
            raise RunError(f"rollout engine {self.name} was told to resume without weights; it gave them up to sleep")
        self._replica.resume()
        if self._loaded:
            self._loaded = False
            await self._while_alive(asyncio.sleep(self.resume_s))

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive ``version`` from the transport during decoding."""
        self._check_alive()
        self._staged = None  # all or nothing: also not what was there before
        report = await self._while_alive(self.receive(self.name, version))
        self._staged = version
        return report

    async def activate(self, version: int) -> float:
        """Swap the staged ``version`` in. Raises `RunError` unless paused and still, `UpdateFailed` if not staged."""
        self._check_alive()
        if self._staged != version:
            raise UpdateFailed(
                f"rollout engine {self.name} was told to load version {version}, but what is staged is "
                f"{'nothing' if self._staged is None else f'version {self._staged}'}; call stage_weights first"
            )
        with self._standing_still("load"):
            await self._while_alive(asyncio.sleep(self.load_s))
            self._replica.load(version)
            self._loaded = self._whole = True
            if self._staged == version:  # the next one may have arrived meanwhile
                self._staged = None
        return self.load_s

    async def probe(self) -> None:
        """Return None: a simulated replica has no weights to compute with."""

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache; what was cut is prefilled again. Raises `RunError` unless paused and still.

        Without ``keep_weights`` it cannot `resume` before it has loaded a version.
        """
        self._check_alive()
        if self._asleep:
            return
        with self._standing_still("sleep"):
            self._replica.free_cache()
            self._asleep = True
            # Before the wait: whoever gives the call up meanwhile still has an engine that sleeps.
            self._whole = keep_weights
            await self._while_alive(asyncio.sleep(self.sleep_s))

    async def wake(self) -> None:
        """Take the device back; still paused."""
        self._check_alive()
        if not self._asleep:
            return
        with self._standing_still("wake"):
            await self._while_alive(asyncio.sleep(self.wake_s))
            self._asleep = False

    @contextmanager
    def _standing_still(self, what: str) -> Iterator[None]:
        if not self._replica.stopped.is_set() or self._busy_with:
            state = f"is busy with {self._busy_with}" if self._busy_with else "is not paused, or still decodes"
            raise RunError(f"rollout engine {self.name} was told to {what}, but it {state}; pause it and wait for that")
        self._busy_with = what
        try:
            yield
        finally:
            self._busy_with = None

    # ---------------------------------------------------------------- the end

    def die(self, error: BaseException) -> None:
        """Make every method raise ``error`` from now on, those under way included."""
        if self._died is None:
            self._died = error
            self._replica.pause(OnUpdate.INTERRUPT)
            for outbox in self._outboxes.values():
                outbox.put_nowait(error)
            # `cancel` only schedules: each leaves the dictionary in a later turn of the loop.
            for waiting in self._waiting:
                waiting.cancel()

    async def close(self) -> None:
        """Methods that are still waiting, and later ones, raise `RunError`. Closing twice is harmless."""
        self.die(RunError(f"rollout engine {self.name} is closed"))

    def _check_alive(self, client: str | None = None) -> None:
        if self._died is not None:
            raise self._died
        if client in self._dropped:
            raise ClientGone(f"rollout engine {self.name}: {client!r} was given up; another one has its place")

    async def _while_alive(self, awaitable: Awaitable[T]) -> T:
        """The result of ``awaitable``, or the error that the engine died of meanwhile."""
        waiting = asyncio.ensure_future(awaitable)
        self._waiting[waiting] = None
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # it was the future that was cancelled, by `die`
                self._check_alive()
            raise
        finally:
            del self._waiting[waiting]
