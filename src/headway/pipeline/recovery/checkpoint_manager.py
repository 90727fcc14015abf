"""Checkpoints: the driver's state at a boundary between versions, saved with the trainer's and the critic's state.

    ActorTrain consumed all of version k−1 ──reached(k)──▶ taken, as JSON ──k is published──▶ models are copied ─┐
                                                       training goes on ◀─┤                                    ◀┘
                                                                          └▶ the copy is written ──▶ checkpoint
    checkpoint ──restore()──▶ version k; the groups that were open: made again under their numbers

The checkpoint of version 0 has only the driver's state: ranks that load it keep the initial model.

A snapshot is the same copy, held in the memory of other processes. A restarted trainer loads the newest checkpoint or
snapshot. A snapshot may be lost, and has no driver's state: batches are kept until the next checkpoint.

A boundary is the instant at which version k−1 is consumed and nothing of version k has begun: the update to k follows.
When the models are copied, groups of the next version may have been admitted or finished: the checkpoint has none of
them. So a resumed run begins with that update, and admits nothing before it. State that is not listed in
`CheckpointManager` is either configuration or created at every start (docs/resume.md lists it).

Only one checkpoint or snapshot is made at a time: meanwhile a due checkpoint waits, and a due snapshot is left out.
`headway.reports.checkpoint_folders.CheckpointRetention` removes older checkpoints when a newer one is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from headway.config.sections.run_section import TrainerConfig
from headway.config.sizing.placement import ACTOR, CRITIC
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import PromptSource
from headway.data.types import Prompt
from headway.errors import DataError, RunError, WorkerDied, boundary
from headway.events import CheckpointCopied, CheckpointFailed, CheckpointSaved, SnapshotKept, VersionReached
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.admission.train_batches import TrainBatches
from headway.pipeline.stage import WaitingFor
from headway.runtime.task_groups import Tasks

DriverState = Mapping[str, Any]
"""State of the driver as JSON values."""
MOST_FAILURES = 3
"""Number of failed checkpoints in a row that ends the run."""


def balance(driver_state: DriverState) -> dict[str, int]:
    """Return the ledger's counts in a checkpoint, in the form of the `VersionReached` event of its boundary."""
    ledger = Ledger()
    ledger.restore(driver_state["ledger"], {})
    return ledger.counts() | {Fate.IN_FLIGHT.value: len(driver_state["ledger"]["open"])}


class SnapshotStore(Protocol):
    """Store of snapshots of the trainer's ranks. Methods raise `WorkerDied` if a rank ends, `RunError` for other
    failures.
    """

    async def keep(self, version: int) -> bool:
        """Keep the last copy as the snapshot of ``version``, and drop the previous one if this succeeds. Returns True
        if the snapshot outlives the loss of a rank's machine.
        """

    async def load(self, version: int) -> None:
        """Load the snapshot of ``version`` into all ranks, or into none if a rank cannot get its part."""


