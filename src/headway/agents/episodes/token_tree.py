"""The transcript of one episode: a tree of token ids, and the rows that are trained on.

    [context 1][sampled 1][tail][sampled 2]        one row: turn 2 goes on with all that was there
          └────[another tail][sampled 3]           a further row: turn 3 forks where its ids differ

A turn whose context begins, token by token, with everything that some row has continues that row; any other turn begins
a row of its own. A token that rows share is trained in the first row that has it, and is context in all others; so each
sampled token is trained exactly once, in the row that its turn continues or begins.

Shape suffixes: P tokens of a context, T sampled tokens of one call, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.data.types import SampledTokens, TurnSpan

NO_VERSION = -1
"""Version of tokens that are not trained in a row."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row to train on: everything that the policy read and wrote along one path of the tree. All arrays are [L]."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True at the tokens that are trained in this row: those that its turns sampled, and no other row trains."""
    logprobs: NDArray[np.float32]
    """Log-probs (nats) of the trained tokens as sampled; 0 elsewhere."""
    versions: NDArray[np.int32]
    """Versions of the weights that sampled the trained tokens; `NO_VERSION` elsewhere."""
    turns: tuple[TurnSpan, ...]
    """The turns that are trained in this row, in order, at their places in all of it."""
    number: int
    """The row's number in its episode, from 0, in the order in which rows began."""
    parent: int | None
    """Number of the row that this one forked from; None where it shares no token with an earlier one."""
    shared: int
    """Leading tokens that the row has in common with its parent."""


@dataclass(slots=True, eq=False)
class _TreeNode:
    """A stretch of tokens of the tree. Its children begin with different tokens."""

    ids: NDArray[np.int32]
    parent: _TreeNode | None
    owner: int
    """The first row that has the stretch."""
    children: dict[int, _TreeNode] = field(default_factory=dict)
    """Children by their first token."""
    ends: list[int] = field(default_factory=list)
    """Rows that end with the stretch."""


@dataclass(slots=True, eq=False)
class _GrowingRow:
    """A row that later turns may continue."""

    end: _TreeNode
    parent: int | None
    shared: int
    turns: list[tuple[TurnSpan, SampledTokens]] = field(default_factory=list)


