"""Conversations with tools in each dialect, by the clients that people use: what is trained is what the engine did."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle, product
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from headway.agents.chat.conversations import ChatPrompt, Conversations
from headway.agents.interface.program_messages import Access, TurnNote
from tests.agents.endpoint.scripted import ADD, ADD_PARAMETERS, calling, made
from tests.agents.episodes.conftest import renderer_of
from tests.tiers import mostly_slow

SAYS = [calling(1, 2), "let me see\n" + calling(3, 3) + "\n" + calling(4, 5), "it is 3, 6 and 9", "good bye"]
"""A conversation: a call, a text with two calls, and two answers."""
SYSTEM, FIRST, THEN = "you add numbers", "add 1 and 2", "thank you"
Conversation = Callable[[Access], Awaitable[list[str]]]


def client(access: Access) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # certificates that nobody asks for take long to load
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, http_client=http)


def anthropic_client(access: Access) -> anthropic.AsyncAnthropic:
    root = access.base_url.removesuffix("/v1")
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=root, api_key=access.api_key, max_retries=0, http_client=http)


def added(arguments: Any) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


async def chat(access: Access, *, stream: bool) -> list[str]:
    messages: list[Any] = [
        {"role": "developer", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": FIRST}]},
    ]
    tools: Any = [{"type": "function", "function": {**ADD, "parameters": ADD_PARAMETERS, "strict": True}}]
    texts = []
    for _ in SAYS:
        asked = {"model": access.model, "messages": messages, "tools": tools}
        if stream:
            async with client(access).chat.completions.stream(**asked) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client(access).chat.completions.create(**asked)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        texts.append(message.content or "")
        assert answer.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}
            for call in message.tool_calls or ()
        ]
        if not message.tool_calls:
            messages.append({"role": "user", "content": THEN})
    return texts


async def responses(access: Access, *, stream: bool) -> list[str]:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": FIRST}]}]
    tools: Any = [{"type": "function", **ADD, "parameters": ADD_PARAMETERS, "strict": True}]
    texts = []
    for _ in SAYS:
        asked = {"model": access.model, "input": items, "instructions": SYSTEM, "tools": tools}
        if stream:
            async with client(access).responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client(access).responses.create(**asked)
        assert answer.status == "completed"
        texts.append(answer.output_text)
        items += [item.model_dump(exclude_unset=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": added(call.arguments)} for call in calls
        ]
        if not calls:
            items.append({"role": "user", "content": THEN})
    return texts


async def messages(access: Access, *, stream: bool) -> list[str]:
    told: list[Any] = [{"role": "user", "content": FIRST}]
    tools: Any = [{**ADD, "input_schema": ADD_PARAMETERS}]
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    texts = []
    for _ in SAYS:
        asked: Any = {"model": access.model, "max_tokens": 100, "messages": told, "system": system, "tools": tools}
        if stream:
            async with anthropic_client(access).messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await anthropic_client(access).messages.create(**asked)
        texts.append("".join(block.text for block in answer.content if block.type == "text"))
        told.append(
            {"role": "assistant", "content": [block.model_dump(exclude_unset=True) for block in answer.content]}
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": added(call.input)}]}
            for call in calls
        ]
        told.append({"role": "user", "content": results or THEN})
    return texts


async def completions(access: Access, *, stream: bool) -> list[str]:
    """By token ids, which a client that has the tokenizer keeps itself."""
    renderer = renderer_of("qwen2_5")
    ids = renderer.encode(renderer.render([{"role": "user", "content": FIRST}])).tolist()
    texts = []
    for _ in SAYS:
        asked: Any = {"model": access.model, "prompt": ids, "max_tokens": 200, "stream": stream}
        answer = await client(access).completions.create(**asked, extra_body={"return_token_ids": True})
        chunks = [chunk async for chunk in answer] if stream else [answer]
        texts.append("".join(chunk.choices[0].text for chunk in chunks))
        ids = ids + [id for chunk in chunks for id in chunk.choices[0].token_ids]
        ids += renderer.encode(f"\n<|im_start|>user\n{THEN}<|im_end|>\n<|im_start|>assistant\n").tolist()
    return texts


async def generate(access: Access, *, stream: bool) -> list[str]:
    """By token ids, in vLLM's form."""
    renderer = renderer_of("qwen2_5")
    ids = renderer.encode(renderer.render([{"role": "user", "content": FIRST}])).tolist()
    url = access.base_url.removesuffix("/v1") + "/inference/v1/generate"
    texts = []
    for _ in SAYS:
        params = {"stop_token_ids": sorted(renderer.end_ids), "logprobs": 1, "skip_special_tokens": False}
        body = {"model": access.model, "token_ids": ids, "sampling_params": params, "stream": stream, "priority": 3}
        headers = {"X-Session-ID": "17", "Authorization": f"Bearer {access.api_key}"}
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            answered = await http.post(url, json=body, headers=headers)
        data = json.loads(answered.text.split("\n\n")[0].removeprefix("data: "))
        (choice,) = data["choices"]
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{n}" for n in choice["token_ids"]]
        assert choice["finish_reason"] == "stop"
        texts.append(renderer.text(choice["token_ids"]))
        ids = ids + choice["token_ids"]
        ids += renderer.encode(f"\n<|im_start|>user\n{THEN}<|im_end|>\n<|im_start|>assistant\n").tolist()
    return texts


