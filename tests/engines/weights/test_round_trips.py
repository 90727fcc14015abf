"""Tensors to flat bytes and back, whatever the buckets on either side."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import strategies as st

from headway.engines.weights.buckets import Part, Tensors, pack, whole
from headway.engines.weights.digests import digest
from headway.engines.weights.incoming_version import BackBuffer, InPlace
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.weight_layout import (
    ALIGNMENT,
    Manifest,
    buckets,
    build_manifest,
    combined,
)
from tests.engines.weights.versions import (
    assert_same,
    contents,
    hand_over,
    manifest_of,
    same_bits,
    view,
    weights,
    windows,
)
from tests.tiers import searched

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SIZES = st.integers(1, 16).map(lambda n: n * ALIGNMENT)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs, infinities and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=10
).map(lambda rows: {f"w{i}": random_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(rows)})


def bytes_of(tensors: dict[str, torch.Tensor], manifest: Manifest) -> bytes:
    """What the layout promises, without its code: each tensor's bytes, one behind the other."""
    return b"".join(bytes(tensors[slot.name].reshape(-1).view(torch.uint8).tolist()) for slot in manifest.slots)


@searched(100, tensors=TENSORS, size=SIZES)
def test_packed_buckets_are_the_tensors_bytes_one_behind_the_other(tensors: dict[str, torch.Tensor], size: int) -> None:
    manifest = manifest_of(tensors)
    packed = [(offset, bytes(bucket.tolist())) for offset, bucket in windows(tensors, manifest, size)]
    assert b"".join(data for _, data in packed) == bytes_of(tensors, manifest)
    assert [offset for offset, _ in packed] == list(range(0, manifest.nbytes, size))


@searched(100, tensors=TENSORS, size=SIZES, window=SIZES)
def test_whatever_is_sent_arrives_bit_by_bit_in_a_buffer_and_in_place(
    tensors: dict[str, torch.Tensor], size: int, window: int
) -> None:
    manifest = manifest_of(tensors)
    back = BackBuffer(manifest)
    report = back.fill(7, hand_over(Stream(manifest, windows(tensors, manifest, size))))
    assert back.version == 7 and report.nbytes == manifest.nbytes
    assert [*contents(back)] == [slot.name for slot in manifest.slots]
    assert_same(contents(back), tensors)

    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for offset, data in back.windows(window):
        Tensors(manifest, whole(loaded)).write(offset, data)
    assert_same(loaded, tensors)

    served = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    in_place = InPlace(manifest, Tensors(manifest, whole(served)), window=window)
    again = in_place.fill(7, hand_over(Stream(manifest, windows(tensors, manifest, size))))
    assert again.checksum == report.checksum
    assert_same(served, tensors)


@searched(100, tensors=TENSORS, size=SIZES, senders=st.integers(1, 8), with_delta=st.booleans())
def test_whatever_several_senders_send_is_what_one_would(
    tensors: dict[str, torch.Tensor], size: int, senders: int, with_delta: bool
) -> None:
    """Two versions; each sender has a copy of its share, and its own buckets."""
    manifest = replace(manifest_of(tensors), senders=senders)
    shares = manifest.shares()
    staged = [Staged(share, size, with_delta=with_delta) for share in shares]
    back = BackBuffer(manifest)
    served = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    in_place = InPlace(manifest, Tensors(manifest, whole(served)), window=ALIGNMENT)
    for version in (1, 2):
        for copy, share in zip(staged, shares, strict=True):
            copy.gather(version, windows(tensors, share, size))
        report = back.fill(version, hand_over(*(copy.outgoing(version, to=version - 1) for copy in staged)))
        assert_same(contents(back), tensors)
        assert report.checksum == combined([digest(tensors[s.name].view(-1).view(torch.uint8)) for s in manifest.slots])
        back.loaded()
        again = in_place.fill(version, hand_over(*(Stream(of, windows(tensors, of, size)) for of in shares)))
        assert again.checksum == report.checksum
        assert_same(served, tensors)
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[:1] ^= 1


@searched(100, size=SIZES, other=SIZES)
def test_equal_weights_have_equal_bytes_and_digests_whatever_the_buckets(size: int, other: int) -> None:
    streams = [Stream(manifest_of(weights(1)), windows(weights(1), bucket=bucket)) for bucket in (size, other)]
    one, two = (b"".join(bytes(chunk.payload.tolist()) for chunk in stream) for stream in streams)
    assert one == two
    assert streams[0].digests == streams[1].digests
    manifest = manifest_of(weights(1))
    assert streams[0].digests == tuple(
        digest(weights(1)[slot.name].reshape(-1).view(torch.uint8)) for slot in manifest.slots
    )


