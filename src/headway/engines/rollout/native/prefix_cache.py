"""The prefix cache's bookkeeping: which blocks of memory hold the keys and values of which contexts. No tensor.

A context is cut into blocks of `BLOCK` tokens. A block is found by what is before it and by its own token ids, which
are compared, not only hashed: the cache is a tree, and a context a way down from its root.

    root ─▶ tokens 0..31 ─▶ 32..63 ─▶ 64..76 of episode a (its last block, in part)
                                 └──▶ 64..95 of episode b ─▶ …

What is computed by decoding differs in its last bits from what a prefill computes for the same tokens. Blocks with
sampled tokens, and all that follow them, are therefore found by their own episode alone, so that others that come by
the same tokens change no bit of it. Whole blocks of prompts are shared by all episodes.

Blocks of open episodes are pinned. Of the others, the least recently used goes first, from the end of its context. When
all are pinned, those of episodes that decode at the moment lose their pins, for they have everything in a row; then the
youngest open episode loses its own, which is counted.
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
"""Tokens of a block."""

Ids = NDArray[np.integer]


@dataclass(slots=True, eq=False)
class _CacheNode:
    """A block in use, or a root, which has no tokens."""

    parent: _CacheNode | None
    ids: Ids
    owner: TrajectoryId | None
    """The one episode that finds it; None: all do."""
    given: int
    """Leading tokens that were prefilled behind shared ones: any episode would compute the same bits."""
    block: int
    """Number of the block; -1 for a root."""
    pins: int = 0
    """Contexts of open episodes that begin with it."""
    children: dict[Hashable, list[_CacheNode]] = field(default_factory=dict)
    """Blocks that follow, by their `key`: one by its tokens, any number by an owner."""

    @property
    def key(self) -> Hashable:
        """Key of the block among the children of its parent."""
        return _key(self.ids) if self.owner is None else self.owner

    def way(self) -> list[_CacheNode]:
        """The block and all before it, up to the root."""
        way: list[_CacheNode] = []
        node = self
        while node.parent is not None:
            way.append(node)
            node = node.parent
        return way


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    """An open episode: one that may call again."""

    holder: Hashable
    root: _CacheNode
    running: int = 0
    """Number of the episode's calls that decode."""
    leaves: list[_CacheNode] = field(default_factory=list)
    """Last blocks of the episode's contexts, which are pinned."""


@dataclass(frozen=True, slots=True)
class Found:
    """Part of a context that the cache has."""

    blocks: tuple[int, ...] = ()
    length: int = 0
    """Number of tokens; the last block may count in part."""
    shared: int = 0
    """Number of leading tokens whose keys and values all episodes share; none of them was sampled."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Tokens ``start`` to ``stop`` of a context, to be copied into ``block``, from its position ``offset`` on."""

    block: int
    offset: int
    start: int
    stop: int


