"""Further models whose outputs become columns of the rows.

ProximalWeights   the weights at the start of a version: the anchor of the trust region, while the policy moves on
LogProbCopy       a copy of the policy on ranks of its own, which receives every update
FsdpCritic        the initial model's decoder with a scalar head and its own optimizer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headway.algorithms.aggregation import token_weights
from headway.algorithms.losses.clipped import value_loss
from headway.config.schema import Config
from headway.data.interfaces.training import StepReport
from headway.data.interfaces.weights import ReceiveReport
from headway.data.packing import CollatedRow, Tree
from headway.data.types import ColumnName
from headway.engines.train.fsdp.checkpoint import HostState
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.learner import BatchTotals, Learner, Sums
from headway.engines.train.fsdp.micro_batches import collate, on_device
from headway.engines.train.fsdp.objective import required_column, response_aligned
from headway.engines.train.fsdp.sharded_module import ValueModule, forward_sharded, frozen_policy, probe, sharded
from headway.engines.train.fsdp.shards import boxes, local
from headway.engines.weights.buckets import parts_of_files
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.served_weights import ServedWeights, outcome
from headway.engines.weights.weight_layout import Manifest, bucket_bytes
from headway.errors import RunError
from headway.models.weight_files import file_tensors


class ProximalWeights:
    """One rank's shards of the policy at the start of a version, copied to host memory.

        restored (v) ─▶ step ─▶ restored (v) ─▶ step ─▶ …      the first one finds the policy as it is, and copies it
                                   └─ the copy takes the policy's place for a forward pass

    While the copy is in place, a second copy holds the current weights.

    Example:
        >>> policy = nn.Linear(1, 1, bias=False)
        >>> proximal = ProximalWeights(policy, keeps_copy=True)
        >>> with proximal.restored(version=3):
        ...     start = policy.weight.item()
        >>> proximal.stepping(version=3)
        >>> nn.init.zeros_(policy.weight).item()  # an optimizer step
        0.0
        >>> with proximal.restored(version=3):
        ...     policy.weight.item() == start
        True
    """

    def __init__(self, module: nn.Module, *, keeps_copy: bool) -> None:
        """Track the weights of ``module``. Without ``keeps_copy`` a version's start is lost at its first step."""
        self._module = module
        self._keeps_copy = keeps_copy
        self._copied: int | None = None
        """Version whose starting weights are in the copy; None before the first copy."""
        self._stepped: int | None = None
        """The version that the last optimizer step belongs to."""
        self._start = HostState(pinned=False)

    def stepping(self, version: int) -> None:
        """Note that an optimizer step of ``version`` follows."""
        self._stepped = version

    @contextmanager
    def restored(self, version: int) -> Iterator[None]:
        """Context in which the module holds the policy at the start of ``version``. Raises `RunError` if unknown."""
        if self._stepped is None or version > self._stepped:  # no step of this version yet: the policy is at its start
            if self._keeps_copy and self._copied != version:
                self._start.copy(self._shards())
                self._copied = version  # after the copy: a failed copy has no version
            yield
            return
        if self._copied != version:
            raise RunError(
                f"log-probs under the policy at the start of version {version} were asked for after its first "
                "optimizer step, and nobody had asked before it; ask at the version's first batch"
            )
        now = HostState(pinned=False)
        now.copy(self._shards())  # before the write: no other copy of the current weights exists
        self._start.restore(self._shards())
        try:
            yield
        finally:
            now.restore(self._shards())  # also after an error: the next step would train the old weights

    def _shards(self) -> dict[str, torch.Tensor]:
        return {name: local(parameter) for name, parameter in self._module.named_parameters()}


