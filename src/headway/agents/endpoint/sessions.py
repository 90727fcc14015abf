"""Requests of one episode's agent: each is a turn, and a repeated request gets the same turn.

    request ─▶ sent before, and its answer did not arrive? ─no──▶ a turn of the episode ─▶ its answer
                                  └──yes──▶ that turn, finished or under way

A client marks a repeated request by a header (OpenAI's and Anthropic's do), or repeats a request whose answer was cut
off. Only the requests show this, so it is handled here. If a client hangs up before its answer, the episode gives the
turn up (`headway.agents.endpoint.dialect.Turns.turn`): the policy goes on with the call, and the same request later
gets its result. Otherwise the turn is not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain

from headway.agents.endpoint.dialect import RequestRefused, Turns
from headway.agents.interface.program_messages import MadeTurn, TurnNote, TurnRequest

OVER = "the episode of this key is over"


@dataclass(slots=True, eq=False)
class _Request:
    """A request for a turn, which may be sent several times."""

    turn: asyncio.Task[MadeTurn]
    clients: int = 0
    """Number of clients that wait for the answer, or are receiving it."""
    delivered: bool = False
    """True once a client has received the whole answer."""
    sent: int = 1
    """Number of times that the request was sent."""

    @property
    def given_up(self) -> bool:
        """True if the client hung up before there was an answer."""
        return self.turn.cancelling() > 0 or self.turn.cancelled()


class AgentSession:
    """The requests with one key."""

    def __init__(self, turns: Turns, tag: str) -> None:
        """``tag``: last part of the ids of its answers."""
        self.turns, self.tag = turns, tag
        self._requests: dict[bytes, list[_Request]] = {}
        """Digest of a request → requests with it, in order."""
        self._closed = False

    @asynccontextmanager
    async def turn(self, wanted: TurnRequest, digest: bytes, *, again: bool) -> AsyncIterator[MadeTurn]:
        """Yield the turn ``wanted``: a new one, or the one asked for before. Its answer is sent within the context.

        If this is cancelled and no other client waits, the turn is given up.

        Args:
            wanted: the request to the policy.
            digest: digest of everything that the client sent.
            again: True if the client says that it has sent this before.

        Raises:
            RequestRefused: the episode is over.
            HeadwayError: as `Turns.turn` does.
        """
        request = self._request(wanted, digest, again=again)
        request.clients += 1
        try:
            # Shielded: another client may wait for the same turn.
            yield await asyncio.shield(request.turn)
            request.delivered = True
        except asyncio.CancelledError:
            # The turn was cancelled, not this client: its episode is over.
            if request.turn.cancelled() and self._closed:
                raise RequestRefused(401, "episode_over", OVER) from None
            if request.clients == 1 and not request.turn.done():
                self.turns.note(TurnNote.HUNG_UP, "")
                request.turn.cancel()
            raise
        finally:
            request.clients -= 1

    def close(self) -> None:
        """End the requests under way: the episode is over."""
        self._closed = True
        for request in chain(*self._requests.values()):
            request.turn.cancel()
        self._requests.clear()

    def _request(self, wanted: TurnRequest, digest: bytes, *, again: bool) -> _Request:
        if self._closed:
            raise RequestRefused(401, "episode_over", OVER)
        known = [one for one in self._requests.get(digest, ()) if one.given_up or not _failed(one.turn)]
        # Equal requests may be sent concurrently: a repeated one is the one whose answer was lost, else the one that
        # was repeated least.
        lost = [one for one in known if not (one.clients or one.delivered)]
        candidates = lost or (known if again else [])
        found = min(reversed(candidates), key=lambda one: (one.given_up, one.delivered, one.sent), default=None)
        if found is not None and not found.given_up:
            found.sent += 1
            self.turns.note(TurnNote.REPEATED, "")
            return found
        # No await since the look-up: otherwise the same request, sent twice at once, would become two turns.
        request = _Request(asyncio.get_running_loop().create_task(self.turns.turn(wanted)))
        # It replaces the given-up request: a repeated one would find that again, and get no answer.
        self._requests[digest] = [*(one for one in known if one is not found), request]
        return request


def _failed(turn: asyncio.Task[MadeTurn]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is not None
