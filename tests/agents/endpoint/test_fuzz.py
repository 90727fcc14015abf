"""Whatever comes in is answered or refused, in the client's form, and goes to the episode of its key alone."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import strategies as st

from headway.agents.endpoint.endpoint_server import DIALECTS
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import GenerateRequest
from tests.agents.endpoint.scripted import ADD, ADD_PARAMETERS, Made, Scripted, calling
from tests.agents.endpoint.served import endpoint
from tests.agents.episodes.program_episodes import RENDERER, Here, request
from tests.tiers import searched

LIMITS = EpisodeLimits(max_length=2000, max_turns=10**6, step_timeout_s=3600, episode_timeout_s=3600)
MARKS = ("zebra", "giraffe")
"""What the conversations of each episode are about, and no others."""
ANSWERS = [
    calling(1, 2),
    "is 3",
    calling(1, 2).replace("1", "NaN").replace("2", "1e999"),
    calling(1, 2).replace("1,", "1,,"),
    calling(1, 2).replace("add", "sub") + calling(1, 2),
    "<think>hm",
    "<tool_call>" * 3 + "\x00\u2028\ufffd",
]
"""What the policy says of them."""
OUTSIDE_S = 20.0
"""Seconds that an answer may take."""


@dataclass
class Open:
    """Two episodes on their way, whose agents leave the asking to the test."""

    loop: asyncio.AbstractEventLoop
    accesses: list[Access] = field(default_factory=list)
    policy: Scripted = field(init=False)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answered: int = 0

    async def program(self, start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        assert start.access is not None
        self.accesses.append(start.access)
        if len(self.accesses) == len(MARKS):
            self.begun.set()
        await self.over.wait()
        return EpisodeEnd(1.0)

    def says(self, call: GenerateRequest) -> str:
        return f"the {MARKS[call.trajectory[-1]]} {ANSWERS[len(self.policy.record) % len(ANSWERS)]}"

    async def make(self) -> Group:
        stop_ids = tuple(sorted(RENDERER.end_ids))
        hosting = Hosting(
            Here(self.program), Chats(RENDERER).new_episode, LIMITS, stop_ids=stop_ids, endpoint=(serving := endpoint())
        )
        self.policy = Scripted(self.says, RENDERER)
        await serving.start()
        async with local_episode_worker(self.policy, hosting=hosting) as worker:
            (group,) = [group async for group in worker.generate([request(2)])]
            return group

    async def send(
        self, which: int, path: str, body: bytes, method: str = "POST", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send a request with the key of an episode, unless ``headers`` have another."""
        access = self.accesses[which]
        root = access.base_url.removesuffix("/v1")
        sent = {"Authorization": f"Bearer {access.api_key}", **(headers or {})}
        limit = aiohttp.ClientTimeout(total=OUTSIDE_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as http,
            http.request(method, root + path, data=body, headers=sent) as answer,
        ):
            return answer.status, await answer.read()

    def ask(self, which: int, path: str, body: bytes, **options: Any) -> tuple[int, bytes]:
        status, answer = self.loop.run_until_complete(self.send(which, path, body, **options))
        check(path, status, answer, method=options.get("method", "POST"))
        assert MARKS[1 - which].encode() not in answer
        self.answered += status == 200
        return status, answer


@pytest.fixture(scope="module")
def episodes() -> Iterator[Open]:
    """Two open episodes. In the end, both have trained rows of just what was sampled for them."""
    loop = asyncio.new_event_loop()
    opened = Open(loop)
    making = loop.create_task(opened.make())
    loop.run_until_complete(asyncio.wait_for(opened.begun.wait(), OUTSIDE_S))
    order = {access.api_key: n for n, access in enumerate(opened.accesses)}
    assert len(order) == 2, "each episode has a key of its own"
    yield opened
    opened.over.set()
    group = loop.run_until_complete(asyncio.wait_for(making, OUTSIDE_S))
    loop.close()
    assert group.tokens is not None
    for episode in group.trajectories:
        rows = [group.tokens[at.index] for at in episode.rows]
        k = episode.id[-1]
        record = [(call, tokens) for call, tokens in opened.policy.record if call.trajectory[-1] == k]
        Made(episode, rows, record).check(rows=None)
        assert not any(MARKS[1 - k] in RENDERER.text(row.ids) for row in rows)


