"""A chat with tools from its messages to its rows, all parts together."""

from dataclasses import replace

import numpy as np
import pytest

from headway.agents.chat.conversations import Conversations
from headway.agents.chat.tool_calls import choose_parser
from headway.agents.episodes.episode_tokens import TokenRows
from headway.agents.interface.program_messages import said
from headway.agents.interface.tool import make_tool
from headway.data.types import SampledTokens
from tests.agents.episodes.conftest import renderer_of


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


@pytest.mark.parametrize(
    ("template", "forks"),
    [("qwen2_5", 0), ("qwen3", 0), ("llama3", 0), ("mistral", 1)],  # Mistral's tools move to the message on the error
)
async def test_calls_good_and_bad_are_answered_and_all_that_was_sampled_is_trained(template, forks):
    renderer, tool = renderer_of(template), make_tool(add, "here")
    parser = choose_parser(renderer)
    chats, token_rows, chat = Conversations(renderer), TokenRows(), [said("user", "add 1 and 2")]
    call = renderer.example_call("add", {"a": 1, "b": 2}).removeprefix("<think>\n\n</think>\n\n")
    told, everything = [], []
    for text in (call, call.replace("1,", "1,,"), call.replace('"add"', '"sub"'), call, "It is 3."):
        prompt = chats.prompt(chat, [tool.schema])
        sampled = [*renderer.encode(text).tolist(), *renderer.end_ids]
        everything += sampled
        zeros = np.zeros(len(sampled))
        tokens = SampledTokens(np.array(sampled, np.int32), zeros.astype(np.float32), zeros.astype(np.int32))
        token_rows.add(prompt.ids, tokens)
        answer = parser.parse(renderer.text(sampled), [tool.schema], first_id=len(told))
        chats.answered(prompt, sampled, answer.message)
        chat.append(answer.message)
        if answer.calls:
            texts = [one.error or (await tool.call(one.arguments)).text for one in answer.calls]
            chat += replace(answer, error_role=renderer.error_role).results(texts)
            told += texts
    assert [text[:30] for text in told] == [
        "3",
        "Error: the tool call cannot be",
        "Error: there is no tool 'sub';",
        "3",
    ]
    assert (token_rows.turns, token_rows.forks) == (5, forks)
    assert np.concatenate([row.ids[row.loss_mask] for row in token_rows.rows()]).tolist() == everything