class TokenTree:
    """One episode's turns: a tree of token ids, and the rows to train on. Not safe for threads.

    Example:
        >>> def sampled(*ids):
        ...     n = len(ids)
        ...     return SampledTokens(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
        >>> tree = TokenTree()
        >>> tree.add([1, 2], sampled(3)), tree.add([1, 2, 3, 4], sampled(5)), tree.add([1, 9], sampled(6))
        (False, True, False)
        >>> [row.ids[row.loss_mask].tolist() for row in tree.rows()]  # the third turn forks
        [[3, 5], [6]]
    """

    def __init__(self) -> None:
        self._root = _TreeNode(np.empty(0, np.int32), None, 0)
        self._rows: list[_GrowingRow] = []
        self.turns = 0
        """Number of turns."""

    @property
    def forks(self) -> int:
        """Number of turns that continued no row, the first one not counted. Further conversations are among them."""
        return max(0, len(self._rows) - 1)

    def add(
        self,
        context: Sequence[int] | NDArray[np.int32],
        tokens: SampledTokens,
        number: int | None = None,
        state: int | None = None,
    ) -> bool:
        """Add a turn: ``tokens`` [T], sampled after ``context`` [P]. Tells whether it continues a row.

        Args:
            number: the turn's number in its episode; None for that of turns added so far.
            state: the state that it was taken in (`state_key`); None for one of what ``context`` has beyond the row.

        Raises:
            ValueError: arrays of ``tokens`` differ in length.
        """
        if not len(tokens.ids) == len(tokens.logprobs) == len(tokens.versions):
            raise ValueError(
                f"a turn has {len(tokens.ids)} sampled ids, {len(tokens.logprobs)} log-probs and "
                f"{len(tokens.versions)} versions; give one of each for each token"
            )
        ids = np.asarray(context, np.int32)
        index, shared, parent = self._longest(ids)
        if continues := index is not None:
            row = self._rows[index]
            row.end.ends.remove(index)
            known = row.turns[-1][0].stop
        else:
            known = 0
            index = len(self._rows)
            row = _GrowingRow(self._root, parent, shared)
            self._rows.append(row)
        row.end = self._insert(np.concatenate([ids, np.asarray(tokens.ids, np.int32)]), index)
        row.end.ends.append(index)
        number = self.turns if number is None else number
        state = state_key(ids[known:].tobytes()) if state is None else state
        row.turns.append((TurnSpan(number, len(ids), len(ids) + len(tokens.ids), state), tokens))
        self.turns += 1
        return continues

    def rows(self) -> list[TokenRow]:
        """The rows to train on. A row in which no token was sampled is left out."""
        return [
            self._row(number, growing)
            for number, growing in enumerate(self._rows)
            if any(len(tokens.ids) for _, tokens in growing.turns)
        ]

    # ------------------------------------------------------------------------------------- the tree

    def _longest(self, ids: NDArray[np.int32]) -> tuple[int | None, int, int | None]:
        """The longest row that ``ids`` begins with, if any; how many tokens ``ids`` shares with any row, and the first
        row that has these, if there are any."""
        node, depth, found, owner = self._root, 0, None, None
        while True:
            if node.ends:
                found = node.ends[0]
            child = node.children.get(int(ids[depth])) if depth < len(ids) else None
            if child is None:
                return found, depth, owner
            common = _common(child.ids, ids[depth:])
            depth, owner = depth + common, child.owner
            if common < len(child.ids):
                return found, depth, owner
            node = child

    def _insert(self, ids: NDArray[np.int32], row: int) -> _TreeNode:
        """Make sure that the tree has the path ``ids``; returns the node that it ends with."""
        node, depth = self._root, 0
        while depth < len(ids):
            child = node.children.get(int(ids[depth]))
            if child is None:
                child = _TreeNode(ids[depth:].copy(), node, row)  # a view would keep the whole of every turn's context
                node.children[int(ids[depth])] = child
                return child
            common = _common(child.ids, ids[depth:])
            if common < len(child.ids):
                child = _split(child, common)
            node, depth = child, depth + common
        return node

    def _row(self, number: int, growing: _GrowingRow) -> TokenRow:
        ids = _path(growing.end)
        mask = np.zeros(len(ids), np.bool_)
        logprobs = np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), NO_VERSION, np.int32)
        for turn, tokens in growing.turns:
            here = slice(turn.start, turn.stop)
            mask[here], logprobs[here], versions[here] = True, tokens.logprobs, tokens.versions
        turns = tuple(turn for turn, _ in growing.turns)
        return TokenRow(ids, mask, logprobs, versions, turns, number, growing.parent, growing.shared)


def call_key(
    context: Sequence[int] | NDArray[np.int32], taken: Container[int] = (), ends: tuple[object, ...] = ()
) -> int:
    """The key of a call with the context [P]: 64 bits, never 0, the same in every process and on every machine.

    Each further call with the same context has another one: the first, in an order that the context gives, that is none
    of ``taken``. ``ends``: limits and stops of this call's own (`TurnRequest.ends`).
    """
    whole = xxhash.xxh3_64(np.asarray(context, "<i4").tobytes())
    if ends:
        whole.update(repr(ends).encode(errors="surrogatepass"))
    return next(key for occurrence in count() if (key := _key(whole, occurrence)) not in taken)


def _key(context: xxhash.xxh3_64, occurrence: int) -> int:
    digest = context.copy()
    digest.update(occurrence.to_bytes(8, "little"))
    return digest.intdigest() or 1  # 0 is the first call's


def state_key(said: bytes) -> int:
    """The key of the state that ``said`` describes: 64 bits with a sign, the same on every machine."""
    return int.from_bytes(xxhash.xxh3_64_digest(said), "big", signed=True)


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of leading tokens that both have."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _split(node: _TreeNode, at: int) -> _TreeNode:
    """Cut ``node`` into two; returns the first part, which has the second as its only child."""
    assert node.parent is not None, "the root has no tokens to cut"
    first = _TreeNode(node.ids[:at], node.parent, node.owner)
    node.parent.children[int(node.ids[0])] = first
    node.ids, node.parent = node.ids[at:], first
    first.children[int(node.ids[0])] = node
    return first


def _path(node: _TreeNode | None) -> NDArray[np.int32]:
    parts: list[NDArray[np.int32]] = []
    while node is not None:
        parts.append(node.ids)
        node = node.parent
    return np.concatenate(parts[::-1])
