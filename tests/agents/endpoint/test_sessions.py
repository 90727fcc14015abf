"""The requests of one key, without HTTP: which of them are the same turn."""

from __future__ import annotations

import asyncio

import pytest

from headway.agents.endpoint.sessions import AgentSession
from headway.agents.interface.program_messages import MadeTurn, TurnAnswer, TurnNote, TurnRequest, said
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import SampledTokens

ASK = TurnRequest([said("user", "begin")])


class Numbered:
    """A try of an episode whose turns are made once ``go`` is set."""

    name, sampling, trains = "episode (0, 0, 0, 0)", SamplingParams(50), True

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self.noted: list[TurnNote] = []

    async def turn(self, request: TurnRequest) -> MadeTurn:
        number, self.asked = self.asked, self.asked + 1
        await self.go.wait()
        return MadeTurn(number, TurnAnswer("", "", said("assistant", "")), 1, SampledTokens.nothing())

    async def count(self, request: TurnRequest) -> int:
        return 1

    def note(self, kind: TurnNote, reason: str) -> None:
        self.noted.append(kind)


async def sent(session: AgentSession, *, again: bool = False) -> int:
    """The number of the turn that the request is answered with, all of which arrives."""
    async with session.turn(ASK, b"digest", again=again) as turn:
        return turn.number


async def test_a_request_is_the_same_turn_until_its_answer_has_arrived_or_where_its_client_says_so() -> None:
    session = AgentSession(turns := Numbered(), "tag")
    turns.go.set()
    with pytest.raises(ConnectionError):
        async with session.turn(ASK, b"digest", again=False):
            raise ConnectionError("the stream is cut")
    assert [await sent(session, again=again) for again in (False, False, True)] == [0, 1, 1]
    assert turns.noted == [TurnNote.REPEATED, TurnNote.REPEATED]


async def test_an_equal_request_while_the_answer_is_sent_is_another_turn() -> None:
    session = AgentSession(turns := Numbered(), "tag")
    turns.go.set()
    async with session.turn(ASK, b"digest", again=False) as one:
        assert await sent(session) != one.number
    assert turns.noted == []


async def test_a_turn_is_given_up_once_no_client_waits_for_it() -> None:
    session = AgentSession(turns := Numbered(), "tag")
    first, second = (asyncio.ensure_future(sent(session, again=again)) for again in (False, True))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert (turns.asked, turns.noted) == (1, [TurnNote.REPEATED])
    second.cancel()
    await asyncio.wait([second])
    assert turns.noted == [TurnNote.REPEATED, TurnNote.HUNG_UP]
    third = asyncio.ensure_future(sent(session, again=True))
    turns.go.set()
    assert await third == 1


async def test_of_equal_requests_side_by_side_the_one_that_is_repeated_is_the_one_that_was_lost() -> None:
    session = AgentSession(turns := Numbered(), "tag")
    first, second = (asyncio.ensure_future(sent(session)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    again = asyncio.ensure_future(sent(session, again=True))
    await asyncio.sleep(0)
    turns.go.set()
    assert (await second, await again, turns.asked) == (1, 2, 3)  # the third takes the place of the first


async def test_equal_requests_that_are_all_repeated_share_no_turn() -> None:
    session = AgentSession(turns := Numbered(), "tag")
    asked = [asyncio.ensure_future(sent(session, again=again)) for again in (False, False, True, True)]
    await asyncio.sleep(0)
    turns.go.set()
    assert (sorted(await asyncio.gather(*asked)), turns.asked) == ([0, 0, 1, 1], 2)
