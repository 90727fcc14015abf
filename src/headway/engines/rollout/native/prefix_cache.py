"""The prefix cache's bookkeeping: which blocks of memory hold the keys and values of which contexts. Has no tensors.

A context is cut into blocks of `BLOCK` tokens. The cache is a tree, and a context is a path from its root. A block is
found by the blocks before it and by its own token ids, which are compared, not only hashed.

    root ─▶ tokens 0..31 ─▶ 32..63 ─▶ 64..76 of episode a (its last block, in part)
                                 └──▶ 64..95 of episode b ─▶ …

For the same tokens, decoding and prefill give keys and values that differ in their last bits. Therefore only their own
episode finds blocks with sampled tokens, and all blocks after them: an episode's bits do not depend on other episodes
with the same tokens. Whole blocks of prompts are shared by all episodes.

Blocks of open episodes are pinned. Of the others, the least recently used is evicted first, from the end of its
context. If all are pinned, episodes that are decoding lose their pins first, as they have everything in a row; then the
youngest open episode loses its pins, which is counted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.data.types import TrajectoryId

BLOCK = 32
"""Number of tokens in a block."""

Ids = NDArray[np.integer]


@dataclass(slots=True, eq=False)
class _CacheNode:
    """A block in use, or a root, which has no tokens."""

    parent: _CacheNode | None
    ids: Ids
    owner: TrajectoryId | None
    """The only episode that finds the block; None: all do."""
    given: int
    """Number of leading tokens that were prefilled after shared ones: any episode would compute the same bits."""
    block: int
    """Number of the block; -1 for a root."""
    pins: int = 0
    """Number of contexts of open episodes that contain the block."""
    children: dict[Hashable, list[_CacheNode]] = field(default_factory=dict)
    """`key` -> blocks that follow: one under a key of tokens, any number under an owner's."""

    @property
    def key(self) -> Hashable:
        """Key of the block among the children of its parent."""
        return _key(self.ids) if self.owner is None else self.owner

    def way(self) -> list[_CacheNode]:
        """Return the block and all blocks before it, up to the root."""
        way: list[_CacheNode] = []
        node = self
        while node.parent is not None:
            way.append(node)
            node = node.parent
        return way


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    """An open episode, which may call again."""

    holder: Hashable
    root: _CacheNode
    running: int = 0
    """Number of the episode's calls that decode."""
    leaves: list[_CacheNode] = field(default_factory=list)
    """Last blocks of the episode's contexts, which are pinned."""


@dataclass(frozen=True, slots=True)
class Found:
    """Part of a context that was found in the cache."""

    blocks: tuple[int, ...] = ()
    length: int = 0
    """Number of tokens found; the last block may count in part."""
    shared: int = 0
    """Number of leading tokens whose keys and values all episodes share; none of them was sampled."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of a context's tokens ``start`` to ``stop`` into ``block``, from its position ``offset`` on."""

    block: int
    offset: int
    start: int
    stop: int


