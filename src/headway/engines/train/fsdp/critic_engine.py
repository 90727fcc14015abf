"""The critic: the initial model's decoder with a scalar head and its own optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.aggregation import token_weights
from headway.algorithms.values import value_loss
from headway.config.schema import Config
from headway.data.interfaces.training import StepReport
from headway.data.packing import CollatedRow, Tree
from headway.data.types import ColumnName
from headway.engines.train.fsdp.collectives import BatchTotals, Sums
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.learner import Learner
from headway.engines.train.fsdp.micro_batches import collate, required_column, response_aligned
from headway.engines.train.fsdp.policy import ValueModule, forward_sharded
from headway.engines.train.fsdp.sharding import sharded


class FsdpCritic:
    """One rank of the critic. Collective like `engine.FsdpEngine`, beside which it may live."""

    def __init__(self, *, model_path: str, config: Config, total_optimizer_steps: int, mesh: TrainMesh) -> None:
        """Load and shard the model at ``model_path``. Raises `ModelError` on every rank when it cannot be used."""
        self._cliprange = config.critic.cliprange_value
        self._device = mesh.device
        self._module = sharded(lambda lm: ValueModule(lm, mesh), model_path, config, mesh)
        self._packing = self._module.packing(config)
        self._learner = Learner(
            self._module,
            config.critic.optim,
            grad_clip=config.critic.grad_clip,
            packing=self._packing,
            total_steps=total_optimizer_steps,
            mesh=mesh,
        )

    def forward_values(self, rows: Sequence[CollatedRow]) -> list[NDArray[np.float32]]:
        """The [T] float32 values of each of this rank's ``rows``: V(s_t), before token t."""
        return forward_sharded(self._module, rows, self._packing, self._device)

    def train_step(self, rows: Sequence[CollatedRow]) -> StepReport:
        """Take one optimizer step towards the ``returns`` of ``rows``, this rank's share of a mini-batch.

        Metrics: ``vf_loss``, ``vf_clipfrac``, ``vpred_mean``, ``returns_mean``, ``vf_explained_var`` (as in verl:
        1 − Var(R − V)/Var(R), V being the values at the batch's start), ``grad_norm``, ``lr``.
        """
        report = self._learner.step(rows, self._part)
        metrics = report.metrics
        square = metrics.pop("returns_square")
        error = metrics.pop("error_square") - metrics.pop("error_mean") ** 2
        variance = square - metrics["returns_mean"] ** 2
        # Returns that are all equal leave no exact zero, but what rounding makes of the difference.
        metrics["vf_explained_var"] = 1.0 - error / variance if variance > 1e-12 * square else 0.0
        return report

    def save(self, path: Path) -> None:
        """Write a checkpoint of model, optimizer and schedule. Atomic: a rename ends it."""
        self._learner.save(path, {})

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, on any number of ranks."""
        self._learner.load(path)

    def _part(
        self, rows: Sequence[CollatedRow], trees: Sequence[Tree], totals: BatchTotals
    ) -> tuple[torch.Tensor, Sums]:
        batch = collate(rows, self._device, trees, self._module.ranks)

        def floats(name: str) -> torch.Tensor:
            return response_aligned(rows, lambda row: required_column(row, name), np.float32, self._device)

        old_M1, returns_M1 = floats(ColumnName.VALUES), floats(ColumnName.RETURNS)
        mask_M1 = response_aligned(rows, lambda row: row.loss_mask, np.bool_, self._device)
        values_M1 = self._module(batch)[:, None]
        losses_M1, per_token = value_loss(values_M1, old_M1, returns_M1, mask_M1, cliprange=self._cliprange)
        weights_M1 = token_weights(mask_M1, "token-mean", total_tokens=totals.tokens, total_sequences=totals.sequences)
        loss = (weights_M1 * losses_M1).sum()
        with torch.no_grad():
            means = {
                **per_token,
                "vpred_mean": values_M1,
                "returns_mean": returns_M1,
                "returns_square": returns_M1.double().square(),
                "error_mean": (old_M1 - returns_M1).double(),
                "error_square": (old_M1 - returns_M1).double().square(),
            }
            sums = {"loss": loss.detach().double(), "vf_loss": loss.detach().double()}
            for name, values in means.items():
                sums[name] = values.double().masked_fill(~mask_M1, 0.0).sum() / max(totals.tokens, 1.0)
        return loss, sums
