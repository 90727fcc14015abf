"""Roles of ranks that compute with samples: the trainer's, and those of critic, reference and log-probs.

The trainer's ranks send weights; ranks that recompute log-probs (log π_prox) receive them. Registered methods that
compute are collective over the ranks of a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.role import Role
from headway.cluster.roles.weight_roles import Left, Send, Sent, WeightInbox, WeightSendRole, transport_in
from headway.cluster.snapshots import RankSnapshot
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.training import StepContext, StepReport, TokenLoss
from headway.data.interfaces.weights import GatherReport, ReceiveReport
from headway.data.types import ColumnName, Outcomes, TrainSample
from headway.devices import kind_of
from headway.engines.weights.protocols import Address, through_devices
from headway.engines.weights.weight_layout import Manifest


class ColumnRole(Role):
    """Base of roles whose ranks may hold the critic and the reference policy, once they are built. Registered methods
    are collective over the ranks.
    """

    RANKS: str
    """Name under which the role's ranks meet."""

    def __init__(self, *, with_reference: bool = False, total_critic_steps: int | None = None, **common: Any) -> None:
        """Create the role. ``total_critic_steps``: None if the critic is absent or has separate ranks."""
        super().__init__(**common)
        self._with_reference = with_reference
        self._total_critic_steps = total_critic_steps

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the models."""
        self._join_ranks(store, self.RANKS)
        self._load_models()

    def _load_models(self) -> None:
        from headway.engines.train.fsdp.column_engines import FsdpCritic
        from headway.engines.train.fsdp.sharded_module import frozen_policy

        if self._with_reference:
            self._reference = frozen_policy(self._model_path, self._config, self._mesh)
        if self._total_critic_steps is not None:
            self._critic = FsdpCritic(self._model_path, self._config, self._total_critic_steps, self._mesh)

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        from headway.engines.train.fsdp.sharded_module import forward_sharded

        return forward_sharded(self._reference, self.batch.rows(samples))

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward_values(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return self._critic.forward_values(self.batch.rows(samples))

    @register(Dispatch.SPLIT)
    def critic_step(self, samples: Sequence[TrainSample]) -> StepReport:
        return self._critic.train_step(self.batch.rows(samples))

    @register(Dispatch.ONE_TO_ALL)
    def copy_critic(self) -> None:
        self._critic.learner.copy_state()

    @register(Dispatch.ONE_TO_ALL, files="saving the critic's checkpoint")
    async def save_critic(self, path: Path) -> None:
        """Write the copy in a thread, so that the rank can train meanwhile."""
        await asyncio.to_thread(self._critic.learner.save, path, {})

    @register(Dispatch.ONE_TO_ALL, files="loading the critic's checkpoint")
    def load_critic(self, path: Path) -> None:
        self._critic.learner.load(path)


class ActorRole(ColumnRole):
    """Role of one training rank. Every method that is registered for all ranks is collective."""

    RANKS = "actor"

    def __init__(self, *, total_optimizer_steps: int, **common: Any) -> None:
        super().__init__(**common)
        self._total_optimizer_steps = total_optimizer_steps
        self.outbox = WeightSendRole(self._config, self._rank, self._here)
        self.snapshot = RankSnapshot()
        self._returns: list[NDArray[np.float32]] = []
        """Returns of a batch, from `advantages` until `returns` takes them."""

    def _load_models(self) -> None:
        from headway.engines.train.batch_advantages import BatchAdvantages
        from headway.engines.train.fsdp.engine import FsdpEngine

        self._engine = FsdpEngine(self._model_path, self._config, self._total_optimizer_steps, self._mesh)
        super()._load_models()
        self.snapshot.learners = [self._engine.learner]
        if self._total_critic_steps is not None:
            self.snapshot.learners.append(self._critic.learner)
        self._advantages = BatchAdvantages(self._config.algorithm)

    @register(Dispatch.RANK_ZERO)
    def layout(self, dtype: str) -> Manifest:
        """Return the manifest of the weights for receivers in ``dtype``."""
        import torch

        # Kernels of several communicators, beside those that decode, would wait for each other on a receiver's device.
        between_devices = through_devices(self._config, self._device)
        most = 1 if between_devices else TRANSPORTS[transport_in(self._config)].most_senders
        return self._engine.manifest(getattr(torch, dtype), most_senders=most)

    @register(Dispatch.ONE_TO_ALL)
    def open_route(self, dtype: str) -> None:
        """Prepare for sending weights to receivers that hold them in ``dtype``."""
        self.outbox.open_route(dtype, self.layout(dtype), pinned=kind_of(self._device).pins_host_memory)

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self.batch.rows(samples))

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[NDArray[np.float32]]:
        return self._engine.proximal_logprobs(self.batch.rows(samples), version)

    @register(Dispatch.RANK_ZERO)
    def outcome_advantages(self, outcomes: Outcomes) -> NDArray[np.float32] | None:
        """Return the advantage of each episode of a whole batch, [E]; None if the estimator needs tokens."""
        return self._advantages.of_outcomes(outcomes)

    @register(Dispatch.RANK_ZERO, Collect.COLUMNS)
    def advantages(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> list[NDArray[np.float32]]:
        """Return the advantages of each sample of a whole batch, computed from all of its tokens."""
        columns = self._advantages(self.batch.rows(samples, once=True), outcomes)
        self._returns = columns.get(ColumnName.RETURNS, [])
        return columns[ColumnName.ADVANTAGES]

    @register(Dispatch.RANK_ZERO, Collect.COLUMNS)
    def returns(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """Return the returns of each sample of the last call of `advantages`. Requires a critic."""
        returns, self._returns = self._returns, []  # freed now, not at the next batch
        return returns

    @register(Dispatch.SPLIT, Collect.JOINED)
    def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        return self._engine.train_step(self.batch.rows(samples), context)

    @register(Dispatch.SPLIT, Collect.JOINED)
    def token_loss(self, samples: Sequence[TrainSample]) -> TokenLoss:
        """Return the loss of the tokens that the samples train, under the current weights."""
        rows = self.batch.rows(samples)
        logprobs = self._engine.forward_logprobs(rows)
        nats = -sum(float(of_row[row.loss_mask].sum()) for row, of_row in zip(rows, logprobs, strict=True))
        return TokenLoss(nats, sum(int(row.loss_mask.sum()) for row in rows))

    @register(Dispatch.ONE_TO_ALL, Collect.JOINED)
    def send_weights(self, version: int, send: Send, everywhere: bool, verify: bool) -> Sent | None:
        """Gather and send weights: this rank's share, or all to the receiver in its process (``everywhere``).

        Returns None on a rank that sends nothing, or the same as rank zero.
        """
        try:
            sent = self.outbox.send(version, send, partial(self._engine.gather, everywhere=everywhere))
        finally:
            probe = self.probe() if verify else None  # also after a failure: it is collective
        if sent is None or (everywhere and self._rank):
            return None
        return replace(sent, report=replace(sent.report, probe=probe))

    @register(Dispatch.ONE_TO_ALL, Collect.JOINED)
    def gather_weights(self, version: int, verify: bool) -> GatherReport:
        """Gather this rank's share of the weights into its copies."""
        gathered = self.outbox.gather(version, self._engine.gather)
        return replace(gathered, probe=self.probe()) if verify else gathered

    @register(Dispatch.ONE_TO_ALL)
    def probe(self) -> NDArray[np.float32]:
        """Return the log-probs [N] of the probe's sequences under the current weights. Collective."""
        return self._engine.probe()

    @register(Dispatch.RANK_ZERO)
    def padded(self) -> str | None:
        """Return why the model's rows are padded and not packed; None if they are packed."""
        return self._engine.padded

    @register(Dispatch.ONE_TO_ALL)
    def copy_state(self) -> None:
        self._engine.learner.copy_state()

    @register(Dispatch.ONE_TO_ALL, files="saving the checkpoint")
    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        """Write the copy in a thread, so that the rank can train meanwhile."""
        await asyncio.to_thread(self._engine.learner.save, path, driver_state)

    @register(Dispatch.ONE_TO_ALL, files="loading the checkpoint")
    def load(self, path: Path) -> dict[str, Any]:
        return self._engine.learner.load(path)

    @register(Dispatch.ONE_TO_ALL, files="exporting the model to")
    def export(self, path: Path) -> None:
        self._engine.export(path)

    def close(self) -> None:
        """Leave the process groups that carry weights, and remove files of stored versions."""
        self.outbox.close()


