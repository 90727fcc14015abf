"""The record of an episode whose tokens are only simulated: lengths, and which of them were there before.

    messages ─▶ a path: what was said, and the keys of the answers in it ─▶ a context that has a length ─▶ RowAt

A message says how many tokens it has; two messages are the same where role, content and tokens are. An answer is known
by the key of its call, so that a path tells all that the tokens of a context would.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from itertools import count

import xxhash

from headway.agents.episodes.episode_tokens import Prompted
from headway.agents.interface.program_messages import Message, TurnAnswer, TurnRequest, said
from headway.data.interfaces.generation import FinishedCall
from headway.data.types import FinishReason, RowAt
from headway.planner.simulation.zeros import same_ids

Item = int | tuple[str, str, int]
"""A message as what it is known by: the key of an answer, or (role, content, tokens)."""
Path = tuple[Item, ...]
"""The messages of a context."""


def said_in_tokens(role: str, content: str, tokens: int) -> Message:
    """Make a message that is ``tokens`` tokens long. ``content`` tells it apart from others."""
    return {**said(role, content), "tokens": tokens}


@dataclass(slots=True)
class _SimulatedTurn:
    """A turn that has its answer."""

    path: Path
    """Its context."""
    tokens: int
    """Sampled tokens."""
    row: int
    """Index of the row that it continued or began."""


class SimulatedRecord:
    """`headway.agents.episodes.episode_tokens.EpisodeTokens` of lengths. Rows are `RowAt`: there is nothing behind
    them.

    All ids of a context are the same number, which takes no memory: how many of its tokens some earlier turn of the
    episode has left behind, as far as the last answer in it, or 0 for a first turn. `PrefixCache` reads it.
    """

    def __init__(self) -> None:
        self._turns: dict[int, _SimulatedTurn] = {}
        """Turns by the keys of their calls."""
        self._rows: list[RowAt] = []
        self._last: list[int] = []
        """Key of the last turn of each row."""
        self._first: Path | None = None

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> Prompted:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.prompt`."""
        path: Path = tuple(map(_item, request.messages))
        if self._first is None:
            self._first = path
        key = next(key for occurrence in count() if (key := _key(path, occurrence)) not in taken)
        lengths = [self._tokens(item) for item in path]
        answers = [place for place, item in enumerate(path) if isinstance(item, int)]
        known = answers[-1] + 1 if answers else _common(path, self._first)
        return Prompted(same_ids(sum(lengths), sum(lengths[:known]) if self._turns else 0), key, path)

    def answered(self, prompted: Prompted, request: TurnRequest, finished: FinishedCall, number: int) -> TurnAnswer:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.answered`."""
        path: Path = prompted.chat
        context, row = len(prompted.ids), self._continued(path)
        if row is None:
            row = len(self._rows)
            self._rows.append(RowAt(row, context, finished.length))
            self._last.append(prompted.key)
        else:
            self._rows[row] = replace(self._rows[row], length=context + finished.length - self._rows[row].prompt_length)
            self._last[row] = prompted.key
        self._turns[prompted.key] = _SimulatedTurn(path, finished.length, row)
        reason = "stop" if finished.finish_reason is FinishReason.STOP else "length"
        return TurnAnswer("", "", {**said("assistant", ""), "key": prompted.key}, finish_reason=reason)

    def rows(self) -> list[RowAt]:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.rows`."""
        return self._rows

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of forks."""
        return {"forks": max(0, len(self._rows) - 1)}

    def _tokens(self, item: Item) -> int:
        return self._turns[item].tokens if isinstance(item, int) else item[2]

    def _continued(self, path: Path) -> int | None:
        """The row that a turn with the context ``path`` continues: one whose last answer, and all before it, it has."""
        for place in range(len(path) - 1, -1, -1):
            if isinstance(key := path[place], int):
                turn = self._turns[key]
                return turn.row if self._last[turn.row] == key and turn.path == path[:place] else None
        return None


def _item(message: Message) -> Item:
    if "key" in message:
        return int(message["key"])
    return message["role"], message["content"], message.get("tokens", len(message["content"]))


def _key(path: Path, occurrence: int) -> int:
    """The key of a call: 64 bits, never 0, the same in every process."""
    return xxhash.xxh3_64_intdigest(repr((path, occurrence)).encode()) or 1


def _common(one: Path, other: Path) -> int:
    """The number of leading items that both have."""
    common = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        common += 1
    return common
