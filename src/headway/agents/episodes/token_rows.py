"""The token ids of one episode's turns, and the rows that are trained on.

    [context 1][sampled 1][tail][sampled 2]        one row: turn 2 goes on with all that was there
    [context 1][samp][another tail][sampled 3]     a further row: turn 3 forks where its ids differ

A turn whose context begins, token by token, with everything that some row has continues that row; any other turn begins
a row of its own. Each sampled token is trained exactly once, in the row that its turn continues or begins; in all other
rows it is context.

Shape suffixes: P tokens of a context, T sampled tokens of one call, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.data.types import RowTokens, SampledTokens, TurnSpan

NO_VERSION = -1
"""Version of tokens that are not trained in a row."""


@dataclass(slots=True, eq=False)
class _GrowingRow:
    """A row that later turns may continue."""

    ids: NDArray[np.int32]
    """[L] everything that the policy read and wrote."""
    turns: list[tuple[TurnSpan, SampledTokens]] = field(default_factory=list)


class TokenRows:
    """One episode's turns, and the rows to train on. Not safe for threads.

    Example:
        >>> def sampled(*ids):
        ...     n = len(ids)
        ...     return SampledTokens(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
        >>> tokens = TokenRows()
        >>> tokens.add([1, 2], sampled(3)), tokens.add([1, 2, 3, 4], sampled(5)), tokens.add([1, 9], sampled(6))
        (False, True, False)
        >>> [row.ids[row.loss_mask].tolist() for row in tokens.rows()]  # the third turn forks
        [[3, 5], [6]]
    """

    def __init__(self) -> None:
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
        begun = [row for row in self._rows if np.array_equal(row.ids, ids[: len(row.ids)])]
        # Of rows that begin each other the longest: it leaves the fewest ids as context of this turn alone.
        row = max(begun, key=lambda row: len(row.ids), default=None)
        continues, known = row is not None, 0 if row is None else len(row.ids)
        if row is None:
            row = _GrowingRow(ids)
            self._rows.append(row)
        row.ids = np.concatenate([ids, np.asarray(tokens.ids, np.int32)])
        number = self.turns if number is None else number
        state = state_key(ids[known:].tobytes()) if state is None else state
        row.turns.append((TurnSpan(number, len(ids), len(row.ids), state), tokens))
        self.turns += 1
        return continues

    def rows(self) -> list[RowTokens]:
        """The rows to train on, cut before their first trained token: what comes before is their prompt.

        A row in which no token was sampled is left out.
        """
        return [_row(row) for row in self._rows if any(len(tokens.ids) for _, tokens in row.turns)]


def _row(row: _GrowingRow) -> RowTokens:
    first = row.turns[0][0].start
    n = len(row.ids) - first
    mask, logprobs, versions = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, NO_VERSION, np.int32)
    turns = [(turn._replace(start=turn.start - first, stop=turn.stop - first), tokens) for turn, tokens in row.turns]
    for turn, tokens in turns:
        here = slice(turn.start, turn.stop)
        mask[here], logprobs[here], versions[here] = True, tokens.logprobs, tokens.versions
    return RowTokens(row.ids[:first], row.ids[first:], logprobs, versions, mask, tuple(turn for turn, _ in turns))


def call_key(
    context: Sequence[int] | NDArray[np.int32], taken: Container[int] = (), ends: tuple[object, ...] = ()
) -> int:
    """The key of a call with the context [P]: 64 bits, never 0, the same in every process and on every machine.

    Each further call with the same context has another one: the first, in an order that the context gives, that is none
    of ``taken``. ``ends``: limits and stops of this call's own (`TurnRequest.ends`).
    """
    # Byte order and width are fixed: other processes and machines have to get the same key.
    whole = xxhash.xxh3_64(np.asarray(context, "<i4").tobytes())
    if ends:
        whole.update(repr(ends).encode(errors="surrogatepass"))
    return next(key for occurrence in count() if (key := _key(whole, occurrence)) not in taken)


def _key(context: xxhash.xxh3_64, occurrence: int) -> int:
    digest = context.copy()  # a copy: the next occurrence begins from ``context``, too
    digest.update(occurrence.to_bytes(8, "little"))
    return digest.intdigest() or 1  # 0 is the first call's


def state_key(said: bytes) -> int:
    """The key of the state that ``said`` describes: 64 bits with a sign, the same on every machine."""
    return int.from_bytes(xxhash.xxh3_64_digest(said), "big", signed=True)
