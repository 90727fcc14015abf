"""The KV cache's memory: rows as long as they need to be, no more of them than fit, and nothing lost by it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.engines.rollout.native.kv_cache import ROOM_STEP, SlotCache
from headway.engines.rollout.native.supported_models import KvGeometry
from headway.errors import ConfigError
from tests.engines.rollout.support import AskedCore, assert_logprobs, make_core, make_model, make_request
from tests.tiers import mostly_slow, searched

GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4)
LONG = 4 * ROOM_STEP
OF_TOKEN = 2 * 2 * 2 * 12 * 4
"""Bytes of one token's keys and values: layers, keys and values, heads, head_dim, float32."""


def long_core(tokens: int, **changes: Any) -> AskedCore:
    model = make_model(max_position_embeddings=LONG)
    return make_core(model, max_context=LONG, max_batched_tokens=LONG, kv_cache_bytes=tokens * OF_TOKEN, **changes)


def watched(core: AskedCore, steps: int = 10**6) -> tuple[list[Group], int]:
    """Step while there is work: what finished, and how often a row was parked. The cache never holds too much."""
    finished: list[Group] = []
    parked = 0
    with torch.inference_mode():
        for _ in range(steps):
            if not core.has_work:
                break
            before = core._scheduler.queued
            cache = core._runner.cache
            done = core.step()
            finished += core.groups(done)
            parked += core._scheduler.queued > before
            assert core._batch.rows.active * cache.room <= cache.tokens
            assert cache._kv.numel() == cache.tokens * GEOMETRY.layers * 2 * 2 * 12
    return finished, parked


@searched(60, data=st.data())
def test_rows_hold_what_was_put_into_them_however_the_memory_is_divided(data: st.DataObject) -> None:
    slots, context = 6, 3 * ROOM_STEP + 10
    tokens = data.draw(st.integers(context, slots * context))
    cache = SlotCache(
        GEOMETRY, slots=slots, context=context, dtype=torch.float32, device=torch.device("cpu"), tokens=tokens
    )
    held: list[torch.Tensor] = []
    value = count(1)

    def lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([kv.shape[2] for kv in held], np.int64)

    def fresh(length: int) -> torch.Tensor:
        return torch.full((2, 2, length, 4), float(next(value))) + torch.arange(length).view(-1, 1) / 1024

    for _ in range(data.draw(st.integers(1, 12))):
        longest = int(lengths().max(initial=0))
        match data.draw(st.sampled_from(["add", "grow", "remove"])):
            case "add":
                length = data.draw(st.integers(1, context - 1))
                if len(held) < slots and cache.fits(len(held) + 1, max(longest, length) + 1):
                    cache.reserve(len(held) + 1, max(longest, length) + 1, lengths())
                    held.append(fresh(length))
                    cache.fill(range(len(held) - 1, len(held)), held[-1])
            case "grow" if held and longest < context and cache.fits(len(held), longest + 1):
                cache.reserve(len(held), longest + 1, lengths())
                addresses = cache.addresses(torch.from_numpy(lengths()))
                token = fresh(1)
                for layer in range(2):
                    cache.append(layer, addresses, token[layer, :, 0].expand(len(held), 2, 4))
                held = [torch.cat([kv, token], dim=2) for kv in held]
            case "remove" if held:
                row, last = data.draw(st.integers(0, len(held) - 1)), len(held) - 1
                if row != last:
                    cache.move(last, row, held[last].shape[2])
                held[row] = held[last]
                held.pop()
        assert len(held) * cache.room <= tokens
        for row, kv in enumerate(held):
            for layer in range(2):
                keys, values = cache.view(layer, row, row + 1, kv.shape[2])
                assert torch.equal(torch.cat([keys, values], dim=1)[0], kv[layer])


def test_what_does_not_fit_waits_and_what_no_longer_fits_is_parked_and_goes_on() -> None:
    core = long_core(4 * LONG, slots=16)
    requests = [make_request(i, n=2, max_tokens=200, stop_token_ids=(), seed=i) for i in range(5)]
    core.ask(requests, "owner")
    finished, parked = watched(core)
    assert core.stats().preempted >= parked > 0
    assert sorted(group.number for group in finished) == list(range(5))
    assert all(len(response.ids) == 200 for group in finished for response in group.tokens)
    assert_logprobs(finished, {0: make_model(max_position_embeddings=LONG)})


def test_with_memory_for_every_slot_nobody_is_parked() -> None:
    core = long_core(8 * LONG, slots=8)
    core.ask([make_request(i, n=2, max_tokens=200, stop_token_ids=()) for i in range(4)], "owner")
    _, parked = watched(core)
    assert core.stats().preempted == parked == 0


def test_training_gives_way_to_validation() -> None:
    core = long_core(4 * LONG, slots=16)
    core.ask([make_request(i, n=2, max_tokens=200, stop_token_ids=()) for i in range(4)], "owner")
    asked = make_request(9, n=2, max_tokens=200, stop_token_ids=(), priority=Priority.VALIDATION)
    core.ask([asked], "validation")
    parked = 0
    with torch.inference_mode():
        for _ in range(200):
            assert sum(not run.trains for run in core._batch.rows.runs) == 2 or not core._batch.rows.active
            queued = core._scheduler.queued
            core.groups(core.step())
            parked += core._scheduler.queued > queued
    assert parked > 0
    assert 9 not in core.unfinished()


def test_no_more_memory_is_taken_than_every_slot_can_use() -> None:
    core = long_core(1000 * LONG, slots=8)
    assert core._runner.cache.tokens == (8 + core._runner._least_rows - 1) * LONG
    assert core.reproducible == core._runner.invariant
    assert not long_core(7 * LONG, slots=8).reproducible


@mostly_slow("policy", OnUpdate, quick=[OnUpdate.DRAIN, OnUpdate.INTERRUPT])
def test_a_pause_ends_with_rows_parked_for_want_of_memory_in_the_queue(policy: OnUpdate) -> None:
    core = long_core(4 * LONG, slots=16)
    core.ask([make_request(i, n=2, max_tokens=150, stop_token_ids=()) for i in range(4)], "owner")
    finished, _ = watched(core, steps=100)
    core.pause(policy)
    finished += watched(core)[0]  # a drain's
    assert not core.has_work
    assert (len(finished) == 4) is (policy is OnUpdate.DRAIN)
    core.resume()
    finished += watched(core)[0]
    assert sorted(group.number for group in finished) == list(range(4))


def test_memory_for_less_than_one_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gib=.* 100 tokens"):
        long_core(100)


def test_rows_are_no_longer_than_what_decodes_needs() -> None:
    core = long_core(8 * LONG, slots=8)
    core.ask([make_request(0, n=2, max_tokens=ROOM_STEP * 2, stop_token_ids=())], "owner")
    watched(core, steps=3)
    assert core._runner.cache.room == ROOM_STEP
    watched(core, steps=ROOM_STEP)
    assert core._runner.cache.room == 2 * ROOM_STEP
