"""Requests of agents: whose they are, what is asked again or refused, what becomes of clients that hang up."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import openai
import pytest

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.endpoint.endpoint_server import MOST_TOLD
from headway.agents.endpoint.sessions import AgentSession
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.interface.program_messages import Access
from headway.data.interfaces.rollout import GenerateRequest
from headway.errors import ConfigError
from tests.agents.endpoint.served import LIMITS, endpoint, served
from tests.agents.episodes.program_episodes import RENDERER, Policy, trained

HELLO: list[Any] = [{"role": "user", "content": "begin"}]


def client(access: Access, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, **settings)


async def post(
    access: Access, body: Any, *, key: str | None = None, headers: dict[str, str] | None = None, timeout: float = 30.0
) -> tuple[int, Any]:
    """Status and body of a chat completion."""
    key = access.api_key if key is None else key
    sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout)) as session,
        session.post(f"{access.base_url}/chat/completions", json=body, headers=sent) as response,
    ):
        return response.status, await response.json()


async def test_what_comes_over_http_is_what_the_engine_sampled() -> None:
    async def agent(access: Access) -> None:
        async with client(access) as openai_client:
            messages = [*HELLO]
            for _ in range(3):
                answer = await openai_client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.model_dump(exclude_none=True)
                messages += [said, {"role": "user", "content": "go on"}]

    policy = Policy(seconds=0.01)
    policy.version = 3
    made = await served(agent, policies=[policy])
    [row] = made.rows
    asked = [call.input_ids.tolist() for call in policy.calls]
    assert made.episode.turns == 3
    assert made.episode.metrics["forks"] == 0
    whole = [*row.prompt_ids.tolist(), *row.ids.tolist()]
    assert all(whole[: len(ids)] == ids for ids in asked)  # each context is what was there
    sampled = np.concatenate([policy.said[call.number].ids for call in policy.calls])
    assert trained(row) == sampled.tolist()
    assert set(row.versions[row.loss_mask].tolist()) == {3}
    logprobs = np.concatenate([policy.said[call.number].logprobs for call in policy.calls])
    assert row.logprobs[row.loss_mask].tolist() == logprobs.tolist()


async def test_a_request_that_is_asked_again_after_its_client_hung_up_is_one_turn() -> None:
    asked = asyncio.Event()

    class Asked(Policy):
        async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
            await super().submit(client, calls)
            asked.set()

    async def agent(access: Access) -> Any:
        body = {"model": "policy", "messages": HELLO}
        hangs_up = asyncio.ensure_future(post(access, body))
        await asked.wait()
        hangs_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hangs_up
        return await post(access, body)

    made = await served(agent, policies=[Asked(seconds=0.5)])
    [(status, _)] = made.returned
    assert status == 200
    assert made.calls == 1
    assert made.episode.turns == 1
    assert made.episode.metrics["hung_up_requests"] == 1


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "one"}])
async def test_a_request_that_says_that_it_is_asked_again_gets_the_same_answer(headers: dict[str, str]) -> None:
    async def agent(access: Access) -> Any:
        body = {"model": "policy", "messages": HELLO}
        first = {} if "x-stainless-retry-count" in headers else headers
        return [await post(access, body, headers=first), await post(access, body, headers=headers)]

    made = await served(agent)
    [[(_, one), (_, other)]] = made.returned
    assert one["id"] == other["id"]
    assert one["choices"] == other["choices"]
    assert made.calls == 1
    assert made.episode.metrics["repeated_requests"] == 1


async def test_equal_requests_that_are_no_repetitions_are_turns_of_their_own() -> None:
    async def agent(access: Access) -> Any:
        body = {"model": "policy", "messages": HELLO}
        return await asyncio.gather(post(access, body), post(access, body))

    made = await served(agent)
    assert made.calls == 2
    assert made.episode.turns == 2
    [[(_, one), (_, other)]] = made.returned
    assert one["id"] != other["id"]


async def test_a_key_is_good_for_its_own_episode_and_while_that_lives() -> None:
    seen: list[Access] = []
    both = asyncio.Event()

    async def agent(access: Access) -> Any:
        seen.append(access)
        if len(seen) == 2:
            both.set()
        await both.wait()
        body = {"model": "policy", "messages": HELLO}
        await post(access, body)
        return [await post(access, body, key=key) for key in ("", "hw-unknown")]

    made = await served(agent, n=2)
    for tries in made.returned:
        assert [status for status, _ in tries] == [401, 401]
        assert ["without a key" in body["error"]["message"] for _, body in tries] == [True, False]
        assert {body["error"]["code"] for _, body in tries} == {"invalid_api_key"}
    assert [episode.turns for episode in made.group.trajectories] == [1, 1]
    assert seen[0].api_key != seen[1].api_key

    door, other = endpoint(), endpoint()
    await door.start()
    with (
        door.open(None) as access,  # type: ignore[arg-type]  # it is not asked before it is over
        other.open(None) as elsewhere,  # type: ignore[arg-type]
    ):
        pass
    asked = [
        await post(access, {"model": "policy", "messages": HELLO}, key=key)
        for key in (access.api_key, elsewhere.api_key)
    ]
    await door.close()
    assert [(status, body["error"]["code"]) for status, body in asked] == [
        (401, "episode_over"),
        (401, "invalid_api_key"),
    ]
    assert "is over" in asked[0][1]["error"]["message"]


async def test_the_endpoint_says_without_a_key_that_it_is_there() -> None:
    door = endpoint()
    await door.start()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{door.port}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    await door.close()


async def test_a_key_is_good_in_either_header_beside_one_that_is_made_up() -> None:
    async def agent(access: Access) -> Any:
        headers = [("Bearer dummy", access.api_key), (f"Bearer {access.api_key}", "dummy"), ("Bearer dummy", "dummy")]
        return [
            (await post(access, {"messages": HELLO}, headers={"Authorization": bearer, "x-api-key": key}))[0]
            for bearer, key in headers
        ]

    assert (await served(agent)).returned == [[200, 200, 401]]


@pytest.mark.parametrize(
    ("host", "node", "told"),
    [
        ("127.0.0.1", "10.1.2.3", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "10.1.2.3", "10.1.2.3"),
        ("0.0.0.0", "fd00::2", "127.0.0.1"),
        ("::", "10.1.2.3", "[::1]"),
        ("::", "fd00::2", "[fd00::2]"),
    ],
)
def test_agents_are_told_an_address_that_can_be_asked(host: str, node: str, told: str) -> None:
    assert endpoint(host=host, node=node, port=80).base_url == f"http://{told}:80/v1"


async def test_what_is_no_http_is_answered_and_the_log_does_not_quote_it(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(access: Access) -> list[bytes]:
        address = urlsplit(access.base_url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access.api_key}\r\n"
        found = []
        for rest in (
            "Content-Length: -5\r\n\r\n",
            "Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
            "Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
            f"Long: {'x' * 20000}\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write((head + rest).encode())
            found.append((await reader.readline()).split()[1])
            writer.close()
        await post(access, {"messages": HELLO})
        return found

    made = await served(agent)
    assert made.returned == [[b"400"] * 4]
    # Clients of other tests, whose loop is gone, may still speak as they are collected.
    assert [record for record in caplog.records if "Event loop is closed" not in caplog.handler.format(record)] == []


async def test_a_fault_of_the_servers_own_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: AgentSession, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(AgentSession, "turn", fails)

    async def agent(access: Access) -> Any:
        async with client(access) as openai_client:
            with pytest.raises(openai.InternalServerError):
                await openai_client.chat.completions.create(model="policy", messages=HELLO)

    await served(agent)
    assert "our fault" in caplog.text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": 0.7}, "temperature=0.7 (here 1.0)"),
        ({"n": 4}, "n=4 (here 1)"),
        ({"logit_bias": {"7": 5}}, "logit_bias={'7': 5} (here {})"),
        ({"response_format": {"type": "json_object"}}, "response_format='json_object' (here 'text')"),
        ({"tool_choice": "required"}, "tool_choice='required' (here 'auto')"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs=5 (here 0)"),
    ],
)
async def test_sampling_that_training_cannot_follow_is_overridden_and_counted_or_refused(asked: Any, said: str) -> None:
    async def agent(access: Access) -> Any:
        return await post(access, {"model": "policy", "messages": HELLO, **asked})

    made = await served(agent)
    assert made.returned[0][0] == 200
    assert made.episode.metrics["overridden_sampling"] == 1
    assert said in made.episode.notes["overridden_sampling"]
    strict = await served(agent, strict=True)
    status, body = strict.returned[0]
    assert status == 400
    assert said in body["error"]["message"]
    assert strict.episode.metrics["refused_requests"] == 1


async def test_sampling_as_the_run_has_it_is_no_difference() -> None:
    async def agent(access: Access) -> Any:
        asked = {"temperature": 1, "top_p": 1.0, "n": 1, "presence_penalty": 0, "seed": 4, "top_k": -1}
        asked |= {"logprobs": True, "top_logprobs": 0, "modalities": ["text"], "user": "u", "store": True}
        return await post(access, {"model": "policy", "messages": HELLO, **asked})

    made = await served(agent, strict=True)
    assert made.returned[0][0] == 200
    assert made.episode.notes == {}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt-4o", "messages": HELLO}, 404, "there is no model 'gpt-4o' here"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"model": "policy"}, 400, "messages: Field required"),
        ({"messages": "hello"}, 400, "messages: Input should be a valid array, given 'hello'"),
        ({"messages": [{"content": "?"}]}, 400, "messages.0.role is None; expected one of"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": HELLO, "tools": [{"type": "web_search"}]}, 400, "tools.0"),
        ([1, 2], 400, "the request's body"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(body: Any, status: int, said: str) -> None:
    async def agent(access: Access) -> Any:
        refused = await post(access, body)
        await post(access, {"messages": HELLO})  # the episode goes on
        return refused

    made = await served(agent)
    got, answer = made.returned[0]
    assert got == status
    assert said in answer["error"]["message"]
    assert said in made.episode.notes["refused_requests"]
    assert made.episode.turns == 1
    assert made.episode.failure is None


async def test_of_requests_without_a_valid_key_the_log_has_a_few_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody who reaches the port could fill a disk."""

    async def agent(access: Access) -> None:
        await post(access, {"messages": HELLO})
        async with aiohttp.ClientSession() as session:
            for n in range(MOST_TOLD + 5):
                async with session.get(f"{access.base_url}/models/{n}") as response:
                    assert response.status == 401

    await served(agent)
    told = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert len(told) == MOST_TOLD


