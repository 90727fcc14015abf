"""Forward passes without a gradient, one number per token: what trainer, critic and reference policy share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headway.data.collate import CollatedRow
from headway.data.packing import Pack, Packing
from headway.engines.train.fsdp.micro_batches import MicroBatch, collate, filler_row
from headway.engines.train.fsdp.policy import ShardedModule
from headway.engines.train.fsdp.sharded.collectives import reduce_numbers
from headway.engines.train.fsdp.sharded.sharding import reshard
from headway.models.attention.ulysses import SequenceRanks
from headway.runtime.progress import advance


def micro_batches(
    rows: Sequence[CollatedRow], packing: Packing, device: torch.device, *, whole_episodes: bool = False
) -> list[Pack]:
    """Split this rank's ``rows`` into micro-batches, as many on every rank. Collective.

    A rank that has fewer of its own ends with empty ones, each of which stands for one `filler_row`.
    ``whole_episodes``: see `Packing`.
    """
    packs = packing(rows, whole_episodes=whole_episodes)
    (most,) = reduce_numbers([len(packs)], dist.ReduceOp.MAX, device)
    if len(packs) < most:
        (filler,) = packing([filler_row()])
        packs += [Pack((), filler.trees)] * (int(most) - len(packs))
    return packs


def rows_of(rows: Sequence[CollatedRow], pack: Pack) -> list[CollatedRow]:
    """Return the rows of one micro-batch, or the filler row for an empty one."""
    return [rows[i] for i in pack.rows] or [filler_row()]


Compute = Callable[[MicroBatch], torch.Tensor]
"""Function that computes one number per response token [M] of a micro-batch."""


@torch.no_grad()
def forward_rows(
    rows: Sequence[CollatedRow],
    packs: Sequence[Pack],
    compute: Compute,
    device: torch.device,
    ranks: SequenceRanks | None = None,
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of ``rows``, micro-batch by micro-batch. Collective where ``compute`` is."""
    results = [np.zeros(0, dtype=np.float32)] * len(rows)
    for done, pack in enumerate(packs, 1):
        values = compute(collate(rows_of(rows, pack), device, pack.trees, ranks)).float().cpu().numpy()
        ends = np.cumsum([len(rows[i].logprobs) for i in pack.rows])[:-1]
        for i, part in zip(pack.rows, np.split(values, ends), strict=False):
            results[i] = part
        advance(f"{done} of {len(packs)} micro-batches done")
    return results


def forward_sharded(
    module: ShardedModule, rows: Sequence[CollatedRow], packing: Packing, device: torch.device
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of this rank's ``rows``, by ``module.per_token``. Collective."""
    try:
        packs = micro_batches(rows, packing, device)
        return forward_rows(rows, packs, module.per_token, device, module.ranks)
    finally:
        # The root's parameters stay gathered after a forward pass, waiting for a backward pass that does not come here:
        # the next forward pass would take them as they are, even after the weights have changed.
        reshard(module)
