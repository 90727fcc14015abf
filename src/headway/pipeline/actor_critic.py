"""Actor and critic: the two trained models, which the stages drive one train batch at a time.

A batch is prepared before its first optimizer step, for all its mini-batches and epochs:

    [reference] ▶ [π_prox] ▶ [critic's values] ▶ advantages, returns ▶ [critic's steps] ▶ the policy's steps

Steps in brackets happen here if the role shares the trainer's ranks. A critic on ranks of its own works beside the
trainer, in a fixed order, so that values do not depend on which of the two is faster:

    values (b) ──▶ advantages, returns ──▶ train (b) ──▶ values (b + 1)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from headway.config.schema import Config
from headway.data.assignment import GroupId
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import (
    AdvantageFn,
    CriticEngine,
    LogProbEngine,
    ProximalEngine,
    StepContext,
    TrainEngine,
)
from headway.data.types import AnyColumn, ColumnName, Outcomes, TrainSample, Trajectory
from headway.events import CriticStepped, Emit, OptimizerStepped, TrainerBusy
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.admission.train_batches import TrainBatch
from headway.pipeline.off_policy_guard import ESS, Guard, StepCounter
from headway.pipeline.stage import Signal, WaitingFor

COLUMNS = (ColumnName.ADVANTAGES, ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS)
"""Names of the columns that the loss may read."""
SHOWN_COLUMNS = (*COLUMNS, ColumnName.VALUES, ColumnName.RETURNS)
"""Names of the columns that are read for a group that leaves a sample."""
OnPrepared = Callable[[TrainBatch], Awaitable[object]]


async def _called(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _silent(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class Actor:
    """Policy on the trainer's ranks, and the roles that share them. Prepares train batches and trains on them.

    batch.lags = lags                                 # number → lag of each group
    trained = await actor.learn(batch, waiting_for)   # numbers of the groups that changed the weights
    """

    def __init__(
        self,
        config: Config,
        state: RunState,
        trainer: TrainEngine,
        advantages: AdvantageFn,
        guard: Guard,
        *,
        reference: LogProbEngine | None = None,
        proximal: ProximalEngine | None = None,
        critic: Critic | None = None,
    ) -> None:
        """Create the actor. ``reference``, ``proximal``: None if they have ranks of their own or do not exist."""
        self.trainer, self.guard, self.critic = trainer, guard, critic
        self._config, self._state, self._advantages = config, state, advantages
        self._reference, self._proximal = reference, proximal
        self.steps = StepCounter("actor.optim.lr")
        self._version, self._steps_of_version = 0, 0
        """Version of the last step, and number of steps of that version."""
        self.keeps_batches = False
        """True if batches are kept until the next checkpoint, so that restarted ranks can train on them again."""
        self._kept: list[TrainBatch] = []

    def _begin(self, batch: TrainBatch) -> None:
        # Before any column is added: columns present now came with the groups, and these ranks cannot recompute them.
        batch.given = set(batch.groups[0].columns)
        if self.critic is not None and self.critic.own_ranks:  # the critic still has to train on them, perhaps twice
            batch.given.add(ColumnName.RETURNS)
        if self.keeps_batches:
            self._kept.append(batch)

    def since(self, version: int) -> list[TrainBatch]:
        """Return the batches that were begun from ``version`` on."""
        return [batch for batch in self._kept if batch.version >= version]

    def stands_at(self, version: int) -> bool:
        """Return True if the trainer, having reached ``version``, has made no optimizer step of it yet."""
        return self._version < version or self._steps_of_version == 0

    def forget_before(self, version: int) -> None:
        """Forget the batches before ``version``, whose checkpoint is complete."""
        self._kept = self.since(version)

    async def learn(
        self, batch: TrainBatch, waiting_for: WaitingFor = _silent, on_prepared: OnPrepared | None = None
    ) -> Collection[int]:
        """Prepare a batch and make its optimizer steps. Steps made before are repeated without a report.

        Returns the numbers of the groups whose steps were not skipped. ``on_prepared`` is called before the first step.
        """
        if batch.given is None:
            self._begin(batch)
        await self._prepare(batch, waiting_for, reported=not batch.is_over)
        # The critic already has a batch that is redone: if it were handed on again, the critic would train on it twice.
        if on_prepared is not None and not batch.was_handed_on:
            batch.was_handed_on = True
            await on_prepared(batch)
        trained = await self._train(batch, waiting_for)
        if self.keeps_batches:  # else a critic on ranks of its own has yet to read the columns
            batch.is_over = True
            given = batch.given or ()
            for group in batch.groups:  # drop the columns that the trainer's ranks can recompute
                group.columns = {name: group.columns[name] for name in group.columns if name in given}
        return trained

    async def _prepare(self, batch: TrainBatch, waiting_for: WaitingFor, *, reported: bool) -> None:
        """Set the batch's missing columns, ``advantages`` last, and give it to the critic."""
        critic, rows = self.critic, samples_of(batch.groups)
        # Before anything is computed: ranks keep the rows that they read from here to `end_batch`.
        await self.trainer.begin_batch([samples_of(groups) for groups in _mini_batches(batch, self._config)])
        if self._reference is not None:
            with self._busy("forward", batch.version, waiting_for, reported=reported):
                log_probs = await self._reference.forward_logprobs(rows)
                add_column(batch.groups, ColumnName.REF_LOGPROBS, log_probs)
        if self._proximal is not None:
            with self._busy("forward", batch.version, waiting_for, reported=reported):
                log_probs = await self._proximal.proximal_logprobs(rows, batch.version)
                add_column(batch.groups, ColumnName.PROX_LOGPROBS, log_probs)
        if critic is not None and not critic.own_ranks:
            with self._busy("critic", batch.version, waiting_for, reported=reported):
                await critic.add_values(batch)
        rows = samples_of(batch.groups, (ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS, ColumnName.VALUES))
        for name, values in (await self._advantages(rows, outcomes(batch.groups))).items():
            add_column(batch.groups, name, values)
        if critic is not None:
            # Before the batch goes on: from here on a checkpoint waits for the critic.
            critic.hand(batch)
            if not critic.own_ranks:
                with self._busy("critic", batch.version, waiting_for, reported=reported):
                    await critic.train(batch)

    async def _train(self, batch: TrainBatch, waiting_for: WaitingFor) -> Collection[int]:
        """Make the optimizer steps of a prepared batch."""
        trained, before = set[int](), list(batch.steps)
        mini_batches = _mini_batches(batch, self._config)
        for number, groups in enumerate(mini_batches * self._config.actor.ppo_epochs):
            rows = [
                sample
                for group in groups
                for sample in group.samples(
                    SHOWN_COLUMNS if group.shown else COLUMNS, mask_cut_off=self._config.algorithm.overlong_filtering
                )
            ]
            if number < len(before):
                context, skipped = before[number]
                # A repeated step keeps its first clip range; its rows were sampled the first time.
                await self.trainer.train_step(rows, replace(context, shown=frozenset()))
            else:
                first = number < len(mini_batches)  # a sample has its rows as the first epoch saw them
                shown = {group.prompt.group_id: group.number for group in groups if first and group.shown}
                skipped = await self._step(batch, groups, rows, shown, waiting_for)
            if not skipped:
                trained.update(group.number for group in groups)
        await self.trainer.end_batch()
        return trained

    async def _step(
        self,
        batch: TrainBatch,
        groups: Sequence[Group],
        rows: Sequence[TrainSample],
        shown: Mapping[GroupId, int],
        waiting_for: WaitingFor,
    ) -> bool:
        """Make one optimizer step and report it. Returns True if it was skipped. ``shown``: group id -> number of each
        group whose rows go into samples.
        """
        version = batch.version
        if version != self._version:
            self._version, self._steps_of_version = version, 0
        steps_per_version = self._config.actor.ppo_epochs * (
            self._config.groups_per_version // self._config.actor.ppo_mini_batch_size
        )
        context = StepContext(
            version, self._steps_of_version / steps_per_version, self.guard.clip_scale, frozenset(shown)
        )
        with self._busy("step", batch.version, waiting_for):
            report = await self.trainer.train_step(rows, context)
        # Before the report: if the ranks are lost after this line, the step is redone and not reported twice.
        batch.steps.append((context, report.skipped))
        for row in report.shown:
            drawn = self._state.ledger.open[shown[row.episode[:3]]].drawn
            if drawn is not None:
                drawn.rows.append(row)
        self._steps_of_version += 1
        self.guard.look(None if report.skipped else report.metrics.get(ESS), version)
        trajectories = [t for group in groups for t in group.trajectories]
        self._state.emit(
            OptimizerStepped(
                time=now(),
                step=self.steps.made,
                fetch=batch.index,
                version=version,
                skipped=report.skipped,
                tokens=sum(t.length for t in trajectories),
                trajectories=len(trajectories),
                rows=sum(len(t.rows) for t in trajectories),
                lags=[batch.lags[group.number] for group in groups],
                token_lag=_token_lags(trajectories, version),
                stale_trajectories=sum(any(by < version for _, by in t.version_spans) for t in trajectories),
                metrics=report.metrics,
            )
        )
        self.steps.count(skipped=report.skipped)
        return report.skipped

    @contextmanager
    def _busy(self, what: str, version: int, waiting_for: WaitingFor, *, reported: bool = True) -> Iterator[None]:
        """Emit a `TrainerBusy` event for the block when it ends, if ``reported``."""
        started = now()
        try:
            with waiting_for(f"the trainer's {what}"):
                yield
        finally:
            if reported:
                self._state.emit(TrainerBusy(time=now(), what=what, version=version, span=(started, now())))


