"""Small collectives over the ranks of the default process group, and the sums behind a step's metrics.

Every rank calls the collectives, in the same order. Sums add up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from headway.algorithms import health
from headway.data.packing import CollatedRow, by_episode
from headway.data.types import TrajectoryId
from headway.errors import HeadwayError, RunError, said_by

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
    return {
        name: torch.stack([part[name] for part in parts]).amax(0)
        if name in MAXIMA
        else torch.stack([part[name] for part in parts]).sum(0)
        for name in parts[0]
    }


def as_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute a step's metrics from sums that were reduced over micro-batches and ranks."""
    metrics = {name: float(value) for name, value in sums.items() if not name.startswith(HEALTH)}
    of_health = {n.removeprefix(HEALTH): v for n, v in sums.items() if n.startswith(HEALTH)}
    if not of_health:
        return metrics
    of_lags = {name: value for name, value in of_health.items() if name.startswith("lag/")}
    return metrics | health.health(of_health) | (health.lag_health(of_lags) if of_lags else {})


T = TypeVar("T")


def reduce_numbers(
    values: Sequence[float],
    op: dist.ReduceOp.RedOpType,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """All-reduce ``values`` element by element in float64; every rank of ``group`` gets the same. Collective."""
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.tolist()


def reduce_sums(sums: Sums, group: dist.ProcessGroup) -> Sums:
    """Reduce the sums of ``group``'s ranks to one, on the host, in two collectives and one transfer."""
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


def on_rank_zero(action: Callable[[], T]) -> T | None:
    """Run ``action`` on rank zero while the others wait for it. Returns its result there, None elsewhere.

    What it raises is raised on every rank: otherwise the others would wait in the next collective for ever.
    """
    result: T | None = None
    outcome: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
    return result


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return its result. What the first rank raises that fails is raised on all."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except HeadwayError as error:
        failure = error
    except Exception as error:  # of foreign code, which may not be one that can be sent
        failure = RunError(said_by(error))
        failure.__cause__ = error
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = failure or next((error for error in failures if error is not None), None)
    if first is not None:
        raise first
    return cast(T, result)


def from_rank_zero(action: Callable[[], T]) -> T:
    """Run ``action`` on rank zero alone and return its result, pickled, on every rank. Errors as in `on_rank_zero`."""
    shared: list[Any] = [on_rank_zero(action)]
    dist.broadcast_object_list(shared, src=0)
    result: T = shared[0]
    return result
