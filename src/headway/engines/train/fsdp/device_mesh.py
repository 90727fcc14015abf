"""The ranks of a role as a mesh, and the groups that share weights or rows.

    dense    (replicate, fsdp = shard × cp, tp)      weights are sharded over fsdp, divided over tp
    experts  (replicate, efsdp, ep)                  the same ranks; experts are divided over ep, sharded over efsdp
    rows     ranks of equal cp and tp place          each has rows of its own
    inner    cp × tp neighbours                      compute the same rows, each a part of them

tp is fastest, then cp: an inner mesh is a group of neighbours.

Small collectives over the default process group are here, too. Every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from headway.config.sections.learning import ParallelConfig
from headway.errors import HeadwayError, RunError, said_by
from headway.models.attention.sequence_ranks import SequenceRanks

T = TypeVar("T")

REPLICATE, FSDP, TP, EFSDP, EP = "dp_replicate", "fsdp", "tp", "efsdp", "ep"
"""Names of the dimensions, those of `transformers`."""


@dataclass(frozen=True, slots=True)
class TrainMesh:
    """Mesh of all ranks of the default process group, from the view of one rank."""

    device: torch.device
    parallel: ParallelConfig
    dense: DeviceMesh
    experts: DeviceMesh
    """Mesh of the same ranks for experts; ``dense`` where experts are not divided."""
    copy: ProcessGroup
    """Ranks that together hold one copy of the model, including this rank: all ranks, or those of a replica (HSDP)."""
    rows: ProcessGroup
    """Ranks with different rows, including this rank: one of each inner mesh."""
    inner: ProcessGroup | None
    """Ranks that compute the same rows as this one; None where no other rank does."""
    sequence: SequenceRanks | None
    """Ranks that divide lines of tokens with this one; None where lines are not divided."""
    files: ProcessGroup
    """All ranks, for collectives of threads that write checkpoints."""

    @classmethod
    def make(cls, parallel: ParallelConfig, device: torch.device, timeout: timedelta | None = None) -> TrainMesh:
        """Arrange the ranks of the default process group. Collective; each call makes process groups.

        ``timeout``: how long ranks wait for each other; None: torch's default.

        Raises:
            ValueError: the dimensions do not divide the number of ranks.
        """
        ranks = dist.get_world_size()
        # Checked here: with a mesh of too few ranks the others would wait in its first collective.
        fsdp, rest = divmod(ranks, parallel.replicate * parallel.tp)
        if rest or fsdp % parallel.cp:
            raise ValueError(f"{ranks} ranks do not make a mesh of {parallel}")
        torch.empty(0, device=device)  # marks the device as used, or torch would guess it and warn
        init = partial(init_device_mesh, device.type)
        dense = init((1, parallel.replicate, fsdp, parallel.tp), mesh_dim_names=("pp", REPLICATE, FSDP, TP))
        experts = dense
        if parallel.ep > 1:
            of_experts = (1, parallel.replicate, fsdp * parallel.tp // parallel.ep, parallel.ep)
            experts = init(of_experts, mesh_dim_names=("pp", REPLICATE, EFSDP, EP))
        of_copy = ranks // parallel.replicate
        copy = _own_group([range(first, first + of_copy) for first in range(0, ranks, of_copy)])
        rows, inner, sequence = _groups(parallel, ranks)
        # Not the world's group: a checkpoint's collectives on another thread could meet those of a training step.
        files = dist.new_group(backend="gloo")
        if timeout is not None:
            # Afterwards: `init_device_mesh` takes no time limit, and gives its groups torch's own.
            made = [copy, rows, inner, None if sequence is None else sequence.group, files]
            for group in (*dense.get_all_groups(), *experts.get_all_groups(), *made):
                if group is not None:
                    _set_pg_timeout(timeout, group)
        return cls(device, parallel, dense, experts, copy, rows, inner, sequence, files)

    def sharding(self, *, experts: bool = False) -> DeviceMesh:
        """The dimensions over which weights are sharded: one, or two with copies (HSDP)."""
        name = EFSDP if experts else FSDP
        mesh = self.experts if experts else self.dense
        return mesh[(REPLICATE, name)] if self.parallel.replicate > 1 else mesh[name]

    def plan(self) -> Any:
        """The sizes, as a `DistributedConfig` by which `transformers` looks for a model's plans."""
        from transformers.distributed import DistributedConfig

        parallel = self.parallel
        plan = DistributedConfig(
            tp_size=parallel.tp,
            fsdp_size=dist.get_world_size() // (parallel.replicate * parallel.tp),
            dp_replicate_size=parallel.replicate,
            ep_size=parallel.ep,
        )
        # Checked above against ep. From here on it would ask for a plan of what FSDP2 shards: not its business.
        plan.fsdp_size = plan.dp_replicate_size = 1
        return plan


def _groups(parallel: ParallelConfig, ranks: int) -> tuple[ProcessGroup, ProcessGroup | None, SequenceRanks | None]:
    inner = parallel.inner
    if inner == 1:
        return _own_group([range(ranks)]), None, None
    rows = _own_group([range(place, ranks, inner) for place in range(inner)])
    shared = _own_group([range(start, start + inner) for start in range(0, ranks, inner)])
    if parallel.cp == 1:
        return rows, shared, None
    lines = [range(s + t, s + inner, parallel.tp) for s in range(0, ranks, inner) for t in range(parallel.tp)]
    group = _own_group(lines)
    return rows, shared, SequenceRanks(group, dist.get_rank(group), parallel.cp)


def _own_group(groups: Sequence[Sequence[int]]) -> ProcessGroup:
    """Make all ``groups``, which partition the ranks, and return this rank's."""
    if len(groups) == 1:
        world = dist.group.WORLD
        assert world is not None
        return world
    mine: ProcessGroup | None
    # Every rank makes all groups, not only its own: making a group is collective over all ranks.
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    assert mine is not None
    return mine


def reduce_numbers(
    values: Sequence[float], op: dist.ReduceOp.RedOpType, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """All-reduce ``values`` element by element in float64; every rank of ``group`` gets the same. Collective."""
    # In float32 numbers of tokens above 2²⁴ would be rounded.
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.tolist()


def from_rank_zero(action: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Run ``action`` on rank zero while the others wait for it. Returns its result, pickled, on every rank.

    Its exception is raised on every rank: otherwise the others would wait in the next collective for ever. ``group``: a
    group of all ranks to use instead of the default one.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)  # also without a result: the others wait for it
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast(T, result)


def on_all_ranks(action: Callable[[], T]) -> tuple[T, ...]:
    """Run ``action`` on every rank, and return all results, pickled. If it fails, every rank raises an exception of it.

    A rank that failed raises its own; the others raise that of the first rank that failed.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except HeadwayError as error:
        failure = error
    except Exception as error:  # from foreign code: it may not be picklable
        failure = RunError(said_by(error))
        failure.__cause__ = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    results, failures = zip(*outcomes, strict=True)
    # Its own first: others' have come without their tracebacks.
    first = failure or next((error for error in failures if error is not None), None)
    if first is not None:
        raise first
    return cast(tuple[T, ...], results)