def _token_lags(trajectories: Sequence[Trajectory], version: int) -> dict[int, int]:
    """Return a histogram of the tokens' lags: lag → number of tokens."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        spans = trajectory.version_spans
        ends = [start for start, _ in spans[1:]] + [trajectory.length] * bool(spans)
        for (start, sampled_by), end in zip(spans, ends, strict=True):
            counts[version - sampled_by] += end - start
    return dict(sorted(counts.items()))


class Critic:
    """Critic of a run: computes the values of a train batch, then trains on it."""

    def __init__(self, config: Config, engine: CriticEngine, emit: Emit, *, own_ranks: bool) -> None:
        """Create the critic. ``own_ranks``: False if it shares the trainer's ranks, where the actor begins and ends
        batches.
        """
        self.engine, self.own_ranks = engine, own_ranks
        self._config, self._emit = config, emit
        self.steps = StepCounter("critic.optim.lr")
        self._handed = self._trained = 0
        """Number of batches handed to the critic, and number of batches that it was trained on."""
        self._reported = 0
        """Number of steps reported for the current batch."""
        self._begun: TrainBatch | None = None
        """Last batch that the critic began on ranks of its own."""
        self.surviving: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]] = _called
        """Coroutine function that calls the critic's own ranks, and repeats the call after these are restarted."""
        self._changed = Signal()
        self._ranks = asyncio.Lock()
        """Lock held while the critic's ranks work: different stages request values and checkpoints."""

    async def add_values(self, batch: TrainBatch) -> None:
        """Set the ``values`` column of ``batch``, once the critic was trained on all batches before it."""
        await self.surviving(partial(self._add_values, batch))

    async def _add_values(self, batch: TrainBatch) -> None:
        await self._changed.until(lambda: self._trained >= batch.index)  # more, if shared ranks redo batches
        async with self._ranks:
            if self.own_ranks:
                self._begun = batch
                await self._begin(batch)
            add_column(batch.groups, ColumnName.VALUES, await self.engine.forward_values(samples_of(batch.groups)))

    async def _begin(self, batch: TrainBatch) -> None:
        await self.engine.begin_batch([samples_of(mini_batch) for mini_batch in _mini_batches(batch, self._config)])

    @property
    def behind(self) -> bool:
        """True while the critic has yet to train on batches handed to it."""
        return self._trained != self._handed

    def hand(self, batch: TrainBatch) -> None:
        """Announce that ``batch`` has its returns and will be trained on."""
        self._handed = max(self._handed, batch.index + 1)  # a batch that is redone was handed on before: keep the count

    async def train(self, batch: TrainBatch) -> None:
        """Make optimizer steps towards the batch's ``returns``. Steps made before are repeated without a report.

        Raises `NonFinite` after too many skips in a row.
        """
        await self.surviving(partial(self._train, batch))

    async def _train(self, batch: TrainBatch) -> None:
        # Without the lock `_ranks`: whoever takes it has waited until the critic is trained on all earlier batches.
        redone, columns = batch.index < self._trained, (ColumnName.VALUES, ColumnName.RETURNS)
        for number, mini_batch in enumerate(_mini_batches(batch, self._config) * self._config.critic.ppo_epochs):
            started = now()
            rows = samples_of(mini_batch, columns, mask_cut_off=self._config.algorithm.overlong_filtering)
            report = await self.engine.train_step(rows)
            # The step was made before the ranks were lost: a second report would count it twice.
            if redone or number < self._reported:
                continue
            self._emit(
                CriticStepped(
                    time=now(),
                    step=self.steps.made,
                    fetch=batch.index,
                    version=batch.version,
                    skipped=report.skipped,
                    span=(started, now()),
                    metrics=report.metrics,
                )
            )
            self._reported += 1
            self.steps.count(skipped=report.skipped)
        if self.own_ranks:
            await self.engine.end_batch()  # on the trainer's ranks the actor ends it, after the policy's steps
        if not redone:
            self._reported = 0
            self._trained += 1
            self._changed.changed()

    async def redo(self, batches: Sequence[TrainBatch]) -> int:
        """Train the critic again on the ``batches`` that it was trained on before, and begin the open batch.

        The critic has ranks of its own, which have loaded a checkpoint or the initial model. Returns the number of
        batches that it was trained on again.
        """
        trained = [batch for batch in batches if batch.index < self._trained]
        for batch in trained:
            await self._begin(batch)
            await self._train(batch)
        # The open batch may have its values, and is trained on next: the ranks have to hold its rows again.
        if self._begun is not None and self._begun.index >= self._trained:
            await self._begin(self._begun)
        return len(trained)

    def restore(self, state: Mapping[str, Any], batches: int) -> None:
        """Restore a checkpoint's ``state``. ``batches``: number of batches trained on before the checkpoint."""
        self.steps.restore(state)
        self._handed = self._trained = batches

    async def copy_state(self) -> None:
        """Copy the critic for a checkpoint, after it was trained on all batches handed to it."""
        await self.surviving(self._copy_state)

    async def _copy_state(self) -> None:
        await self._changed.until(lambda: not self.behind)
        async with self._ranks:
            await self.engine.copy_state()


