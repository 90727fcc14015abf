from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
import torch
from hypothesis import strategies as st

from headway.engines.weights.buckets import BLOCK_UNITS, apply, encode
from tests.tiers import mostly_slow, searched

Delta = tuple[torch.Tensor | None, int]

BLOCK_BYTES = 2 * BLOCK_UNITS
EDGES = [0, 1, BLOCK_UNITS - 1, BLOCK_UNITS, 2 * BLOCK_UNITS - 1, 2 * BLOCK_UNITS]


def tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def with_changes(old: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """A copy in which about ``share`` of the bytes differ."""
    differs = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(differs, old ^ 1, old)


def with_units_changed(old: torch.Tensor, units: list[int]) -> torch.Tensor:
    new = old.clone()
    for unit in units:
        new[2 * unit] ^= 0xFF
    return new


def payload_of(delta: Delta) -> torch.Tensor:
    payload, _ = delta
    assert payload is not None
    return payload


def assert_lossless(old: torch.Tensor, new: torch.Tensor) -> Delta:
    payload, changed = encode(old, new)
    if payload is not None:
        assert payload.dtype == torch.uint8 and payload.numel() < new.numel()
        target = old.clone()
        apply(payload, target)
        assert torch.equal(target, new)
    return payload, changed


def units_that_differ(old: bytes, new: bytes) -> int:
    return sum(old[i : i + 2] != new[i : i + 2] for i in range(0, len(old) - 1, 2))


def decoded_by_the_book(payload: bytes, old: bytes) -> bytes:
    """The format as its drawing says, unit by unit."""
    units = list(struct.unpack_from(f"<{len(old) // 2}H", old))
    starts = range(0, len(units), BLOCK_UNITS)
    counts = struct.unpack_from(f"<{len(starts)}I", payload)
    at = 4 * len(starts)
    for start, count in zip(starts, counts, strict=True):
        bitmask = 2 * -(-len(units[start : start + BLOCK_UNITS]) // 16)
        if 2 * count <= bitmask:
            places = list(struct.unpack_from(f"<{count}H", payload, at))
            at += 2 * count
        else:
            places = [8 * i + bit for i in range(bitmask) for bit in range(8) if payload[at + i] >> bit & 1]
            at += bitmask
        for place, value in zip(places, struct.unpack_from(f"<{count}H", payload, at), strict=True):
            units[start + place] = value
        at += 2 * count
    assert at == len(payload)
    return struct.pack(f"<{len(units)}H", *units) + old[2 * len(units) :]


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two versions of 0 to 300 bytes, from equal ones to ones that have nothing in common."""
    old = draw(st.binary(max_size=300))
    new = bytearray(old)
    if old:
        for index, byte in draw(st.dictionaries(st.integers(0, len(old) - 1), st.integers(0, 255))).items():
            new[index] = byte
    return old, draw(st.sampled_from([bytes(new), bytes(byte ^ 0xFF for byte in old)]))


@searched(100, versions())
def test_any_bytes_come_back_and_the_units_that_differ_are_counted(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    payload, changed = assert_lossless(tensor(old), tensor(new))
    assert changed == units_that_differ(old, new)
    if payload is not None:
        assert decoded_by_the_book(bytes(payload.tolist()), old) == new


@searched(
    40,
    nbytes=st.sampled_from([BLOCK_BYTES, 2 * BLOCK_BYTES]).flatmap(lambda n: st.integers(n - 3, n + 3)),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.06, 0.1, 0.5]),
    seed=st.integers(0, 100),
)
def test_several_blocks_come_back_at_any_density(nbytes: int, share: float, seed: int) -> None:
    old = random_bytes(nbytes, seed)
    assert_lossless(old, with_changes(old, share, seed + 1))


@pytest.mark.parametrize("share", [0.01, 0.04, 0.2])
def test_the_format_is_the_one_that_is_drawn(share: float) -> None:
    old = random_bytes(BLOCK_BYTES + 4001)
    new = with_changes(old, share)
    payload = payload_of(encode(old, new))
    assert decoded_by_the_book(bytes(payload.tolist()), bytes(old.tolist())) == bytes(new.tolist())


@pytest.mark.parametrize("unit", EDGES)
def test_a_change_at_the_edge_of_a_block_comes_back(unit: int) -> None:
    old = random_bytes(2 * BLOCK_BYTES + 2)
    assert assert_lossless(old, with_units_changed(old, [unit]))[1] == 1


def test_changes_at_all_edges_of_blocks_at_once_come_back() -> None:
    old = random_bytes(2 * BLOCK_BYTES + 2)
    assert assert_lossless(old, with_units_changed(old, EDGES))[1] == len(EDGES)


@pytest.mark.parametrize("nbytes", [7, 101, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_bucket_whose_odd_last_byte_changed_goes_whole(nbytes: int) -> None:
    old = random_bytes(nbytes)
    new = old.clone()
    new[0] ^= 0x80
    assert (encode(old, new)[0] is None) is (nbytes < 9)
    assert assert_lossless(old, new)[1] == 1
    new[-1] ^= 0x80
    assert encode(old, new) == (None, 1)


def test_both_bytes_of_a_unit_count_once() -> None:
    old = random_bytes(64)
    new = old.clone()
    new[10:12] ^= 0xFF
    assert encode(old, new)[1] == 1
    new[12] ^= 0xFF
    assert encode(old, new)[1] == 2


def test_an_empty_bucket_has_no_delta() -> None:
    assert encode(random_bytes(0), random_bytes(0)) == (None, 0)


def test_a_single_byte_has_no_delta_also_where_it_is_equal() -> None:
    assert encode(torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)) == (None, 0)


def test_of_equal_bytes_only_the_counts_travel() -> None:
    old = random_bytes(2 * BLOCK_BYTES + 10)
    delta = assert_lossless(old, old.clone())
    assert delta[1] == 0 and payload_of(delta).tolist() == [0] * 4 * 3


@pytest.mark.parametrize("nbytes", [1, 4, 1001, 2 * BLOCK_BYTES + 1])
def test_where_everything_changed_there_is_no_delta_but_all_units_are_counted(nbytes: int) -> None:
    old = random_bytes(nbytes)
    assert encode(old, old ^ 0xFF) == (None, nbytes // 2)


def test_a_delta_as_large_as_the_bytes_themselves_is_not_made() -> None:
    old = random_bytes(16)
    assert payload_of(encode(old, with_units_changed(old, [3]))).numel() == 4 + 4
    assert payload_of(encode(old, with_units_changed(old, [0, 1, 2, 3]))).numel() == 4 + 2 + 8
    assert encode(old, with_units_changed(old, [0, 1, 2, 3, 4])) == (None, 5)


def test_a_changed_unit_takes_four_bytes_and_a_block_four_more() -> None:
    old = random_bytes(5 * BLOCK_BYTES)
    units = random.Random(0).sample(range(5 * BLOCK_UNITS), 777)
    delta = encode(old, with_units_changed(old, units))
    assert delta[1] == 777
    assert payload_of(delta).numel() == 4 * 777 + 4 * 5


@mostly_slow(
    ("changes", "where"),
    [(4095, 2 * 4095), (4096, 8192), (4097, 8192), (40_000, 8192)],
    quick=[(4095, 2 * 4095), (4096, 8192), (4097, 8192)],
)
def test_where_more_than_one_in_sixteen_changed_their_places_are_bits(changes: int, where: int) -> None:
    old = random_bytes(BLOCK_BYTES)
    new = with_units_changed(old, random.Random(0).sample(range(BLOCK_UNITS), changes))
    assert payload_of(assert_lossless(old, new)).numel() == 4 + where + 2 * changes


def test_five_per_cent_of_changed_bfloat16_take_less_than_fifteen_per_cent_of_the_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(3 * BLOCK_UNITS + 1000, generator=generator) * 0.02).bfloat16()
    differs = torch.rand(old.shape, generator=generator) < 0.05
    new = torch.where(differs, (old.float() * 1.01 + 1e-5).bfloat16(), old)
    delta = assert_lossless(old.view(torch.uint8), new.view(torch.uint8))
    assert 0.045 < delta[1] / old.numel() < 0.055
    assert payload_of(delta).numel() <= 0.15 * 2 * old.numel()


def test_bits_are_compared_and_not_values() -> None:
    """NaNs that differ in their payloads, equal NaNs, and the two zeros."""
    old = torch.zeros(64, dtype=torch.int16)
    new = old.clone()
    old[:4] = torch.tensor([0x7FC0, 0x7FC0, 0x0000, -0x40])
    new[:4] = torch.tensor([0x7FC0, 0x7FC1, -0x8000, -0x01])
    assert old.view(torch.bfloat16).isnan().sum() == new.view(torch.bfloat16).isnan().sum() == 3
    assert assert_lossless(old.view(torch.uint8), new.view(torch.uint8))[1] == 3


@pytest.mark.parametrize("offset", [0, 1, 64])
def test_a_part_of_a_larger_buffer_is_changed_and_nothing_beside_it(offset: int) -> None:
    flat = random_bytes(BLOCK_BYTES + 500)
    before, stop = flat.clone(), offset + BLOCK_BYTES + 101
    new = with_changes(flat[offset:stop], 0.02)
    apply(payload_of(encode(flat[offset:stop], new)), flat[offset:stop])
    assert torch.equal(flat[offset:stop], new)
    assert torch.equal(flat[:offset], before[:offset]) and torch.equal(flat[stop:], before[stop:])


def test_memory_is_three_payloads_at_the_most_and_a_mebibyte() -> None:
    old = random_bytes(64 * BLOCK_BYTES)
    new, target = with_changes(old, 0.05), old.clone()
    tracemalloc.start()
    payload = payload_of(encode(old, new))
    encoding = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    apply(payload, target)
    applying = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert torch.equal(target, new)
    assert encoding <= 3 * payload.numel() + 2**20
    assert applying <= 2**20


# ── What a delta is for ──────────────────────────────────────────────────────────────────────────────────────────────


def flat_bytes(model: torch.nn.Module) -> torch.Tensor:
    """[n] uint8: the parameters as they are served."""
    return torch.cat([parameter.detach().bfloat16().flatten() for parameter in model.parameters()]).view(torch.uint8)


def test_steps_of_adamw_at_a_small_learning_rate_make_small_lossless_deltas() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(512, 128),
        torch.nn.LayerNorm(128),
        torch.nn.Linear(128, 512),
        torch.nn.GELU(),
        torch.nn.Linear(512, 512),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    served = flat_bytes(model)
    for _ in range(4):
        tokens = torch.randint(0, 512, (256,))
        torch.nn.functional.cross_entropy(model(tokens), tokens.roll(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        new = flat_bytes(model)
        delta = encode(served, new)
        assert 0 < delta[1] < new.numel() // 2
        apply(payload_of(delta), served)
        assert torch.equal(served, new)
        assert payload_of(delta).numel() <= 0.15 * new.numel()
