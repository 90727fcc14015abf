"""Forward passes without a gradient, one number per token: what trainer, critic and reference policy share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headway.data.collate import Row
from headway.engines.train.fsdp.batch import MicroBatch, collate, filler_row, split_by_budget
from headway.engines.train.fsdp.collectives import reduce_numbers
from headway.engines.train.fsdp.policy import ShardedModule
from headway.engines.train.fsdp.sharding import reshard
from headway.progress import advance


def micro_batches(
    rows: Sequence[Row], token_budget: int, device: torch.device, *, whole_episodes: bool = False
) -> list[list[int]]:
    """Indices of this rank's ``rows``, micro-batch by micro-batch; as many of them on every rank. Collective.

    A rank that has fewer of its own ends with empty ones, each of which stands for one `filler_row`.
    ``whole_episodes``: see `split_by_budget`.
    """
    batches = split_by_budget(rows, token_budget, whole_episodes=whole_episodes)
    (most,) = reduce_numbers([len(batches)], dist.ReduceOp.MAX, device)
    return batches + [[] for _ in range(int(most) - len(batches))]


def rows_of(rows: Sequence[Row], indices: Sequence[int]) -> list[Row]:
    """Return the rows of one micro-batch, or the filler row for an empty one."""
    return [rows[i] for i in indices] or [filler_row()]


Compute = Callable[[MicroBatch], torch.Tensor]
"""Function that computes one number per response token [M] of a micro-batch."""


@torch.no_grad()
def forward_rows(
    rows: Sequence[Row], batches: Sequence[Sequence[int]], compute: Compute, device: torch.device
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of ``rows``, micro-batch by micro-batch. Collective where ``compute`` is."""
    results = [np.zeros(0, dtype=np.float32)] * len(rows)
    for done, indices in enumerate(batches, 1):
        values = compute(collate(rows_of(rows, indices), device)).float().cpu().numpy()
        ends = np.cumsum([len(rows[i].logprobs) for i in indices])[:-1]
        for i, part in zip(indices, np.split(values, ends), strict=False):
            results[i] = part
        advance(f"{done} of {len(batches)} micro-batches done")
    return results


def forward_sharded(
    module: ShardedModule, rows: Sequence[Row], token_budget: int, device: torch.device
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of this rank's ``rows``, by ``module.per_token``. Collective."""
    try:
        return forward_rows(rows, micro_batches(rows, token_budget, device), module.per_token, device)
    finally:
        # The root's parameters stay gathered after a forward pass, waiting for a backward pass that does not come here:
        # the next forward pass would take them as they are, even after the weights have changed.
        reshard(module)
