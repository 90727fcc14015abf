"""A sharded module that learns: gradients over micro-batches and ranks, one step or none, a schedule, checkpoints.

    rows of this rank ─▶ micro-batches ─▶ forward, loss, backward  (× as many as the busiest rank has)
                                                 │ gradients summed over ranks
              StepReport ◀── clip, step, or skip ◀── sums reduced over ranks

What is computed is the caller's: the policy's loss, or the critic's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from headway.config.learning import OptimConfig
from headway.data.collate import Row
from headway.data.packing import Packing
from headway.data.trees import Tree
from headway.engines.train.fsdp.checkpoint import load_checkpoint, save_checkpoint
from headway.engines.train.fsdp.collectives import reduce_numbers, reduce_sums
from headway.engines.train.fsdp.forward import micro_batches, rows_of
from headway.engines.train.fsdp.schedule import learning_rate
from headway.engines.train.fsdp.sums import Sums, Totals, as_metrics, count, merge
from headway.interfaces import StepReport
from headway.progress import advance

StepPart = Callable[[Sequence[Row], Sequence[Tree], Totals], tuple[torch.Tensor, Sums]]
"""Function of a micro-batch's rows, the trees that they are packed into and the step's totals: its addend to the loss,
and its sums for the metrics."""


class Learner:
    """Trains a sharded module: gradients, optimizer steps, learning-rate schedule and checkpoints. Collective."""

    def __init__(
        self,
        module: nn.Module,
        optim: OptimConfig,
        *,
        grad_clip: float,
        packing: Packing,
        total_steps: int,
        device: torch.device,
    ) -> None:
        """Set up the optimizer of ``module``, which is sharded. The learning-rate schedule takes ``total_steps``."""
        self.module = module
        self._optim = optim
        self._grad_clip = grad_clip
        self._packing = packing
        self._total_steps = total_steps
        self._device = device
        self._steps = 0
        self._optimizer = torch.optim.AdamW(
            module.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def step(self, rows: Sequence[Row], part: StepPart, *, whole_episodes: bool = False) -> StepReport:
        """Take one optimizer step on a mini-batch of which ``rows`` are this rank's share.

        ``whole_episodes``: the rows of an episode share a micro-batch, as far as the budget allows.

        A loss or gradient that is not finite on any rank skips the step on all: weights and optimizer are unchanged.
        The learning-rate schedule counts skipped steps too, so that it ends where the run does. The metrics of a
        skipped step are not finite.

        Beside the sums of ``part`` the metrics have ``grad_norm``, ``lr`` and ``tokens_saved``: the share of the rows'
        tokens that were not computed, since rows share them; less than 0 where padding was computed.
        """
        try:
            metrics = self._backward(rows, part, whole_episodes=whole_episodes)
            metrics["lr"] = learning_rate(self._optim, self._steps, self._total_steps)
            finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
            if finite:
                self._update(metrics["grad_norm"], metrics["lr"])
        finally:
            self._optimizer.zero_grad()  # also after an error: the next step must not add to half a gradient
        self._steps += 1
        return StepReport(skipped=not finite, metrics=metrics)

    def save(self, model: nn.Module, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint of ``model``: the module, or a part with all its parameters. Atomic: a rename ends it."""
        save_checkpoint(model, self._optimizer, path, {"optimizer_steps": self._steps, "extra": extra})

    def load(self, model: nn.Module, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any number of ranks; returns its ``extra``."""
        state = load_checkpoint(model, self._optimizer, path)
        # The checkpoint's settings came with its state; the run's may differ.
        for group in self._optimizer.param_groups:
            group["betas"], group["weight_decay"] = self._optim.betas, self._optim.weight_decay
        self._steps = int(state["optimizer_steps"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def _backward(self, rows: Sequence[Row], part: StepPart, *, whole_episodes: bool = False) -> dict[str, float]:
        """Leave the mini-batch's gradient in the parameters; returns the metrics, equal on all ranks."""
        mine = count(rows)
        packs = micro_batches(rows, self._packing, self._device, whole_episodes=whole_episodes)
        tokens, sequences, computed, given = reduce_numbers(
            [
                mine.tokens,
                mine.sequences,
                sum(pack.tokens for pack in packs),
                sum(len(row.input_ids) for row in rows),
            ],
            dist.ReduceOp.SUM,
            self._device,
        )
        totals = Totals(tokens, sequences, mine.lengths)
        parts = []
        for done, pack in enumerate(packs, 1):
            loss, sums = part(rows_of(rows, pack), pack.trees, totals)
            loss.backward()
            parts.append(sums)
            advance(f"{done} of {len(packs)} micro-batches done")
        if not parts:
            raise ValueError("a training step needs rows on one rank at least")
        norms = torch._foreach_norm(self._local_grads())
        grad_square = torch.stack(norms).double().square().sum().to(self._device)
        sums = reduce_sums({**merge(parts), "grad_square": grad_square})
        grad_norm = math.sqrt(float(sums.pop("grad_square")))
        return {**as_metrics(sums), "grad_norm": grad_norm, "tokens_saved": 1 - computed / given}

    def _update(self, grad_norm: float, lr: float) -> None:
        if grad_norm > self._grad_clip:
            torch._foreach_mul_(self._local_grads(), self._grad_clip / grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _local_grads(self) -> list[torch.Tensor]:
        """The rank's shards of the gradient. Every parameter is sharded over all ranks, so they are disjoint."""
        return [p.grad.to_local() for p in self.module.parameters() if isinstance(p.grad, DTensor)]