class PrefixCache:
    """The tree of blocks. Block numbers are below `limit`; the lowest free number is used first.

    Example:
        >>> cache, episode = PrefixCache(limit=8), TrajectoryId(0, 0, 0, 0)
        >>> cache.begin(episode, holder="client")
        >>> [(copy.block, copy.start, copy.stop) for copy in cache.store(np.arange(40), episode, shared=40)]
        [(0, 0, 32), (1, 32, 40)]
        >>> cache.find(np.arange(36), episode)
        Found(blocks=(0, 1), length=36, shared=36)
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.lost = 0
        """Number of times that an open episode without a row lost its pins, since this was last set to 0."""
        self.clear()

    def clear(self) -> None:
        """Drop everything; all episodes count as not open."""
        self._root = _root()
        self._nodes: dict[int, _CacheNode] = {}
        """Number of a block -> its node."""
        self._free: list[int] = []
        """Heap of the numbers of free blocks below `top`."""
        self.top = 0
        """All blocks from here on are free."""
        self._unpinned: OrderedDict[_CacheNode, None] = OrderedDict()
        """Blocks that may be evicted, the least recently used first. A block stands before its predecessor in the
        context, which is used whenever the block is."""
        self.episodes: dict[TrajectoryId, _OpenEpisode] = {}
        """Open episodes, the youngest last."""

    def __len__(self) -> int:
        """Number of blocks in use."""
        return len(self._nodes)

    # ------------------------------------------------------------------------------------- contexts

    def find(self, ids: Ids, trajectory: TrajectoryId) -> Found:
        """Find the longest prefix of the context ``ids`` [T] that is cached for an episode."""
        node, length, shared = self._root_of(trajectory), 0, 0
        way: list[_CacheNode] = []
        while length < len(ids):
            child, common = self._next(node, ids[length : length + BLOCK], trajectory)
            if child is None:
                break
            way.append(child)
            if shared == length:
                shared += min(common, child.given)
            length += common
            if common < BLOCK:
                break
            node = child
        for node in reversed(way):  # the end of a context first: a block must not be evicted before its successors
            if node in self._unpinned:
                self._unpinned.move_to_end(node)
        return Found(tuple(node.block for node in way), length, shared)

    def store(self, ids: Ids, trajectory: TrajectoryId, shared: int) -> list[BlockCopy]:
        """Keep the context ``ids`` [T] of an open episode. Returns the copies to make.

        The first ``shared`` tokens were prefilled after shared ones: any episode would compute the same bits. Keeps
        nothing for an episode that is not open, and only a part if memory runs out and this is the youngest episode.
        """
        if (episode := self.episodes.get(trajectory)) is None:
            return []
        copies: list[BlockCopy] = []
        node = episode.root = self._root_of(trajectory)
        for start in range(0, len(ids), BLOCK):
            chunk = ids[start : start + BLOCK]
            given = min(max(shared - start, 0), len(chunk))
            is_shared = given == BLOCK
            child = _shared(node, chunk) if is_shared else self._extended(node, chunk, start, trajectory, copies)
            if child is None:
                if (block := self._take(episode)) is None:
                    self._unpin(node)
                    return copies
                # A copy: a view would keep the whole context of each block in memory.
                child = _CacheNode(node, chunk.copy(), None if is_shared else trajectory, given, block)
                self._nodes[block] = child
                node.children.setdefault(child.key, []).append(child)
                copies.append(BlockCopy(block, 0, start, start + len(chunk)))
            child.pins += 1  # it must not be evicted while room is made for the rest
            self._unpinned.pop(child, None)
            node = child
        way = node.way()
        before = [leaf for leaf in episode.leaves if leaf in way]  # ends of its earlier contexts that this one contains
        episode.leaves = [leaf for leaf in episode.leaves if leaf not in way] + way[:1]
        for leaf in before:
            self._unpin(leaf)
        return copies

    # ------------------------------------------------------------------------------------- episodes

    def begin(self, trajectory: TrajectoryId, holder: Hashable) -> None:
        """Note that a call of an episode decodes; the episode is open until it is released or ``holder`` leaves."""
        episode = self.episodes.setdefault(trajectory, _OpenEpisode(holder, self._root))
        episode.root = self._root_of(trajectory)
        episode.running += 1

    def end(self, trajectory: TrajectoryId) -> None:
        """Note that a call of an episode stopped decoding."""
        if (episode := self.episodes.get(trajectory)) is not None:
            episode.running = max(0, episode.running - 1)

    def release(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Drop the blocks that only these episodes find: the episodes are over."""
        for trajectory in trajectories:
            if (episode := self.episodes.pop(trajectory, None)) is not None:
                for leaf in episode.leaves:
                    self._unpin(leaf, drop=True)

    def leave(self, holder: Hashable) -> None:
        """Release all episodes of ``holder``."""
        self.release([trajectory for trajectory, episode in self.episodes.items() if episode.holder == holder])

    def renew(self) -> None:
        """Restrict all blocks to the open episodes that use them, as the weights have changed."""
        self._root = _root()
        while self._evict():
            pass

    # ------------------------------------------------------------------------------------- memory

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """Restrict blocks to numbers below ``limit``. Returns the moves that this needs, as (from, to), in order."""
        self.limit = limit
        while len(self._nodes) > limit:
            if not self._evict():
                self._unpin_youngest(None)
        if self.top <= limit:
            return []
        moves = []
        self._free = [block for block in self._free if block < limit]
        heapq.heapify(self._free)  # a part of a heap need not be a heap
        for block in sorted(block for block in self._nodes if block >= limit):
            target = heapq.heappop(self._free)
            node = self._nodes[target] = self._nodes.pop(block)
            node.block = target
            moves.append((block, target))
        self.top = limit
        return moves

    def _take(self, episode: _OpenEpisode) -> int | None:
        """Take a block for ``episode``, which is storing; None if older episodes pin all blocks."""
        while len(self._nodes) >= self.limit:
            if not self._evict() and self._unpin_youngest(episode) is episode:
                return None
        if self._free:
            # The lowest: fewer blocks move when rows take memory from the other end.
            return heapq.heappop(self._free)
        self.top += 1
        return self.top - 1

    def _evict(self) -> bool:
        """Drop the least recently used block without a pin. Returns False if there is none."""
        if not self._unpinned:
            return False
        self._remove(next(iter(self._unpinned)))
        return True

    def _unpin_youngest(self, storing: _OpenEpisode | None) -> _OpenEpisode:
        """Remove the pins of the youngest open episode with everything in a row, or else of the youngest open episode.

        The chosen episode may be ``storing``, which may have no pin yet.
        """
        holding = [episode for episode in self.episodes.values() if episode.leaves or episode is storing]
        in_rows = [episode for episode in holding if episode.running and episode is not storing]
        episode = (in_rows or holding)[-1]
        self.lost += not in_rows
        leaves, episode.leaves = episode.leaves, []
        for leaf in leaves:
            self._unpin(leaf)
        return episode

    # ------------------------------------------------------------------------------------- the tree

    def _root_of(self, trajectory: TrajectoryId) -> _CacheNode:
        """Return the root for an episode: that of its existing contexts, even after `renew`; else the current root."""
        episode = self.episodes.get(trajectory)
        return episode.root if episode is not None and (episode.leaves or episode.running) else self._root

    def _next(self, node: _CacheNode, chunk: Ids, trajectory: TrajectoryId) -> tuple[_CacheNode | None, int]:
        """Return the best child of ``node`` for ``chunk``, and its number of matching tokens.

        It is the episode's own child, unless a shared one matches more tokens with the same bits.
        """
        own, common = self._own(node, chunk, trajectory)
        if own is not None and (common > own.given or common == len(chunk)):
            return own, common
        if len(chunk) == BLOCK and (shared := _shared(node, chunk)) is not None:
            return shared, BLOCK
        return own, common

    def _own(self, node: _CacheNode, chunk: Ids, trajectory: TrajectoryId) -> tuple[_CacheNode | None, int]:
        """Return the episode's own child of ``node`` with the most matching tokens of ``chunk``, and their number."""
        best, most = None, 0
        for child in node.children.get(trajectory, ()):
            if (common := _common(child.ids, chunk)) > most:
                best, most = child, common
        return best, most

    def _extended(
        self, node: _CacheNode, chunk: Ids, start: int, trajectory: TrajectoryId, copies: list[BlockCopy]
    ) -> _CacheNode | None:
        """Return an own child of the episode that holds ``chunk``, possibly after the missing tokens are appended."""
        child, common = self._own(node, chunk, trajectory)
        if child is None or common == len(chunk):
            return child
        if common < len(child.ids):
            return None
        child.ids = chunk.copy()
        copies.append(BlockCopy(child.block, common, start + common, start + len(chunk)))
        return child

    def _unpin(self, leaf: _CacheNode, *, drop: bool = False) -> None:
        """Unpin a context, given its last block. ``drop``: free the blocks that only its episode finds at once."""
        for node in leaf.way():
            node.pins -= 1
            if not node.pins:
                self._unpinned[node] = None
                if drop and node.owner is not None and not node.children:
                    self._remove(node)

    def _remove(self, node: _CacheNode) -> None:
        """Free the block of a node without children."""
        assert node.parent is not None
        siblings = node.parent.children[node.key]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.key]
        del self._nodes[node.block], self._unpinned[node]
        heapq.heappush(self._free, node.block)


def _root() -> _CacheNode:
    return _CacheNode(None, np.empty(0, np.int32), None, 0, -1)


def _shared(node: _CacheNode, chunk: Ids) -> _CacheNode | None:
    """Return the child of ``node`` that holds ``chunk`` for all episodes; None if there is none."""
    return next(iter(node.children.get(_key(chunk), ())), None)


def _key(chunk: Ids) -> bytes:
    # Ids may be int32 or int64: equal tokens need equal bytes.
    return chunk.astype(np.int32, copy=False).tobytes()


def _common(first: Ids, second: Ids) -> int:
    """Return the number of leading tokens that two blocks have in common."""
    most = min(len(first), len(second))
    same = first[:most] == second[:most]
    return most if same.all() else int(same.argmin())