async def test_a_body_that_is_too_large_or_no_json_is_refused() -> None:
    async def agent(access: Access) -> Any:
        headers = {"Authorization": f"Bearer {access.api_key}"}
        found = []
        async with aiohttp.ClientSession() as session:
            for body in (b'{"messages": [', b"\xff\xfe", b" " * 40_000_000):
                url = f"{access.base_url}/chat/completions"
                async with session.post(url, data=body, headers=headers) as response:
                    found.append((response.status, (await response.json())["error"]["message"]))
            async with session.get(f"{access.base_url}/chats", headers=headers) as response:
                found.append((response.status, (await response.json())["error"]["message"]))
        await post(access, {"messages": HELLO})
        return found

    made = await served(agent)
    assert [status for status, _ in made.returned[0]] == [400, 400, 413, 404]
    assert "more than 32 MiB" in made.returned[0][2][1]


async def test_a_limit_ends_the_episode_and_its_agent_is_told() -> None:
    async def agent(access: Access) -> Any:
        messages = [*HELLO]
        while True:
            status, body = await post(access, {"messages": messages})
            if status != 200:
                return status, body
            messages += [body["choices"][0]["message"], {"role": "user", "content": "go on"}]

    made = await served(agent, limits=EpisodeLimits(max_length=2000, max_turns=3, step_timeout_s=20))
    status, body = made.returned[0]
    assert status == 400
    assert body["error"]["code"] == "episode_over"
    assert made.episode.limit == "turns"
    assert made.episode.failure is None
    assert made.episode.turns == 3
    long = await served(agent, limits=EpisodeLimits(max_length=60, max_turns=30, step_timeout_s=20))
    assert long.returned[0][1]["error"]["code"] == "context_length_exceeded"
    assert long.episode.limit == "tokens"


