"""The weights of a sharded model, assembled bucket by bucket.

    rank 0   │■■■□□□│            each rank writes what it has of a bucket, cast to the served dtype, among zeros;
    rank 1   │□□□■■■│  ─reduce─▶ the sum of the bytes, of which one at most is not zero, is the bucket

So a rank holds one bucket beside its shards, however large a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from headway.errors import ModelError
from headway.weights.buckets import Shard as OwnShard
from headway.weights.buckets import pack
from headway.weights.layout import ALIGNMENT, Manifest, buckets
from headway.weights.outgoing import Window

_WORD = torch.int64
"""Dtype in which the bytes of buckets are summed: none carries into the next where all terms but one are zero."""


@torch.no_grad()
def gather(
    lm: PreTrainedModel, manifest: Manifest, bucket_bytes: int, device: torch.device, *, everywhere: bool
) -> Iterator[Window]:
    """Yield the weights of a sharded model bucket by bucket, as `FsdpEngine.gather` says. Collective."""
    parts = {name: _part(name, parameter) for name, parameter in lm.named_parameters()}
    spans = list(buckets(manifest.nbytes, bucket_bytes))
    if dist.get_world_size() == 1:
        yield from pack(manifest, parts, spans, device)
        return
    # Whole words, also of the last bucket: the layout ends inside it, and what is beyond stays zero.
    padded = [(start, stop + -stop % ALIGNMENT) for start, stop in spans]
    for (start, bucket), (_, stop) in zip(pack(manifest, parts, padded, device), spans, strict=True):
        words = bucket.view(_WORD)
        if everywhere:
            dist.all_reduce(words)
        else:
            dist.reduce(words, dst=0)
        yield start, bucket[: stop - start]


def _part(name: str, parameter: torch.Tensor) -> OwnShard:
    """The rank's own elements of a parameter, in row-major order of the whole."""
    assert isinstance(parameter, DTensor)
    (placement,) = parameter.placements
    if not (isinstance(placement, Shard) and placement.dim == 0):
        raise ModelError(f"{name} is placed as {placement} over the training ranks; weights are gathered by rows")
    local = parameter.to_local().detach()
    mesh = parameter.device_mesh
    rows = parameter.shape[0] if parameter.ndim else 1
    # As torch.chunk divides: every rank but the last ones has this many rows.
    most = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * most, rows) * (parameter.numel() // max(1, rows))
    return OwnShard(first, local.reshape(-1))