@searched(
    100, size=SIZES, shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), copied=st.booleans(), data=st.data()
)
def test_parts_that_several_ranks_pack_add_up_to_the_whole_and_get_their_own_of_it_again(
    size: int, shape: list[int], copied: bool, data: st.DataObject
) -> None:
    source = random_tensor((*shape,), torch.float32, 3)
    other = random_tensor((5,), torch.float32, 4)
    manifest = build_manifest([("w", (*shape,), torch.bfloat16), ("v", (5,), torch.float32)])
    bounds = [[0, *sorted(data.draw(st.lists(st.integers(0, of), max_size=2))), of] for of in shape]
    spans = list(buckets(manifest.nbytes, size))
    total = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    ranks = []
    for rank, box in enumerate(product(*(pairwise(of) for of in bounds))):
        values = source[tuple(slice(*of) for of in box)]
        part = Part(tuple(first for first, _ in box), values.clone() if copied else values)
        ranks.append({"w": [part], "v": [Part((0,), other)] if rank == 0 else []})
        for offset, bucket in pack(manifest, ranks[-1], spans):
            total[offset : offset + bucket.numel()] += bucket
    (v, w) = manifest.slots
    assert same_bits(view(w, total), source.bfloat16()) and same_bits(view(v, total), other)
    for own in ranks:
        blank = {name: [replace(part, values=torch.zeros_like(part.values)) for part in of] for name, of in own.items()}
        for start, stop in spans:
            Tensors(manifest, blank).write(start, total[start:stop])
        assert all(
            same_bits(a.values.bfloat16(), b.values.bfloat16()) for a, b in zip(blank["w"], own["w"], strict=True)
        )


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_values_are_cast_to_the_served_dtype_when_packed_and_to_the_targets_when_written(
    served: torch.dtype, target: torch.dtype
) -> None:
    source = torch.randn(9, 13, generator=torch.Generator().manual_seed(0))
    manifest = build_manifest([("w", (9, 13), served)])
    into = torch.zeros(9, 13, dtype=target)
    tensors = Tensors(manifest, whole({"w": into}))
    for offset, bucket in windows({"w": source}, manifest, ALIGNMENT):
        tensors.write(offset, bucket)
    assert same_bits(into, source.to(served).to(target))


def test_a_strided_source_is_packed_in_row_major_order() -> None:
    source = torch.arange(12.0).view(3, 4).T
    manifest = build_manifest([("w", (4, 3), torch.bfloat16)])
    ((_, bucket),) = pack(manifest, whole({"w": source}), [(0, manifest.nbytes)])
    assert same_bits(view(manifest.slots[0], bucket), source.to(torch.bfloat16).contiguous())


@searched(100, size=SIZES, shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), data=st.data())
def test_tensors_that_are_not_contiguous_are_written_where_they_are_and_nothing_else_is(
    size: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    surrounding = torch.zeros([2 * shape[axis] + 1 for axis in order])
    inner = surrounding[tuple(slice(1, 2 * shape[axis] + 1, 2) for axis in order)]
    target = inner.permute([order.index(axis) for axis in range(len(shape))])
    assert target.shape == shape
    source = torch.rand(shape) + 1
    manifest = build_manifest([("w", shape, torch.float32)])
    tensors = Tensors(manifest, whole({"w": target}))
    for offset, bucket in windows({"w": source}, manifest, size):
        tensors.write(offset, bucket)
    assert torch.equal(target, source)
    assert surrounding.count_nonzero() == source.numel()


def test_the_parts_of_a_fused_matrix_are_written_by_rows_and_by_columns() -> None:
    parts = {name: torch.rand(4, 6, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("qkv")}
    manifest = manifest_of(parts)
    by_rows, by_columns = torch.zeros(12, 6), torch.zeros(4, 18)
    for fused, dim in ((by_rows, 0), (by_columns, 1)):
        tensors = Tensors(manifest, whole(dict(zip("qkv", fused.chunk(3, dim), strict=True))))
        for offset, bucket in windows(parts, manifest, ALIGNMENT):
            tensors.write(offset, bucket)
        assert torch.equal(fused, torch.cat(list(parts.values()), dim))


def test_a_parameter_that_requires_gradients_can_be_written() -> None:
    target = torch.nn.Parameter(torch.zeros(3))
    manifest = build_manifest([("w", (3,), torch.float32)])
    Tensors(manifest, whole({"w": target})).write(0, torch.ones(3).view(torch.uint8))
    assert target.tolist() == [1, 1, 1]
