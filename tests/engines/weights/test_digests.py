"""Digests find what happens to bytes on their way, and are the same however these are cut, and wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.engines.weights import digests
from headway.engines.weights.digests import COLUMNS, RunningDigests, digest
from headway.engines.weights.weight_layout import build_manifest, combined
from headway.errors import UpdateFailed
from tests.engines.weights.versions import MANIFEST
from tests.tiers import searched

FLAT = torch.arange(MANIFEST.nbytes).to(torch.uint8)
ROW = 8 * COLUMNS
"""Bytes of a row."""
Words = NDArray[np.uint64]


def sequence(first: int, count: int) -> Words:
    """SplitMix64's numbers ``first …``, made odd."""
    with np.errstate(over="ignore"):
        return mixed(np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | 1


def mixed(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def by_definition(data: bytes) -> int:
    """The digest, as the module's first lines define it."""
    rows = np.frombuffer(data + bytes(-len(data) % ROW), "<u8").reshape(-1, COLUMNS)
    with np.errstate(over="ignore"):
        sums = (rows * sequence(0, len(rows))[:, None]).sum(0, dtype=np.uint64)
        total = mixed(sums * sequence(2**40, COLUMNS)).sum(dtype=np.uint64)
        return (int(total) + 0x9E3779B97F4A7C15 * len(data)) % 2**64


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@searched(
    100,
    nbytes=st.sampled_from([0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 3, 3 * ROW, 5 * ROW - 8]),
    seed=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 5 * ROW), max_size=5).map(sorted),
    apart=st.integers(0, 9),
)
def test_a_digest_is_that_of_the_definition_however_the_bytes_are_cut_and_lie(
    nbytes: int, seed: int, cuts: list[int], apart: int
) -> None:
    data = random_bytes(nbytes, seed)
    expected = by_definition(data.numpy().tobytes())
    assert digest(torch.cat([data[:0], random_bytes(apart), data])[apart:]) == expected
    running = RunningDigests(build_manifest([("w", (nbytes,), torch.uint8)]))
    cuts = [min(cut, nbytes) for cut in cuts]
    for start, stop in zip([0, *cuts], [*cuts, nbytes], strict=True):
        running.add(start, data[start:stop])
    assert running.finished() == (expected,)


def test_devices_that_multiply_no_matrices_of_integers_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(7 * ROW + 100)
    expected = digest(data)
    monkeypatch.setattr(digests, "CPU", None)
    assert digest(data) == expected == by_definition(data.numpy().tobytes())


@searched(100, cuts=st.lists(st.integers(0, MANIFEST.nbytes), max_size=6).map(sorted))
def test_the_digests_of_tensors_do_not_depend_on_how_their_bytes_pass_by(cuts: list[int]) -> None:
    running = RunningDigests(MANIFEST)
    for start, stop in zip([0, *cuts], [*cuts, MANIFEST.nbytes], strict=True):
        running.add(start, FLAT[start:stop])
    assert running.finished() == tuple(digest(FLAT[slot.offset : slot.end]) for slot in MANIFEST.slots)


def test_many_tensors_have_the_digests_of_each() -> None:
    manifest = build_manifest((f"w{k}", (3 + k % 5,), torch.bfloat16) for k in range(200))
    flat, running = random_bytes(manifest.nbytes), RunningDigests(manifest)
    running.add(0, flat)
    assert running.finished() == tuple(digest(flat[slot.offset : slot.end]) for slot in manifest.slots)


def test_sums_are_kept_of_some_tensors_at_a_time_however_many_there_are() -> None:
    """A row of sums takes 4 KiB: of 5,000 tensors at once they would be 20 MB."""
    manifest = build_manifest((f"w{k}", (1,), torch.uint8) for k in range(5_000))
    flat, running = random_bytes(manifest.nbytes), RunningDigests(manifest)
    most = 0
    for start in range(0, manifest.nbytes, 4096):
        running.add(start, flat[start : start + 4096])
        assert running._sums is not None
        most = max(most, running._sums.untyped_storage().nbytes())
    assert most <= 2**20
    values = running.finished()
    for k in (0, 63, 64, 3_210, 4_999):
        assert values[k] == digest(flat[manifest.slots[k].offset : manifest.slots[k].end])


