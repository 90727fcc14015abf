"""Log-probs without a gradient: what the trainer and the reference policy share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headway.data.collate import Row
from headway.engines.train.fsdp.batch import collate, filler_row, split_by_budget
from headway.engines.train.fsdp.collectives import reduce_numbers
from headway.engines.train.fsdp.policy import PolicyModule
from headway.engines.train.fsdp.sharding import reshard


def micro_batches(rows: Sequence[Row], token_budget: int, device: torch.device) -> list[list[int]]:
    """Indices of this rank's ``rows``, micro-batch by micro-batch; as many of them on every rank. Collective.

    A rank that has fewer of its own ends with empty ones, each of which stands for one `filler_row`.
    """
    batches = split_by_budget(rows, token_budget)
    (most,) = reduce_numbers([len(batches)], dist.ReduceOp.MAX, device)
    return batches + [[] for _ in range(int(most) - len(batches))]


def rows_of(rows: Sequence[Row], indices: Sequence[int]) -> list[Row]:
    """One micro-batch's rows, or the filler row for an empty one."""
    return [rows[i] for i in indices] or [filler_row()]


@torch.no_grad()
def forward_logprobs(
    policy: PolicyModule, rows: Sequence[Row], token_budget: int, device: torch.device
) -> list[NDArray[np.float32]]:
    """For each of this rank's ``rows`` its [T] float32 log-probs (nats, temperature applied). Collective."""
    results = [np.zeros(0, dtype=np.float32)] * len(rows)
    try:
        for indices in micro_batches(rows, token_budget, device):
            batch = collate(rows_of(rows, indices), device)
            logprobs, _ = policy(batch.input_ids, batch.predictors, batch.targets)
            lengths = [len(rows[i].logprobs) for i in indices]
            ends = np.cumsum(lengths)[:-1]
            for i, values in zip(indices, np.split(logprobs.float().cpu().numpy(), ends), strict=False):
                results[i] = values
    finally:
        # The root's parameters stay gathered after a forward pass, waiting for a backward pass that does not come here:
        # the next forward pass would take them as they are, even after the weights have changed.
        reshard(policy)
    return results