class LogProbCopy:
    """One rank of a copy of the policy that receives every update. Not thread-safe, but for `stage_weights`.

        proximal_logprobs (v) ─▶ stage (v + 1) ─▶ activate (v + 1) ─▶ proximal_logprobs (v + 1) ─▶ …

    `proximal_logprobs` and `probe` are collective; each rank takes its own part of an update from its machine's copy.
    """

    def __init__(
        self,
        model_path: str,
        config: Config,
        mesh: TrainMesh,
        name: str,
        manifest: Manifest,
        receive: Callable[[int, IncomingWeights], None],
    ) -> None:
        """Open the model at ``model_path``, which is version 0, in the dtype that the trainer computes in. Collective.

        Args:
            manifest: layout of the weights of an update.
            receive: blocking function that receives a version.

        Raises:
            ModelError: the model cannot be used, or ``manifest`` is another model's.
        """
        self._name = name
        self._policy = frozen_policy(model_path, config, mesh)
        files, parameters = file_tensors(self._policy.lm), dict(self._policy.lm.named_parameters())
        parts = parts_of_files({of: boxes(parameter) for of, parameter in parameters.items()}, files)
        self._weights = ServedWeights(files, parts, mesh.device, name)
        window = bucket_bytes(config.rollout.param_update_consume_bucket_size_mb)
        self._updates = self._weights.updates(manifest, receive, window)

    def proximal_logprobs(self, rows: Sequence[CollatedRow], version: int) -> list[NDArray[np.float32]]:
        """The [T] float32 log-probs of each row (nats) under ``version``. Raises `RunError` when it serves another."""
        state = self._weights.state
        state.check("compute log-probs")
        if state.served != version:
            raise RunError(
                f"{self._name} serves version {state.served} and was asked for log-probs under version "
                f"{version}; it has every version for as long as the trainer trains it, and refuses any other"
            )
        return forward_sharded(self._policy, rows)

    def probe(self) -> NDArray[np.float32]:
        """The log-probs [8] of the probe's sequences under the served version. Raises `RunError` if it is not whole."""
        self._weights.state.check("probe")
        return probe(self._policy)

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive the weights of ``version``, to be served after `activate`. Raises `UpdateFailed`."""
        return await outcome(self._updates.start(version))

    def activate(self, version: int) -> float:
        """Serve the staged ``version``, and return the seconds it took. Raises `UpdateFailed` unless it is the version
        received last.
        """
        started = time.perf_counter()
        self._updates.load(version)
        return time.perf_counter() - started

    def close(self) -> None:
        """Stop receiving updates; one that is under way ends by itself."""
        self._updates.close()


@dataclass(frozen=True, slots=True)
class _ValueColumns:
    """The columns that the critic's loss reads, [M, 1]."""

    old: torch.Tensor
    """Values before the batch's first step."""
    returns: torch.Tensor
    mask: torch.Tensor


class FsdpCritic:
    """One rank of the critic. Collective like `engine.FsdpEngine`, beside which it may live. Its `learner` has the
    checkpoints.
    """

    def __init__(self, model_path: str, config: Config, total_optimizer_steps: int, mesh: TrainMesh) -> None:
        """Load and shard the model at ``model_path``. Raises `ModelError` on every rank when it cannot be used."""
        self._cliprange = config.critic.cliprange_value
        self._device = mesh.device
        self._module = sharded(lambda lm: ValueModule(lm, mesh), model_path, config, mesh)
        whole = config.trainer.snapshot is not None
        self.learner = Learner(self._module, config.critic, total_optimizer_steps, whole_copies=whole)

    def forward_values(self, rows: Sequence[CollatedRow]) -> list[NDArray[np.float32]]:
        """The [T] float32 values of each of this rank's ``rows``: V(s_t), before token t."""
        return forward_sharded(self._module, rows)

    def train_step(self, rows: Sequence[CollatedRow]) -> StepReport:
        """Take one optimizer step towards the ``returns`` of ``rows``, this rank's share of a mini-batch.

        Metrics: ``vf_loss``, ``vf_clipfrac``, ``vpred_mean``, ``returns_mean``, ``vf_explained_var`` (as in verl:
        1 − Var(R − V)/Var(R), V being the values at the batch's start), ``grad_norm``, ``lr``.
        """
        report = self.learner.step(rows, self._part)
        metrics = report.metrics
        square = metrics.pop("returns_square")
        error = metrics.pop("error_square") - metrics.pop("error_mean") ** 2
        variance = square - metrics["returns_mean"] ** 2
        # Equal returns do not give exactly 0, but a rounding error.
        metrics["vf_explained_var"] = 1.0 - error / variance if variance > 1e-12 * square else 0.0
        return report

    def _part(
        self, rows: Sequence[CollatedRow], trees: Sequence[Tree], totals: BatchTotals
    ) -> tuple[torch.Tensor, Sums]:
        def floats(name: str) -> torch.Tensor:
            return response_aligned(rows, lambda row: required_column(row, name), np.float32)

        mask = response_aligned(rows, lambda row: row.loss_mask, np.bool_)
        columns = _ValueColumns(floats(ColumnName.VALUES), floats(ColumnName.RETURNS), mask)
        batch, columns = on_device(self._device, collate(rows, trees, self._module.ranks), columns)
        old_M1, returns_M1, mask_M1 = columns.old, columns.returns, columns.mask
        values_M1 = self._module(batch)[:, None]
        losses_M1, per_token = value_loss(values_M1, old_M1, returns_M1, mask_M1, cliprange=self._cliprange)
        weights_M1 = token_weights(mask_M1, "token-mean", total_tokens=totals.tokens, total_sequences=totals.sequences)
        loss = (weights_M1 * losses_M1).sum()
        with torch.no_grad():
            means = {
                **per_token,
                "vpred_mean": values_M1,
                "returns_mean": returns_M1,
                # In float64 before squaring: the variance is a small difference of large sums.
                "returns_square": returns_M1.double().square(),
                "error_mean": (old_M1 - returns_M1).double(),
                "error_square": (old_M1 - returns_M1).double().square(),
            }
            sums = {"loss": loss.detach().double(), "vf_loss": loss.detach().double()}
            for name, values in means.items():
                # Filled and not multiplied by the mask: 0 · NaN would not be 0.
                sums[name] = values.double().masked_fill(~mask_M1, 0.0).sum() / max(totals.tokens, 1.0)
        return loss, sums