def samples_of(
    groups: Sequence[Group], columns: Collection[str] = (), *, mask_cut_off: bool = False
) -> list[TrainSample]:
    """Return a sample for each row of ``groups``, in order. See `Group.samples`."""
    return [sample for group in groups for sample in group.samples(columns, mask_cut_off=mask_cut_off)]


def add_column(groups: Sequence[Group], name: str, columns: Iterable[AnyColumn]) -> None:
    """Set the column ``name`` of every row of ``groups``, in order."""
    following = iter(columns)  # shared by all groups: each goes on where the one before stopped
    for group in groups:
        group.columns[name] = tuple(islice(following, sum(len(trajectory.rows) for trajectory in group.trajectories)))


def outcomes(groups: Sequence[Group]) -> Outcomes:
    """Return the episodes' rewards, groups and lengths, for the advantages. Every group must have its rewards.

    Failed episodes are left out: they have no samples and count in no statistic.
    """
    kept = []
    for group in groups:
        assert group.rewards is not None, f"group {group.number} was not rewarded"
        of_group = zip(group.trajectories, group.rewards, strict=True)
        kept += [(group, trajectory, reward) for trajectory, reward in of_group if trajectory.failure is None]
    baselines = [group.baseline for group, _, _ in kept if group.baseline is not None]
    return Outcomes(
        ids=tuple(t.id for _, t, _ in kept),
        rewards=np.array([reward for _, _, reward in kept], dtype=np.float32),
        groups=np.array([group.number for group, _, _ in kept], dtype=np.int64),
        episode_of=np.repeat(np.arange(len(kept), dtype=np.int64), [len(t.rows) for _, t, _ in kept]),
        baselines=np.array(baselines, dtype=np.float32) if baselines else None,
        turn_rewards=tuple(t.turn_rewards for _, t, _ in kept) if any(t.turn_rewards for _, t, _ in kept) else (),
        # Each sampled token is trained in one row.
        lengths=np.array([t.length for _, t, _ in kept], dtype=np.int64),
    )


def _mini_batches(batch: TrainBatch, config: Config) -> list[list[Group]]:
    """Return the groups of each optimizer step."""
    size = config.actor.ppo_mini_batch_size
    return [batch.groups[i : i + size] for i in range(0, len(batch.groups), size)]
