"""ActorTrain: takes a fetch, prepares it once, makes its optimizer steps; every so many fetches, a new version.

consumes        fetches: ``require_batches`` mini-batches of groups
waits for       enough groups, in the order of consumption, and for whoever adds columns to them on ranks of its own
is unblocked by the queue; by the lease, on shared devices; after a version, by ParamUpdate (all replicas loaded it, or
                a copy of the weights was made)
produces        one update per version; each fetch, with its returns, for CriticTrain

A resumed run begins with an update: replicas have the initial model, and the trainer the checkpoint's.

Preparation of a fetch: what is computed once, before its first optimizer step, and kept for all its mini-batches and
epochs.

    [reference] ▶ [π_prox] ▶ [critic's values]  on the trainer's own ranks, one after the other
                                    └──────────▶ advantages, returns

A role with ranks of its own has set its column already (RefLogProb, LogProb, Values).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import (
    AdvantageFn,
    LogProbEngine,
    ProximalEngine,
    StepContext,
    StepReport,
    TrainEngine,
)
from headway.data.types import ColumnName, Trajectory
from headway.events import WAITS_FOR_GROUPS, FetchTaken, OptimizerStepped, TrainerBusy
from headway.pipeline.admission.fetches import Fetch, FetchSource, outcomes, samples_of
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.channel import Channel
from headway.pipeline.critic_turns import Critic
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.observing.off_policy_guard import Guard, SkippedSteps
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager
from headway.pipeline.stage import Stage
from headway.pipeline.update.pause_controller import ColocationLease
from headway.pipeline.update.replica_pool import ReplicaPool

Busy = Callable[[str], AbstractContextManager[None]]
"""Function whose context, while it is open, reports what the trainer's ranks compute."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Preparation of a fetch on the trainer's ranks. An engine that is None is elsewhere, or is not used."""

    advantages: AdvantageFn
    reference: LogProbEngine | None = None
    proximal: ProximalEngine | None = None
    critic: Critic | None = None

    async def prepare(self, fetch: Fetch, busy: Busy) -> None:
        """Set the fetch's missing columns, ``advantages`` last."""
        if self.reference is not None:
            with busy("forward"):
                fetch.add(ColumnName.REF_LOGPROBS, await self.reference.forward_logprobs(fetch.samples()))
        if self.proximal is not None:
            with busy("forward"):
                fetch.add(
                    ColumnName.PROX_LOGPROBS, await self.proximal.proximal_logprobs(fetch.samples(), fetch.version)
                )
        if self.critic is not None:
            with busy("critic"):
                await self.critic.add_values(fetch)
        samples = fetch.samples((ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS, ColumnName.VALUES))
        for name, columns in (await self.advantages(samples, outcomes(fetch.groups))).items():
            fetch.add(name, columns)


COLUMNS = (ColumnName.ADVANTAGES, ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS)
"""Names of the columns that the loss may read."""
SHOWN_COLUMNS = (*COLUMNS, ColumnName.VALUES, ColumnName.RETURNS)
"""Names of the columns that a group brings whose rows are shown."""


