"""Answers with everything in them, thinking, text and calls, as clients read them, and as they send them back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headway.agents.endpoint.anthropic_messages import Messages
from headway.agents.endpoint.completions import ChatCompletions
from headway.agents.endpoint.dialect import Dialect
from headway.agents.endpoint.responses import Responses
from headway.agents.interface.program_messages import Access, MadeTurn, TurnAnswer, TurnNote, TurnRequest, calls_made
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import SampledTokens
from tests.agents.endpoint.served import endpoint as serving
from tests.agents.endpoint.test_dialects import anthropic_client, client
from tests.agents.endpoint.test_read_and_refused import ASK, TEXTS

CALLS = [("call00000", "add", {"a": 1, "b": 2.5}), ("call00001", "look", {"at": {"deep": ["\u2028", None, True]}})]
MESSAGE = {**calls_made("let me see", CALLS), "reasoning_content": "two things at once"}


class Echo:
    """A try of an episode whose every turn is the same answer."""

    name, sampling, trains = "episode (0, 0, 0, 0)", SamplingParams(50), True

    async def turn(self, request: TurnRequest) -> MadeTurn:
        tokens = SampledTokens(np.arange(5, 9, dtype=np.int32), -np.ones(4, np.float32), np.zeros(4, np.int32))
        return MadeTurn(3, TurnAnswer("…", "let me see", MESSAGE), 7, tokens)

    async def count(self, request: TurnRequest) -> int:
        return 7

    def note(self, kind: TurnNote, reason: str) -> None:
        raise AssertionError(f"{kind}: {reason}")


async def chat(access: Access, stream: bool) -> Any:
    asked: Any = {"model": "policy", "messages": [ASK]}
    if stream:
        async with client(access).chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            return await events.get_final_completion()
    return await client(access).chat.completions.create(**asked)


async def responses(access: Access, stream: bool) -> Any:
    asked: Any = {"model": "policy", "input": "hi", "instructions": "add"}
    if stream:
        async with client(access).responses.stream(**asked) as events:
            seen = [event async for event in events]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            return await events.get_final_response()
    return await client(access).responses.create(**asked)


async def messages(access: Access, stream: bool) -> Any:
    asked: Any = {"model": "policy", "messages": [ASK], "max_tokens": 50}
    if stream:
        async with anthropic_client(access).messages.stream(**asked) as events:
            return await events.get_final_message()
    return await anthropic_client(access).messages.create(**asked)


def again(dialect: Dialect, answer: dict[str, Any]) -> dict[str, Any]:
    """The body of a request that sends an answer back."""
    match dialect:
        case ChatCompletions():
            return {"messages": [answer["choices"][0]["message"], ASK]}
        case Responses():
            return {"input": [*answer["output"], ASK]}
        case _:
            return {"messages": [{"role": "assistant", "content": answer["content"]}, ASK]}


@pytest.mark.parametrize(
    ("ask", "dialect"), [(chat, ChatCompletions()), (responses, Responses()), (messages, Messages())]
)
async def test_an_answer_is_the_same_streamed_or_not_and_comes_back_as_it_was(ask, dialect):
    endpoint = serving()
    await endpoint.start()
    try:
        with endpoint.open(Echo()) as access:
            whole, streamed = [(await ask(access, stream)).model_dump(mode="json") for stream in (False, True)]
    finally:
        await endpoint.close()
    for answer in (whole, streamed):
        assert answer["id"].split("-")[1] == "3", "the turn's number, by which agents give rewards"
        body = again(dialect, json.loads(json.dumps(answer)))
        first, second = dialect.read(json.dumps(body).encode(), TEXTS).request.messages
        for call in first["tool_calls"]:
            if isinstance(arguments := call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(arguments)
        assert (first, second) == (MESSAGE, ASK)
    assert whole["usage"] == streamed["usage"]
