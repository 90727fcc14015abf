"""The requests of one episode's agent: each is a turn, and one that is sent again is the same turn.

    request ─▶ sent before, and its answer did not arrive? ─no──▶ a turn of the episode ─▶ its answer
                                  └──yes──▶ that turn, finished or under way

A client that repeats a request says so in a header (OpenAI's and Anthropic's do), or repeats one whose answer was cut
off: only requests tell of that, so that it is known here. One that hangs up before gives its turn up, which is the
episode's matter (`headway.agents.endpoint.dialect.Turns.turn`): the policy goes on with the call, and whoever asks for
the same again gets it. What nobody asks for again is not trained.
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
    """A request for a turn, however often it was sent."""

    turn: asyncio.Task[MadeTurn]
    clients: int = 0
    """Number of clients that wait for the answer, or are getting it."""
    delivered: bool = False
    """True once a client has got the whole answer."""
    sent: int = 1
    """Number of times that it was sent."""

    @property
    def given_up(self) -> bool:
        """True where the client hung up before there was an answer."""
        return self.turn.cancelling() > 0 or self.turn.cancelled()


class AgentSession:
    """The requests with one key."""

    def __init__(self, turns: Turns, tag: str) -> None:
        """``tag``: the end of the ids of its answers."""
        self.turns, self.tag = turns, tag
        self._requests: dict[bytes, list[_Request]] = {}
        """Requests by their digests, in order."""
        self._closed = False

    @asynccontextmanager
    async def turn(self, wanted: TurnRequest, digest: bytes, *, again: bool) -> AsyncIterator[MadeTurn]:
        """The turn ``wanted``, a new one or the one that was asked for before. Its answer is sent within the context.

        Cancelled with nobody else waiting, the turn is given up.

        Args:
            wanted: what the policy is asked for.
            digest: of all that the client has sent.
            again: the client says that it has sent this before.

        Raises:
            Refused: the episode is over.
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
        """End what is under way: the episode is over."""
        self._closed = True
        for request in chain(*self._requests.values()):
            request.turn.cancel()
        self._requests.clear()

    def _request(self, wanted: TurnRequest, digest: bytes, *, again: bool) -> _Request:
        if self._closed:
            raise RequestRefused(401, "episode_over", OVER)
        known = [one for one in self._requests.get(digest, ()) if one.given_up or not _failed(one.turn)]
        # Equal requests may be sent side by side: one that is repeated is the one whose answer was lost, else the one
        # that was repeated least.
        lost = [one for one in known if not (one.clients or one.delivered)]
        candidates = lost or (known if again else [])
        found = min(reversed(candidates), key=lambda one: (one.given_up, one.delivered, one.sent), default=None)
        if found is not None and not found.given_up:
            found.sent += 1
            self.turns.note(TurnNote.REPEATED, "")
            return found
        # No await between the look-up and here: the same request, sent twice at once, would become two turns.
        request = _Request(asyncio.get_running_loop().create_task(self.turns.turn(wanted)))
        # In place of the one that was given up: a repeated request would find that one again, and get no answer.
        self._requests[digest] = [*(one for one in known if one is not found), request]
        return request


def _failed(turn: asyncio.Task[MadeTurn]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is not None
