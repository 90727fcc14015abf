"""Messages of an episode that its program and its keeper both have: a request for a turn sends only new ones.

program ─▶ SentMessages: [0, 1, 2], and message 2 ─▶ pickled ─▶ ReceivedMessages: messages 0, 1 and 2 ─▶ keeper

Example:
    sent, received = SentMessages(ask), ReceivedMessages()      # ask() answers received.whole(request)
    await sent.ask(TurnRequest([question]))                     # sends one message
    await sent.ask(TurnRequest([question, answer, follow_up]))  # sends two
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from itertools import count

from headway.agents.interface.program_messages import Message, TurnAnswer, TurnRequest

MOST_KNOWN = 8
"""Messages at one place of a conversation that are compared with a new one: an episode may have several."""


class SentMessages:
    """The messages that a program's requests have sent, and the keeper has answered.

    They are copies, and compared with what is sent next: a program may change its messages where they are. Text is
    shared with the copy, and compared by identity.
    """

    def __init__(self, ask: Callable[[TurnRequest], Awaitable[TurnAnswer]]) -> None:
        self._ask = ask
        self._numbers = count()
        self._known: dict[int, list[tuple[int, Message]]] = {}
        """Numbered messages by their place in a conversation."""

    async def ask(self, request: TurnRequest) -> TurnAnswer:
        """Ask for a turn. Messages count as sent once there is an answer."""
        try:
            numbers, new = self._numbered(request)
        except Exception:  # messages that can be neither copied nor compared: the keeper says what is wrong with them
            return await self._ask(request)
        sent = [message for _, _, message in new]
        answer = await self._ask(replace(request, messages=sent, numbers=tuple(numbers)))
        for place, number, message in new:
            known = self._known.setdefault(place, [])
            known.append((number, message))
            del known[:-MOST_KNOWN]
        return answer

    def _numbered(self, request: TurnRequest) -> tuple[list[int], list[tuple[int, int, Message]]]:
        """The number of each message, and those that are new, with their places and numbers."""
        numbers: list[int] = []
        new: list[tuple[int, int, Message]] = []
        for place, message in enumerate(request.messages):
            known = reversed(self._known.get(place, ()))
            number = next((number for number, one in known if one == message), None)
            if number is None:
                number = next(self._numbers)
                new.append((place, number, deepcopy(message)))
            numbers.append(number)
        return numbers, new


class ReceivedMessages:
    """The messages that the requests of one try of an episode have sent."""

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}

    def whole(self, request: TurnRequest) -> TurnRequest:
        """Return ``request`` with all of its messages: those that were sent before are the same objects."""
        if request.numbers is None:
            return request
        new = iter(request.messages)
        for number in request.numbers:
            if number not in self._messages:
                self._messages[number] = next(new)
        return replace(request, messages=[self._messages[number] for number in request.numbers], numbers=None)
