"""ActorTrain: takes a fetch, computes advantages once, makes its optimizer steps; every so many fetches, a new version.

consumes        fetches from the message queue: ``require_batches`` mini-batches of groups
waits for       enough groups, in the order of consumption
is unblocked by the queue; by the lease, on shared devices; after a version, by ParamUpdate (all replicas loaded it, or
                a copy of the weights was made)
produces        one update per version
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headway.data.types import Column, Group, Sample, Trajectory
from headway.errors import NonFinite
from headway.events import FetchTaken, OptimizerStepped, TrainerBusy
from headway.interfaces import AdvantageFn, LogProbEngine, StepReport, TrainEngine
from headway.pipeline.channel import Channel
from headway.pipeline.fleet import Fleet
from headway.pipeline.lease import Lease
from headway.pipeline.ledger import Fate
from headway.pipeline.stage import Stage
from headway.pipeline.stages.ref_logprob import add_ref_logprobs, forward_samples
from headway.pipeline.state import RunState, now


@dataclass(slots=True)
class Update:
    """The trainer reached ``version``, and goes on when it is released."""

    version: int
    released_at: float | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """The trainer may change its weights again: every replica serves the version, or a copy was made."""
        self.released_at = now()
        self._released.set()

    async def until_released(self) -> None:
        await self._released.wait()


@dataclass(frozen=True, slots=True)
class TrainSettings:
    mini_batch_size: int
    """Groups per optimizer step."""
    mini_batches_per_fetch: int
    ppo_epochs: int
    use_rollout_log_probs: bool
    max_nonfinite_steps: int
    save_freq: int
    """Versions between two checkpoints; -1 for none before the end."""

    @property
    def fetch_size(self) -> int:
        return self.mini_batch_size * self.mini_batches_per_fetch


class ActorTrain(Stage[list[Group], Update]):
    waits_for_input = "groups from the message queue"
    waits_for_output = "ParamUpdate"

    def __init__(
        self,
        state: RunState,
        trainer: TrainEngine,
        advantages: AdvantageFn,
        output: Channel[Update],
        settings: TrainSettings,
        *,
        lease: Lease,
        fleet: Fleet,
        reference: LogProbEngine | None = None,
        checkpoint: Callable[[int], Awaitable[object]],
    ) -> None:
        """``reference`` is given only when it shares the trainer's ranks: it then runs inside each fetch."""
        super().__init__(state.emit)
        self._state = state
        self._trainer = trainer
        self._advantages = advantages
        self._output = output
        self._settings = settings
        self._lease = lease
        self._fleet = fleet
        self._reference = reference
        self._checkpoint = checkpoint
        self._fetches = 0
        self._steps = 0
        self._skipped_in_row = 0

    async def get_input_data(self) -> list[Group] | None:
        if not self._state.trains_more:
            return None
        started = now()
        groups = await self._state.take(self._settings.fetch_size)
        if not self._state.trains_more:
            return None  # a stop was asked for meanwhile, and this fetch abandoned
        if not groups and self._state.at_boundary:
            return None
        if groups:
            self._report_fetch(groups, started)
        self._state.fetching = len(groups)
        return groups

    async def process_data(self, groups: list[Group]) -> AsyncGenerator[Update, None]:
        # Only now, with a whole fetch in hand: generation could not make the rest of one without its devices.
        await self._lease.to_train(self._waiting_within, new_weights=self._makes_version(len(groups)))
        if groups:
            await self._train(groups)
        # With a number of groups as the run's length every fetch is full; a short one means that the data gave out.
        self._state.data_ended = len(groups) < self._settings.fetch_size
        if self._state.at_boundary or self._state.data_ended:
            version = self._state.version
            await self._drop_overdue(version)
            yield Update(version)
            if self._settings.save_freq > 0 and version % self._settings.save_freq == 0 and self._state.trains_more:
                await self._checkpoint(version)
        # Not in a finally: a trainer that failed ends the run, and no engine must wake up on its devices.
        await self._lease.to_generate(self._waiting_within)

    def _makes_version(self, groups: int) -> bool:
        """A fetch of so many ``groups`` reaches a boundary, or is the last of data that gave out."""
        consumed = self._state.consumed + groups
        return consumed % self._state.staleness.groups_per_version == 0 or groups < self._settings.fetch_size

    async def send_output_data(self, update: Update) -> bool:
        if not await self._output.send(update):
            return False
        await update.until_released()
        return True

    def close_output(self) -> None:
        self._output.close()

    async def _train(self, groups: list[Group]) -> None:
        version = self._state.version
        lags = {g.number: self._state.staleness.check(g.number, g.oldest_version, version) for g in groups}
        samples = await self._prepare(groups)
        size = self._settings.mini_batch_size
        mini_batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        trained: set[int] = set()
        for _ in range(self._settings.ppo_epochs):
            for mini_batch in mini_batches:
                rows = [sample for group in mini_batch for sample in samples[group.number]]
                with self._busy("step"):
                    report = await self._trainer.train_step(rows)
                self._report_step(report, mini_batch, lags)
                if not report.skipped:
                    trained.update(group.number for group in mini_batch)
        for group in groups:
            if group.number in trained:
                self._state.consume(group.number, Fate.TRAINED, lag=lags[group.number])
            else:
                self._state.consume(group.number, Fate.DROPPED, "nonfinite")
        self._state.fetching = 0
        self._fetches += 1

    async def _drop_overdue(self, version: int) -> None:
        """Of what is still being generated; what is queued is dropped when it would be taken."""
        oldest = self._state.staleness.oldest_trainable(version)
        if oldest is not None and self._state.trains_more:
            await self._fleet.drop_older_than(oldest)

    async def _prepare(self, groups: list[Group]) -> dict[int, list[Sample]]:
        """Whatever is computed once per fetch: the reference's and proximal log-probs, advantages."""
        prox: Iterator[Column] | None = None
        if self._reference is not None:
            with self._busy("forward"):
                await add_ref_logprobs(groups, self._reference)
        if not self._settings.use_rollout_log_probs:
            with self._busy("forward"):
                prox = iter(await self._trainer.forward_logprobs(forward_samples(groups)))
        samples: dict[int, list[Sample]] = {}
        for group, advantages in zip(groups, self._advantages(groups), strict=True):
            samples[group.number] = [
                Sample(
                    tokens=group.responses[k].tokens,
                    k=group.responses[k].index,
                    prompt_length=trajectory.prompt_length,
                    length=trajectory.length,
                    advantages=advantages[k],
                    columns=_columns(group, k, prox),
                )
                for k, trajectory in enumerate(group.trajectories)
            ]
        return samples

    @contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        started, version = now(), self._state.version
        try:
            with self._waiting_within(f"the trainer's {what}"):
                yield
        finally:
            self._emit(TrainerBusy(time=now(), what=what, version=version, span=(started, now())))

    def _report_fetch(self, groups: Sequence[Group], started: float) -> None:
        self._emit(
            FetchTaken(
                time=now(),
                fetch=self._fetches,
                version=self._state.version,
                numbers=[group.number for group in groups],
                waited=(started, now()),
            )
        )

    def _report_step(self, report: StepReport, groups: Sequence[Group], lags: dict[int, int]) -> None:
        version = self._state.version
        trajectories = [t for group in groups for t in group.trajectories]
        self._emit(
            OptimizerStepped(
                time=now(),
                step=self._steps,
                fetch=self._fetches,
                version=version,
                skipped=report.skipped,
                tokens=sum(t.length for t in trajectories),
                trajectories=len(trajectories),
                lags=[lags[group.number] for group in groups],
                token_lag=_token_lags(trajectories, version),
                stale_trajectories=sum(_is_older(t, version) for t in trajectories),
                metrics=report.metrics,
            )
        )
        self._steps += 1
        self._skipped_in_row = self._skipped_in_row + 1 if report.skipped else 0
        if self._skipped_in_row > self._settings.max_nonfinite_steps:
            raise NonFinite(
                f"{self._skipped_in_row} optimizer steps in a row were skipped because loss or gradient was not finite "
                "(trainer.max_nonfinite_steps); lower actor.optim.lr, or look at the rewards for extreme values"
            )


def _columns(group: Group, k: int, prox: Iterator[Column] | None) -> dict[str, Any]:
    columns = {}
    if group.ref_logprobs is not None:
        columns["ref_logprobs"] = group.ref_logprobs[k]
    if prox is not None:
        columns["prox_logprobs"] = next(prox)
    return columns


def _is_older(trajectory: Trajectory, version: int) -> bool:
    oldest = trajectory.oldest_version
    return oldest is not None and oldest < version


def _token_lags(trajectories: Sequence[Trajectory], version: int) -> dict[int, int]:
    """Histogram: lag → tokens."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        spans = trajectory.version_spans
        ends = [start for start, _ in spans[1:]] + [trajectory.length] * bool(spans)
        for (start, sampled_by), end in zip(spans, ends, strict=True):
            counts[version - sampled_by] += end - start
    return dict(sorted(counts.items()))
