"""Restarts of ranks within a run: lost ranks of a role are started again and brought back to their state.

    a rank's process ends, nothing moves in an open call, or they are given up ─▶ ranks.lost: calls under way are
    cancelled ─▶ all ranks of the role start again, with the initial model ─▶ they are brought back:
        actor    loads the newest checkpoint, if there is one; batches since then are redone (`redo_actor`)
                 (on shared devices with new replicas, which get the present version while it holds that)
        critic   the same, from the values and returns that the batches have (`redo_critic`)
        logp     gets the version that a batch waits for, from the trainer (`ParamUpdate.serve_again`)
        ref      has what it needs
    ─▶ ranks.restarted: what was cancelled is done again

Batches are redone with the same groups and step contexts: neither the ledger nor the version changes, and no step is
reported twice. Replicas and episodes go on meanwhile. The same number of ranks computes the same results, so with equal
batches a run ends with the same weights as one without losses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from math import isfinite
from typing import Any, NoReturn, TypeVar

from headway.config.sizing.placement import ACTOR, CRITIC
from headway.config.sizing.timeouts import END_KNOWN_S, HEARTBEAT_S, file_stall_s
from headway.data.interfaces.rollout import RolloutEngine
from headway.errors import HeadwayError, RunError, StallError, TokensLost
from headway.events import RanksLost, RanksRestarted
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager
from headway.pipeline.recovery.liveness import ask
from headway.pipeline.recovery.supervision import Restarts
from headway.pipeline.stage import Signal
from headway.runtime.progress import Living
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RestartableRanks:
    """Functions that watch and restart the ranks of one role."""

    ranks: Callable[[], Sequence[Living]]
    """Function that returns the current ranks."""
    watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    """Coroutine function that raises `WorkerDied` when one of the current ranks ends or is given up."""
    restart: Callable[[], Coroutine[Any, Any, None]]
    """Coroutine function that ends all ranks and starts as many or fewer new ones, with the initial model, within
    `Timeouts.start_s`. Raises errors of `headway.errors`."""
    replicas: Callable[[], Sequence[RolloutEngine]] | None = None
    """Function that returns the replicas in the processes of the current ranks, which end and start with these; None if
    replicas have processes of their own."""


@dataclass(eq=False)
class RankRestarts:
    """Restarts of one role's ranks.

    consumes        the deaths that `RestartableRanks.watch` tells of; heartbeats of the ranks while a call is open;
                    what `give_up` says
    waits for       a rank to end; on a loss for cancelled calls to end, and for new ranks
    is unblocked by the operating system or the cluster, which tell of a process's end; time
    produces        ranks that stand where the lost ones stood; the end of the run when restarts are used up

    Example:
        >>> async def calls_a_reference(state):
        ...     restarts = RankRestarts(state, "ref", None, Restarts(3, Timeouts.of(Config())))
        ...     return await restarts.surviving(lambda: asyncio.sleep(0, "log-probs"))
        >>> from headway.config.schema import Config
        >>> from headway.config.sizing.timeouts import Timeouts
        >>> asyncio.run(calls_a_reference(None))  # these ranks cannot be started again: the call is made as it is
        'log-probs'
    """

    state: RunState
    role: str
    ranks: RestartableRanks | None
    """Ranks of the role; None if they cannot be restarted: their loss then ends the run."""
    restarts: Restarts
    _: KW_ONLY
    on_lost: Callable[[RunError], object] = lambda loss: None
    """Function called at once with the error for which the ranks are given up."""
    bring_back: Callable[[], Coroutine[Any, Any, int]] | None = None
    """Coroutine function that brings new ranks from the initial model to the state of the lost ones. Returns the number
    of batches that it redid. None: nothing has to be done."""

    _lost: RunError | None = field(default=None, init=False)
    """Error for which the ranks were given up; None while the ranks are ready."""
    _given_up: RunError | None = field(default=None, init=False)
    """Error passed to `give_up`, until the restart begins; None otherwise."""
    _works: dict[asyncio.Task[Any], None] = field(default_factory=dict, init=False)
    _changed: Signal = field(default_factory=Signal, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)
    _asked: int = field(default=0, init=False)
    """Number of ranks at the start."""

    def start(self, tasks: Tasks) -> None:
        """Watch the ranks and restart them when they are lost, until `stop`."""
        if self.ranks is not None:
            self._asked = len(self.ranks.ranks())
            self._watching = tasks.start(self._attend(self.ranks))

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def give_up(self, why: RunError) -> None:
        """Restart the ranks, even if they live. Raises ``why`` if that is impossible."""
        if self.ranks is None:
            raise why
        if self._lost is None:
            self._given_up = why
            self._changed.changed()

    async def again(self, why: RunError) -> None:
        """Restart the ranks from the newest checkpoint, though they live. If they are lost already, wait until they are
        back.
        """
        self.give_up(why)
        await self._changed.until(lambda: self._given_up is None and self._lost is None)

    async def until_there(self) -> None:
        """Wait until the ranks are ready."""
        await self._changed.until(lambda: self._lost is None)

    async def surviving(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, which calls the ranks. It is repeated on new ranks if the ranks are lost."""
        if self.ranks is None:
            return await work()
        while True:
            await self.until_there()
            task = asyncio.ensure_future(work())  # its own task: `_recover` can cancel it without the caller
            self._works[task] = None
            self._changed.changed()
            try:
                return await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                # Otherwise `_recover` has cancelled the call but not its caller, which repeats it.
                if self._lost is None or (current is not None and current.cancelling()):
                    raise
            except HeadwayError:
                if not await self._was_lost():
                    raise
            finally:
                del self._works[task]
                self._changed.changed()

    async def _was_lost(self) -> bool:
        """Return True if the ranks are lost, after a failed call. It waits a little: a call may fail before the loss is
        known.
        """
        try:
            async with asyncio.timeout(END_KNOWN_S):
                await self._changed.until(lambda: self._lost is not None)
        except TimeoutError:
            return False
        return True

    async def _attend(self, ranks: RestartableRanks) -> None:
        while True:
            try:
                await concurrently([ranks.watch(), self._end_of_motion(ranks), self._end_by_others()])
            except RunError as loss:
                await self._recover(ranks, loss)

    async def _end_by_others(self) -> NoReturn:
        await self._changed.until(lambda: self._given_up is not None)
        assert self._given_up is not None
        raise self._given_up

    async def _end_of_motion(self, ranks: RestartableRanks) -> NoReturn:
        """Raise `StallError` when no rank moves while a call of them is open."""
        quiet_s = self.restarts.timeouts.trainer_quiet_s
        looks_s = min(HEARTBEAT_S, quiet_s / 4)
        while True:
            await self._changed.until(lambda: bool(self._works))
            await asyncio.sleep(looks_s)
            answers = await ask(ranks.ranks(), looks_s)
            # Ranks without work (`quiet_s` is infinite) do not hang: their open call may wait for the driver.
            works = any(beat is not None and isfinite(beat.quiet_s) for beat in answers.by_worker.values())
            if self._works and works and now() >= answers.deadline(quiet_s, file_stall_s):
                raise StallError(f"the ranks of {self.role} do not move: {answers}")

    async def _recover(self, ranks: RestartableRanks, loss: RunError) -> None:
        """Start new ranks and bring them to the state of the lost ones. Raises ``loss`` if that is impossible."""
        # `_lost` is set before calls are cancelled: `surviving` tells a loss from a cancellation by it.
        began, self._lost, self._given_up = now(), loss, None
        self.state.emit(RanksLost(time=began, role=self.role, reason=str(loss)))
        self.on_lost(loss)  # before works end: releases calls that wait for replicas in the same processes
        for work in self._works:
            work.cancel()
        self._changed.changed()
        # A call still under way could reach new ranks half-way.
        await self._changed.until(lambda: not self._works)
        redone: int | None = None
        while redone is None:
            if not self.restarts.left:
                raise type(loss)(f"{loss}. It is not started again: trainer.max_restarts is used up") from loss
            self.restarts.begin()  # before the attempt: a failed start counts, too
            try:
                await ranks.restart()
                redone = await failing_as_one(partial(self._back, ranks, self.bring_back)) if self.bring_back else 0
            except TokensLost as failure:  # another start would fail alike
                raise TokensLost(f"{loss}. What it was trained on cannot be redone: {failure}") from failure
            except RunError as failure:
                self.state.note(f"the ranks of {self.role} could not be brought back: {failure}")
                loss = failure
                self.on_lost(loss)  # replicas that came back with those ranks are lost again
        self._lost = None
        self._changed.changed()
        self.state.emit(
            RanksRestarted(
                time=now(),
                role=self.role,
                version=self.state.version,
                batches=redone,
                span=(began, now()),
                ranks=len(ranks.ranks()),
                of=self._asked,
            )
        )

    async def _back(
        self, ranks: RestartableRanks, bring_back: Callable[[], Coroutine[Any, Any, int]], tasks: Tasks
    ) -> int:
        """Return the result of ``bring_back``, while watching the new ranks, which may be lost, too."""
        # Without this watch, a new rank that hung while it was brought back ended the run.
        watching = [tasks.start(ranks.watch()), tasks.start(self._end_of_motion(ranks))]
        try:
            return await tasks.start(bring_back(), among=self._works)
        finally:
            for task in watching:
                task.cancel()


async def redo_actor(
    state: RunState, actor: Actor, checkpoints: CheckpointManager, on_version: Callable[[int], Awaitable[None]]
) -> int:
    """Load the newest checkpoint into the trainer's new ranks, and train again on all batches since then. Returns the
    number of batches. ``on_version`` is called whenever the ranks hold a version as it was published.
    """
    at = await checkpoints.load_newest(ACTOR)
    await on_version(at)
    batches = [batch for batch in actor.since(at) if batch.is_over]  # `surviving` makes the open one again
    for batch in batches:
        if batch.version != at:
            await on_version(batch.version)
        at = batch.version
        await actor.learn(batch)
    if state.version != at:  # at a boundary, no batch of the version has begun
        await on_version(state.version)
    return len(batches)


async def redo_critic(actor: Actor, checkpoints: CheckpointManager) -> int:
    """Bring a critic on new ranks of its own back to its state. Returns the number of batches redone."""
    assert actor.critic is not None, "its ranks were started again"
    at = await checkpoints.load_newest(CRITIC)
    return await actor.critic.redo(actor.since(at))
