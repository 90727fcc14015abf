from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.weights.weight_layout import RunningDigests, combined, digest
from headway.errors import UpdateFailed
from tests.engines.weights.versions import MANIFEST

NOTHING = 0x2D06800538D394C2
"""XXH3_64bits of no bytes, from the algorithm's own test vectors: https://github.com/Cyan4973/xxHash"""
FLAT = torch.arange(MANIFEST.nbytes).to(torch.uint8)


@given(cuts=st.lists(st.integers(0, MANIFEST.nbytes), max_size=6).map(sorted))
def test_the_digests_of_tensors_do_not_depend_on_how_their_bytes_pass_by(cuts: list[int]) -> None:
    running = RunningDigests(MANIFEST)
    for start, stop in zip([0, *cuts], [*cuts, MANIFEST.nbytes], strict=True):
        running.add(start, FLAT[start:stop])
    assert running.finished() == tuple(digest(FLAT[slot.offset : slot.end]) for slot in MANIFEST.slots)


def test_a_tensor_without_elements_has_the_digest_of_no_bytes() -> None:
    running = RunningDigests(MANIFEST)
    running.add(0, FLAT)
    by_name = dict(zip((slot.name for slot in MANIFEST.slots), running.finished(), strict=True))
    assert by_name["empty"] == digest(FLAT[:0]) == NOTHING


def test_every_bit_and_the_order_of_tensors_count() -> None:
    other = FLAT.clone()
    other[-1] ^= 1
    assert digest(other) != digest(FLAT)
    assert combined([1, 2]) != combined([2, 1])
    assert combined([]) == NOTHING


@pytest.mark.parametrize("offset", [0, 65, 128])
def test_bytes_that_do_not_follow_are_refused(offset: int) -> None:
    running = RunningDigests(MANIFEST)
    running.add(0, FLAT[:64])
    with pytest.raises(UpdateFailed, match=f"from {offset} on came where those from 64 on were due"):
        running.add(offset, FLAT[64:128])
