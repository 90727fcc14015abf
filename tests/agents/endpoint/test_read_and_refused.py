"""What requests say in their dialects, and what is told of those that cannot be answered."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from headway.agents.endpoint.anthropic_messages import Messages
from headway.agents.endpoint.completions import ChatCompletions, Completions, TokenGenerate
from headway.agents.endpoint.dialect import Dialect, RequestRefused, TextCodec, differences
from headway.agents.endpoint.responses import Responses
from headway.agents.interface.program_messages import Access, TurnNote
from headway.data.interfaces.rollout import SamplingParams
from tests.agents.endpoint.scripted import ADD, ADD_PARAMETERS, calling, made
from tests.agents.endpoint.test_dialects import anthropic_client, client
from tests.agents.episodes.conftest import renderer_of

TEXTS = TextCodec(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = (
    *(ChatCompletions(), Completions(), Responses()),
    *(Messages(), TokenGenerate()),
)
ASK: Any = {"role": "user", "content": "hi"}
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FUNCTION: Any = {"type": "function", "function": {"name": "add"}}


def read(dialect: Dialect, body: Any) -> Any:
    return dialect.read(json.dumps(body).encode(), TEXTS)


@pytest.mark.parametrize(
    ("dialect", "body", "told"),
    [
        (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role is 'king'; expected one of system"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "reasoning_text", "text": "hm"}]}]}, "of type text"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "the policy reads text alone, no images or files"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5; expected text"),
        (CHAT, {"messages": [ASK], "functions": [{"name": "add"}]}, "expected tools, the form that followed"),
        (CHAT, {"messages": [{"role": "function", "name": "add", "content": "3"}]}, "expected tool_calls and messages"),
        (CHAT, {"messages": [{**ASK, "tool_calls": [FUNCTION]}]}, "expected a list, in a message of role assistant"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls.0 is 1; expected {"),
        (CHAT, {"messages": [ASK], "continue_final_message": True}, "the policy begins its answers"),
        (CHAT, {"messages": [ASK], "tools": [{"type": "web_search"}]}, "no tools of the server"),
        (CHAT, {"messages": [ASK], "tools": [FUNCTION, FUNCTION]}, "tools.1: there is a tool named 'add' already"),
        (
            CHAT,
            {"messages": [ASK], "tools": [{"type": "function", "function": {"name": "add", "parameters": 1}}]},
            "tools.0.parameters is 1; expected a JSON schema",
        ),
        (CHAT, {"messages": [ASK], "stop": ["x"] * 17}, "17 strings that end an answer, the longest of 1 characters"),
        (CHAT, {"messages": [ASK], "stop_token_ids": [*range(129)]}, "129 tokens that end an answer (stop_token_ids)"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 257}, "at most 16, each of at most 256"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "expected one prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "put the prompt before it yourself"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "the policy writes on, and does not fill in"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp-0-1"}, "send all items of the conversation as input"),
        (RESPONSES, {"input": "a", "background": True}, "responses are not kept here"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "reasoning_text", "text": "hm"}]}]},
            "of type text",
        ),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input.0.type is 'computer_call'; expected message, func"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "no tools of the server"),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom", "name": "code"}]}, "a function with a name and parame"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input.0.arguments is None"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no images or files"),
        (MESSAGES, {"messages": [ASK, {"role": "assistant", "content": "It is"}]}, "does not go on with yours"),
        (MESSAGES, {"messages": [ASK], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "no tools of the server"),
        (GENERATE, {"token_ids": [1], "sampling_params": {}, "features": {"a": 1}}, "no images or files"),
        (GENERATE, {"token_ids": [2**31], "sampling_params": {}}, "token_ids.0: Input should be less than"),
        (GENERATE, {"token_ids": [1]}, "sampling_params: Field required"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_where_and_why(dialect, body, told):
    with pytest.raises(RequestRefused) as refused:
        read(dialect, body)
    assert told in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("dialect", "body", "sampling"),
    [
        (CHAT, {"messages": [ASK], "temperature": 0.5, "seed": 3, "user": "me"}, {"temperature": 0.5}),
        (CHAT, {"messages": [ASK], "tool_choice": "required"}, {"tool_choice": "required"}),
        (CHAT, {"messages": [ASK], "response_format": {"type": "json_object"}}, {"response_format": "json_object"}),
        (CHAT, {"messages": [ASK], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (CHAT, {"messages": [ASK], "guided_regex": "a*"}, {"guided_regex": "a*"}),
        (CHAT, {"messages": [ASK], "top_logprobs": 2, "verbosity": "low"}, {"top_logprobs": 2, "verbosity": "low"}),
        (CHAT, {"messages": [ASK], "reasoning_effort": "high", "store": True}, {"reasoning_effort": "high"}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5}, {"logprobs": 5}),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "low"}}, {"reasoning.effort": "low"}),
        (RESPONSES, {"input": "a", "truncation": "auto", "top_logprobs": 1}, {"truncation": "auto", "top_logprobs": 1}),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "text"}}}, {}),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, {"text.format": "json_schema"}),
        (MESSAGES, {"messages": [ASK], "tool_choice": {"type": "any"}}, {"tool_choice": "any"}),
        (MESSAGES, {"messages": [ASK], "thinking": {"type": "enabled", "budget_tokens": 99}}, {"thinking": "enabled"}),
        (MESSAGES, {"messages": [ASK], "output_config": {"effort": "low"}}, {"output_config.effort": "low"}),
        (
            MESSAGES,
            {"messages": [ASK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice.disable_parallel_tool_use": True},
        ),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0.5, "n": 2}}, {"top_p": 0.5, "n": 2}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, {"prompt_logprobs": 1}),
    ],
)
def test_sampling_that_is_asked_for_is_read_for_the_endpoint_to_compare(dialect, body, sampling):
    assert read(dialect, body).sampling == sampling
    assert len(differences(sampling, SamplingParams(50))) == len(sampling)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [ASK], "top_logprobs": 0, "modalities": ["text"], "verbosity": "medium"}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}),
        (RESPONSES, {"input": "a", "truncation": "disabled", "reasoning": {"summary": "auto"}, "include": []}),
        (MESSAGES, {"messages": [ASK], "thinking": {"type": "adaptive"}, "metadata": {"user_id": "me"}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": 1, "seed": 3}}),
    ],
)
def test_what_asks_for_nothing_else_than_there_is_makes_no_difference(dialect, body):
    assert differences(read(dialect, body).sampling, SamplingParams(50)) == []


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [ASK], "tools": [FUNCTION], "tool_choice": "none"}),
        (RESPONSES, {"input": "hi", "tools": [{"type": "function", "name": "add"}], "tool_choice": "none"}),
        (MESSAGES, {"messages": [ASK], "tools": [{"name": "add"}], "tool_choice": {"type": "none"}}),
    ],
)
def test_where_no_tool_may_be_called_the_policy_is_told_of_none(dialect, body):
    assert read(dialect, body).request.tools is None
    assert read(dialect, {**body, "tool_choice": None}).request.tools is not None


def test_a_result_that_is_an_error_says_so():
    def told(text: str) -> str:
        result = {"type": "tool_result", "tool_use_id": "a", "content": text, "is_error": True}
        messages = read(MESSAGES, {"messages": [{"role": "user", "content": [result]}]}).request.messages
        return str(messages[0]["content"])

    assert told("no such file") == "Error: no such file"
    assert told("error: no such file") == "error: no such file"


def test_thinking_comes_back_as_a_part_of_its_answer():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "see", "reasoning_content": "hm", "tool_calls": [call]}
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "3"}]},
    ]
    result = {"role": "tool", "content": "3", "tool_call_id": "a", "name": "add"}
    assert read(RESPONSES, {"input": items}).request.messages == [answer, result]
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "see"},
        {"type": "tool_use", "id": "a", "name": "add", "input": {}},
    ]
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]
    told = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    call["function"]["arguments"] = {}
    assert read(MESSAGES, {"messages": told}).request.messages == [answer, result]
    call["function"]["arguments"] = "{}"
    plain = [{**answer, "refusal": None, "annotations": []}, {"role": "tool", "content": "3", "tool_call_id": "a"}]
    assert read(CHAT, {"messages": plain}).request.messages == [answer, result]


async def test_a_turn_ends_at_the_agents_own_strings_and_tokens():
    renderer = renderer_of("qwen2_5")
    told: list[Any] = []

    async def agent(access: Access) -> float:
        asked: Any = {"model": access.model, "messages": [ASK]}
        answer = await anthropic_client(access).messages.create(**asked, max_tokens=50, stop_sequences=["x", "high;"])
        told.append((answer.stop_reason, answer.stop_sequence, answer.content[0].text))
        answer = await anthropic_client(access).messages.create(**asked, max_tokens=50, stop_sequences=["zzz"])
        told.append((answer.stop_reason, answer.stop_sequence, answer.content[0].text))
        answer = await anthropic_client(access).messages.create(**asked, max_tokens=50, stop_sequences=["low"])
        told.append((answer.stop_reason, answer.stop_sequence, answer.content[0].text))
        answer = await anthropic_client(access).messages.create(**asked, max_tokens=2)
        told.append((answer.stop_reason, answer.stop_sequence))
        chat = await client(access).chat.completions.create(**asked, stop="high;")
        told.append((chat.choices[0].finish_reason, chat.choices[0].message.content))
        (end,) = renderer.encode(";").tolist()
        chat = await client(access).chat.completions.create(**asked, extra_body={"stop_token_ids": [end]})
        told.append((chat.choices[0].finish_reason, chat.choices[0].message.content))
        flat = await client(access).responses.create(model=access.model, input="hi", max_output_tokens=2)
        told.append((flat.status, flat.incomplete_details.reason))
        return 1.0

    episode = await made(agent, ["too high; too low"] * 2 + ["<tool_call>too low"] + ["too high; too low"] * 4)
    assert episode.episode.failure is None
    assert told == [
        ("stop_sequence", "high;", "too "),
        ("end_turn", None, "too high; too low"),
        ("stop_sequence", "low", "<tool_call>too "),
        ("max_tokens", None),
        ("stop", "too "),
        ("stop", "too high"),
        ("incomplete", "max_output_tokens"),
    ]
    episode.check(rows=7)


async def test_each_dialect_has_errors_of_its_own_form():
    told: dict[str, Any] = {}

    async def agent(access: Access) -> float:
        root = access.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with openai.DefaultAsyncHttpxClient(base_url=root, headers=headers) as http:

            async def post(path: str, **options: Any) -> Any:
                return await http.post(path, **options)

            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
                told[path] = [
                    (answer.status_code, answer.json())
                    for answer in (
                        await post(path, content=b"{"),
                        await post(path, json={}, headers={"Authorization": "Bearer no"}),
                        await http.get(path),
                    )
                ]
            assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        await client(access).chat.completions.create(model=access.model, messages=[ASK])
        return 1.0

    episode = await made(agent, ["hi"])
    for path, answers in told.items():
        kinds = [body["error"]["type"] for _, body in answers]
        assert [status for status, _ in answers] == [400, 401, 405]
        assert kinds == ["invalid_request_error", "authentication_error", "invalid_request_error"]
        assert all(body["error"]["message"] for _, body in answers)
        assert all((body.get("type") == "error") == (path == "/v1/messages") for _, body in answers)
    assert episode.episode.metrics[TurnNote.REFUSED] == len(told)


@pytest.mark.parametrize("schema", [{"required": 7}, {"properties": 5}, {"properties": {"a": {"enum": 1, "type": {}}}}])
async def test_a_tool_whose_schema_is_none_may_be_called(schema):
    async def agent(access: Access) -> float:
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
        asked: Any = {"model": access.model, "messages": [ASK], "tools": tools}
        answer = await client(access).chat.completions.create(**asked)
        assert answer.choices[0].message.tool_calls[0].function.name == "add"
        return 1.0

    (await made(agent, [calling(1, 2)])).check(rows=1)


async def test_a_model_tells_how_long_a_context_may_be():
    told: list[Any] = []

    async def agent(access: Access) -> float:
        told.extend([model.max_model_len async for model in client(access).models.list()])
        told.append((await anthropic_client(access).models.retrieve(access.model)).max_model_len)
        await client(access).chat.completions.create(model=access.model, messages=[ASK])
        return 1.0

    assert (await made(agent, ["hi"], max_length=4000)).episode.failure is None
    assert told == [4000, 4000]


async def test_a_context_that_is_too_long_is_told_in_words_that_agents_know():
    told: list[str] = []

    async def agent(access: Access) -> float:
        await client(access).chat.completions.create(model=access.model, messages=[ASK])
        with pytest.raises(openai.BadRequestError) as refused:
            await client(access).completions.create(model=access.model, prompt=[1] * 5000)
        told.append(str(refused.value))
        assert refused.value.code == "context_length_exceeded"
        return 1.0

    assert (await made(agent, ["hi"])).episode.limit == "tokens"
    assert "prompt is too long for the maximum context length" in told[0]


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_arguments_that_json_cannot_have_are_null_and_the_answer_is_known_again(dialect: str) -> None:
    async def agent(access: Access) -> Any:
        tool = {**ADD, "parameters": ADD_PARAMETERS}
        asked: list[Any] = [ASK]
        for _ in range(2):
            if dialect == "chat":
                chat = await client(access).chat.completions.create(
                    model=access.model, messages=asked, tools=[{"type": "function", "function": tool}]
                )
                message = chat.choices[0].message.model_dump(exclude_none=True)
                calls = message.get("tool_calls") or [{"function": {"arguments": None}}]
                told.append(calls[0]["function"]["arguments"])
                asked += [message, {"role": "tool", "tool_call_id": calls[0].get("id"), "content": "none"}]
            else:
                flat = await client(access).responses.create(
                    model=access.model, input=asked, tools=[{"type": "function", **tool}]
                )
                item: Any = flat.output[0]
                told.append(getattr(item, "arguments", None))
                result = {"type": "function_call_output", "call_id": getattr(item, "call_id", ""), "output": "none"}
                asked += [item.model_dump(exclude_none=True), result]
        return 1.0

    told: list[str | None] = []
    says = calling(1, 2).replace("2", "-1e999")  # read as infinity
    episode = await made(agent, [says, "that is none"])
    assert episode.episode.failure is None
    assert told == ['{"a": 1, "b": null}', None]
    episode.check(rows=1)
