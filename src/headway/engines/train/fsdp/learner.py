"""A sharded module that learns: gradients over micro-batches and ranks, one step or none, a schedule, checkpoints.

    rows of this rank ─▶ micro-batches ─▶ forward, loss, backward  (× as many as the busiest rank has)
                                                 │ gradients summed over ranks
              StepReport ◀── clip, step, or skip ◀── sums reduced over ranks

What is computed is the caller's: the policy's loss, or the critic's. Sums behind the metrics add up over micro-batches
and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor

from headway.algorithms import health
from headway.config.sections.learning import ActorConfig, CriticConfig, OptimConfig
from headway.data.interfaces.training import StepReport
from headway.data.packing import CollatedRow, Tree, by_episode
from headway.data.types import TrajectoryId
from headway.devices import kind_of
from headway.engines.train.fsdp.checkpoint import HostState, load_checkpoint, save_checkpoint
from headway.engines.train.fsdp.device_mesh import reduce_numbers
from headway.engines.train.fsdp.micro_batches import micro_batches
from headway.engines.train.fsdp.sharded_module import ShardedModule
from headway.engines.train.fsdp.shards import Pieces, copies, local
from headway.errors import RunError
from headway.runtime.progress import advance


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    It rises linearly over ``lr_warmup_steps`` (the first step already has lr/lr_warmup_steps, so none is wasted), then
    stays, or falls to ``min_lr_ratio · lr``, which the last step has.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    last = total_steps - 1
    progress = min(1.0, (step - warmup) / (last - warmup)) if last > warmup else 0.0
    match config.lr_scheduler_type:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


Sums = dict[str, Tensor]
"""Sums for a step's metrics: float64 tensors by name. Those in `MAXIMA` are reduced by maximum, all others by sum."""

HEALTH = "health/"
MAXIMA = frozenset(HEALTH + name for name in health.MAX_REDUCED)


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Numbers of tokens and sequences that the loss counts in a whole mini-batch, over all ranks."""

    tokens: float
    """Number of tokens that the loss counts."""
    sequences: float
    """Number of episodes with at least one token that the loss counts."""
    lengths: Mapping[TrajectoryId, int] = field(default_factory=dict)
    """Episode of this rank with several rows -> number of its tokens that the loss counts."""


def count(rows: Sequence[CollatedRow]) -> BatchTotals:
    """Count the tokens and episodes of this rank's ``rows``: its share of the mini-batch's totals."""
    tokens = [int(row.loss_mask.sum()) for row in rows]
    episodes = by_episode(rows)
    several = {rows[own[0]].episode: sum(tokens[i] for i in own) for own in episodes if len(own) > 1}
    return BatchTotals(
        tokens=float(sum(tokens)),
        sequences=float(sum(any(tokens[i] for i in own) for own in episodes)),
        lengths={episode: length for episode, length in several.items() if episode is not None},
    )


def merge(parts: Sequence[Sums]) -> Sums:
    """Merge the sums of several micro-batches: by maximum for names in `MAXIMA`, by addition for all others."""
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: of.amax(0) if name in MAXIMA else of.sum(0) for name, of in stacked.items()}


def as_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute a step's metrics from sums that were reduced over micro-batches and ranks."""
    metrics = {name: float(value) for name, value in sums.items() if not name.startswith(HEALTH)}
    of_health = {n.removeprefix(HEALTH): v for n, v in sums.items() if n.startswith(HEALTH)}
    if not of_health:
        return metrics
    of_lags = {name: value for name, value in of_health.items() if name.startswith("lag/")}
    return metrics | health.health(of_health) | (health.lag_health(of_lags) if of_lags else {})