def test_a_tensor_without_elements_has_the_digest_of_no_bytes() -> None:
    running = RunningDigests(MANIFEST)
    running.add(0, FLAT)
    by_name = dict(zip((slot.name for slot in MANIFEST.slots), running.finished(), strict=True))
    assert by_name["empty"] == digest(FLAT[:0]) == 0


Corruption = Callable[[torch.Tensor, int, int], None]
"""Function that changes bytes, given two places among them."""


def flipped(data: torch.Tensor, here: int, there: int) -> None:
    data[here] ^= 1 << there % 8


def signs_flipped(data: torch.Tensor, here: int, there: int) -> None:
    """The highest bits of two words: what a sum of odd multiples alone does not see."""
    data[here // 8 * 8 + 7] ^= 128
    data[there // 8 * 8 + 7] ^= 128


def words_swapped(data: torch.Tensor, here: int, there: int) -> None:
    here, there = here // 8 * 8, there // 8 * 8
    mine, theirs = data[here : here + 8].clone(), data[there : there + 8].clone()
    data[here : here + 8], data[there : there + 8] = theirs, mine


def elements_swapped(data: torch.Tensor, here: int, there: int) -> None:
    halves = data.view(torch.int16)
    mine, theirs = int(halves[here // 2]), int(halves[there // 2])
    halves[here // 2], halves[there // 2] = theirs, mine


def blocks_swapped(data: torch.Tensor, here: int, there: int) -> None:
    size = 4096
    here, there = here // size * size, there // size * size
    mine, theirs = data[here : here + size].clone(), data[there : there + size].clone()
    data[here : here + size], data[there : there + size] = theirs, mine


def shifted(data: torch.Tensor, here: int, there: int) -> None:
    block = data[here : here + 5000]
    block.copy_(block.roll(1 + there % 64))


def zeroed(data: torch.Tensor, here: int, there: int) -> None:
    data[here : here + 1 + there] = 0


def a_lane_zeroed(data: torch.Tensor, here: int, there: int) -> None:
    data[here % 8 :: 8] = 0


def rows_rotated(data: torch.Tensor, here: int, there: int) -> None:
    data.copy_(data.roll(ROW * (1 + there % 5)))


CORRUPTIONS = [
    flipped,
    signs_flipped,
    words_swapped,
    elements_swapped,
    blocks_swapped,
    shifted,
    zeroed,
    a_lane_zeroed,
    rows_rotated,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
@searched(100, seed=st.integers(0, 3), here=st.integers(0, 12 * 4096 - 1), there=st.integers(0, 12 * 4096 - 1))
def test_what_goes_wrong_on_the_way_is_found(corrupt: Corruption, seed: int, here: int, there: int) -> None:
    data = random_bytes(12 * 4096, seed)
    if corrupt is signs_flipped and (here // 8 - there // 8) % COLUMNS == 0:
        return  # two words of one column: these are lost, as the module says
    other = data.clone()
    corrupt(other, here, there)
    assert (digest(other) == digest(data)) == torch.equal(other, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_with_other_signs_or_another_order_are_found(dtype: torch.dtype) -> None:
    square = torch.randn(128, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    seen = {digest(t.contiguous().view(-1).view(torch.uint8)) for t in (square, -square, square.t(), square.flip(0))}
    assert len(seen) == 4


def test_zeros_of_another_length_are_another_tensor() -> None:
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in range(20)}) == 20


def test_the_order_of_tensors_counts() -> None:
    assert combined([1, 2]) != combined([2, 1])
    assert combined([]) != combined([0]) != combined([0, 0])


@pytest.mark.parametrize("offset", [0, 65, 128])
def test_bytes_that_do_not_follow_are_refused(offset: int) -> None:
    running = RunningDigests(MANIFEST)
    running.add(0, FLAT[:64])
    with pytest.raises(UpdateFailed, match=f"from {offset} .*from 64 .*due"):
        running.add(offset, FLAT[64:128])
