"""Small collectives over the ranks of the default process group. Every rank calls them, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from headway.engines.train.fsdp.metric_sums import MAXIMA, Sums
from headway.errors import HeadwayError, RunError, said_by

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

    What it raises is raised on every rank: otherwise the others would go on into a collective and wait there for ever.
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