DIALECTS = [chat, responses, messages, completions, generate]


def shown(texts: Sequence[str], dialect: Any) -> list[str]:
    """What the dialect shows of ``texts``: calls are calls where there are tools, else text."""
    return list(texts) if dialect in (completions, generate) else ["", "let me see", *texts[2:]]


@mostly_slow(
    ("dialect", "stream"), product(DIALECTS, [False, True]), quick=[*zip(DIALECTS, cycle([True, False]), strict=False)]
)
async def test_a_conversation_in_any_dialect_is_one_row_with_what_the_engine_sampled(dialect, stream):
    said: list[str] = []

    async def agent(access: Access) -> float:
        said.extend(await dialect(access, stream=stream))
        return 1.0

    episode = await made(agent, SAYS)
    assert episode.episode.failure is None
    assert said == shown(SAYS, dialect)
    episode.check(rows=1)


@mostly_slow(
    ("dialect", "template"),
    product([chat, responses, messages], ["qwen3", "llama3", "mistral"]),
    quick=[(chat, "mistral"), (responses, "qwen3"), (messages, "llama3")],
)
async def test_dialects_make_the_same_prompts_of_a_conversation(dialect, template, monkeypatch):
    says = [calling(1, 2, template=template), calling(3, 3, template=template), "it is 3 and 6", "good bye"]
    monkeypatch.setattr(f"{__name__}.SAYS", says)
    prompts = []
    for one in (chat, dialect):

        async def agent(access: Access, one: Any = one) -> float:
            await one(access, stream=False)
            return 1.0

        episode = await made(agent, says, template=template)
        assert episode.episode.failure is None
        prompts.append([call.input_ids.tolist() for call, _ in episode.record])
    assert prompts[0] == prompts[1]


THOUGHTS = ["<think>\nI add\n</think>\n\n", "<think>hm</think>", "<think>\nah\n</think>\n\n", "<think>bye</think>\n"]
SAYS_THINKING = [thought + text for thought, text in zip(THOUGHTS, SAYS, strict=True)]


@mostly_slow(
    ("dialect", "stream"),
    product([chat, responses, messages], [False, True]),
    quick=[(chat, False), (responses, True), (messages, True)],
)
async def test_thinking_is_apart_in_every_dialect_and_a_conversation_with_it_is_one_row(dialect, stream, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SAYS", SAYS_THINKING)
    said: list[str] = []

    async def agent(access: Access) -> float:
        said.extend(await dialect(access, stream=stream))
        return 1.0

    episode = await made(agent, SAYS_THINKING)
    assert said == ["", "let me see", "it is 3, 6 and 9", "good bye"]
    episode.check(rows=1)


def _inline(message: dict[str, Any]) -> dict[str, Any]:
    thinking = message.pop("reasoning_content")
    return {**message, "content": f"<think>\n{thinking}\n</think>\n\n{message.get('content', '')}"}


SENT_BACK: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "reasoning_content": lambda message: message,
    "reasoning": lambda message: {**message, "reasoning": message.pop("reasoning_content")},
    "in tags": _inline,
    "left out": lambda message: {name: value for name, value in message.items() if name != "reasoning_content"},
}


@mostly_slow(
    ("form", "template", "tools"),
    product(SENT_BACK, ["qwen2_5", "qwen3", "deepseek_r1"], [True, False]),
    quick=[
        ("reasoning_content", "qwen3", True),
        ("reasoning", "qwen2_5", True),
        ("in tags", "deepseek_r1", False),
        ("left out", "qwen3", False),
        ("left out", "deepseek_r1", False),
        ("in tags", "qwen2_5", False),
    ],
)
async def test_an_answer_is_known_again_in_whatever_form_its_thinking_comes_back(form, template, tools):
    if template == "deepseek_r1" and tools:
        return  # its template has none
    call = calling(1, 2, template=template) if tools else "3?"
    opened = template == "deepseek_r1"  # by the prompt
    says = [f"{'' if opened else '<think>'}\n{thought}\n</think>\n\n{call}" for thought in ("I add", "hm", "ah")]
    told: Any = [{"type": "function", "function": {**ADD, "parameters": ADD_PARAMETERS}}] if tools else openai.omit
    known = []

    async def agent(access: Access) -> float:
        messages: list[Any] = [{"role": "user", "content": FIRST}]
        for _ in says:
            answer = await client(access).chat.completions.create(model="policy", messages=messages, tools=told)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            assert message["reasoning_content"] in ("I add", "hm", "ah")
            assert "think" not in (message.get("content") or "")
            messages.append(SENT_BACK[form](message))
            if tools:
                messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"})
            else:
                messages.append({"role": "user", "content": THEN})
        return 1.0

    def noted(self: Any, *given: Any) -> ChatPrompt:
        prompt = prompted(self, *given)
        known.append(len(prompt.answers))
        return prompt

    prompted = Conversations.prompt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversations, "prompt", noted)
        episode = await made(agent, says, template=template)
    assert known[0] == 0
    assert 0 not in known[1:]
    episode.check(rows=1 if template == "qwen2_5" or tools else None)