class PrefixCache:
    """The tree of blocks. Numbers of blocks are below `limit`, the lowest free one is taken first.

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
        """Nodes by block."""
        self._free: list[int] = []
        """Heap of free blocks below `top`."""
        self.top = 0
        """All blocks from here on are free."""
        self._unpinned: OrderedDict[_CacheNode, None] = OrderedDict()
        """Blocks that may go, the least recently used first. A block comes before the one that it follows in a context:
        who uses it uses both."""
        self.episodes: dict[TrajectoryId, _OpenEpisode] = {}
        """Open episodes, the youngest last."""

    def __len__(self) -> int:
        """Number of blocks in use."""
        return len(self._nodes)

    # ------------------------------------------------------------------------------------- contexts

    def find(self, ids: Ids, trajectory: TrajectoryId) -> Found:
        """Find the longest part of the context ``ids`` [T] that is there for an episode, from its beginning on."""
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
        for node in reversed(way):  # the end of a context first: what it follows must not go before it
            if node in self._unpinned:
                self._unpinned.move_to_end(node)
        return Found(tuple(node.block for node in way), length, shared)

    def store(self, ids: Ids, trajectory: TrajectoryId, shared: int) -> list[BlockCopy]:
        """Keep the context ``ids`` [T] of an open episode. Returns what has to be copied for that.

        The first ``shared`` tokens were prefilled behind shared ones. Keeps nothing for an episode that is
        not open, and only a part where memory runs out and this is the youngest.
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
            child.pins += 1  # it has to stay while room is made for the rest
            self._unpinned.pop(child, None)
            node = child
        way = node.way()
        before = [leaf for leaf in episode.leaves if leaf in way]  # ends of its earlier contexts, which this one has
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
        """Note that a call of an episode decodes no longer."""
        if (episode := self.episodes.get(trajectory)) is not None:
            episode.running = max(0, episode.running - 1)

    def release(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Give up what is kept for these episodes alone: they are over."""
        for trajectory in trajectories:
            if (episode := self.episodes.pop(trajectory, None)) is not None:
                for leaf in episode.leaves:
                    self._unpin(leaf, drop=True)

    def leave(self, holder: Hashable) -> None:
        """Release all episodes of ``holder``."""
        self.release([trajectory for trajectory, episode in self.episodes.items() if episode.holder == holder])

    def renew(self) -> None:
        """Keep blocks only for the open episodes that use them, as the weights have changed."""
        self._root = _root()
        while self._evict():
            pass

    # ------------------------------------------------------------------------------------- memory

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """Keep to blocks below ``limit``; the blocks that move for that, as (from, to), in this order."""
        self.limit = limit
        while len(self._nodes) > limit:
            if not self._evict():
                self._unpin_youngest(None)
        if self.top <= limit:
            return []
        moves = []
        self._free = [block for block in self._free if block < limit]
        heapq.heapify(self._free)  # what is left of a heap need not be one
        for block in sorted(block for block in self._nodes if block >= limit):
            target = heapq.heappop(self._free)
            node = self._nodes[target] = self._nodes.pop(block)
            node.block = target
            moves.append((block, target))
        self.top = limit
        return moves

    def _take(self, episode: _OpenEpisode) -> int | None:
        """Take a block for ``episode``, which is storing; None where all are pinned by older ones."""
        while len(self._nodes) >= self.limit:
            if not self._evict() and self._unpin_youngest(episode) is episode:
                return None
        if self._free:
            # The lowest: fewer blocks move when rows take memory from the other end.
            return heapq.heappop(self._free)
        self.top += 1
        return self.top - 1

    def _evict(self) -> bool:
        """Drop the least recently used block that may go, if there is one."""
        if not self._unpinned:
            return False
        self._remove(next(iter(self._unpinned)))
        return True

    def _unpin_youngest(self, storing: _OpenEpisode | None) -> _OpenEpisode:
        """Take the pins of the youngest open episode: of those first that have everything in a row.

        One that is ``storing`` may be that, without a pin yet.
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
        """The root for an episode: the one its contexts are under, even after `renew`; else the current."""
        episode = self.episodes.get(trajectory)
        return episode.root if episode is not None and (episode.leaves or episode.running) else self._root

    def _next(self, node: _CacheNode, chunk: Ids, trajectory: TrajectoryId) -> tuple[_CacheNode | None, int]:
        """Best child of ``node`` for ``chunk``, and its number of matching tokens.

        The episode's own, unless a shared one has the same bits and more of them.
        """
        own, common = self._own(node, chunk, trajectory)
        if own is not None and (common > own.given or common == len(chunk)):
            return own, common
        if len(chunk) == BLOCK and (shared := _shared(node, chunk)) is not None:
            return shared, BLOCK
        return own, common

    def _own(self, node: _CacheNode, chunk: Ids, trajectory: TrajectoryId) -> tuple[_CacheNode | None, int]:
        """The child of ``node`` that its episode alone finds with the most tokens of ``chunk``, and how many."""
        best, most = None, 0
        for child in node.children.get(trajectory, ()):
            if (common := _common(child.ids, chunk)) > most:
                best, most = child, common
        return best, most

    def _extended(
        self, node: _CacheNode, chunk: Ids, start: int, trajectory: TrajectoryId, copies: list[BlockCopy]
    ) -> _CacheNode | None:
        """A child of the episode's own that holds ``chunk``, or that does when what is missing is added at its end."""
        child, common = self._own(node, chunk, trajectory)
        if child is None or common == len(chunk):
            return child
        if common < len(child.ids):
            return None
        child.ids = chunk.copy()
        copies.append(BlockCopy(child.block, common, start + common, start + len(chunk)))
        return child

    def _unpin(self, leaf: _CacheNode, *, drop: bool = False) -> None:
        """Unpin a context by its end. ``drop``: blocks that only its episode finds go at once."""
        for node in leaf.way():
            node.pins -= 1
            if not node.pins:
                self._unpinned[node] = None
                if drop and node.owner is not None and not node.children:
                    self._remove(node)

    def _remove(self, node: _CacheNode) -> None:
        """Free the block of a node that nothing follows."""
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
    """The child of ``node`` that holds ``chunk`` for all episodes."""
    return next(iter(node.children.get(_key(chunk), ())), None)


def _key(chunk: Ids) -> bytes:
    # Ids come as int32 and as int64: equal tokens have to have equal bytes.
    return chunk.astype(np.int32, copy=False).tobytes()


def _common(first: Ids, second: Ids) -> int:
    """Number of leading tokens that two blocks have in common."""
    most = min(len(first), len(second))
    same = first[:most] == second[:most]
    return most if same.all() else int(same.argmin())
