"""Totals of a mini-batch, and the sums behind the metrics of a step, which add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from headway.algorithms import health
from headway.data.packing import CollatedRow, by_episode
from headway.data.types import TrajectoryId

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
    """Numbers of tokens that the loss counts, of those episodes of this rank that have several rows."""


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