@dataclass(slots=True)
class PendingUpdate:
    """Update to ``version``, which the trainer has reached. Training waits for its release."""

    version: int
    released_at: float | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let the trainer change its weights again: every replica serves the version, or a copy was made."""
        self.released_at = now()
        self._released.set()

    async def until_released(self) -> None:
        await self._released.wait()


@dataclass(frozen=True, slots=True)
class TrainSettings:
    mini_batch_size: int
    """Number of groups per optimizer step."""
    mini_batches_per_fetch: int
    ppo_epochs: int
    steps_per_version: int
    save_freq: int
    """Number of versions between two checkpoints; -1 for none before the end."""
    mask_cut_off: bool
    """True where answers that did not end by themselves are left out of the loss."""

    @property
    def fetch_size(self) -> int:
        return self.mini_batch_size * self.mini_batches_per_fetch


@dataclass(frozen=True, slots=True)
class Resumed:
    """First input of a resumed run: the trainer holds ``version`` from a checkpoint, and no receiver has it."""

    version: int


class ActorTrain(Stage[Fetch | Resumed, PendingUpdate]):
    waits_for_output = "ParamUpdate"

    def __init__(
        self,
        state: RunState,
        input: FetchSource,
        output: Channel[PendingUpdate],
        trainer: TrainEngine,
        preparation: Preparation,
        settings: TrainSettings,
        *,
        lease: ColocationLease,
        fleet: ReplicaPool,
        episode_workers: EpisodeWorkers,
        guard: Guard,
        boundaries: CheckpointManager,
        turn: asyncio.Lock,
        critic: Critic | None = None,
        to_critic: Channel[Fetch] | None = None,
        follows: str = WAITS_FOR_GROUPS,
    ) -> None:
        """Build the stage. ``turn``: lock for calls of the trainer. ``to_critic``: leads to a critic with its own
        ranks; ``follows``: names the input.
        """
        super().__init__(state.emit, output=output)
        self.waits_for_input = follows
        self._state = state
        self._fetches = input
        self._trainer = trainer
        self._preparation = preparation
        self._settings = settings
        self._lease = lease
        self._fleet = fleet
        self._episode_workers = episode_workers
        self._guard = guard
        self._boundaries = boundaries
        self._turn = turn
        self._critic = critic
        self._to_critic = to_critic
        self._skipped = SkippedSteps("actor.optim.lr")
        self._steps = 0
        self._steps_of_version = 0
        self._to_publish: Resumed | None = None

    def counters(self) -> dict[str, Any]:
        """Return the stage's part of a checkpoint, at a version boundary."""
        return {"steps": self._steps, "skipped_in_row": self._skipped.state()}

    def restore(self, state: Mapping[str, Any], version: int) -> None:
        """Restore what `counters` returned at the boundary of ``version``, which is published before anything else is
        done.
        """
        self._steps = state["steps"]
        self._skipped.restore(state["skipped_in_row"])
        self._to_publish = Resumed(version) if version > 0 else None  # version 0 is the initial model: all have it

    async def get_input_data(self) -> Fetch | Resumed | None:
        if self._to_publish is not None:
            resumed, self._to_publish = self._to_publish, None
            return resumed
        started = now()
        fetch = await self._fetches.get()
        if fetch is not None and fetch.groups:
            numbers, waited = [group.number for group in fetch.groups], (started, now())
            self._emit(FetchTaken(time=now(), fetch=fetch.index, version=fetch.version, numbers=numbers, waited=waited))
        return fetch

    async def process_data(self, item: Fetch | Resumed) -> AsyncGenerator[PendingUpdate, None]:
        async with self._turn, aclosing(self._work_on(item)) as updates:
            async for update in updates:
                yield update

    async def _work_on(self, item: Fetch | Resumed) -> AsyncGenerator[PendingUpdate, None]:
        if isinstance(item, Resumed):
            await self._lease.to_train(self._waiting_within, new_weights=True)
            yield PendingUpdate(item.version)
            await self._lease.to_generate(self._waiting_within)
            return
        fetch = item
        size = len(fetch.groups)
        consumed = self._state.consumed + size
        # A fetch makes a version where it reaches a boundary, or is the last of data that gave out.
        makes_version = consumed % self._state.staleness.groups_per_version == 0 or size < self._settings.fetch_size
        # Only now, with a whole fetch in hand: generation could not make the rest of one without its devices.
        await self._lease.to_train(self._waiting_within, new_weights=makes_version)
        if fetch.groups:
            await self._train(fetch)
        # With a number of groups as the run's length every fetch is full; a short one means that the data gave out.
        self._state.data_ended = size < self._settings.fetch_size
        if self._state.at_boundary or self._state.data_ended:
            version = self._state.version
            self._steps_of_version = 0
            # Before the first wait: nothing that follows belongs to this boundary.
            self._boundaries.reached(version, self.counters())
            oldest = self._state.staleness.oldest_trainable(version)
            if oldest is not None and self._state.trains_more:  # what is queued is dropped when it would be taken
                await self._episode_workers.abort_older_than(oldest)
                await self._fleet.abort_older_than(oldest)
            yield PendingUpdate(version)
            if self._settings.save_freq > 0 and version % self._settings.save_freq == 0 and self._state.trains_more:
                await self._boundaries.save(version)
        # Not in a finally: a trainer that failed ends the run, and no engine must wake up on its devices.
        await self._lease.to_generate(self._waiting_within)

    async def send_output_data(self, update: PendingUpdate) -> bool:
        if not await super().send_output_data(update):
            return False
        await update.until_released()
        return True

    def close_output(self) -> None:
        super().close_output()
        if self._to_critic is not None:
            self._to_critic.close()

    async def _train(self, fetch: Fetch) -> None:
        version, groups = self._state.version, fetch.groups
        lags = {g.number: self._state.staleness.check(g.number, g.oldest_version, version) for g in groups}
        size = self._settings.mini_batch_size
        mini_batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        await self._trainer.begin_fetch([samples_of(mini_batch) for mini_batch in mini_batches])
        await self._preparation.prepare(fetch, self._busy)
        await self._train_critic(fetch)
        trained: set[int] = set()
        for epoch in range(self._settings.ppo_epochs):
            for mini_batch in mini_batches:
                report = await self._step(mini_batch, first=epoch == 0)
                self._report_step(report, fetch, mini_batch, lags)
                if not report.skipped:
                    trained.update(group.number for group in mini_batch)
        await self._trainer.end_fetch()
        for group in groups:
            if group.number in trained:
                self._state.consume(group.number, Fate.TRAINED, lag=lags[group.number])
            else:
                self._state.consume(group.number, Fate.DROPPED, "nonfinite")

    async def _train_critic(self, fetch: Fetch) -> None:
        if self._critic is None:
            return
        self._critic.hand(fetch)
        if self._to_critic is not None:
            await self._to_critic.send(fetch)
        else:
            with self._busy("critic"):
                await self._critic.train(fetch)

    async def _step(self, groups: Sequence[Group], *, first: bool) -> StepReport:
        """Make one optimizer step. ``first``: in the first epoch, whose rows are shown where their groups are drawn."""
        mask_cut_off, samples = self._settings.mask_cut_off, self._state.samples
        shown = frozenset(group.id for group in groups if first and group.shown)
        rows = [
            sample
            for group in groups
            for sample in group.samples(SHOWN_COLUMNS if group.id in shown else COLUMNS, mask_cut_off=mask_cut_off)
        ]
        progress = self._steps_of_version / self._settings.steps_per_version
        context = StepContext(self._state.version, progress, self._guard.clip_scale, shown)
        with self._busy("step"):
            report = await self._trainer.train_step(rows, context)
        if samples is not None:
            samples.trained(report.shown)
        self._steps_of_version += 1
        self._guard.look(report, context.version)
        return report

    @contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        started, version = now(), self._state.version
        try:
            with self._waiting_within(f"the trainer's {what}"):
                yield
        finally:
            self._emit(TrainerBusy(time=now(), what=what, version=version, span=(started, now())))

    def _report_step(self, report: StepReport, fetch: Fetch, groups: Sequence[Group], lags: dict[int, int]) -> None:
        version = self._state.version
        trajectories = [t for group in groups for t in group.trajectories]
        self._emit(
            OptimizerStepped(
                time=now(),
                step=self._steps,
                fetch=fetch.index,
                version=version,
                skipped=report.skipped,
                tokens=sum(t.length for t in trajectories),
                trajectories=len(trajectories),
                rows=sum(len(t.rows) for t in trajectories),
                lags=[lags[group.number] for group in groups],
                token_lag=_token_lags(trajectories, version),
                stale_trajectories=sum(_is_older(t, version) for t in trajectories),
                metrics=report.metrics,
            )
        )
        self._steps += 1
        self._skipped.count(report)


def _is_older(trajectory: Trajectory, version: int) -> bool:
    oldest = trajectory.oldest_version
    return oldest is not None and oldest < version


def _token_lags(trajectories: Sequence[Trajectory], version: int) -> dict[int, int]:
    """Return a histogram of the tokens' lags: lag → number of tokens."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        spans = trajectory.version_spans
        ends = [start for start, _ in spans[1:]] + [trajectory.length] * bool(spans)
        for (start, sampled_by), end in zip(spans, ends, strict=True):
            counts[version - sampled_by] += end - start
    return dict(sorted(counts.items()))
