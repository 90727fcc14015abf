from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UpdateFailed
from headway.interfaces import Manifest
from headway.weights.buckets import ALIGNMENT, BackBuffer, build_manifest, checksum, pack, view

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def random_weights(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{i}": (torch.randn(shape, generator=generator) * 10).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }


def manifest_of(weights: dict[str, torch.Tensor], bucket_bytes: int) -> Manifest:
    return build_manifest([(n, tuple(t.shape), t.dtype) for n, t in weights.items()], bucket_bytes)


weights_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=12
).map(lambda rows: random_weights([shape for shape, _ in rows], [dtype for _, dtype in rows]))


@settings(deadline=None, max_examples=60)
@given(weights=weights_strategy, bucket_bytes=st.integers(1, 4096))
def test_whatever_is_packed_comes_out_of_the_back_buffer_unchanged(
    weights: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    manifest = manifest_of(weights, bucket_bytes)
    back = BackBuffer(manifest)
    report = back.fill(7, pack(manifest, weights.__getitem__))
    assert back.version == 7
    assert report.nbytes == manifest.nbytes
    received = dict(back.items())
    assert list(received) == list(weights)
    for name, tensor in weights.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor)


@settings(deadline=None, max_examples=60)
@given(weights=weights_strategy, bucket_bytes=st.integers(1, 4096))
def test_slots_are_aligned_in_order_disjoint_and_inside_buckets_no_larger_than_asked(
    weights: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    manifest = manifest_of(weights, bucket_bytes)
    ends = [0] * len(manifest.bucket_nbytes)
    members = [0] * len(manifest.bucket_nbytes)
    previous = 0
    for slot in manifest.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.bucket in (previous, previous + 1)
        assert slot.offset >= ends[slot.bucket]
        ends[slot.bucket] = slot.offset + slot.nbytes
        members[slot.bucket] += slot.nbytes > 0
        previous = slot.bucket
    for end, count, nbytes in zip(ends, members, manifest.bucket_nbytes, strict=True):
        assert end <= nbytes
        assert nbytes <= bucket_bytes or count == 1


def test_a_tensor_larger_than_a_bucket_has_a_bucket_of_its_own() -> None:
    manifest = build_manifest(
        [("a", (4,), torch.float32), ("big", (100,), torch.float32), ("b", (4,), torch.float32)], bucket_bytes=128
    )
    assert [slot.bucket for slot in manifest.slots] == [0, 1, 2]
    assert manifest.bucket_nbytes == (64, 448, 64)


def test_packing_casts_to_the_served_dtype_and_takes_strided_tensors() -> None:
    source = torch.arange(12, dtype=torch.float32).view(3, 4).T
    manifest = build_manifest([("w", (4, 3), torch.bfloat16)], bucket_bytes=1024)
    (bucket,) = pack(manifest, lambda _: source)
    assert torch.equal(view(manifest.slots[0], bucket), source.to(torch.bfloat16))


def test_the_checksum_is_that_of_all_bytes_in_order_and_padding_never_changes_it() -> None:
    weights = random_weights([(3,), (5, 5), (2,), (7,)], [torch.float32] * 4)
    manifest = manifest_of(weights, 128)
    everything, running = b"", 0
    for bucket in pack(manifest, weights.__getitem__):
        everything += bytes(bucket.numpy())
        running = checksum(bucket, running)
    assert running == zlib.crc32(everything)
    assert BackBuffer(manifest).fill(1, pack(manifest, weights.__getitem__)).checksum == running


def test_a_tensor_of_another_shape_than_the_manifest_says_is_named() -> None:
    manifest = build_manifest([("embed", (2, 3), torch.float32)], 1024)
    with pytest.raises(UpdateFailed, match=r"'embed' has shape \(3, 2\).*\(2, 3\)"):
        list(pack(manifest, lambda _: torch.zeros(3, 2)))


def small() -> tuple[Manifest, BackBuffer]:
    manifest = build_manifest([("a", (16,), torch.float32), ("b", (16,), torch.float32)], 64)
    back = BackBuffer(manifest)
    back.fill(1, pack(manifest, lambda _: torch.ones(16)))
    return manifest, back


def bucket(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([bucket(64)], "ended after 1 buckets; the manifest says 2"),
        ([bucket(64), bucket(64), bucket(64)], "more buckets than the 2"),
        ([bucket(64), bucket(32)], r"bucket 1 of version 2 is \(32,\).*\(64,\)"),
        ([torch.zeros(64), bucket(64)], "bucket 0 of version 2"),
    ],
)
def test_an_incomplete_version_is_never_staged(buckets: list[torch.Tensor], message: str) -> None:
    _, back = small()
    with pytest.raises(UpdateFailed, match=message):
        back.fill(2, buckets)
    assert back.version is None
    with pytest.raises(UpdateFailed, match="no version is staged"):
        list(back.items())


def test_an_error_of_the_transport_passes_through_and_leaves_nothing_staged() -> None:
    _, back = small()

    def broken() -> Iterator[torch.Tensor]:
        yield bucket(64)
        raise UpdateFailed("the sender went away")

    with pytest.raises(UpdateFailed, match="went away"):
        back.fill(2, broken())
    assert back.version is None


def test_a_cleared_buffer_can_be_filled_again() -> None:
    manifest, back = small()
    back.clear()
    assert back.version is None
    back.fill(2, pack(manifest, lambda _: torch.full((16,), 2.0)))
    assert back.version == 2 and all(bool((t == 2).all()) for _, t in back.items())