@pytest.mark.parametrize(
    "path", ["chat/completions", pytest.param("completions", marks=pytest.mark.slow), "responses/input_tokens"]
)
async def test_text_of_ten_megabytes_is_refused_at_once_and_holds_up_nobody(path: str) -> None:
    text = "2026-11-23 12:07 error in /usr/lib/x31.so: code 7919\n" * 200_000
    form = {"chat/completions": "messages", "completions": "prompt"}.get(path, "input")
    sent = json.dumps({form: [{"role": "user", "content": text}] if form == "messages" else text}).encode()
    limits = replace(LIMITS, max_length=2000)
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            begun = time.process_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.process_time() - begun)

    async def agent(access: Access) -> Any:
        await post(access, {"messages": HELLO})  # what is made once is made
        beating = asyncio.ensure_future(beat())
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{access.base_url}/{path}", data=sent, headers=headers) as response,
        ):
            answer = await response.json()
        beating.cancel()
        return answer

    renderer = ChatRenderer(RENDERER.tokenizer, most_tokens=limits.max_length)
    made = await served(agent, limits=limits, renderer=renderer)
    [answer] = made.returned
    assert longest < 2.0  # of the processor's time: mostly a quarter of a second; all of the text takes many
    if path.endswith("tokens"):
        assert limits.max_length < answer["input_tokens"] < 10 * limits.max_length
        assert made.episode.limit is None
    else:
        assert answer["error"]["code"] == "context_length_exceeded"
        assert made.episode.limit == "tokens"
        assert made.calls == 1