class CriticRole(ColumnRole):
    """Role of one rank of a critic on separate ranks."""

    RANKS = "critic"


class RefRole(ColumnRole):
    """Role of one rank of the frozen reference policy on separate ranks."""

    RANKS = "ref"


class LogpRole(Role):
    """Role of one rank that recomputes log-probs with its ``copy`` of the policy, which is called by name
    (``copy.activate``). Methods that compute are collective over these ranks. Each rank takes its part of new weights
    from its machine's copy.
    """

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.inbox = WeightInbox(self.name, self._here)

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``."""
        self._join_ranks(store, "logp")

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, manifest: Manifest) -> None:
        """Open the model, for updates in the layout ``manifest``."""
        from headway.engines.train.fsdp.column_engines import LogProbCopy

        receive = self.inbox.receive
        self.copy = LogProbCopy(self._model_path, self._config, self._mesh, self.name, manifest, receive)

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[NDArray[np.float32]]:
        return self.copy.proximal_logprobs(self.batch.rows(samples), version)

    async def stage_weights(self, version: int, left: Left) -> ReceiveReport:
        """Stage ``version``. ``left``: senders' stored versions, or the copy of another process."""
        with self.inbox.holding(version, left):
            return await self.copy.stage_weights(version)

    def close(self) -> None:
        """Close the receiver's end of the link to the trainer."""
        self.inbox.close()  # first: a thread may be waiting for a bucket
        if hasattr(self, "copy"):
            self.copy.close()
