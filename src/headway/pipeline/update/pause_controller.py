"""Pauses of replicas: for new weights, and for a trainer that shares their devices.

    halt(replica, why):  wait for its validation ▶ [finish episodes] ▶ no new requests to it ▶ pause(policy)
    release(replica, why):  deferred check ▶ resume ▶ new requests to it; all of it once no other reason is left

``drain`` lets submitted calls finish; ``interrupt`` and ``keep`` cut them, and keep the tokens so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from headway.config.schema import Config
from headway.data.interfaces.rollout import OnUpdate, RolloutEngine
from headway.events import ReplicaHalted
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.remote_workers import Replica, WorkerUnavailable


@dataclass(slots=True)
class ReplicaPause:
    """Pause of one replica, for one or more reasons."""

    by: list[str] = field(default_factory=list)
    """Reasons for the pause. The replica resumes when none is left."""
    stopped: float | None = None
    """Time on the event clock at which the replica stopped decoding; None while it still decodes."""
    interrupted: int = 0
    stall_s: float = 0.0
    """Seconds without decoding, from the end of the engine's pause call to the end of resume; set by a load."""
    validation_s: float = 0.0
    """Seconds for which the halt waited for the replica's validation."""
    check: Callable[[], Awaitable[object]] | None = None
    """Coroutine function that must succeed before the replica resumes; None for no check."""


class PauseController:
    """Controller of the pauses of a run's replicas. `ReplicaPool` tells it which replicas serve."""

    def __init__(self, config: Config, state: RunState, episode_workers: EpisodeWorkers) -> None:
        """Create the controller. ``episode_workers`` are told which replicas take new calls."""
        self.policy = OnUpdate(config.async_training.on_update)
        self.episode_workers = episode_workers
        drains = self.policy is OnUpdate.DRAIN and config.async_training.drain == "episode"
        self._by_episodes = drains and config.agent.has_program
        """True if a drain finishes all episodes of started groups before it pauses a replica, since their next turns
        need it."""
        self.gate = asyncio.Event()
        """Event that is set while some serving replica is not halted, or no replica serves."""
        self.gate.set()
        self._state = state
        self._halts: dict[str, ReplicaPause] = {}
        self._serving: dict[str, None] = {}
        self._available: dict[str, None] = {}
        """Names of the serving replicas that are not halted."""
        self._turns: dict[str, asyncio.Lock] = {}
        self._still: set[str] = set()
        """Names of replicas that are resuming, or were stopped at the end of the run."""
        self._holding: set[str] = set()
        """Names of the replicas whose halt keeps episode workers from starting groups."""

    def joined(self, replica: RolloutEngine) -> None:
        self._serving[replica.name] = None
        if replica.name not in self._halts:
            self._available[replica.name] = None
        self._set_gate()

    def left(self, replica: str) -> None:
        self._let_go_on(replica)
        del self._serving[replica]
        self._available.pop(replica, None)
        self._turns.pop(replica, None)
        self._set_gate()

    def stands(self, replica: str) -> bool:
        """Return True if ``replica`` has stopped decoding, False while it drains."""
        halt = self._halts.get(replica)
        return replica in self._still or (halt is not None and halt.stopped is not None)

    async def end(self, replica: Replica) -> None:
        """Interrupt ``replica`` for the rest of the run. Raises `WorkerUnavailable`."""
        self._still.add(replica.name)
        await replica.pause(OnUpdate.INTERRUPT)

    async def halt(self, replica: Replica, why: str) -> ReplicaPause:
        """Halt ``replica`` for the reason ``why``. Returns its pause once it has stopped. Raises
        `WorkerUnavailable`.
        """
        # One at a time: a second reason joins the existing halt, and the engine is paused once.
        async with self._turns.setdefault(replica.name, asyncio.Lock()):
            if (halted := self._halts.get(replica.name)) is not None:
                halted.by.append(why)
                return ReplicaPause([why], stopped=now())  # separate: this reason waited for nothing and cut nothing
            asked = now()
            validated = partial(self._state.changed.until, lambda: replica.name not in self._state.validating)
            await validated()
            # Not before that wait: generation for training goes on beside a validation, refills included.
            if self._by_episodes:
                await self._finish_episodes(replica)
                await validated()  # another one may have begun meanwhile
            halt = self._halts[replica.name] = ReplicaPause([why], validation_s=now() - asked)
            # Before the pause: a call sent to the replica meanwhile would wait there for the whole update.
            self._available.pop(replica.name, None)
            self._set_gate()
            try:
                paused = await replica.pause(self.policy)
            except WorkerUnavailable:
                del self._halts[replica.name]
                self._let_go_on(replica.name)
                raise
            halt.stopped, halt.interrupted = now(), paused.interrupted
            return halt

    async def release(self, replica: Replica, why: str) -> None:
        """Withdraw the reason ``why``. ``replica`` resumes if no reason is left. Raises `WorkerUnavailable`."""
        halt = self._halts[replica.name]
        if halt.by == [why] and halt.check is not None:
            check, halt.check = halt.check, None
            await check()  # still halted: a reason added meanwhile is respected below
        halt.by.remove(why)
        if halt.by:
            return
        del self._halts[replica.name]  # before it resumes: a halt meanwhile is a new one
        self._still.add(replica.name)  # otherwise the monitor would take the time of resuming for silence
        try:
            await replica.resume()
            if replica.name in self._serving and replica.name not in self._halts:  # lost, or halted again, meanwhile
                self._available[replica.name] = None
                self._set_gate()
        finally:
            self._still.discard(replica.name)
            self._let_go_on(replica.name)  # after the replica takes calls: held groups spread over all replicas
        stopped = halt.stopped if halt.stopped is not None else now()
        self._state.emit(
            ReplicaHalted(
                time=now(),
                replica=replica.name,
                reason=why,
                span=(stopped, now()),
                interrupted=halt.interrupted,
            )
        )

    async def _finish_episodes(self, replica: Replica) -> None:
        """Wait until all episodes of started groups are over. Returns early at a stop, which does not wait for user
        code.
        """
        if replica.name not in self._serving or self._state.stopping:
            return  # it has no episodes, or the run is stopping
        self._holding.add(replica.name)
        holding = asyncio.ensure_future(self.episode_workers.hold())
        holding.add_done_callback(lambda _: self._state.changed.changed())
        try:
            await self._state.changed.until(lambda: holding.done() or self._state.stopping)
        finally:
            holding.cancel()
        if holding.done():
            await holding  # it is done: this raises its failure, if it has one

    def _let_go_on(self, replica: str) -> None:
        """End the hold of ``replica`` on the episode workers' start of groups, if it has one."""
        if replica in self._holding:
            self._holding.discard(replica)
            self.episode_workers.go_on()

    def defer(self, replica: Replica, why: str, check: Callable[[], Awaitable[object]] | None) -> bool:
        """Run ``check`` before ``replica`` resumes, if it is halted for another reason beside ``why``; `release` then
        raises the check's errors. Returns False if ``why`` is the only reason.
        """
        halt = self._halts[replica.name]
        if halt.by == [why]:
            return False
        halt.check = check
        return True

    def _set_gate(self) -> None:
        if self._available or not self._serving:
            self.gate.set()
        else:
            self.gate.clear()
        # If all replicas are halted, calls can wait inside them.
        self.episode_workers.route(tuple(self._available or self._serving), halted=not self._available)