def check(path: str, status: int, answer: bytes, method: str = "POST") -> None:
    """Check that an answer is what the clients of ``path`` read."""
    assert 200 <= status < 500, (status, answer)
    if method == "HEAD":
        return
    if status >= 400:
        body = read(answer)
        assert isinstance(body["error"]["message"], str)
        assert body["error"]["message"]
        assert (body.get("type") == "error") == (path in ("/v1/messages", "/v1/messages/count_tokens"))
    elif answer.startswith((b"data:", b"event:")):
        for block in answer.decode().removesuffix("\n\n").split("\n\n"):
            data = block.split("data: ", 1)[1]
            assert data == "[DONE]" or isinstance(read(data.encode()), dict)
    else:
        assert isinstance(read(answer), dict)


def read(answer: bytes) -> Any:
    """Read JSON as strict clients do: it has no NaN."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(answer, parse_constant=refuse)


# ------------------------------------------------------------------------------------------------- what is sent

FUNCTION = {**ADD, "parameters": ADD_PARAMETERS}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
COMMON = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 1, "logit_bias": {}, "stream": False, "model": "policy"}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **COMMON,
        "messages": [
            {"role": "system", "content": "add"},
            {"role": "user", "content": [{"type": "text", "text": "1 and 2"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "logprobs": True,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "max_tokens": 5,
    },
    "/v1/completions": {**COMMON, "prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1, "stop": "x", "echo": False},
    "/v1/responses": {
        **COMMON,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1 and 2"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1, "b": 2}'},
            {"type": "function_call_output", "call_id": "a", "output": "3"},
        ],
        "instructions": "add",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 50,
    },
    "/v1/messages": {
        **COMMON,
        "system": [{"type": "text", "text": "add"}],
        "messages": [
            {"role": "user", "content": "1 and 2"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1, "b": 2}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]},
        ],
        "tools": [{**ADD, "input_schema": ADD_PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "max_tokens": 50,
    },
    "/inference/v1/generate": {
        "model": "policy",
        "token_ids": [5, 6, 7],
        "sampling_params": {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": [9], "logprobs": 1, "stop": ["x"]},
        "cache_salt": "a",
        "priority": 1,
        "stream": False,
    },
}
PATHS = sorted(VALID)
COUNTS = {dialect.counts: dialect.path for dialect in DIALECTS if dialect.counts is not None}
FIELDS = sorted({name for body in VALID.values() for name in body} | {"functions", "suffix", "previous_response_id"})
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**64), 10**300]),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),  # lone surrogates, too
    st.sampled_from(["auto", "none", "text", "user", "assistant", "tool", "function", "{", "{}", "[1]", "NaN", "{% x"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name", "a", "$ref"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def near_valid(draw: st.DrawFn) -> tuple[str, Any]:
    """A request with a few things changed, left out or added."""
    path = draw(st.sampled_from(PATHS))
    body = copy.deepcopy(VALID[path])
    body["stream"] = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        at: Any = body
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
                at = at[key]
                continue
            change = draw(st.sampled_from(["replace", "replace", "leave out", "double"]))
            if change == "leave out":
                del at[key]
            elif change == "double" and isinstance(at, list):
                at.append(copy.deepcopy(at[key]))
            else:
                at[key] = draw(VALUES)
            break
    return path, body


WHICH = st.sampled_from([0, 1])


@searched(100, which=WHICH, sent=near_valid())
def test_requests_that_are_nearly_right_are_answered_or_refused(episodes, which, sent):
    path, body = sent
    episodes.ask(which, path, json.dumps(body).encode())


@searched(100, which=WHICH, path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES)
def test_any_json_is_answered_or_refused(episodes, which, path, body):
    episodes.ask(which, path, json.dumps(body).encode())


NESTED = st.builds(
    lambda opening, n, middle: opening * n + middle,
    st.sampled_from(['{"messages":', "[", '{"a":[']),
    st.sampled_from([10, 300, 100_000]),
    st.sampled_from(["", "1", '"']),
)
BYTES = st.binary(max_size=50) | NESTED.map(str.encode) | st.just(b'{"model": "\\ud800"}') | st.just(b"\xef\xbb\xbf{}")


@searched(100, which=WHICH, path=st.sampled_from(PATHS), body=BYTES)
def test_any_bytes_are_refused(episodes, which, path, body):
    status, _ = episodes.ask(which, path, body)
    assert status == 400


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *("Content-Type", "Content-Encoding", "Accept"),
            *("Idempotency-Key", "x-stainless-retry-count", "X-Session-ID"),
        ]
    ),
    st.sampled_from(["gzip", "deflate", "text/html; charset=x", "", "1", "-1", "äß", "a" * 5000])
    | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=9),
)


@searched(100, which=WHICH, sent=near_valid())
def test_what_is_only_to_be_counted_is_counted_or_refused(episodes, which, sent):
    path, body = sent
    for counts, of in COUNTS.items():
        if of == path:
            episodes.ask(which, counts, json.dumps(body).encode())


@searched(100, which=WHICH, path=st.sampled_from(PATHS), headers=HEADERS)
def test_any_headers_are_taken(episodes, which, path, headers):
    episodes.ask(which, path, json.dumps(VALID[path]).encode(), headers=headers)


@searched(
    100, key=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60), path=st.sampled_from(PATHS)
)
def test_no_other_key_is_good(episodes, key, path):
    status, _ = episodes.ask(0, path, json.dumps(VALID[path]).encode(), headers={"Authorization": f"Bearer {key}"})
    assert status == 401


@searched(
    100,
    method=st.sampled_from(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]),
    path=st.sampled_from([*PATHS, *COUNTS, "/", "/v1", "/v1/models/%00", "/v1//messages", "/v1/../../etc/passwd"]),
)
def test_other_methods_and_paths_are_refused(episodes, method, path):
    status, _ = episodes.ask(0, path, b"", method=method)
    assert status in (404, 405)


@searched(100, data=st.binary(max_size=80), opened=st.booleans())
def test_a_connection_that_speaks_no_http_ends_nothing(episodes, data, opened):
    async def speak() -> bytes:
        host, _, port = episodes.accesses[0].base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = episodes.accesses[0].api_key
        head = f"POST /v1/messages HTTP/1.1\r\nx-api-key: {key}\r\nContent-Length: 5\r\n" if opened else ""
        writer.write(head.encode() + data + b"\r\n\r\n")
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), OUTSIDE_S)
        writer.close()
        return answer

    answer = episodes.loop.run_until_complete(speak())
    assert not answer.startswith(b"HTTP/1.1 5")
    assert MARKS[1].encode() not in answer
    status, _ = episodes.ask(0, "/v1/completions", json.dumps(VALID["/v1/completions"]).encode())
    assert status == 200


@searched(100, turns=st.lists(st.tuples(WHICH, st.sampled_from(PATHS), st.booleans()), min_size=2, max_size=6))
def test_conversations_of_two_episodes_at_once_do_not_meet(episodes, turns):
    """Plays many random conversations."""

    async def both() -> list[tuple[int, bytes]]:
        asked = []
        for which, path, stream in turns:
            body = json.dumps({**VALID[path], "stream": stream}).replace("1 and 2", f"of the {MARKS[which]}")
            asked.append(episodes.send(which, path, body.encode()))
        return await asyncio.gather(*asked)

    for (which, path, _), (status, answer) in zip(turns, episodes.loop.run_until_complete(both()), strict=True):
        assert status == 200
        check(path, status, answer)
        assert MARKS[1 - which].encode() not in answer


def test_the_dialects_are_all_tried():
    assert sorted(dialect.path for dialect in DIALECTS) == PATHS