async def test_anthropics_own_loop_of_tools_which_would_keep_threads_here_sends_its_conversation_whole():
    async def agent(access: Access) -> float:
        runner = anthropic_client(access).beta.messages.tool_runner(
            model=access.model,
            max_tokens=100,
            messages=[{"role": "user", "content": FIRST}],
            tools=[anthropic.beta_async_tool(add)],
        )
        answers = [answer async for answer in runner]
        assert answers[-1].content[0].text == SAYS[2]
        return 1.0

    episode = await made(agent, SAYS[:3])
    episode.check(rows=1)
    assert episode.episode.metrics[TurnNote.REFUSED] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_own_loop_of_tools_which_checks_all_that_it_reads_goes_through(stream):
    async def execute(arguments: dict[str, object]) -> str:
        return added(arguments)

    async def agent(access: Access) -> float:
        tool: Any = {"type": "function", **ADD, "parameters": ADD_PARAMETERS, "strict": None}
        runner = AsyncResponsesToolRunner(functions=[AsyncRegisteredFunction(tool, execute)])
        asked: Any = {"model": access.model, "input": FIRST}
        answer = await runner.run(client(access), asked, stream=stream, eager=stream)
        assert answer.output_text == SAYS[2]
        return 1.0

    (await made(agent, SAYS[:3])).check(rows=1)


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def test_tokens_are_counted_without_a_turn():
    counted: list[int] = []

    async def agent(access: Access) -> float:
        told: Any = {"model": access.model, "messages": [{"role": "user", "content": FIRST}]}
        counted.append((await anthropic_client(access).messages.count_tokens(**told)).input_tokens)
        asked = client(access).responses
        counted.append((await asked.input_tokens.count(model=access.model, input=FIRST)).input_tokens)
        counted.append((await asked.create(model=access.model, input=FIRST)).usage.input_tokens)
        return 1.0

    episode = await made(agent, SAYS[2:3])
    episode.check(rows=1)
    assert counted == [len(episode.record[0][0].input_ids)] * 3


async def test_answers_have_the_fields_of_the_clients_types():
    bodies: dict[str, bytes] = {}

    async def agent(access: Access) -> float:
        tools: Any = [{"type": "function", "function": {**ADD, "parameters": ADD_PARAMETERS}}]
        talk: Any = [{"role": "user", "content": FIRST}]
        raw = client(access).with_raw_response
        asked: Any = {"model": access.model, "messages": talk, "tools": tools, "logprobs": True}
        bodies["chat"] = (await raw.chat.completions.create(**asked)).http_response.content
        told: Any = {"include_usage": True}
        streamed = await client(access).chat.completions.create(**asked, stream=True, stream_options=told)
        for chunk in [one async for one in streamed]:
            ChatCompletionChunk.model_validate_json(chunk.model_dump_json(exclude_unset=True), strict=True)
        asked = {"model": access.model, "prompt": "1 and 2", "logprobs": 0}
        bodies["completion"] = (await raw.completions.create(**asked)).http_response.content
        flat: Any = [{"type": "function", **ADD, "parameters": ADD_PARAMETERS}]
        asked = {"model": access.model, "input": FIRST, "tools": flat, "include": ["message.output_text.logprobs"]}
        bodies["response"] = (await raw.responses.create(**asked)).http_response.content
        asked = {"model": access.model, "messages": talk, "max_tokens": 9}
        bodies["message"] = (
            await anthropic_client(access).with_raw_response.messages.create(**asked)
        ).http_response.content
        return 1.0

    assert (await made(agent, [SAYS[1]] * 5)).episode.failure is None
    chat = ChatCompletion.model_validate_json(bodies["chat"], strict=True)
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    Completion.model_validate_json(bodies["completion"], strict=True)
    Response.model_validate_json(bodies["response"])
    AnthropicMessage.model_validate_json(bodies["message"], strict=True)
