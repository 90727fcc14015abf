"""Restarts of ranks inside the run: a role's ranks are lost, started again, and brought to where they were.

    a rank's process ends, nothing moves in an open call, or they are given up ─▶ ranks.lost: calls under way are
    cancelled ─▶ all ranks of the role start again, with the initial model ─▶ they are brought back:
        actor    loads the newest checkpoint, if there is one; batches since then are redone (`redo_actor`)
                 (on shared devices with new replicas, which get the present version while it holds that)
        critic   the same, from the values and returns that the batches have (`redo_critic`)
        logp     gets the version that a batch waits for, from the trainer (`ParamUpdate.serve_again`)
        ref      has what it needs
    ─▶ ranks.restarted: what was cancelled is done again

The batches are redone as they were composed, with the contexts of their steps: neither the ledger nor the version
changes, and no step is reported twice. Replicas and episodes go on meanwhile. The same ranks compute the same numbers,
so that with equal batches a run ends with the weights of one in which nothing was lost.
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
    """Ranks of one role, as they are watched and started again."""

    ranks: Callable[[], Sequence[Living]]
    """Function that returns the present ranks."""
    watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    """Coroutine function that raises `WorkerDied` when one of the present ranks ends, or is given up."""
    restart: Callable[[], Coroutine[Any, Any, None]]
    """Coroutine function that ends all ranks and starts others, with the initial model, within `Timeouts.start_s`:
    as many, or fewer. Raises the errors of `headway.errors`."""
    replicas: Callable[[], Sequence[RolloutEngine]] | None = None
    """Function that returns the replicas in the present ranks' processes, which end and start with them; None where
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
    """None where they cannot be started again: their loss ends the run."""
    restarts: Restarts
    _: KW_ONLY
    on_lost: Callable[[RunError], object] = lambda loss: None
    """Function that is called at once with the error for which the ranks are given up."""
    bring_back: Callable[[], Coroutine[Any, Any, int]] | None = None
    """Coroutine function that brings ranks that hold the initial model to where the lost ones stood. Returns the number
    of batches that it redid."""

    _lost: RunError | None = field(default=None, init=False)
    """Error for which the ranks were given up; None while there are ranks that stand where they should."""
    _given_up: RunError | None = field(default=None, init=False)
    """Error for which others gave the ranks up, until that is attended to."""
    _works: dict[asyncio.Task[Any], None] = field(default_factory=dict, init=False)
    _changed: Signal = field(default_factory=Signal, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)
    _asked: int = field(default=0, init=False)
    """Number of ranks at the start."""

    def start(self, tasks: Tasks) -> None:
        """Watch the ranks, and start them again where they are lost, until `stop`."""
        if self.ranks is not None:
            self._asked = len(self.ranks.ranks())
            self._watching = tasks.start(self._attend(self.ranks))

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def give_up(self, why: RunError) -> None:
        """Start the ranks again, even if they live. Raises ``why`` where that is impossible."""
        if self.ranks is None:
            raise why
        if self._lost is None:
            self._given_up = why
            self._changed.changed()

    async def again(self, why: RunError) -> None:
        """Bring the ranks back from the newest checkpoint though they live, or wait until lost ones are back."""
        self.give_up(why)
        await self._changed.until(lambda: self._given_up is None and self._lost is None)

    async def until_there(self) -> None:
        """Wait until the ranks are where they should be."""
        await self._changed.until(lambda: self._lost is None)

    async def surviving(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, which calls the ranks; it is repeated on new ranks if these are lost."""
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
                # Else `_recover` has cancelled the call alone: its caller was not asked to end, and calls again.
                if self._lost is None or (current is not None and current.cancelling()):
                    raise
            except HeadwayError:
                if not await self._was_lost():
                    raise
            finally:
                del self._works[task]
                self._changed.changed()

    async def _was_lost(self) -> bool:
        """Tell whether the ranks are lost, after a call that failed: it may fail before the loss is known."""
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
            # Ranks without work (`quiet_s` is infinite) do not hang: an open call may wait for something in the driver.
            works = any(beat is not None and isfinite(beat.quiet_s) for beat in answers.by_worker.values())
            if self._works and works and now() >= answers.deadline(quiet_s, file_stall_s):
                raise StallError(f"the ranks of {self.role} do not move: {answers}")

    async def _recover(self, ranks: RestartableRanks, loss: RunError) -> None:
        """Bring new ranks to where the lost ones stood. Raises ``loss`` when that cannot be."""
        # Before calls are cancelled: `surviving` tells a loss from a cancellation by it.
        began, self._lost, self._given_up = now(), loss, None
        self.state.emit(RanksLost(time=began, role=self.role, reason=str(loss)))
        self.on_lost(loss)  # before works end: whoever waits for replicas in the same processes is let go
        for work in self._works:
            work.cancel()
        self._changed.changed()
        # A call that was still under way could reach new ranks half-way.
        await self._changed.until(lambda: not self._works)
        redone: int | None = None
        while redone is None:
            if not self.restarts.left:
                raise type(loss)(f"{loss}. It is not started again: trainer.max_restarts is used up") from loss
            self.restarts.begin()  # before it is tried: a start that fails counts, too
            try:
                await ranks.restart()
                redone = await failing_as_one(partial(self._back, ranks, self.bring_back)) if self.bring_back else 0
            except TokensLost as failure:  # another start would meet the same
                raise TokensLost(f"{loss}. What it was trained on cannot be redone: {failure}") from failure
            except RunError as failure:
                self.state.note(f"the ranks of {self.role} could not be brought back: {failure}")
                loss = failure
                self.on_lost(loss)  # what came back with those ranks is lost with them
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
        """Return the result of ``bring_back``. The new ranks are watched meanwhile, and may be lost, too."""
        # New ranks, too: one that hung while it was brought back ended the run, because nothing watched it.
        watching = [tasks.start(ranks.watch()), tasks.start(self._end_of_motion(ranks))]
        try:
            return await tasks.start(bring_back(), among=self._works)
        finally:
            for task in watching:
                task.cancel()


async def redo_actor(
    state: RunState, actor: Actor, checkpoints: CheckpointManager, on_version: Callable[[int], Awaitable[None]]
) -> int:
    """Load the newest checkpoint into the trainer's ranks, which have the initial model, and train on all batches since
    then. Returns their number. ``on_version`` is called whenever the ranks hold a version as it was published.
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
    """Bring a critic with own ranks to where it was. Returns how many batches were redone."""
    assert actor.critic is not None, "its ranks were started again"
    at = await checkpoints.load_newest(CRITIC)
    return await actor.critic.redo(actor.since(at))
