"""The weights of a sharded model, assembled bucket by bucket.

    on the rank that sends it   each rank writes what it has of the bucket among zeros; the sum of the bytes, of which
                                one at most is not zero, is the bucket
    on every rank               each rank broadcasts what it has of the bucket, packed; nothing travels twice

So a rank holds at most two buckets beside its shards, however large a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.shard_boxes import boxes, is_first
from headway.engines.weights.buckets import Part, Parts, meetings, pack
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, buckets
from headway.models.weight_files import FileTensor
from headway.runtime.progress import advance

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
