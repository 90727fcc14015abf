"""Restarts of the trainer inside the run: its ranks are lost, started again, and brought to where they were.

    a rank ends or is given up, or none moves in an open call ─▶ trainer.lost: calls under way are cancelled
        ─▶ all ranks start again ─▶ newest checkpoint, or the initial model ─▶ batches since then are redone
        ─▶ trainer.restarted: what was cancelled is done again

The batches are redone as they were composed, with the contexts of their steps, by `Actor.learn`: neither the ledger nor
the version changes, and no step is reported twice. Replicas and episodes go on meanwhile. The same ranks compute the
same numbers, so that with equal batches a run ends with the weights of one in which nothing was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn, TypeVar

from headway.config.sizing.timeouts import HEARTBEAT_S, Timeouts, file_stall_s
from headway.data.interfaces.training import TrainEngine
from headway.errors import HeadwayError, RunError, StallError
from headway.events import Note, TrainerLost, TrainerRestarted
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.channel import Signal
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager
from headway.pipeline.recovery.liveness import ask
from headway.runtime.progress import Living
from headway.runtime.task_groups import Tasks, concurrently

T = TypeVar("T")
NOTICE_S = 2.0
"""Seconds within which the end of a rank is known after a call failed by it."""


@dataclass(frozen=True, slots=True)
class RestartableTrainer:
    """The trainer's ranks, as they are watched and started again."""

    ranks: Callable[[], Sequence[Living]]
    """Function that returns the present ranks."""
    watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    """Coroutine function that raises `WorkerDied` when one of the present ranks ends, or is given up."""
    restart: Callable[[], Coroutine[Any, Any, None]]
    """Coroutine function that ends all ranks and starts others, with the initial model, within `Timeouts.start_s`.
    Raises the errors of `headway.errors`."""


class TrainerRestarts:
    """Restarts of one run's trainer.

    consumes        the deaths that `RestartableTrainer.watch` tells of; heartbeats of the ranks while a call is open
    waits for       a rank to end; on a loss for cancelled calls to end, and for new ranks
    is unblocked by the operating system or the cluster, which tell of a process's end; time
    produces        trainers that stand where the lost one stood; the end of the run when restarts are used up
    """

    def __init__(
        self,
        state: RunState,
        actor: Actor,
        checkpoints: CheckpointManager,
        trainer: RestartableTrainer | None,
        max_restarts: int,
        timeouts: Timeouts,
    ) -> None:
        """Set up. ``trainer``: None where it cannot be started again: a loss ends the run."""
        self._state = state
        self._actor = actor
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._left = max_restarts
        self._timeouts = timeouts
        self.on_version: Callable[[int], Awaitable[None]] | None = None
        """Coroutine function that is called when a trainer that was started again holds a version once more."""
        self.starts_until = 0.0
        """Time on the event clock by which the newest restart has ended."""
        self._lost: RunError | None = None
        """Error for which the trainer was given up; None while there is one that stands where it should."""
        self._works: dict[asyncio.Task[Any], None] = {}
        self._changed = Signal()
        self._watching: asyncio.Task[None] | None = None

    @property
    def engine(self) -> TrainEngine:
        """The trainer, whichever ranks it has."""
        return self._actor.trainer

    def start(self, tasks: Tasks) -> None:
        """Watch the trainer, and start it again where it is lost, until `stop`."""
        if self._trainer is not None:
            self._watching = tasks.start(self._attend(self._trainer))

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def surviving(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``work``, which calls the trainer: where that is lost, of doing it again afterwards."""
        if self._trainer is None:
            return await work()
        while True:
            await self._changed.until(lambda: self._lost is None)
            task = asyncio.ensure_future(work())
            self._works[task] = None
            self._changed.changed()
            try:
                return await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if self._lost is None or (current is not None and current.cancelling()):
                    raise
            except HeadwayError:
                if not await self._was_lost():
                    raise
            finally:
                del self._works[task]
                self._changed.changed()

    async def _was_lost(self) -> bool:
        """Tell whether the trainer is lost, for which a call may fail before its end is known."""
        try:
            async with asyncio.timeout(NOTICE_S):
                await self._changed.until(lambda: self._lost is not None)
        except TimeoutError:
            return False
        return True

    async def _attend(self, trainer: RestartableTrainer) -> None:
        while True:
            try:
                await concurrently([trainer.watch(), self._end_of_motion(trainer)])
            except RunError as loss:
                await self._recover(trainer, loss)

    async def _end_of_motion(self, trainer: RestartableTrainer) -> NoReturn:
        """Raise `StallError` when no rank moves while a call of them is open."""
        quiet_s = self._timeouts.trainer_quiet_s
        looks_s = min(HEARTBEAT_S, quiet_s / 4)
        while True:
            await self._changed.until(lambda: bool(self._works))
            await asyncio.sleep(looks_s)
            answers = await ask(trainer.ranks(), looks_s)
            works = any(beat is not None and isfinite(beat.quiet_s) for beat in answers.by_worker.values())
            if self._works and works and now() >= answers.deadline(quiet_s, file_stall_s):
                raise StallError(f"the trainer's ranks do not move: {answers}")

    async def _recover(self, trainer: RestartableTrainer, loss: RunError) -> None:
        """Bring a new trainer to where the lost one stood. Raises ``loss`` when that cannot be."""
        began, self._lost = now(), loss
        self._state.emit(TrainerLost(time=began, reason=str(loss)))
        for work in self._works:
            work.cancel()
        self._changed.changed()
        await self._changed.until(lambda: not self._works)
        redone: int | None = None
        while redone is None:
            if not self._left:
                raise type(loss)(f"{loss}. It is not started again: trainer.max_restarts is used up") from loss
            self._left -= 1
            self.starts_until = now() + self._timeouts.start_s
            try:
                await trainer.restart()
                redone = await self._redo()
            except RunError as failure:
                text = f"the trainer could not be brought back: {failure}"
                self._state.emit(Note(time=now(), level="warning", text=text))
                loss = failure
        self._lost = None
        self._changed.changed()
        version = self._state.version
        self._state.emit(TrainerRestarted(time=now(), version=version, batches=redone, span=(began, now())))

    async def _redo(self) -> int:
        """Load the newest checkpoint and train on all batches since. Returns their number."""
        at = await self._checkpoints.load_newest()
        if self.on_version is not None:
            await self.on_version(at)
        batches = self._actor.since(at)
        for learned in batches:
            if learned.batch.version != at and self.on_version is not None:
                await self.on_version(learned.batch.version)
            at = learned.batch.version
            await self._actor.learn(learned)
        if self._state.version != at and self.on_version is not None:
            await self.on_version(self._state.version)
        return len(batches)