@dataclass(eq=False)
class CheckpointManager:
    """Version boundaries of one run, and the checkpoints of some of them.

    Its attributes are the parts of the pipeline with state that a resumed run has to restore.
    """

    state: RunState
    source: PromptSource
    batches: TrainBatches
    actor: Actor
    checkpoints: Path
    timeouts: Timeouts
    trainer: TrainerConfig
    """Settings of how often checkpoints and snapshots are made."""
    snapshots: SnapshotStore | None = None
    keep_start: Callable[[DriverState], bool] | None = field(default=None, init=False)
    """Function that writes the checkpoint of version 0, and returns True if it exists; None if none is wanted."""

    writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Lock held while a checkpoint is copied and written, or a snapshot is copied and sent."""
    saved: int | None = field(default=None, init=False)
    """Version of the newest checkpoint; None before the first."""
    _kept: int | None = field(default=None, init=False)
    """Version of the snapshot; None if there is none."""
    _keeps: bool = field(default=True, init=False)
    """False after a snapshot that could not be kept, until the next one is kept."""
    _took_s: float | None = field(default=None, init=False)
    """Seconds that writing the last checkpoint took; None before the first one."""
    _failures: list[str] = field(default_factory=list, init=False)
    """Reasons of the failures since the last saved checkpoint."""
    _tasks: Tasks | None = field(default=None, init=False)
    _driver_state: DriverState | None = field(default=None, init=False)
    """Driver's state at the last boundary; None before the first one."""

    def reached(self, version: int) -> None:
        """Take the driver's state at the boundary to ``version``: earlier groups are consumed, later work has not
        begun.

        The critic may still be training: `save` adds its state. Raises `LedgerImbalance`.
        """
        state = self.state
        state.check_balance()
        self._driver_state = {
            **state.state(),
            "source": self.source.state(),
            "fetches": self.batches.taken,
            "trainer": self.actor.steps.state(),
            "guard": self.actor.guard.state(),
        }
        if state.journal is not None:
            state.journal.boundary(version, min(state.ledger.open, default=state.ledger.admitted))
        groups, episodes = state.ledger.counts(), state.ledger.episode_counts()
        state.emit(VersionReached(time=now(), version=version, groups=groups, episodes=episodes))
        if version == 0 and self.keep_start is not None:
            critic = self.actor.critic
            critic_state = {} if critic is None else {"critic": critic.steps.state()}
            if self.keep_start({**self._driver_state, **critic_state}):
                self.saved = version

    def restore(self, driver_state: DriverState) -> None:
        """Begin at the boundary of a checkpoint, before anything runs. Emits the fates of groups that were open then.

        Raises `DataError` if the data differ from those of the checkpoint.
        """
        state, actor = self.state, self.actor
        self.source.restore(driver_state["source"])  # first: `_found` may take further prompts from it
        again = [self._found(*one) for one in driver_state["again"]]
        lost = [self._found(*one) for _, *one in driver_state["ledger"]["open"]]
        # With another action of the guard, nothing would raise a lowered η again.
        eta_now = Fraction(driver_state["eta_now"]) if actor.guard.lowers_eta else state.staleness.eta
        state.restore(driver_state, again=again, open_prompts=lost, eta_now=eta_now)
        self.batches.taken = driver_state["fetches"]
        actor.steps.restore(driver_state["trainer"])
        actor.guard.restore(driver_state["guard"])
        if actor.critic is not None:
            actor.critic.restore(driver_state["critic"], driver_state["fetches"])
        self.saved = state.version

    def _found(self, epoch: int, row: int, attempt: int) -> Prompt:
        """Return the prompt of an unfinished group, or the next one in its place if changed data do not contain it."""
        prompt = self.source.find(epoch, row)
        if prompt is not None:
            return replace(prompt, attempt=attempt)
        if (following := self.source.next()) is None:
            raise DataError(
                f"the checkpoint waits for row {row} of epoch {epoch}, which the data do not have, and they have no "
                "further one in its place. Resume with the same data"
            )
        return following

    @property
    def takes(self) -> str:
        """Text with the time that a checkpoint takes: that of the last one, or an estimate for the slowest disk."""
        if self._took_s is not None:
            return f"about {self._took_s:.0f} s, as the last one did"
        return f"{self.timeouts.checkpoint_s:.0f} s at most, on the slowest disk"

    @property
    def can_save(self) -> bool:
        """True if the models are those of the last boundary."""
        critic = self.actor.critic
        return not self.state.unfinished and (critic is None or not critic.behind)

    def start(self, tasks: Tasks) -> None:
        """Start to write checkpoints beside training, in tasks of the run."""
        self._tasks = tasks

    async def save_if_due(self, version: int, waiting_for: WaitingFor) -> None:
        """Begin to save the checkpoint or the snapshot of ``version`` if one is due. The last version's checkpoint is
        left to `save`.

        Returns when the models are copied, so that training may go on. Raises as `_failed` does.
        """
        if not self.state.trains_more:
            return
        if self.trainer.save_freq > 0 and version % self.trainer.save_freq == 0:
            await self._begin(version, waiting_for)
        elif self.snapshots is not None and version % self.trainer.snapshot_freq == 0 and not self.writing.locked():
            await self._begin(version, waiting_for, self.snapshots)

    async def save(self, version: int) -> None:
        """Save the run's last checkpoint, that of ``version``, after any that is under way. Waits until it is written.

        Does nothing if it is saved already. Raises `RunError` if it cannot be written.
        """
        await self._written()
        self.state.check_balance()
        if self.saved == version:
            return
        await self._begin(version)
        await self._written()
        if self.saved != version:
            why = self._failures[-1] if self._failures else "a rank was lost that was writing it"
            raise RunError(f"the run's last checkpoint was not saved: {why}")

    async def _begin(
        self,
        version: int,
        waiting_for: WaitingFor = lambda _: nullcontext(),
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """Copy the state of ``version``, and begin to write or keep it. Waits for a checkpoint or a snapshot that is
        under way.
        """
        if self._driver_state is None:
            raise RunError(f"version {version} cannot be saved: no version boundary was reached before")
        state, critic, asked, driver_state = self.state, self.actor.critic, now(), self._driver_state
        if self.writing.locked():
            text = f"the checkpoint of version {version} is due, and waits for the one before, which is being saved"
            state.note(text, "info")
        if state.hurried and snapshots is None:
            state.note(f"writing the checkpoint of version {version}, which takes {self.takes}", "info")
        with waiting_for("the checkpoint before to be written"):
            # Not `async with`: the task that writes beside training releases it.
            await self.writing.acquire()
        try:
            with self._attributed(version), waiting_for("the state to be copied for a checkpoint"):
                if critic is not None and not (snapshots and critic.own_ranks):  # own ranks have no snapshots
                    await critic.copy_state()
                    driver_state = {**driver_state, "critic": critic.steps.state()}
                await self.actor.trainer.copy_state()
        except BaseException as failure:  # also for a cancellation: the lock must not stay held
            self.writing.release()
            self._failed(version, failure, snapshots)
            return
        state.emit(CheckpointCopied(time=now(), version=version, span=(asked, now())))
        assert self._tasks is not None, "start comes first"
        work = self._write(version, driver_state) if snapshots is None else self._keep(version, snapshots)
        # Not a `finally` within the task: a task cancelled before its first step never runs it.
        self._tasks.start(work).add_done_callback(lambda _: self.writing.release())

    async def _write(self, version: int, driver_state: DriverState) -> None:
        state, critic, path, started = self.state, self.actor.critic, self._path(version), now()
        try:
            with self._attributed(version):
                if critic is not None:  # first: a checkpoint with the actor's folder counts as complete
                    await critic.engine.save(self._critic_path(version))
                await self.actor.trainer.save(path, driver_state)
        except WorkerDied:
            if not self.actor.keeps_batches:
                raise
            return  # the ranks are restarted, and the next checkpoint is theirs
        except Exception as failure:
            self._failed(version, failure)
            return
        self.saved, self._took_s, self._failures = version, now() - started, []
        self.actor.forget_before(version)  # only now: before, lost ranks go further back and need these
        state.emit(CheckpointSaved(time=now(), version=version, path=str(path), span=(started, now())))

    async def _keep(self, version: int, snapshots: SnapshotStore) -> None:
        started, state = now(), self.state
        try:
            outlives_machines = await snapshots.keep(version)
        except WorkerDied:
            return  # the trainer is restarted from the previous snapshot
        except Exception as failure:
            self._failed(version, failure, snapshots)
            return
        if self._kept is None and not outlives_machines:
            text = "snapshots of training ranks outlive processes, not a machine: no episode worker is on another one"
            state.note(text, "info")
        # Batches since the checkpoint are kept: if the snapshot is lost, ranks go back to the checkpoint.
        self._kept, self._keeps = version, True
        state.emit(SnapshotKept(time=now(), version=version, span=(started, now())))

    def _failed(self, version: int, failure: BaseException, snapshots: SnapshotStore | None = None) -> None:
        """Report a failed checkpoint, or the first of several failed snapshots. Raises at the third failed checkpoint
        in a row, and if ``failure`` is the loss of a rank or a defect.
        """
        # `WorkerDied` is a `RunError`, too, but `RankRestarts.surviving` has to see it, to repeat the copy on new
        # ranks.
        if not isinstance(failure, RunError) or isinstance(failure, WorkerDied):
            raise failure
        if snapshots is not None:
            if self._keeps:
                self.state.note(
                    f"the snapshot of version {version} was not kept: {failure}. A lost rank goes back further"
                )
            self._keeps = False
            return
        self._failures.append(str(failure))
        in_row = len(self._failures)
        event = CheckpointFailed(time=now(), version=version, reason=str(failure), in_row=in_row)
        self.state.emit(event)
        if in_row >= MOST_FAILURES:
            raise RunError(f"{failure}. No checkpoint could be saved {in_row} times in a row") from failure

    async def load_newest(self, role: str) -> int:
        """Load the newest checkpoint, or the trainer's snapshot, into new ranks of ``role``: the trainer's, or a
        critic's own. Returns its version; 0 if the ranks keep the initial model.

        A snapshot that cannot be loaded is reported, and not used again.
        """
        kept = self._kept if role == ACTOR else None
        if self.snapshots is not None and kept is not None and kept > (self.saved or 0):
            try:
                await self.snapshots.load(kept)
                return kept
            except WorkerDied:  # a `RunError`, too, but the ranks are lost, not the snapshot
                raise
            except RunError as failure:
                instead = f"the checkpoint of version {self.saved}" if self.saved else "the initial model"
                self._kept = None
                self.state.note(f"the snapshot of version {kept} cannot be loaded, and {instead} is: {failure}")
        if self.saved is not None:
            if role == ACTOR:
                await self.actor.trainer.load(self._path(self.saved))
            # A critic on the trainer's ranks is loaded together with them, a critic on its own ranks alone.
            if (critic := self.actor.critic) is not None and critic.own_ranks == (role == CRITIC):
                await critic.engine.load(self._critic_path(self.saved))
        return self.saved or 0

    async def _written(self) -> None:
        """Wait until no checkpoint is being written."""
        async with self.writing:
            return

    def _attributed(self, version: int) -> AbstractContextManager[None]:
        return boundary(f"could not write the checkpoint {self._path(version)}", RunError)

    def _path(self, version: int) -> Path:
        return self.checkpoints / f"version_{version}"

    def _critic_path(self, version: int) -> Path:
        return self.checkpoints / "critic" / f"version_{version}"