def reduce_sums(sums: Sums, group: dist.ProcessGroup) -> Sums:
    """Reduce the sums of ``group``'s ranks to one, on the host, in two collectives and one transfer."""
    # Sorted: ranks add up by place, so all of them need one order of names.
    maxima = sorted(name for name in sums if name in MAXIMA)
    added = sorted(name for name in sums if name not in MAXIMA)
    names = [*maxima, *added]
    flat = torch.cat([sums[name].reshape(-1) for name in names])
    split = sum(sums[name].numel() for name in maxima)
    if maxima:
        dist.all_reduce(flat[:split], op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(flat[split:], op=dist.ReduceOp.SUM, group=group)
    parts = flat.cpu().split([sums[name].numel() for name in names])
    return {name: part.view(sums[name].shape) for name, part in zip(names, parts, strict=True)}


StepPart = Callable[[Sequence[CollatedRow], Sequence[Tree], BatchTotals], tuple[torch.Tensor, Sums]]
"""Function of a micro-batch's rows, the trees that they are packed into and the step's totals: its addend to the loss,
and its sums for the metrics."""


class Learner:
    """Trains a sharded module: gradients, optimizer steps, learning-rate schedule and checkpoints. Collective."""

    def __init__(
        self, module: ShardedModule, config: ActorConfig | CriticConfig, total_steps: int, *, whole_copies: bool = False
    ) -> None:
        """Set up the optimizer of ``module``, and a schedule of ``total_steps``.

        ``whole_copies``: copies have all data of this rank, for `restore_copy`, not only the part that it writes.
        """
        assert module.mesh is not None
        self._module, self._mesh = module, module.mesh
        self._parameters = dict(module.named_parameters())
        assert all(isinstance(p, DTensor) for p in self._parameters.values()), "FSDP still has gathered parameters"
        optim = self._optim = config.optim
        self._grad_clip = config.grad_clip
        self._total_steps = total_steps
        self._steps = 0
        self._shards = {name: nn.Parameter(local(parameter)) for name, parameter in self._parameters.items()}
        """This rank's part of each parameter, as the optimizer steps it: parameters lie on meshes of several kinds."""
        self._optimizer = torch.optim.AdamW(
            self._shards.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self._host = HostState(pinned=kind_of(self._mesh.device.type).pins_host_memory, whole=whole_copies)
        self._copied: dict[str, Any] | None = None
        """Tensors of the next checkpoint, and the number of optimizer steps; None before they were copied."""
        self._writing = Lock()

    def step(self, rows: Sequence[CollatedRow], part: StepPart, *, whole_episodes: bool = False) -> StepReport:
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
            # Of numbers that were reduced over all ranks: they all skip the step, or none does.
            finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
            if finite:
                self._update(metrics["grad_norm"], metrics["lr"])
        finally:
            self._forget_grads()  # also after an error: the next step must not add to half a gradient
        self._steps += 1
        return StepReport(skipped=not finite, metrics=metrics)

    def copy_state(self) -> None:
        """Copy all that a checkpoint has into host memory, for `save`.

        Raises `RunError` while the checkpoint before is being written: the copy is still needed.
        """
        if self._writing.locked():  # not waited for: training would stand still meanwhile
            raise RunError("the checkpoint before is still being written, from the memory that the next one would take")
        # The steps as a tensor: `restore_copy` finds them among the copies.
        self._copied = self._host.copy({**self._state(), "steps": torch.tensor(self._steps)})

    @contextmanager
    def copy_bytes(self) -> Iterator[list[memoryview]]:
        """Context with the writable bytes of the copy that `copy_state` made. No other copy is made in the block."""
        with self._writing:
            self._copied = None
            yield self._host.views()

    def restore_copy(self) -> None:
        """Set weights, optimizer and schedule to the copy in host memory, whose bytes may have been overwritten."""
        steps = torch.tensor(0)
        self._host.restore({**self._state(), "steps": steps})
        self._steps = int(steps)

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Write what `copy_state` copied, or else what is there now, as a checkpoint with ``extra`` (JSON). Atomic: a
        rename ends it.

        Any other thread may call it, while steps are made.
        """
        if self._copied is None:
            self.copy_state()
        assert self._copied is not None
        with self._writing:
            tensors, self._copied = self._copied, None  # written once; the next `save` copies anew
            steps = int(tensors.pop("steps"))  # they stand in state.json, not among the tensors
            save_checkpoint(tensors, path, {"optimizer_steps": steps, "extra": dict(extra)}, self._mesh.files)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any mesh; returns its ``extra``."""
        state = load_checkpoint(self._state(), path)
        self._steps = int(state["optimizer_steps"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def _state(self) -> dict[str, Any]:
        """Contents of a checkpoint: weights and optimizer state, as views of this rank's parts."""
        self._meet_shards()
        if not self._optimizer.state:
            _init_optim_state(self._optimizer)  # by a step with a rate of 0, which is counted
            for state in self._optimizer.state.values():
                state["step"].zero_()
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            of = name.removeprefix("lm.")  # of a policy the names are the model's own
            weights[of] = Pieces(parameter)
            moments[of] = {
                # `step` has no dimensions, and is the same on all ranks. Moments lie as their parameter does.
                key: value if value.ndim == 0 and parameter.ndim else Pieces(parameter, value)
                for key, value in self._optimizer.state[self._shards[name]].items()
            }
        return {"model": weights, "optimizer": {"state": moments}}

    def _meet_shards(self) -> None:
        """Point the optimizer's parameters at this rank's parts in FSDP, which may have moved them."""
        for name, parameter in self._parameters.items():
            self._shards[name].data = local(parameter)

    def _backward(
        self, rows: Sequence[CollatedRow], part: StepPart, *, whole_episodes: bool = False
    ) -> dict[str, float]:
        """Leave the mini-batch's gradient in the parameters; returns the metrics, equal on all ranks."""
        mine = count(rows)
        packs = micro_batches(rows, self._module.packing, self._mesh.device, whole_episodes=whole_episodes)
        own = [mine.tokens, mine.sequences, sum(p.tokens for _, p in packs), sum(len(row.input_ids) for row in rows)]
        tokens, sequences, computed, given = reduce_numbers(own, dist.ReduceOp.SUM, self._mesh.device, self._mesh.rows)
        totals = BatchTotals(tokens, sequences, mine.lengths)
        parts = []
        for done, (of, pack) in enumerate(packs, 1):
            loss, sums = part(of, pack.trees, totals)
            loss.backward()
            parts.append(sums)  # tensors of the device: `float` here would wait for it in each micro-batch
            advance(f"{done} of {len(packs)} micro-batches done")
        if not parts:
            raise ValueError("a training step needs rows on one rank at least")
        grads = self._local_grads()
        # Squares in float64: each shard that several ranks hold is counted by all of them and divided by their number.
        squares = torch.stack(torch._foreach_norm(list(grads.values()))).double().square()
        there = torch.tensor([copies(self._parameters[name]) for name in grads], device=squares.device)
        grad_square = (squares / there).sum().to(self._mesh.device)
        # Over neighbours here, over ranks with rows of their own in `reduce_sums`: together each rank counts once.
        if self._mesh.inner is not None:
            dist.all_reduce(grad_square, group=self._mesh.inner)
        sums = reduce_sums({**merge(parts), "grad_square": grad_square}, self._mesh.rows)
        grad_norm = math.sqrt(float(sums.pop("grad_square")))
        return {**as_metrics(sums), "grad_norm": grad_norm, "tokens_saved": 1 - computed / given}

    def _update(self, grad_norm: float, lr: float) -> None:
        if grad_norm > self._grad_clip:
            torch._foreach_mul_(list(self._local_grads().values()), self._grad_clip / grad_norm)
        self._meet_shards()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # After `_meet_shards`: torch refuses a gradient on another device than its parameter.
        for name, grad in self._local_grads().items():
            self._shards[name].grad = grad
        self._optimizer.step()

    def _forget_grads(self) -> None:
        for parameter, shard in zip(self._parameters.values(), self._shards.values(), strict=True):
            parameter.grad = shard.grad = None

    def _local_grads(self) -> dict[str, torch.Tensor]:
        """This rank's part of the gradient, of each parameter that has one."""
        return {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}
