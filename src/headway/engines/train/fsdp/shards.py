"""Local shards of a tensor, as offsets and shapes; buckets of whole weights, assembled from all ranks' shards.

    whole [6, 4], divided over tp by rows in two strides, then sharded over two ranks:

        rows 0 1 2 │ 3 4 5      a fused matrix of two halves: each tp rank has a part of both
             ▓ ░ ·   ▓ ░ ·      ▓ a rank's rows: the boxes at rows 0 and 3

Checkpoints, exports, updates and restores on another mesh all need to know which elements are here, and their places.

The tensors of files are assembled from shards, bucket by bucket: a rank holds at most two buckets besides its shards,
however large a tensor is. Each rank writes its part of the bucket among zeros. The bucket is the sum over the ranks, as
at most one rank has a nonzero byte at each place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from headway.engines.train.fsdp.device_mesh import EP, REPLICATE, TP, TrainMesh
from headway.engines.weights.buckets import Part, Parts, pack, parts_of_files
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, buckets
from headway.models.weight_files import FileTensor
from headway.runtime.progress import advance


def boxes(tensor: torch.Tensor, part: torch.Tensor | None = None) -> list[Part]:
    """Return this rank's part of ``tensor`` as boxes; a tensor that is not divided is one box.

    ``part``: another tensor in the layout of the rank's part of ``tensor``, to use instead of that part.
    """
    if not isinstance(tensor, DTensor):
        return [Part((0,) * tensor.ndim, tensor.detach() if part is None else part)]
    own = local(tensor) if part is None else part
    found = []
    for runs in product(*(_runs(indices) for indices in _indices(tensor))):
        values = own
        for dim, (_, at, size) in enumerate(runs):
            values = values.narrow(dim, at, size)
        found.append(Part(tuple(first for first, _, _ in runs), values))
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


def _indices(tensor: DTensor) -> list[NDArray[np.int64]]:
    """The rank's indices in each dimension of ``tensor``, ascending.

    tp and ep divide the tensor first, and FSDP2 shards the result. It uses a strided placement if another dimension of
    the mesh divides the same dimension of the tensor.
    """
    mesh, own = tensor.device_mesh, [np.arange(size) for size in tensor.shape]
    names, place = mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.get_coordinate()
    assert place is not None
    # In this order, not in that of the mesh: FSDP2 has sharded what tensor and expert parallelism had left.
    for at in sorted(range(mesh.ndim), key=lambda at: (names[at] not in (TP, EP), at)):
        placement = tensor.placements[at]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim, parts = placement.dim % tensor.ndim, 1
        if names[at] in (TP, EP) and isinstance(placement, _StridedShard):
            parts = int(placement.split_factor)
        divided = [_chunk(own[dim], parts, part) for part in range(parts)]
        own[dim] = np.concatenate([_chunk(part, mesh.size(at), place[at]) for part in divided])
    return own


def _chunk(indices: NDArray[np.int64], count: int, index: int) -> NDArray[np.int64]:
    """Chunk ``index`` of ``count`` of the ``indices``, as torch.chunk divides."""
    size = -(-len(indices) // count)
    return indices[index * size : (index + 1) * size]


def _runs(indices: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive numbers in ``indices``: first number, its place in ``indices``, and length."""
    # -2: the first index begins a run, also if it is 0.
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1).tolist()
    return [(int(indices[a]), a, b - a) for a, b in zip(starts, [*starts[1:], len(indices)], strict=False)]


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

    def copied(self, copy: Callable[[torch.Size, torch.Tensor], torch.Tensor], *, whole: bool = False) -> Pieces:
        """Return pieces to be written: of each box that this rank writes, what ``copy`` makes of its start and it.
        ``whole``: of each box that it holds, also where another rank writes the same.
        """
        pieces: Pieces = torch.Tensor._make_wrapper_subclass(type(self), self.shape, dtype=self.dtype)
        boxes = self._boxes if whole or self._written else {}
        pieces._boxes = {start: copy(start, box) for start, box in boxes.items()}
        pieces._written = self._written
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


_WORD = torch.int64
"""Dtype in which the bytes of buckets are summed: none carries into the next where all terms but one are zero."""


@torch.no_grad()
def gather(
    parts: Parts, manifest: Manifest, bucket_bytes: int, mesh: TrainMesh, *, everywhere: bool = False
) -> Iterator[Window]:
    """Yield this rank's share of the weights bucket by bucket, as `FsdpEngine.gather` says. Collective.

    ``parts``: the elements that this rank contributes; within a copy of the model each element comes from one rank. The
    ranks of rank zero's copy get the layout's shares; other ranks get nothing. ``everywhere``: each rank gets all
    weights, from the ranks of its own copy.
    """
    members = dist.get_process_group_ranks(mesh.copy)
    if 0 not in members and not everywhere:  # another copy of the model (HSDP): rank zero's sends for all
        return
    shares, place = ((manifest,), 0) if everywhere else (manifest.shares(), dist.get_rank(mesh.copy))
    largest = max(shares, key=lambda share: share.nbytes)
    nbytes = min(largest.nbytes, bucket_bytes)
    own = torch.zeros(nbytes + -nbytes % ALIGNMENT, dtype=torch.uint8, device=mesh.device)
    # A rank with a share needs two: its own bucket has to last until the others' of the round were summed.
    others = torch.empty_like(own) if len(shares) > 1 and place < len(shares) else own
    streams = [
        pack(share, parts, _padded(share, bucket_bytes), own if index == place else others)
        for index, share in enumerate(shares)
    ]
    gathered = 0
    for _ in buckets(largest.nbytes, bucket_bytes):
        mine: Window | None = None
        for index, (share, stream) in enumerate(zip(shares, streams, strict=True)):
            if (window := next(stream, None)) is None:
                continue
            start, bucket = window
            if len(members) > 1:
                # Collective: every rank takes part in every share, in the same order, also in those that others send.
                # As integers: as floats -0.0 + 0.0 would be 0.0, and a NaN could change its bits.
                if everywhere:
                    dist.all_reduce(bucket.view(_WORD), group=mesh.copy)
                else:
                    dist.reduce(bucket.view(_WORD), dst=members[index], group=mesh.copy)
            data = bucket[: share.stop - start]  # without the zeros that fill the last word
            if index == place:
                mine = start, data
            gathered += data.numel()
            advance(f"{gathered / 1e6:,.0f} of {manifest.nbytes / 1e6:,.0f} MB gathered")
        # After the round's collectives: the other ranks would wait in them while this one sends.
        if mine is not None:
            yield mine


def _padded(share: Manifest, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of buckets in whole words: the last may end behind the share, in zeros."""
    for start, stop in buckets(share.nbytes, bucket_bytes):
        yield share.start + start, share.start + stop + -stop % ALIGNMENT


def given_parts(parameters: Mapping[str, torch.Tensor], files: Sequence[FileTensor]) -> dict[str, list[Part]]:
    """Return this rank's contribution: each element comes from the first rank of each copy of the model to hold it."""
    given = {name: boxes(of) if is_first(of, of_copy=True) else [] for name, of in parameters.items()}
    return parts_of_files(given, files)
