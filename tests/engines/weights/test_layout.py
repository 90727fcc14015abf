from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, bucket_bytes, buckets, build_manifest, slots_in
from tests.tiers import searched

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12).map(
    lambda rows: build_manifest((f"w{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows))
)
SIZES = st.integers(1, 64).map(lambda n: n * ALIGNMENT)


@searched(100, manifest=LAYOUTS)
def test_tensors_lie_without_gaps_each_at_a_multiple_of_its_dtypes_size(manifest: Manifest) -> None:
    end = 0
    for slot in manifest.slots:
        size = getattr(torch, slot.dtype).itemsize
        assert slot.offset == end and slot.offset % size == 0
        assert slot.nbytes == math.prod(slot.shape) * size
        assert slot.itemsize == (size if slot.nbytes else 1)
        end = slot.end
    assert manifest.nbytes == end


@searched(100, manifest=LAYOUTS)
def test_the_widest_dtypes_come_first_and_equally_wide_ones_in_the_order_given(manifest: Manifest) -> None:
    order = [(-getattr(torch, slot.dtype).itemsize, int(slot.name[1:])) for slot in manifest.slots]
    assert order == sorted(order)


@searched(100, nbytes=st.integers(0, 10_000), size=SIZES)
def test_buckets_cover_all_bytes_in_order_and_begin_aligned(nbytes: int, size: int) -> None:
    spans = list(buckets(nbytes, size))
    assert [at for start, stop in spans for at in range(start, stop)] == list(range(nbytes))
    for start, stop in spans:
        assert start % ALIGNMENT == 0 and 0 < stop - start <= size


@searched(100, manifest=LAYOUTS, size=SIZES)
def test_a_layouts_buckets_have_each_tensors_bytes_once_and_in_order(manifest: Manifest, size: int) -> None:
    pieces: dict[str, list[int]] = {slot.name: [] for slot in manifest.slots}
    for start, stop in buckets(manifest.nbytes, size):
        for slot, first, last in slots_in(manifest.slots, start, stop):
            assert start <= slot.offset + first < slot.offset + last <= stop
            assert first % slot.itemsize == 0 and last % slot.itemsize == 0
            pieces[slot.name] += range(first, last)
    assert pieces == {slot.name: list(range(slot.nbytes)) for slot in manifest.slots}


@searched(100, manifest=LAYOUTS, senders=st.integers(1, 9))
def test_shares_have_all_tensors_in_order_and_about_as_many_bytes_each(manifest: Manifest, senders: int) -> None:
    shares = replace(manifest, senders=senders).shares()
    assert 1 <= len(shares) <= senders
    assert tuple(slot for share in shares for slot in share.slots) == manifest.slots
    assert all(share.slots for share in shares) or not manifest.slots
    largest = max((slot.nbytes for slot in manifest.slots), default=0)
    for share in shares:
        assert share.shares() == (share,) and share.nbytes == share.stop - share.start
        assert share.nbytes == sum(slot.nbytes for slot in share.slots) <= manifest.nbytes / senders + largest + 1


def test_equal_tensors_are_shared_out_evenly() -> None:
    manifest = build_manifest((f"w{i}", (100,), torch.float32) for i in range(12))
    for senders in (1, 2, 3, 4, 6, 12):
        assert {len(share.slots) for share in replace(manifest, senders=senders).shares()} == {12 // senders}


def test_a_bucket_size_is_a_multiple_of_the_alignment_and_never_nothing() -> None:
    assert bucket_bytes(1) == 2**20
    assert bucket_bytes(0.001) == 1024
    assert bucket_bytes(1e-9) == ALIGNMENT


@pytest.mark.parametrize("size", [0, -64, 100])
def test_buckets_that_would_cut_an_element_in_two_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a bucket of {size} bytes"):
        list(buckets(1000, size))


def test_a_layout_is_plain_data() -> None:
    manifest = build_manifest([("a", (2, 3), torch.bfloat16), ("b", (), torch.float32)])
    rows = [(slot.name, slot.shape, slot.dtype, slot.offset, slot.nbytes) for slot in manifest.slots]
    assert json.loads(json.dumps(rows)) == [["b", [], "float32", 0, 4], ["a", [2, 3], "bfloat16", 4, 12]]
