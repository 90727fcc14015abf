"""Clients of workers that may be lost: replicas, other receivers of the policy, episode workers.

    its process ended                       ┐
    it did not answer within the limit      ├─▶ `WorkerUnavailable` ─▶ ReplicaPool.lose ─▶ leave: its other calls end
    another call, or a watcher, found out   ┘

For example, a replica that hangs while it loads weights exceeds the limit of `ReceiverClient.activate`, and
`headway.pipeline.recovery.supervision` starts another one. No call to a lost worker stays open, so callers need no time
limit of their own. A call that is given up is cancelled without waiting for its end: the other side may have stopped
for ever. The clients of episode workers are in `headway.pipeline.episode_workers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.rollout import EngineStats, OnUpdate, Paused, RolloutEngine
from headway.data.interfaces.weights import PolicyReceiver, ReceiveReport
from headway.errors import RunError, UpdateFailed, WorkerDied
from headway.runtime.task_groups import failure_ignored

T = TypeVar("T")


class WorkerUnavailable(Exception):
    """Error of a call to a ``remote`` worker that died or does not answer. Another worker may replace it."""

    def __init__(self, remote: RemoteWorker, why: RunError) -> None:
        super().__init__(f"{remote.name}: {why}")
        self.remote = remote
        self.why = why


class RemoteWorker:
    """Client of a worker that may be lost: limits calls in time, and ends them all once the worker is given up."""

    def __init__(self, name: str, timeout_s: float, limit: Callable[[float], str]) -> None:
        """Create the client. ``timeout_s``: time limit of short calls, in seconds. ``limit`` puts a limit into
        words.
        """
        self.name = name
        self.why: RunError | None = None
        """Error for which the worker was given up; None while it is reachable."""
        self._timeout_s, self._limit = timeout_s, limit
        self._open: dict[asyncio.Timeout, None] = {}
        """Timeouts of the calls that are under way."""

    @property
    def is_gone(self) -> bool:
        return self.why is not None

    def leave(self, why: RunError) -> None:
        """Note that the worker is gone: calls under way, and later ones, raise `WorkerUnavailable`."""
        if self.why is None:
            self.why = why
            for call in self._open:
                # A timeout that has fired raises when it is rescheduled.
                if not call.expired():
                    call.reschedule(asyncio.get_running_loop().time())

    async def gone(self) -> NoReturn:
        """Wait until the worker is gone, then raise `WorkerUnavailable`."""
        await self._ask(asyncio.Event().wait())
        raise AssertionError("unreachable: nobody sets that event")

    async def _ask_soon(self, call: Coroutine[Any, Any, T], what: str) -> T:
        return await self._ask(call, within_s=self._timeout_s, what=what)

    async def _ask(self, call: Coroutine[Any, Any, T], *, within_s: float | None = None, what: str = "") -> T:
        if self.why is not None:
            call.close()  # else Python warns of a coroutine that was never awaited
            raise WorkerUnavailable(self, self.why)
        task = asyncio.ensure_future(call)
        try:
            # Shielded: a call that does not end when it is cancelled must not delay its caller.
            return await self._while_here(asyncio.shield(failure_ignored(task)), within_s, what)
        finally:
            task.cancel()

    async def _while_here(self, answer: Awaitable[T], within_s: float | None = None, what: str = "") -> T:
        try:
            async with asyncio.timeout(within_s) as limit:
                self._open[limit] = None
                return await answer
        except WorkerDied as death:
            raise WorkerUnavailable(self, death) from death
        except TimeoutError:
            # A timeout raised by the call's own work does not mean that the worker is silent.
            if not limit.expired():
                raise
            why = f"{self.name} was told to {what} and did not answer within {self._limit(within_s or 0.0)}"
            # `leave` also ends open calls through their timeouts: then its reason is the right one.
            raise WorkerUnavailable(self, self.why or UpdateFailed(why)) from None
        finally:
            self._open.pop(limit, None)


class ReceiverClient(RemoteWorker):
    """Client of a `PolicyReceiver`."""

    def __init__(self, engine: PolicyReceiver, timeouts: Timeouts) -> None:
        super().__init__(engine.name, timeouts.answer_s, timeouts.update_limit)
        self._timeouts = timeouts
        self.copy = engine.copy
        self.version = 0
        """Version that the receiver serves."""
        self.receiver = engine

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Stage ``version``. Has no time limit here: the transfer as a whole has one."""
        return await self._ask(self.receiver.stage_weights(version))

    async def activate(self, version: int) -> float:
        load = self.receiver.activate(version)
        return await self._ask(load, within_s=self._timeouts.load_s, what=f"load version {version}")

    async def probe(self) -> NDArray[np.float32] | None:
        probe = self.receiver.probe()
        return await self._ask(probe, within_s=self._timeouts.probe_s, what="compute the log-probs of the probe")


def by_copy(receivers: Iterable[ReceiverClient]) -> dict[str, list[ReceiverClient]]:
    """Return copy -> the ``receivers`` that load from it."""
    found: dict[str, list[ReceiverClient]] = {}
    for receiver in receivers:
        found.setdefault(receiver.copy, []).append(receiver)
    return found


class Replica(ReceiverClient):
    """Client of a `RolloutEngine`. Its calls raise `WorkerUnavailable` once the replica is gone."""

    def __init__(self, engine: RolloutEngine, timeouts: Timeouts) -> None:
        super().__init__(engine, timeouts)
        self.engine = engine

    async def pause(self, policy: OnUpdate) -> Paused:
        """Pause the engine by ``policy``. With `OnUpdate.DRAIN` this takes as long as the longest answer."""
        call = self.engine.pause(policy)
        return await (self._ask(call) if policy is OnUpdate.DRAIN else self._ask_soon(call, f"stop ({policy})"))

    async def resume(self) -> None:
        await self._ask_soon(self.engine.resume(), "go on")

    async def abort_older_than(self, version: int) -> None:
        await self._ask(self.engine.abort_older_than(version))

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._ask(self.engine.sleep(keep_weights=keep_weights))

    async def wake(self) -> None:
        await self._ask(self.engine.wake())

    async def stats(self) -> EngineStats:
        """Return the engine's statistics. The engine answers between two steps, so one that hangs in a step does not
        answer.
        """
        return await self._ask_soon(self.engine.stats(), "say what it does")
