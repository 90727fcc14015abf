"""Role of one training rank: the policy that learns, and the sender of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.critic_role import WithCritic
from headway.cluster.roles.weight_roles import Send, Sent, SentWeights, WeightSendRole, transport_in
from headway.cluster.snapshots import RankSnapshot
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.training import StepContext, StepReport, TokenLoss
from headway.data.interfaces.weights import GatherReport
from headway.data.types import ColumnName, Outcomes, TrainSample
from headway.devices import kind_of
from headway.engines.weights.protocols import Address, Link, through_devices
from headway.engines.weights.weight_layout import Manifest
from headway.errors import RunError

if TYPE_CHECKING:
    from headway.engines.train.fsdp.column_engines import ReferenceEngine
    from headway.engines.train.fsdp.engine import FsdpEngine


class ActorRole(WithCritic):
    """Role of one training rank. Every method that is registered for all ranks is collective."""

    def __init__(
        self,
        *,
        total_optimizer_steps: int,
        with_reference: bool,
        total_critic_steps: int | None,
        **common: Any,
    ) -> None:
        """Create the role. ``total_critic_steps``: None if the critic is absent or has separate ranks."""
        super().__init__(**common)
        self._total_optimizer_steps = total_optimizer_steps
        self._with_reference = with_reference
        self._total_critic_steps = total_critic_steps
        self._outbox = WeightSendRole(self._config, rank=self._rank)
        self.snapshot = RankSnapshot(
            lambda: [self._engine.learner, *(() if self._critic is None else (self._critic.learner,))]
        )
        self._returns: list[NDArray[np.float32]] = []
        """Returns of a batch, from `advantages` until `returns` takes them."""

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the trainer's model."""
        from headway.engines.train.batch_advantages import BatchAdvantages
        from headway.engines.train.fsdp.column_engines import ReferenceEngine
        from headway.engines.train.fsdp.engine import FsdpEngine

        self._join_ranks(store, "actor")
        self._engine: FsdpEngine = FsdpEngine(
            model_path=self._model_path,
            config=self._config,
            total_optimizer_steps=self._total_optimizer_steps,
            mesh=self._mesh,
        )
        self._reference: ReferenceEngine | None = None
        if self._with_reference:
            self._reference = ReferenceEngine(model_path=self._model_path, config=self._config, mesh=self._mesh)
        if self._total_critic_steps is not None:
            self._build_critic(self._total_critic_steps)
        self._advantages = BatchAdvantages(self._config.algorithm)

    @register(Dispatch.RANK_ZERO)
    def layout(self, dtype: str) -> Manifest:
        """Return the manifest of the weights as receivers in ``dtype`` get them."""
        import torch

        # Kernels of several communicators, beside those that decode, would wait for each other on a receiver's device.
        between_devices = through_devices(self._config, self._device)
        most = 1 if between_devices else TRANSPORTS[transport_in(self._config)].most_senders
        return self._engine.manifest(getattr(torch, dtype), most_senders=most)

    @register(Dispatch.ONE_TO_ALL)
    def open_route(self, dtype: str) -> None:
        """Prepare for sending weights to receivers that hold them in ``dtype``."""
        self._outbox.open_route(dtype, self.layout(dtype), pinned=self._on_gpu)

    async def connect(self, key: str, link: Link) -> None:
        """Open this rank's end of ``link``, in place of the previous one under ``key``, also while the rank trains.

        May wait for receivers.
        """
        await self._outbox.connect(key, link, self._here())

    def open_link(self, key: str, link: Link) -> None:
        """Open the sender's end of ``link`` directly, for a link within this process."""
        self._outbox.open_link(key, link, self._here())

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self.batch.rows(samples))

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        if self._reference is None:
            raise RunError("this run has no reference policy: nothing in its algorithm asks for one")
        return self._reference.forward_logprobs(self.batch.rows(samples))

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[NDArray[np.float32]]:
        return self._engine.proximal_logprobs(self.batch.rows(samples), version)

    @register(Dispatch.RANK_ZERO)
    def outcome_advantages(self, outcomes: Outcomes) -> NDArray[np.float32] | None:
        """Return the advantage of each episode of a whole batch, [E]; None where tokens have to be looked at."""
        return self._advantages.of_outcomes(outcomes)

    @register(Dispatch.RANK_ZERO, Collect.COLUMNS)
    def advantages(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> list[NDArray[np.float32]]:
        """Return the advantages of each sample of a whole batch, all of whose tokens are looked at here."""
        columns = self._advantages(self.batch.rows(samples, once=True), outcomes)
        self._returns = columns.get(ColumnName.RETURNS, [])
        return columns[ColumnName.ADVANTAGES]

    @register(Dispatch.RANK_ZERO, Collect.COLUMNS)
    def returns(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """Return what `advantages` was called for last: the returns of each of its samples. There is a critic."""
        returns, self._returns = self._returns, []
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
    def send_weights(self, version: int, sends: Sequence[Send], everywhere: bool, verify: bool) -> SentWeights:
        """Gather and send weights: this rank's share, or all to the receiver in its process (``everywhere``)."""
        gather = self._engine.gather_everywhere if everywhere else self._engine.gather
        sent, failures = [], []
        for send in sends:
            try:
                sent.append(self._outbox.send(version, send, gather))
            except Exception as failure:  # raised after the last one: the other ranks gather for each
                failures.append(failure)
        probe = self.probe() if verify else None  # also after a failure: the other ranks compute it, too
        if failures:
            raise failures[0]
        if everywhere and self._rank:  # each rank has sent the same
            sent = [None for _ in sent]
        return SentWeights(tuple(sent), probe)

    @register(Dispatch.ONE_TO_ALL, Collect.JOINED)
    def gather_weights(self, version: int, verify: bool) -> GatherReport:
        """Gather this rank's share of the weights into its copies."""
        gathered = self._outbox.gather(version, self._engine.gather)
        return replace(gathered, probe=self.probe()) if verify else gathered

    async def send_gathered(self, version: int, send: Send) -> Sent:
        """Send the copy of this rank's share in a thread, so that the rank can train meanwhile."""
        return await self._outbox.send_gathered(version, send)

    @register(Dispatch.ONE_TO_ALL)
    def probe(self) -> NDArray[np.float32]:
        """Return the log-probs [N] of the probe's sequences under the current weights. Collective."""
        from headway.models.logprobs import probe_rows, probe_vector

        return probe_vector(self._engine.forward_logprobs(probe_rows(self._engine.vocabulary)))

    @register(Dispatch.RANK_ZERO)
    def padded(self) -> str | None:
        """Return why the model's rows are padded and not packed; None where they are packed."""
        return self._engine.padded

    @register(Dispatch.RANK_ZERO)
    def compute_dtype(self) -> str:
        """Dtype of the model's matrix products, as torch spells it without the prefix."""
        return self._computed_dtype()

    @register(Dispatch.ONE_TO_ALL)
    def copy_state(self) -> None:
        self._engine.copy_state()

    @register(Dispatch.ONE_TO_ALL, files="saving the checkpoint")
    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        """Write the copy in a thread, so that the rank can train meanwhile."""
        await asyncio.to_thread(self._engine.save, path, dict(driver_state))

    @register(Dispatch.ONE_TO_ALL, files="loading the checkpoint")
    def load(self, path: Path) -> dict[str, Any]:
        return self._engine.load(path)

    @register(Dispatch.ONE_TO_ALL, files="exporting the model to")
    def export(self, path: Path) -> None:
        self._engine.export(path)

    def close(self) -> None:
        """Leave the groups that carry weights, and remove the files that they left."""
        self._outbox.close()

    @property
    def _on_gpu(self) -> bool:
        return kind_of(self._device).pins_host_memory
