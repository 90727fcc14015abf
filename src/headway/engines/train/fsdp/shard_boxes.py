"""Local shards of a tensor, as offsets and shapes.

    whole [6, 4], divided over tp by rows in two strides, then sharded over two ranks:

        rows 0 1 2 │ 3 4 5      a fused matrix of two halves: each tp rank has a part of both
             ▓ ░ ·   ▓ ░ ·      ▓ a rank's rows: the boxes at rows 0 and 3

A checkpoint, an export, an update and a restored mesh all ask the same: which elements are here, and where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from headway.engines.train.fsdp.device_mesh import EP, REPLICATE, TP
from headway.engines.weights.buckets import Part

Span = tuple[int, int]
"""First index of some neighbours in one dimension, and the index behind the last."""


def boxes(tensor: torch.Tensor, part: torch.Tensor | None = None) -> list[Part]:
    """Return what this rank holds of ``tensor``: boxes that cover it; all of a tensor that is not divided.

    ``part``: another tensor that lies as the rank's own part of ``tensor`` does, in place of that part.
    """
    if not isinstance(tensor, DTensor):
        return [Part((0,) * tensor.ndim, tensor.detach() if part is None else part)]
    own = local(tensor) if part is None else part
    spans = [_nonempty(of) for of in _spans(tuple(tensor.shape), tensor.device_mesh, tensor.placements)]
    steps = [accumulate((stop - first for first, stop in of), initial=0) for of in spans]  # of the rank's elements
    found = []
    for chosen in product(*(zip(of, ahead, strict=False) for of, ahead in zip(spans, steps, strict=True))):
        values = own
        for dim, ((first, stop), at) in enumerate(chosen):
            values = values.narrow(dim, at, stop - first)
        found.append(Part(tuple(first for (first, _), _ in chosen), values))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copies(tensor: torch.Tensor) -> int:
    """Number of ranks that hold the same part of ``tensor`` as this one."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    mesh = tensor.device_mesh
    apart = [mesh.size(at) for at, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return dist.get_world_size() // math.prod(apart)


def is_first(tensor: torch.Tensor, *, of_copy: bool = False) -> bool:
    """Tell whether this rank is the first of those that hold the same part of ``tensor``; ``of_copy``: of those of one
    copy of the model (HSDP).
    """
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    names, place = mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.get_coordinate()
    assert place is not None
    for name, at, placement in zip(names, place, tensor.placements, strict=True):
        if at and placement.is_replicate() and not (of_copy and name == REPLICATE):
            return False
    # Where the mesh is a part of the ranks, the others are translations of it, of which that of rank zero is first.
    return int(mesh.mesh.flatten()[0]) == 0


def _spans(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[list[Span]]:
    """The rank's elements of each dimension.

    tp and ep divide the whole; what is left is sharded, however torch spells that: FSDP2 writes a strided placement
    where another dimension of the mesh divides the same one of the tensor, and shards what that left.
    """
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    place = mesh.get_coordinate()
    assert place is not None
    order = sorted(range(mesh.ndim), key=lambda at: (names[at] not in (TP, EP), at))
    for at in order:
        placement, count, index = placements[at], mesh.size(at), place[at]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim = placement.dim % len(shape)
        if names[at] in (TP, EP) and isinstance(placement, _StridedShard):
            (whole,) = spans[dim]
            parts = _chunk([whole], int(placement.split_factor))
            spans[dim] = [span for part in parts for span in _chunk([part], count, index)]
        else:
            spans[dim] = _chunk(spans[dim], count, index)
    return spans


def _chunk(spans: Sequence[Span], count: int, index: int | None = None) -> list[Span]:
    """Chunk ``index`` of ``count`` of the elements of ``spans``, as torch.chunk divides; None: all, of one span."""
    total = sum(stop - first for first, stop in spans)
    size = math.ceil(total / count)
    if index is None:
        ((first, stop),) = spans
        return [(min(first + k * size, stop), min(first + (k + 1) * size, stop)) for k in range(count)]
    low, high = min(index * size, total), min((index + 1) * size, total)
    found, before = [], 0
    for first, stop in spans:
        start, end = max(low - before, 0), min(high - before, stop - first)
        if start < end:
            found.append((first + start, first + end))
        before += stop - first
    return found


def _nonempty(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span[0] < span[1]]


class Pieces(torch.Tensor):
    """A tensor in a distributed checkpoint, as the boxes that a rank holds; torch itself takes its part for one box.

    It has a shape and a dtype, and no elements of its own. The methods are those that `torch.distributed.checkpoint`
    asks of tensors that bring their own chunks.
    """

    _boxes: dict[torch.Size, torch.Tensor]
    _written: bool

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, part: torch.Tensor | None = None) -> Pieces:
        """``part``: see `boxes`."""
        dtype = (tensor if part is None else part).dtype
        pieces: Pieces = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=dtype)
        pieces._boxes = {torch.Size(box.start): box.values for box in boxes(tensor, part) if box.values.numel()}
        pieces._written = is_first(tensor)
        return pieces

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: pieces of a tensor are written and read, not computed with")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self._written:
            return []
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(start, values.shape), properties, self.size()),
            )
            for start, values in self._boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(start, values.shape) for start, values in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._boxes[index.offset]
