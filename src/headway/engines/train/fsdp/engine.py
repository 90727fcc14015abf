"""The `fsdp` train engine, as one of its ranks sees it: synchronous, single program, multiple data.

    rows of this rank ─▶ micro-batches ─▶ forward, loss, backward  (× as many as the busiest rank has)
                                                 │ gradients summed over ranks
              StepReport ◀── clip, step, or skip ◀── sums reduced over ranks

Every method is collective unless it says otherwise: all ranks call it, in the same order. The default process group is
the caller's, and a process keeps its rank for life; on GPUs it is an NCCL group, and ``device`` is the current device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from headway.config.schema import Config
from headway.data.collate import Row
from headway.engines.train.fsdp import objective
from headway.engines.train.fsdp.batch import collate
from headway.engines.train.fsdp.checkpoint import load_checkpoint, save_checkpoint
from headway.engines.train.fsdp.collectives import on_rank_zero, reduce_numbers, reduce_sums
from headway.engines.train.fsdp.forward import forward_logprobs, micro_batches, rows_of
from headway.engines.train.fsdp.gather import gather
from headway.engines.train.fsdp.objective import Objective, Sums, Totals
from headway.engines.train.fsdp.schedule import learning_rate
from headway.engines.train.fsdp.sharding import sharded_policy
from headway.interfaces import StepReport
from headway.models.export import export
from headway.models.loading import compute_dtype, load_tokenizer
from headway.weights.layout import Manifest, build_manifest
from headway.weights.outgoing import Window


class FsdpEngine:
    """One rank of the trainer."""

    def __init__(self, *, model_path: str, config: Config, total_optimizer_steps: int, device: torch.device) -> None:
        """Load, shard and set up the optimizer.

        Args:
            model_path: Hugging Face folder, or a model's name on the hub.
            total_optimizer_steps: of the whole run; the learning-rate schedule ends there.
            device: this rank's own.

        Raises:
            ModelError: on every rank, when the model cannot be used.
        """
        self._config = config
        self._device = device
        self._model_path = model_path
        self._total_steps = total_optimizer_steps
        self._steps = 0
        self._policy = sharded_policy(model_path, config, device)
        self._objective = Objective(config)
        optim = config.actor.optim
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    # ------------------------------------------------------------------------------------------ compute

    def forward_logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """For each of this rank's ``rows`` its [T] float32 log-probs (nats, ``rollout.temperature`` applied)."""
        return forward_logprobs(self._policy, rows, self._token_budget, self._device)

    def train_step(self, rows: Sequence[Row]) -> StepReport:
        """One optimizer step on a mini-batch of which ``rows`` (advantages set) are this rank's share.

        A loss or gradient that is not finite on any rank skips the step on all: weights and optimizer are unchanged.
        The learning-rate schedule counts skipped steps too, so that it ends where the run does. The metrics of a
        skipped step are not finite.
        """
        try:
            metrics = self._backward(rows)
            metrics["lr"] = learning_rate(self._config.actor.optim, self._steps, self._total_steps)
            finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
            if finite:
                self._update(metrics["grad_norm"], metrics["lr"])
        finally:
            self._optimizer.zero_grad()  # also after an error: the next step must not add to half a gradient
        self._steps += 1
        return StepReport(skipped=not finite, metrics=metrics)

    def _backward(self, rows: Sequence[Row]) -> dict[str, float]:
        """Leave the mini-batch's gradient in the parameters; returns the metrics, equal on all ranks."""
        totals = self._totals(rows)
        parts = [self._accumulate(rows_of(rows, i), totals) for i in self._micro_batches(rows)]
        if not parts:
            raise ValueError("a training step needs rows on one rank at least")
        sums = reduce_sums({**objective.merge(parts), "grad_square": self._local_grad_square()})
        grad_norm = math.sqrt(sums.pop("grad_square"))
        return {**objective.as_metrics(sums), "grad_norm": grad_norm}

    def _update(self, grad_norm: float, lr: float) -> None:
        limit = self._config.actor.grad_clip
        if grad_norm > limit:
            torch._foreach_mul_(self._local_grads(), limit / grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    @property
    def _token_budget(self) -> int:
        return self._config.actor.ppo_max_token_len_per_gpu

    def _micro_batches(self, rows: Sequence[Row]) -> list[list[int]]:
        return micro_batches(rows, self._token_budget, self._device)

    def _totals(self, rows: Sequence[Row]) -> Totals:
        mine = objective.count(rows)
        return Totals(*reduce_numbers([mine.tokens, mine.sequences], dist.ReduceOp.SUM, self._device))

    def _accumulate(self, rows: Sequence[Row], totals: Totals) -> Sums:
        """Add one micro-batch's gradient to what is there."""
        batch = collate(rows, self._device)
        columns = objective.collate_columns(rows, self._device, with_ref=self._objective.needs_ref)
        logprobs, entropy = self._policy(batch.input_ids, batch.predictors, batch.targets)
        loss, sums = self._objective(batch, columns, totals, logprobs, entropy)
        loss.backward()
        return sums

    def _local_grads(self) -> list[torch.Tensor]:
        """This rank's shards of the gradient. Every parameter is sharded over all ranks, so they are disjoint."""
        return [p.grad.to_local() for p in self._policy.parameters() if isinstance(p.grad, DTensor)]

    def _local_grad_square(self) -> torch.Tensor:
        norms = torch._foreach_norm(self._local_grads())
        return torch.stack(norms).double().square().sum().to(self._device)

    # ------------------------------------------------------------------------------------------ weights

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self._policy.lm.get_input_embeddings().weight.shape[0])

    def manifest(self, dtype: torch.dtype) -> Manifest:
        """The layout of the weights in ``dtype``: names of the Hugging Face model, tied ones once. Not collective."""
        return build_manifest((name, tuple(p.shape), dtype) for name, p in self._policy.lm.named_parameters())

    def gather(self, manifest: Manifest, bucket_bytes: int, *, everywhere: bool = False) -> Iterator[Window]:
        """The weights bucket by bucket, on rank zero's device or ``everywhere``; other ranks' bytes are unspecified.

        Every rank must draw them all; each is valid until the next one is drawn. One bucket is held and nothing else.
        """
        return gather(self._policy.lm, manifest, bucket_bytes, self._device, everywhere=everywhere)

    @torch.no_grad()
    def _full(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole of a sharded parameter, in the served dtype, on the device. Collective."""
        served = parameter.detach().to(device=self._device, dtype=compute_dtype(self._config, self._device))
        assert isinstance(served, DTensor)
        full: torch.Tensor = served.full_tensor()
        return full

    # ------------------------------------------------------------------------------------------ files

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """A checkpoint of model, optimizer and schedule, with ``extra`` (JSON values). Atomic: a rename ends it."""
        state = {"optimizer_steps": self._steps, "extra": dict(extra)}
        save_checkpoint(self._policy.lm, self._optimizer, path, state)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any number of ranks; returns its ``extra``."""
        state = load_checkpoint(self._policy.lm, self._optimizer, path)
        self._steps = int(state["optimizer_steps"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def export(self, path: Path) -> None:
        """Write the weights, in the served dtype, with config and tokenizer as a Hugging Face folder. Atomic."""
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in self._policy.lm.named_parameters():
            full = self._full(parameter)
            if dist.get_rank() == 0:  # full copies are kept in host memory, on rank zero alone
                weights[name] = full.cpu()
        trust = self._config.model.trust_remote_code

        def write() -> None:
            tokenizer = load_tokenizer(self._model_path, trust_remote_code=trust)
            export(self._policy.lm, tokenizer, path, weights)

        on_rank_zero(write)
