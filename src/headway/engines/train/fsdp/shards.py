"""Local shards of a tensor, as offsets and shapes.

    whole [6, 4], divided over tp by rows in two strides, then sharded over two ranks:

        rows 0 1 2 │ 3 4 5      a fused matrix of two halves: each tp rank has a part of both
             ▓ ░ ·   ▓ ░ ·      ▓ a rank's rows: the boxes at rows 0 and 3

A checkpoint, an export, an update and a restored mesh all ask the same: which elements are here, and where they belong.

Weights of files are assembled from them, bucket by bucket, so that a rank holds at most two buckets beside its shards,
however large a tensor is:

    on the rank that sends it   each rank writes what it has of the bucket among zeros; the sum of the bytes, of which
                                one at most is not zero, is the bucket
    on every rank               each rank broadcasts what it has of the bucket, packed; nothing travels twice
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from headway.engines.train.fsdp.device_mesh import EP, REPLICATE, TP, TrainMesh
from headway.engines.weights.buckets import Part, Parts, meetings, pack
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, buckets
from headway.models.weight_files import FileTensor
from headway.runtime.progress import advance

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
def gather(parts: Parts, manifest: Manifest, bucket_bytes: int, mesh: TrainMesh) -> Iterator[Window]:
    """Yield this rank's share of the weights bucket by bucket, as `FsdpEngine.gather` says. Collective.

    ``parts``: what this rank gives, so that the ranks of each copy of the model give each element once. The ranks of
    rank zero's copy get shares, as many as the layout has; others nothing.
    """
    members = dist.get_process_group_ranks(mesh.copy)
    if 0 not in members:
        return
    shares, place = manifest.shares(), dist.get_rank(mesh.copy)
    nbytes = max(share.nbytes for share in shares)
    own = _room(min(nbytes, bucket_bytes), mesh)
    others = torch.empty_like(own) if len(shares) > 1 and place < len(shares) else own
    streams = [
        pack(share, parts, _padded(share, bucket_bytes), own if index == place else others)
        for index, share in enumerate(shares)
    ]
    gathered = 0
    for _ in buckets(nbytes, bucket_bytes):
        mine: Window | None = None
        for index, (share, stream) in enumerate(zip(shares, streams, strict=True)):
            if (window := next(stream, None)) is None:
                continue
            start, bucket = window
            if len(members) > 1:
                # Collective: every rank takes part in every share, in the same order, also in those that others send.
                # As integers: as floats -0.0 + 0.0 would be 0.0, and a NaN could change its bits.
                dist.reduce(bucket.view(_WORD), dst=members[index], group=mesh.copy)
            data = bucket[: share.stop - start]
            if index == place:
                mine = start, data
            gathered += data.numel()
            _advance(gathered, manifest)
        if mine is not None:
            yield mine


@torch.no_grad()
def gather_everywhere(parts: Parts, manifest: Manifest, bucket_bytes: int, mesh: TrainMesh) -> Iterator[Window]:
    """Yield all weights bucket by bucket on each rank, as `FsdpEngine.gather_everywhere` says. Collective.

    Bytes come from the ranks of this rank's own copy of the model, and only from those that have them.
    """
    members, place = dist.get_process_group_ranks(mesh.copy), dist.get_rank(mesh.copy)
    room = _room(min(manifest.nbytes, bucket_bytes), mesh)
    if len(members) == 1:
        yield from pack(manifest, parts, buckets(manifest.nbytes, bucket_bytes), room)
        return
    of_all = _of_all(parts, mesh)
    packed = torch.empty_like(room)
    for start, stop in buckets(manifest.nbytes, bucket_bytes):
        bucket = room[: stop - start]
        for index, rank in enumerate(members):
            pieces = list(meetings(manifest.slots, of_all[index], start, bucket))
            nbytes = sum(piece.nbytes for piece, _ in pieces)
            if not nbytes:
                continue
            end = 0
            at = [(piece, packed[end : (end := end + piece.nbytes)].view(piece.dtype)) for piece, _ in pieces]
            if index == place:
                for (piece, there), (_, values) in zip(at, pieces, strict=True):
                    there.view(piece.shape).copy_(piece.copy_(values))
            dist.broadcast(packed[:nbytes], src=rank, group=mesh.copy)
            if index != place:
                for piece, there in at:
                    piece.copy_(there.view(piece.shape))
        _advance(stop, manifest)
        yield start, bucket


def _of_all(parts: Parts, mesh: TrainMesh) -> list[Parts]:
    """Return what each rank of this copy has: of others, parts without values. Collective."""
    boxes_here = {name: [(part.start, tuple(part.values.shape)) for part in found] for name, found in parts.items()}
    of_all: list[dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]] = [{} for _ in range(mesh.copy.size())]
    dist.all_gather_object(of_all, boxes_here, group=mesh.copy)
    found: list[Parts] = [
        {name: [Part(start, torch.empty(shape, device="meta")) for start, shape in held] for name, held in rank.items()}
        for rank in of_all
    ]
    found[dist.get_rank(mesh.copy)] = parts
    return found


def _advance(gathered: int, manifest: Manifest) -> None:
    advance(f"{gathered / 1e6:,.0f} of {manifest.nbytes / 1e6:,.0f} MB gathered")


def _padded(share: Manifest, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of buckets in whole words: the last may end behind the share, in zeros."""
    for start, stop in buckets(share.nbytes, bucket_bytes):
        yield share.start + start, share.start + stop + -stop % ALIGNMENT


def _room(nbytes: int, mesh: TrainMesh) -> torch.Tensor:
    return torch.zeros(nbytes + -nbytes % ALIGNMENT, dtype=torch.uint8, device=mesh.device)


def parts_of_files(parameters: Mapping[str, torch.Tensor], files: Sequence[FileTensor]) -> dict[str, list[Part]]:
    """Return what this rank holds of each tensor of a model's files."""
    held = {name: boxes(parameter) for name, parameter in parameters.items()}
    found: dict[str, list[Part]] = {}
    for file in files:
        found[file.name] = [part for box in held[file.parameter] if (part := _part(box, file)) is not None]
    return found


def given_parts(parameters: Mapping[str, torch.Tensor], files: Sequence[FileTensor]) -> dict[str, list[Part]]:
    """Return what this rank gives where the ranks of each copy give each element once: of equal parts the first."""
    parts = parts_of_files(parameters, files)
    gives = {name: is_first(parameter, of_copy=True) for name, parameter in parameters.items()}
    return {file.name: parts[file.name] if gives[file.parameter] else [] for file in files}


def _part(box: Part, file: FileTensor) -> Part | None:
    """The elements that a box of a parameter has of a file's tensor; None where it has none."""
    values, start = box.values, []
    for dim, first in enumerate(file.start):
        size = file.shape[file.dims.index(dim)] if dim in file.dims else 1
        low, high = max(first, box.start[dim]), min(first + size, box.start[dim] + box.values.shape[dim])
        if low >= high:
            return None
        values = values.narrow(dim, low - box.start[dim], high - low)
        start.append(low - first)
    for dim in reversed(range(len(file.start))):
        if dim not in file.dims:
            values = values.select(dim, 0)
    return Part(tuple(start[dim] for dim in file.dims), values)
