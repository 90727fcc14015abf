"""Pauses of replicas: for new weights, and for a trainer that shares their devices.

    halt(replica, why):  wait for its validation ▶ [finish episodes] ▶ no new requests to it ▶ pause(policy)
    release(replica, why):  deferred check ▶ resume ▶ new requests to it; all of it once no other reason is left

``drain`` lets what was submitted finish, ``interrupt`` and ``keep`` cut it; the tokens so far stay.
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
    """Pause of one replica, which may have several reasons."""

    by: list[str] = field(default_factory=list)
    """Reasons for the halt; the replica resumes when none is left."""
    stopped: float | None = None
    """Time on the event clock from which on the replica decoded nothing; None before that."""
    interrupted: int = 0
    stall_s: float = 0.0
    """Seconds from the end of the pause to the end of resume, in which nothing decoded; set by a load."""
    validation_s: float = 0.0
    """Seconds for which the halt waited for the replica's validation."""
    check: Callable[[], Awaitable[object]] | None = None
    """Check that must pass before the replica resumes; None for no check."""


class PauseController:
    """Controller of the pauses of a run's replicas. `ReplicaPool` tells it which replicas serve."""

    def __init__(self, config: Config, state: RunState, episode_workers: EpisodeWorkers) -> None:
        """``episode_workers`` hear which replicas take new calls."""
        self.policy = OnUpdate(config.async_training.on_update)
        self.episode_workers = episode_workers
        drains = self.policy is OnUpdate.DRAIN and config.async_training.drain == "episode"
        self._by_episodes = drains and config.agent.has_program
        """True where a drain finishes all episodes of the groups that were started, whose next turns need the replica,
        before it pauses that."""
        self.gate = asyncio.Event()
        """Event that is set while a serving replica is not halted, or none serves."""
        self.gate.set()
        self._state = state
        self._halts: dict[str, ReplicaPause] = {}
        self._serving: dict[str, None] = {}
        self._available: dict[str, None] = {}
        """Names of the serving replicas that are not halted."""
        self._turns: dict[str, asyncio.Lock] = {}
        self._still: set[str] = set()
        """Names of replicas that resume, or that the end of the run has told to stop."""
        self._holding: set[str] = set()
        """Names of the replicas for whose halt episode workers start no group."""

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
        """Tell whether ``replica`` has stopped decoding; False while it drains."""
        halt = self._halts.get(replica)
        return replica in self._still or (halt is not None and halt.stopped is not None)

    async def end(self, replica: Replica) -> None:
        """Interrupt ``replica`` for the rest of the run. Raises `WorkerUnavailable`."""
        self._still.add(replica.name)
        await replica.pause(OnUpdate.INTERRUPT)

    async def halt(self, replica: Replica, why: str) -> ReplicaPause:
        """Halt ``replica`` because of ``why``; return its pause once it stands still. Raises `WorkerUnavailable`."""
        # One at a time: a second reason joins the halt that is there, and the engine is paused once.
        async with self._turns.setdefault(replica.name, asyncio.Lock()):
            if (halted := self._halts.get(replica.name)) is not None:
                halted.by.append(why)
                return ReplicaPause([why], stopped=now())  # its own: it waited for nothing, and cut nothing
            asked = now()
            validated = partial(self._state.changed.until, lambda: replica.name not in self._state.validating)
            await validated()
            # Not before that wait: training generation goes on beside a validation, refills included.
            if self._by_episodes:
                await self._finish_episodes(replica)
                await validated()  # another one may have begun meanwhile
            halt = self._halts[replica.name] = ReplicaPause([why], validation_s=now() - asked)
            # Before it is paused: a call that is sent to it meanwhile would wait there for the whole update.
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
        """Withdraw the reason ``why``; ``replica`` resumes if no other reason is left. Raises `WorkerUnavailable`."""
        halt = self._halts[replica.name]
        if halt.by == [why] and halt.check is not None:
            check, halt.check = halt.check, None
            await check()  # halted as before: whoever wants it halted meanwhile is heard below
        halt.by.remove(why)
        if halt.by:
            return
        del self._halts[replica.name]  # before it resumes: a halt that comes meanwhile is a new one
        self._still.add(replica.name)  # else the monitor would take the time until it has resumed for silence
        try:
            await replica.resume()
            if replica.name in self._serving and replica.name not in self._halts:  # lost, or halted again, meanwhile
                self._available[replica.name] = None
                self._set_gate()
        finally:
            self._still.discard(replica.name)
            self._let_go_on(replica.name)  # not before the replica takes calls: the held groups spread over all
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
        """Wait until all episodes of the groups that were started are over; a stop waits for no user's code."""
        if replica.name not in self._serving or self._state.stopping:
            return  # it makes no episodes yet, or no more; or nobody waits for them
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
        """Let episode workers start groups again, as far as ``replica`` is concerned, if it held them back."""
        if replica in self._holding:
            self._holding.discard(replica)
            self.episode_workers.go_on()

    def defer(self, replica: Replica, why: str, check: Callable[[], Awaitable[object]] | None) -> bool:
        """Have ``check`` run before ``replica`` resumes, where it is halted for another reason beside ``why``;
        `release` raises what it raises. Returns False where ``why`` is the only one.
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
        # Where every one is halted, calls can wait inside them.
        self.episode_workers.route(tuple(self._available or self._serving), halted=not self._available)
