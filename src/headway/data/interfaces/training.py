"""Engines that compute on samples (trainer, critic, log-probs), with advantages, steps and profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.assignment import GroupId
from headway.data.interfaces.weights import GatherReport, SendReport
from headway.data.types import AnyColumn, Column, Outcomes, TrainSample, TrajectoryId


@dataclass(frozen=True, slots=True)
class StepContext:
    """Position of an optimizer step in the run."""

    version: int = 0
    """Version of the trainer; optimizer steps since that version are not counted."""
    progress: float = 0.0
    """Share of this version's optimizer steps made before this one: in [0, 1)."""
    clip_scale: float = 1.0
    """Width of the trust region, as a multiple of the configured one."""
    shown: frozenset[GroupId] = frozenset()
    """Groups of the mini-batch whose rows go into the report."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One row as an optimizer step saw it. All arrays are [T]: one value for each response token.

    It costs no computation: the log-probs are those of the step's own forward pass.
    """

    episode: TrajectoryId
    prompt_ids: NDArray[np.int32]
    """Token ids of the row's prompt, [P]."""
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """True if the loss counts the token."""
    versions: NDArray[np.int32]
    """Version that sampled each token; -1 if it was not sampled."""
    behaviour: NDArray[np.float32]
    """Log-probs (nats) under the policy that sampled the tokens, as the engine gave them."""
    logprobs: NDArray[np.float32]
    """Log-probs (nats) under the trainer's policy, before the step."""
    entropy: NDArray[np.float32]
    """Entropies (nats) of the trainer's policy at each token."""
    columns: Mapping[str, NDArray[np.float32]]
    """Columns of the row, by name."""
    cut: int = 0
    """Number of tokens left out in the middle of a long response; T counts only the remaining ones."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report on one optimizer step. ``skipped`` when loss or gradient norm was not finite: weights are unchanged."""

    skipped: bool
    metrics: dict[str, float]
    shown: tuple[TrainedRow, ...] = ()
    """Rows of the groups in `StepContext.shown`, the rows of an episode in order."""

    def joined(self, others: Sequence[StepReport]) -> StepReport:
        """Return the merged report of all ranks: their metrics are equal, their rows differ."""
        return replace(self, shown=tuple(row for report in (self, *others) for row in report.shown))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Negative log-likelihood of some tokens."""

    nats: float
    """Sum over the tokens."""
    tokens: int

    def joined(self, others: Sequence[TokenLoss]) -> TokenLoss:
        """Return the loss of the tokens of all ranks."""
        everything = (self, *others)
        return TokenLoss(sum(one.nats for one in everything), sum(one.tokens for one in everything))


class Profiled(Protocol):
    """A process of the run whose work can be profiled.

    await process.start()                   # whatever it computes from now on is recorded, on all of its threads
    await process.stop()
    trace = await process.take(origin)      # a Chrome trace, compressed
    """

    name: str
    """Names of the workers in the process, joined by ``_``."""

    async def start(self) -> None:
        """Start to record. Raises `RunError` if that is impossible."""

    async def stop(self) -> None:
        """Stop recording. The record is kept for `take`. The process may block for seconds meanwhile."""

    async def take(self, origin: float) -> bytes:
        """Return the record as a Chrome trace in gzip, and forget it.

        Its times are microseconds since ``origin``, which is in Unix seconds.
        """


class BatchEngine(Protocol):
    """Engine with several calls for one batch, which it divides among its ranks once.

        await engine.begin_batch(mini_batches)              # each rank gets groups that are its own from now on
        values = await engine.forward_values(samples)       # it reads their tokens, and holds them
        await engine.train_step(mini_batches[0])
        await engine.end_batch()                            # they are forgotten when another one is read

    Calls between `begin_batch` and `end_batch` are only about samples of that batch.
    """

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        """Assign the samples of a batch to ranks. ``mini_batches``: the samples of each optimizer step."""

    async def end_batch(self) -> None:
        """End the batch. Its data are forgotten now, or when the next batch is read."""


class LogProbEngine(Protocol):
    """Engine that recomputes log-probs: a frozen or separately served copy of the policy."""

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        """Return the [T] float32 log-probs of each sample (nats, ``rollout.temperature`` applied)."""


class ProximalEngine(Protocol):
    """Engine for log π_prox: log-probs under the policy before a version's first optimizer step."""

    async def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[Column]:
        """Return the [T] float32 log-probs of each sample under ``version`` (nats, ``rollout.temperature`` applied).

        Raises `RunError` if the engine does not have exactly that version.
        """


