"""Train batches: the groups that the trainer takes from the queue together, and the source of batches.

    MessageQueue ──▶ TrainBatches ──▶ [LogProb] ──▶ [Values] ──▶ ActorTrain

A stage with ranks of its own may work on the next batch while the trainer is busy with the current one, but only within
the trainer's version: a later policy does not exist yet. Within a version, taking earlier changes no lag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import StepContext
from headway.events import WAITS_FOR_GROUPS
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.pipeline_state import RunState


@dataclass(slots=True)
class TrainBatch:
    """Groups that the trainer takes from the queue together. Fewer than usual, or none, at the end of the data."""

    index: int
    """Number of the batch in the run, counted from 0."""
    version: int
    """Trainer's version while it trains on the batch."""
    groups: list[Group]
    is_last: bool = False
    """True if the batch has fewer groups because the data has ended."""
    lags: Mapping[int, int] = field(default_factory=dict)
    """Number -> lag of each group, checked when training on the batch begins."""
    given: set[str] | None = None
    """Names of the columns that other roles' ranks computed, which are kept; None before training on the batch
    begins."""
    steps: list[tuple[StepContext, bool]] = field(default_factory=list)
    """Context of each optimizer step made, and True if it was skipped. The steps are repeated if a rank is lost before
    the next checkpoint."""
    is_over: bool = False
    """True once all steps were made."""
    was_handed_on: bool = False
    """True once the batch was handed to a critic on ranks of its own."""


class TrainBatches:
    """Source of train batches, taken from the message queue."""

    name = WAITS_FOR_GROUPS

    def __init__(self, state: RunState, size: int, *, fill_first: bool = False) -> None:
        """Take batches of ``size`` groups. ``fill_first``: True if the first batch waits for all groups that may run
        ahead.
        """
        self.taken = 0
        """Number of batches taken, including those before a resume. ``fill_first`` applies again after a resume."""
        self._state = state
        self._size = size
        self._fill_first = fill_first
        self._ended = False

    async def get(self) -> TrainBatch | None:
        state = self._state
        # Never a batch of the next version: the policy for its π_prox does not exist yet.
        await state.changed.until(lambda: not state.took_version)
        if self._ended or not state.trains_more:
            return None
        if self._fill_first:
            await state.queue.until_full()
            self._fill_first = False
        groups = await self._take(state.version, state.taken)
        if not state.trains_more:
            return None  # a stop abandoned this batch, or the rest of the version
        # If the run's length is a number of groups, every batch is full; a short batch means that the data has ended.
        self._ended = len(groups) < self._size
        # At a version boundary nothing is left to do; within a version an empty batch ends the version (`is_last`).
        if not groups and state.taken % state.staleness.groups_per_version == 0:
            return None
        self.taken += 1
        return TrainBatch(self.taken - 1, state.version, groups, is_last=self._ended)

    async def _take(self, version: int, taken: int) -> list[Group]:
        """Wait for the next groups to train on, and drop groups that became too old. See `MessageQueue.take`."""
        state, journal = self._state, self._state.journal

        def drop(group: Group) -> None:
            state.discard(group.number, Fate.DROPPED, "overdue" if group.oldest_version <= version else "resume")

        groups = None
        if journal is not None and (before := journal.composed(taken)) is not None:
            groups = await state.queue.take_again(before, version)
            if groups is None:
                journal.forget_batches()
                state.note(
                    f"version {version} is trained on other groups than before: not all of {[*before]} came again"
                )
        if groups is None:
            groups = await state.queue.take(self._size, version, drop)
        # In the same step of the event loop as the take: a stop in between would miss these groups.
        state.in_training += len(groups)
        if journal is not None and groups:
            journal.batch(taken, {group.number: group.prompt.group_id for group in groups})
        return groups
