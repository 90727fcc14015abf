"""The requests of one episode's agent: each is a turn, and one that is asked again is the same turn.

    request ─▶ asked before, and its answer did not arrive? ─no──▶ a turn of the episode ─▶ its answer
                                  └──yes──▶ that turn, finished or under way

A client that hangs up gives its turn up: the policy goes on with the call, and whoever asks for the same again gets it.
What nobody asks for again is not trained. A client that repeats a request says so in a header (OpenAI's and Anthropic's
do), or repeats one whose answer it did not get.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headway.endpoint.dialect import Refused
from headway.endpoint.turns import MadeTurn, Note, Turns
from headway.programs.messages import TurnRequest

OVER = "the episode of this key is over"


@dataclass(slots=True, eq=False)
class Request:
    """A request for a turn, however often it was made."""

    turn: asyncio.Task[MadeTurn]
    waiting: int = 0
    """Clients that wait for the answer."""
    delivered: bool = False
    """A client has got the whole answer."""


class Session:
    """The requests with one key."""

    def __init__(self, turns: Turns, tag: str) -> None:
        """``tag``: the end of the ids of its answers."""
        self.turns, self.tag = turns, tag
        self._requests: dict[bytes, Request] = {}
        """The last request with each digest."""
        self._turns: set[asyncio.Task[MadeTurn]] = set()
        """All turns that are under way."""
        self._closed = False

    def request(self, wanted: TurnRequest, digest: bytes, *, again: bool) -> Request:
        """The request for the turn ``wanted``: a new one, or the one that it repeats.

        Args:
            digest: of all that the client has sent.
            again: the client says that it has sent this before.

        Raises:
            Refused: the episode ended while the request came in.
        """
        if self._closed:
            raise Refused(401, "episode_over", OVER)
        found = self._requests.get(digest)
        if found is not None and not _failed(found.turn):
            lost = found.waiting == 0 and not found.delivered and found.turn.done()
            if again or lost:
                self.turns.note(Note.REPEATED, "")
                return found
        turn = asyncio.get_running_loop().create_task(self.turns.turn(wanted))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        self._requests[digest] = request = Request(turn)
        return request

    async def answer(self, request: Request) -> MadeTurn:
        """Wait for the turn of ``request``. Cancelled with nobody else waiting, the turn is given up.

        Raises:
            Refused: the episode ended meanwhile.
            HeadwayError: as `Turns.turn` does.
        """
        request.waiting += 1
        try:
            return await asyncio.shield(request.turn)
        except asyncio.CancelledError:
            if request.turn.cancelled() and self._closed:
                raise Refused(401, "episode_over", OVER) from None
            if request.waiting == 1 and not request.turn.done():
                self.turns.note(Note.HUNG_UP, "")
                request.turn.cancel()
            raise
        finally:
            request.waiting -= 1

    def close(self) -> None:
        """End what is under way: the episode is over."""
        self._closed = True
        for turn in self._turns:
            turn.cancel()
        self._requests.clear()


def _failed(turn: asyncio.Task[MadeTurn]) -> bool:
    return turn.cancelling() > 0 or turn.cancelled() or (turn.done() and turn.exception() is not None)