class SupervisedEngine(BatchEngine, Protocol):
    """Training engine for supervised fine-tuning: the trainer's ranks, driven as one."""

    async def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        """Make one optimizer step on a mini-batch. The gradient does not depend on how the mini-batch is split."""

    async def token_loss(self, samples: Sequence[TrainSample]) -> TokenLoss:
        """Return the loss of the tokens that the samples train, under the current weights."""

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        """Save a complete checkpoint: model, optimizer, schedule, and ``driver_state`` as JSON. Atomic, by a rename."""

    async def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint. Returns its ``driver_state``."""

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder that ``AutoModelForCausalLM.from_pretrained`` opens."""


class TrainEngine(BatchEngine, LogProbEngine, ProximalEngine, Protocol):
    """Training engine: the trainer's ranks, driven as one.

        await trainer.begin_batch(mini_batches)
        for mini_batch in mini_batches:
            await trainer.train_step(mini_batch, StepContext(version=2))
        await trainer.end_batch()
        await trainer.reach(["rollout-0"])
        await trainer.send_weights(3, ["rollout-0"])        # while rollout-0 stages version 3
        await trainer.copy_state()
        await trainer.save(path, driver_state)              # the ranks may train meanwhile

    Ask for log-probs under a version's weights before the version's first step. The engine then keeps the weights that
    it needs for further requests.
    """

    async def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        """Make one optimizer step on a mini-batch. The gradient does not depend on how the mini-batch is split."""

    async def reach(self, receivers: Sequence[str]) -> None:
        """Prepare to send the next version to exactly these receivers, none of which is receiving.

        Call it before every transfer; it is quick if nothing changed. After a failure, or a receiver's death or join, a
        transport whose members depend on each other sets up its group again. Raises `UpdateFailed` if a receiver does
        not join.
        """

    async def send_weights(self, version: int, receivers: Sequence[str]) -> SendReport:
        """Gather and send the weights, bucket by bucket, to ``receivers``, whose `stage_weights` must run at the same
        time.

        They must be those of the last `reach`. Raises `UpdateFailed` if one of them does not answer or gives up.
        """

    async def gather_weights(self, version: int) -> GatherReport:
        """Gather the weights into the ranks' copy in host memory. The ranks are free again when this returns. Not while
        `send_gathered` runs.
        """

    async def send_gathered(self, version: int, receivers: Sequence[str]) -> SendReport:
        """Send the copy, which must hold ``version``, to receivers that load from one copy of their own.

        Their `stage_weights` must run at the same time. Needs no time of the ranks, and may run several times at once;
        ``gather_s`` of the report is 0.
        """

    async def copy_state(self) -> None:
        """Copy model, optimizer and schedule into the ranks' host memory, for `save`. Not while `save` runs."""

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        """Save a complete checkpoint: the copy, and ``driver_state`` as JSON. Atomic, by a rename.

        Needs no time of the ranks, which may train on. One at a time.
        """

    async def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint. Returns its ``driver_state``."""

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder that ``AutoModelForCausalLM.from_pretrained`` opens."""


OverlappingTrainEngine = TrainEngine
"""Earlier name of a trainer that sends weights while it trains on, as every trainer does now."""


class CriticEngine(BatchEngine, Protocol):
    """Critic's ranks, driven as one: V(s_t), an estimate of the rewards from token t on, before token t."""

    async def forward_values(self, samples: Sequence[TrainSample]) -> list[Column]:
        """Return the [T] float32 values of each sample."""

    async def train_step(self, samples: Sequence[TrainSample]) -> StepReport:
        """Make one optimizer step towards the samples' ``returns``, from their ``values``."""

    async def copy_state(self) -> None:
        """Copy model, optimizer and schedule into the ranks' host memory, for `save`. Not while `save` runs."""

    async def save(self, path: Path) -> None:
        """Save the copy as a complete checkpoint. Atomic, by a rename. Takes no time of the ranks; one at a time."""

    async def load(self, path: Path) -> None: ...


class AdvantageFn(Protocol):
    """Function that computes the advantages of a batch once, in the process that has the batch's tokens."""

    async def __call__(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> Mapping[str, Sequence[AnyColumn]]:
        """Return ``advantages`` and, with a critic, ``returns``: for each sample a [T] float32 column, or one number
        for all its tokens.

        Raises `RunError`, naming a trajectory, for a reward or an advantage that is not finite.
        """
