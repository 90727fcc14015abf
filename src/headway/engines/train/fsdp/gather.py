"""The weights of a sharded model, assembled bucket by bucket.

    rank 0   │■■■□□□│            each rank writes what it has of a bucket, cast to the served dtype, among zeros;
    rank 1   │□□□■■■│  ─reduce─▶ the sum of the bytes, of which one at most is not zero, is the bucket

So a rank holds one bucket beside its shards, however large a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from headway.engines.train.fsdp.mesh import TrainMesh
from headway.engines.train.fsdp.pieces import Box, boxes, is_first
from headway.models.files import FileTensor
from headway.weights.buckets import Part, Parts, pack
from headway.weights.layout import ALIGNMENT, Manifest, buckets
from headway.weights.outgoing import Window

_WORD = torch.int64
"""Dtype in which the bytes of buckets are summed: none carries into the next where all terms but one are zero."""


@torch.no_grad()
def gather(
    parts: Parts, manifest: Manifest, bucket_bytes: int, mesh: TrainMesh, *, everywhere: bool
) -> Iterator[Window]:
    """Yield the weights bucket by bucket, as `FsdpEngine.gather` says. Collective.

    ``parts``: what this rank gives, so that the ranks of each copy of the model give each element once. Ranks of other
    copies than rank zero's get nothing, unless ``everywhere``.
    """
    spans = list(buckets(manifest.nbytes, bucket_bytes))
    if mesh.copy.size() == 1:
        yield from pack(manifest, parts, spans, mesh.device)
        return
    if not everywhere and 0 not in dist.get_process_group_ranks(mesh.copy):
        return
    # Whole words, also of the last bucket: the layout ends inside it, and what is beyond stays zero.
    padded = [(start, stop + -stop % ALIGNMENT) for start, stop in spans]
    for (start, bucket), (_, stop) in zip(pack(manifest, parts, padded, mesh.device), spans, strict=True):
        words = bucket.view(_WORD)
        if everywhere:
            dist.all_reduce(words, group=mesh.copy)
        else:
            dist.reduce(words, dst=0, group=mesh.copy)
        yield start, bucket[: stop - start]


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


def _part(box: Box, file: FileTensor) -> Part | None:
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
