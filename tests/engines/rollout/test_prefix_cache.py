"""The prefix cache's bookkeeping against memory in which every token's place says how it was computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.data.types import TrajectoryId
from headway.engines.rollout.native.prefix_cache import BLOCK, Found, PrefixCache
from tests.tiers import searched

Bits = tuple[Any, ...]
"""How a token was computed: by what, from which token, behind which bits."""


def episode(k: int) -> TrajectoryId:
    return TrajectoryId(0, 0, 0, k)


def computed(by: str, before: Sequence[int], token: int) -> int:
    return hash((by, before[-1] if before else 0, int(token)))


class Memory:
    """A cache with the memory that it speaks of, and rows that fill it."""

    def __init__(self, limit: int) -> None:
        self.cache = PrefixCache(limit)
        self.blocks: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.kept: dict[TrajectoryId, list[int]] = {}
        """The context that each open episode stored last."""

    def turn(self, k: int, context: Sequence[int], answer: Sequence[int]) -> list[int]:
        """A call of an episode that goes on, and all bits of its row."""
        ids = np.array(context, np.int32)
        found = self.cache.find(ids[:-1], episode(k))
        bits = self.gather(ids, found)
        self.cache.begin(episode(k), "me")
        for token in context[len(bits) :]:
            bits.append(computed("prefill", bits, token))
        shared = found.shared if found.shared < found.length else len(context)
        for token in answer[:-1]:
            bits.append(computed("decode", bits, token))
        self.cache.end(episode(k))
        self.keep(k, np.array([*context, *answer[:-1]], np.int32), bits, shared)
        return bits

    def gather(self, ids: np.ndarray[Any, Any], found: Found) -> list[int]:
        bits = [bit for block in found.blocks for bit in self.blocks[block]][: found.length]
        held = [token for block in found.blocks for token in self.tokens[block]][: found.length]
        assert held == ids[: found.length].tolist(), "what is found has other tokens"
        prefilled: list[int] = []
        for token in ids[: found.shared]:
            prefilled.append(computed("prefill", prefilled, token))
        assert bits[: found.shared] == prefilled, "what is everybody's was not prefilled"
        return bits

    def keep(self, k: int, ids: np.ndarray[Any, Any], bits: list[int], shared: int) -> None:
        for copy in self.cache.store(ids, episode(k), shared):
            new = copy.offset == 0
            block, tokens = ([], []) if new else (self.blocks[copy.block], self.tokens[copy.block])
            assert len(block) >= copy.offset
            self.blocks[copy.block] = block[: copy.offset] + bits[copy.start : copy.stop]
            self.tokens[copy.block] = tokens[: copy.offset] + ids[copy.start : copy.stop].tolist()
        self.kept[episode(k)] = ids.tolist()
        self.check()

    def resize(self, limit: int) -> None:
        for source, target in self.cache.resize(limit):
            assert source >= limit > target
            self.blocks[target], self.tokens[target] = self.blocks[source], self.tokens[source]
        self.check()

    def release(self, k: int) -> None:
        self.cache.release([episode(k)])
        self.kept.pop(episode(k), None)
        self.check()

    def check(self) -> None:
        cache = self.cache
        assert len(cache) <= cache.limit and cache.top <= cache.limit
        assert set(cache._nodes) | set(cache._free) == set(range(cache.top))
        for block, node in cache._nodes.items():
            assert node.block == block and node.ids.tolist() == self.tokens[block]
            assert node.parent is not None and (node.parent.block < 0 or cache._nodes[node.parent.block] is node.parent)
            assert len(node.parent.ids) in (0, BLOCK) and len(node.ids) <= BLOCK
        pinned = [node for one in cache.episodes.values() for leaf in one.leaves for node in leaf.way()]
        assert sum(node.pins for node in cache._nodes.values()) == len(pinned)
        places = {node: place for place, node in enumerate(cache._unpinned)}
        assert places.keys() == {node for node in cache._nodes.values() if not node.pins}
        for node, place in places.items():
            assert place < places.get(node.parent, len(places)), "a block is to go after all that follow it"
        if not cache.lost:
            for trajectory, ids in self.kept.items():
                if cache.episodes[trajectory].running:
                    continue
                assert cache.find(np.array(ids, np.int32), trajectory).length == len(ids)


# Hardly a token differs from another, so that the same block often comes about in several ways.
words = st.tuples(st.integers(1, 2 * BLOCK), st.integers(0, 400)).map(lambda d: [int(i == d[1]) for i in range(d[0])])
prompts = st.integers(0, 2).map(lambda seed: [0] * (3 * BLOCK - seed) + [1] * seed)
turns = st.lists(
    st.tuples(
        st.integers(0, 3),  # who
        st.sampled_from([0.0, 0.0, 0.0, 0.4, 1.0]),  # the share of its context that it forgets
        words,  # what it is told
        words,  # what it says
    ),
    min_size=1,
    max_size=14,
)


def told(context: Sequence[int], prompt: Sequence[int], forgets: float, said: Sequence[int]) -> list[int]:
    left = context[: len(context) - int(forgets * len(context))] if context else prompt[: 5 + 20 * len(said) % 90]
    return [*left, *said]


@searched(100, prompt=prompts, played=turns)
def test_company_changes_no_bit_of_an_episode(prompt: list[int], played: list[Any]) -> None:
    together = Memory(10**6)
    alone = {k: Memory(10**6) for k in range(4)}
    contexts: dict[int, list[int]] = {}
    for k, forgets, said, says in played:
        context = told(contexts.get(k, []), prompt, forgets, said)
        assert together.turn(k, context, says) == alone[k].turn(k, context, says)
        contexts[k] = [*context, *says]
    assert together.cache.lost == 0
    assert len(together.cache) <= sum(len(memory.cache) for memory in alone.values())


@searched(100, prompt=prompts, played=turns, data=st.data())
def test_whatever_is_found_is_right_however_little_memory_there_is(
    prompt: list[int], played: list[Any], data: st.DataObject
) -> None:
    memory = Memory(data.draw(st.integers(0, 20)))
    contexts: dict[int, list[int]] = {}
    for k, forgets, said, says in played:
        context = told(contexts.get(k, []), prompt, forgets, said)
        memory.turn(k, context, says)
        contexts[k] = [*context, *says]
        match data.draw(st.sampled_from(["go on", "go on", "resize", "release", "renew", "clear"])):
            case "resize":
                memory.resize(data.draw(st.integers(0, 20)))
            case "release":
                memory.release(k)
                contexts.pop(k)
            case "renew":
                memory.cache.renew()
                memory.check()
                assert memory.cache.find(np.array(context, np.int32), episode(99)).length == 0
            case "clear":
                memory.cache.clear()
                memory.kept.clear()
                assert len(memory.cache) == 0
    for k in list(contexts):
        memory.release(k)
    while memory.cache._evict():
        pass
    assert len(memory.cache) == 0


def context(k: int, blocks: int) -> list[int]:
    return [k, *range(1, blocks * BLOCK)]


def test_the_least_recently_used_goes_first_from_the_end_of_its_context() -> None:
    memory = Memory(6)
    for k in range(3):
        memory.turn(k, context(k, 2), [7])
        memory.release(k)
    memory.cache.find(np.array(context(0, 2), np.int32), episode(9))
    lengths = []
    for limit in range(5, -1, -1):
        memory.resize(limit)
        tree = [memory.cache._next(memory.cache._root, np.array(context(k, 1)), episode(9))[0] for k in range(3)]
        lengths.append([0 if node is None else 1 + len(node.children) for node in tree])
    assert lengths == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_pins_hold_until_all_is_pinned_and_then_the_youngest_loses_them() -> None:
    memory = Memory(6)
    for k in range(3):
        memory.turn(k, context(k, 2), [7])
    memory.turn(3, context(3, 1), [7])
    found = [memory.cache.find(np.array(context(k, 2), np.int32), episode(k)).length for k in range(3)]
    assert found == [2 * BLOCK] * 3 and memory.cache.lost == 1
    memory.turn(1, context(1, 3), [7])
    assert memory.cache.find(np.array(context(1, 3), np.int32), episode(1)).length == 3 * BLOCK
    assert memory.cache.find(np.array(context(2, 2), np.int32), episode(2)).length == BLOCK
    assert memory.cache.lost == 2


def test_what_decodes_gives_way_before_what_waits_and_that_is_no_loss() -> None:
    memory = Memory(4)
    memory.turn(0, context(0, 2), [7])
    memory.turn(1, context(1, 2), [7])
    memory.cache.begin(episode(0), "me")
    memory.resize(2)
    assert memory.cache.find(np.array(context(1, 2), np.int32), episode(1)).length == 2 * BLOCK
    assert len(memory.cache) == 2 and memory.cache.lost == 0


def test_an_episode_that_is_not_open_leaves_nothing() -> None:
    memory = Memory(8)
    memory.turn(0, context(0, 2), [7, 8, 9])
    memory.release(0)
    assert len(memory.cache) == 2, "the prompt's whole blocks are everybody's"
    assert memory.cache.store(np.arange(100), episode(0), 0) == []
    memory.turn(1, context(1, 2), [7])
    memory.turn(2, context(2, 2), [7])
    memory.cache.leave("somebody else")
    assert episode(1) in memory.cache.episodes
    memory.cache.leave("me")
    assert episode(1) not in memory.cache.episodes


@pytest.mark.parametrize("forked", [5, BLOCK + 5])
def test_a_branch_copies_the_block_in_which_it_leaves(forked: int) -> None:
    memory = Memory(20)
    memory.turn(0, context(0, 1)[:20], list(range(2 * BLOCK)))
    blocks = len(memory.cache)
    stem = memory.kept[episode(0)]
    memory.turn(0, [*stem[: 20 + forked], 1, 2, 3], [4, 5])
    assert len(memory.cache) == blocks + 1
    for ids in (stem, [*stem[: 20 + forked], 1, 2, 3, 4]):
        assert memory.cache.find(np.array(ids, np.int32), episode(0)).length == len(ids)
