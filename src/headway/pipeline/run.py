"""One run: starts, watches and ends its stages in order. `Pipeline.run` is Headway's main loop.

              ┌──────── ground truth, extra fields ───────┐
 PromptLoader ─▶ Generate ──────────────────────────────▶ Reward ─▶ [RefLogProb] ─▶ MessageQueue
      ▲             ▲     episode workers make groups   (may filter)                     │
  admission      weights  from replicas' answers                                         ▼  a batch
      │             │                     [CriticTrain] ◀─ ActorTrain ◀─ [Values] ◀─ [LogProb]
      └── Staleness ◀──── ParamUpdate: gather ▶ send ▶ recv ▶ register ▶ load ◀┘
                              └─▶ Validate

Stages in brackets exist if the algorithm needs them and they have ranks of their own.
`headway.pipeline.wiring` builds all of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headway.config.schema import Config
from headway.errors import UpdateFailed, WorkerDied
from headway.events import Observer, RunFinished, RunStarted
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.checkpoint_manager import DriverState
from headway.pipeline.remote_workers import Replica
from headway.pipeline.stages.actor_train import PendingUpdate
from headway.pipeline.wiring import AnyStage, Parts, Wiring
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one

TRAINING_SHARE = 0.75
"""Share of ``run.stop_timeout_s`` for finishing the current version; the rest is for writing and ending workers."""


class Status(StrEnum):
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(eq=False)
class Pipeline:
    """Pipeline of one run: builds all stages and runs them. An instance can be run once."""

    config: Config
    parts: Parts
    observers: Sequence[Observer]
    checkpoints: Path
    resume_from: DriverState | None = None
    """Driver's state in the checkpoint that trainer and critic loaded; None for a new run."""

    def __post_init__(self) -> None:
        self._wiring = Wiring(self.config, self.parts, self.observers, self.checkpoints)
        self._state = self._wiring.state

    @property
    def stages(self) -> list[AnyStage]:
        return [*self._wiring.upstream, *self._wiring.downstream]

    @property
    def stop_reason(self) -> str | None:
        """Reason why the run stopped itself; None if it did not."""
        return self._state.stop_reason

    async def run(self) -> Status:
        """Train until all groups are consumed, a stop is requested, or something fails (the failure is raised).

        Whatever happens, the last event is `RunFinished` with the ledger's balance.
        """
        self._emit_started()
        try:
            self._begin()
            # Validations of later versions are ordered when replicas have loaded these. A resumed run may know this
            # one's result.
            if self._state.version == 0 and self.parts.validation and self.parts.validated != 0:
                await self._wiring.validations.send(self._wiring.validators.order(0))
            try:
                await failing_as_one(self._run_to_the_end)
            finally:
                await self._wiring.episode_workers.close()
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._emit_finished(Status.INTERRUPTED, "left at once")
            raise
        except BaseException as failure:
            self._emit_finished(Status.FAILED, f"{type(failure).__name__}: {failure}")
            raise
        status = Status.INTERRUPTED if self._state.stopping and not self._trained_all() else Status.COMPLETED
        reason, version = self.stop_reason, self._state.version + 1
        if self.unfinished and not reason:
            reason = f"version {version} was begun and not finished: its other groups did not come, or not in time"
        self._emit_finished(status, reason)
        return status

    def request_stop(self) -> None:
        """Finish the current version, save, and return from `run` within ``run.stop_timeout_s``.

        Nothing new is begun, with one exception: if the last boundary has no checkpoint, discarded groups are replaced,
        so that the next boundary is reached.
        """
        state, saved = self._state, self._wiring.checkpoints.saved
        state.hurried = True
        state.request_stop()
        if saved == state.version:
            state.admit_no_more()
        self._wiring.scoring.stop()

    @property
    def unfinished(self) -> bool:
        """True if the run stopped within a version, because the groups for the rest of it did not come."""
        return not self._wiring.checkpoints.can_save

    def _begin(self) -> None:
        """Begin at the boundary of version 0 or of the checkpoint, which the earlier run reported and saved."""
        wiring = self._wiring
        if self.resume_from is None:
            wiring.checkpoints.reached(0)
            return
        wiring.checkpoints.restore(self.resume_from)
        version = self._state.version
        wiring.actor_train.resumed = PendingUpdate(version) if version > 0 else None  # before anything else is done
        # The result of the checkpoint's own validation is not known, unless it was `validated`.
        wiring.validators.newest = version if self.parts.validated == version else max(0, version - 1)
        wiring.validators.answered = self.parts.validated

    async def _run_to_the_end(self, tasks: Tasks) -> None:
        """Run all stages side by side until the stages behind the queue end; then end the stages before it."""
        wiring = self._wiring
        watchers = [tasks.start(watch()) for watch in (wiring.monitor.run, self.parts.watch) if watch]
        watchers.append(tasks.start(wiring.scoring.watch(self._scores_given_up)))
        wiring.checkpoints.start(tasks)
        for restarts in wiring.restarts.values():
            restarts.start(tasks)
        serving_again = tasks.start(wiring.param_update.serve_again())
        for supervision in wiring.supervisions:
            supervision.start(tasks)
        wiring.episode_workers.start(tasks, wiring.pool.failed)
        upstream = [tasks.start(stage.run(), name=stage.name) for stage in wiring.upstream]
        downstream = tasks.start(concurrently(stage.run() for stage in wiring.downstream))
        cutting_off = tasks.start(self._cut_off(downstream))

        # `wait` does not raise: a task cancelled by `_cut_off` is no failure. `result` raises real failures.
        await asyncio.wait([downstream])
        if not downstream.cancelled():
            downstream.result()
        cutting_off.cancel()
        # Before the wait for upstream stages: they would wait for room that nobody makes any more.
        wiring.prompt_loader.end()
        serving_again.cancel()
        for supervision in wiring.supervisions:
            supervision.stop()
        # Nothing will be trained on open groups: their calls end now, not with their last token.
        if self._state.ledger.open:
            if not downstream.cancelled():
                await concurrently(self._interrupt(replica) for replica in wiring.pool.serving)
            for task in upstream:
                task.cancel()
        await asyncio.wait(upstream)  # does not raise for cancelled tasks
        if not downstream.cancelled():
            with suppress(WorkerDied, UpdateFailed):  # nothing more is needed from replicas
                await wiring.monitor.report()
        if not self.unfinished:
            await wiring.save(self._state.version)
        for restarts in wiring.restarts.values():
            restarts.stop()  # only now: ranks lost while the last checkpoint is written are restarted
        wiring.episode_workers.stop()
        for watcher in watchers:
            watcher.cancel()

    async def _interrupt(self, replica: Replica) -> None:
        with suppress(WorkerDied, UpdateFailed):  # even the last replica is not needed any more
            async with self._wiring.pool.losing():
                await self._wiring.pool.pauses.end(replica)

    async def _cut_off(self, downstream: asyncio.Task[list[None]]) -> None:
        """Cancel the stages behind the queue when the time for a stop is over. A checkpoint under way is completed."""
        state, checkpoints, limit_s = self._state, self._wiring.checkpoints, self.config.run.stop_timeout_s
        await state.changed.until(lambda: state.hurried)
        await asyncio.sleep(TRAINING_SHARE * limit_s)
        if checkpoints.writing.locked():
            state.note(
                f"the stop waits for the checkpoint that is being written; one takes {checkpoints.takes}", "info"
            )
        # The lock is held until training is cancelled: a checkpoint that began in between would be cut off.
        async with checkpoints.writing:
            state.give_up()
            state.note(f"the stop waits no longer (run.stop_timeout_s={limit_s:g}): {self._wiring.monitor.who_waits()}")
            downstream.cancel()

    def _scores_given_up(self, count: int) -> None:
        """Report that a stop gave up ``count`` scores. If scoring is closed, give up the version as well."""
        scoring = self._wiring.scoring
        self._state.note(
            f"the stop does not wait for {count} scores that did not come within {scoring.patience_s:.0f} s"
        )
        if scoring.closed:
            self._wiring.prompt_loader.end()
            self._state.give_up_version()

    def _trained_all(self) -> bool:
        """Return True if the run trained on all its groups. Called after the stages end; may draw one more prompt."""
        total, state = self.config.rollout.total_rollout_steps, self._state
        if total is not None:
            return state.consumed >= total
        return not state.ledger.open and not state.waiting_again and self.parts.source.next() is None

    def _emit_finished(self, status: Status, reason: str | None) -> None:
        self._state.leave_open_in_flight()
        ledger, version = self._state.ledger, self._state.version
        self._state.emit(
            RunFinished(
                time=now(),
                status=status.value,
                reason=reason,
                version=version,
                groups=ledger.counts(),
                episodes=ledger.episode_counts(),
            )
        )

    def _emit_started(self) -> None:
        config, staleness = self.config, self._state.staleness
        self._state.emit(
            RunStarted(
                time=now(),
                mode=config.mode,
                seed=config.run.seed,
                groups_per_version=staleness.groups_per_version,
                total_groups=staleness.total,
                lag_bound=staleness.bound,
                order=config.async_training.order.value,
                on_update=config.async_training.on_update,
                slots={replica.name: replica.slots for replica in self.parts.machinery.rollouts},
                stages=[stage.name for stage in self.stages],
                episodes=self._state.ledger.episodes,
            )
        )