async def test_an_agent_that_never_asks_has_failed() -> None:
    async def agent(access: Access) -> None:
        await asyncio.sleep(0)

    made = await served(agent)
    assert made.episode.failure is not None
    assert "made no turn" in made.episode.failure


async def test_a_port_in_use_is_told_at_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*agent.endpoint_port=0"):
            await endpoint(port=port).start()


async def test_a_stream_has_the_same_turn_in_pieces() -> None:
    async def agent(access: Access) -> Any:
        async with client(access) as openai_client:
            stream = await openai_client.chat.completions.create(
                model="policy", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            return [piece async for piece in stream]

    made = await served(agent)
    pieces = made.returned[0]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == made.episode.text
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "stop"
    assert pieces[-1].usage.completion_tokens == made.episode.length


@pytest.mark.parametrize("updates", [40, pytest.param(100, marks=pytest.mark.slow)])
async def test_no_request_is_lost_over_many_updates_and_the_death_of_a_replica(updates: int) -> None:
    """Takes some seconds: each update lasts 10 ms, and as much lies between two of them, in real time."""
    policies = [Policy(name, seconds=0.02) for name in ("a", "b")]

    async def agent(access: Access) -> int:
        turns = 0
        while policies[1].version < updates:
            status, body = await post(access, {"messages": [{"role": "user", "content": str(turns)}]})
            assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
            turns += 1
        return turns

    async def meanwhile(worker: EpisodeWorker) -> None:
        alive = ["a", "b"]
        for version in range(updates):
            await worker.route([], halted=True)
            await asyncio.sleep(0.01)
            for policy in policies:
                policy.version = version + 1
            if version == updates // 2:
                policies[0].dies()
                await worker.leave("a")
                alive.remove("a")
            await worker.route(alive)
            await asyncio.sleep(0.01)

    limits = EpisodeLimits(max_length=2000, max_turns=10_000, step_timeout_s=200, episode_timeout_s=600)
    made = await served(agent, policies=policies, limits=limits, n=8, meanwhile=meanwhile)
    for episode, turns in zip(
        sorted(made.group.trajectories, key=lambda episode: episode.turns), sorted(made.returned), strict=True
    ):
        assert episode.failure is None
        assert episode.turns == turns > 10


async def test_a_request_whose_body_comes_after_the_episode_is_refused() -> None:
    """The body is sent when the agent has returned: its key was good when the request began."""
    sent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "late"}]}).encode()

    async def agent(access: Access) -> None:
        await post(access, {"model": "policy", "messages": HELLO})
        url = urlsplit(access.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        await writer.drain()
        await asyncio.sleep(0.05)
        sent.append((reader, writer))
        half_sent.set()

    async def later(worker: EpisodeWorker) -> None:
        await half_sent.wait()
        reader, writer = sent[0]
        await asyncio.sleep(0.05)
        writer.write(body[10:])
        answers.append((await reader.readline()).decode())
        writer.close()

    answers: list[str] = []
    half_sent = asyncio.Event()
    made = await served(agent, meanwhile=later)
    assert made.episode.turns == made.calls == 1
    assert "401" in answers[0]


async def test_parallel_equal_requests_all_end_with_their_episode() -> None:
    seen: list[asyncio.Task[Any]] = []

    async def agent(access: Access) -> None:
        await post(access, {"model": "policy", "messages": [{"role": "user", "content": "first"}]})
        seen.extend(asyncio.create_task(post(access, {"model": "policy", "messages": HELLO})) for _ in range(3))
        asked.set()
        await asyncio.sleep(0.2)

    async def ended(worker: EpisodeWorker) -> None:
        await asked.wait()
        for status, body in await asyncio.wait_for(asyncio.gather(*seen), 10):
            assert (status, body["error"]["code"]) == (401, "episode_over")

    asked = asyncio.Event()
    policy = Policy(seconds=0.01)
    policy.says = lambda call: setattr(policy, "seconds", 5.0) or "first"
    made = await served(agent, policies=[policy], meanwhile=ended)
    assert made.episode.turns == 1


async def test_a_conversation_that_was_too_long_goes_on_when_it_is_compacted() -> None:
    async def agent(access: Access) -> list[int]:
        long = [{"role": "user", "content": "word " * 500}]
        asked = [HELLO, long, [{"role": "user", "content": "summary"}]]
        return [(await post(access, {"messages": messages}))[0] for messages in asked]

    made = await served(agent, limits=EpisodeLimits(max_length=400, max_turns=20, step_timeout_s=20))
    assert made.returned == [[200, 400, 200]]
    assert (made.episode.limit, made.episode.turns, made.episode.failure) == (None, 2, None)
