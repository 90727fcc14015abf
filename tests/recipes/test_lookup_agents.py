"""The look-up in each form of an agent: asked by a scripted model, it calls the tool and scores the answer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config.loading import load
from headway.models.made_model import make_model
from headway.models.tokenizer import load_tokenizer
from headway.runtime.user_code import load_object

FOLDER = Path(__file__).parents[2] / "recipes" / "agents"
KEYS = ("kqe", "wza")
value = load_object(f"{FOLDER / 'lookup.py'}:value")
SUM = str(sum(map(value, KEYS)) % 10)
ROW = {"prompt": [{"role": "user", "content": "+".join(KEYS)}], "answer": SUM}
ROW["messages"] = ROW["prompt"]


class Model(BaseHTTPRequestHandler):
    """Calls the tool with a wrong argument, with each key, and then answers."""

    asked: list[dict[str, Any]]
    last: str

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Authorization"]) == ("/v1/chat/completions", "Bearer hw-key")
        told = sum(message["role"] == "tool" for message in body["messages"])
        self.asked.append(body)
        message: dict[str, Any] = {"role": "assistant", "content": self.last}
        if told < 3:
            given = {"kye": "kqe"} if told == 0 else {"key": KEYS[told - 1]}
            function = {"name": "look_up", "arguments": json.dumps(given)}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": f"call{told}", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": f"chatcmpl-{told}-aa", "object": "chat.completion", "created": 0, "model": "policy"}
        content = json.dumps(answer | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(params=["right", "wrong"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[type[Model], str]]:
    """The model's class, and its address."""
    last = f"={SUM}" if request.param == "right" else "?"
    kind: type[Model] = type("Model", (Model,), {"asked": [], "last": last})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield kind, f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)


def ended(form: str, base_url: str) -> Any:
    """What the agent of a form returns, or prints last."""
    if form == "command":
        there = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "hw-key"}
        command = [sys.executable, str(FOLDER / "lookup_command.py")]
        done = subprocess.run(
            command, input=json.dumps(ROW), env=there, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])["reward"]
    if form == "openai":
        return asyncio.run(load_object(f"{FOLDER / 'lookup_agent.py'}:run")(ROW, base_url, "hw-key"))
    agent = load_object(f"{FOLDER / 'lookup_areal.py'}:LookUpAgent")()
    by_id = asyncio.run(agent.run(ROW, base_url=base_url, api_key="hw-key", http_client=None))
    [(name, reward)] = by_id.items()
    assert name == "chatcmpl-3-aa"
    return reward


@pytest.mark.parametrize("form", ["openai", "areal", "command"])
def test_an_agent_tells_the_model_what_the_tool_says_and_scores_its_answer(
    form: str, model: tuple[type[Model], str]
) -> None:
    """Imports OpenAI's client, which takes seconds."""
    kind, base_url = model
    assert ended(form, base_url) == float(kind.last == f"={SUM}")
    assert {body["tools"][0]["function"]["name"] for body in kind.asked} == {"look_up"}
    told = [message["content"] for message in kind.asked[-1]["messages"] if message["role"] == "tool"]
    assert told == ["no key", *(str(value(key)) for key in KEYS)]


def test_the_agent_loop_puts_what_the_tool_says_between_what_was_sampled(tmp_path: Path) -> None:
    """Makes the recipe's model, for its tokenizer."""
    config = load(FOLDER / "lookup.yaml").config
    assert config.model.make is not None
    make_model(config.model.make, 0, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    said = [f'[TOOL_CALLS]look_up{{"key": "{key}"}}' for key in KEYS] + [f"={SUM}"]
    asked: list[list[int]] = []

    async def generate(request_id: Any, *, prompt_ids: list[int], sampling_params: Any) -> Any:
        asked.append(prompt_ids)
        ids = tokenizer.encode(said[len(asked) - 1], add_special_tokens=False)
        return SimpleNamespace(token_ids=[*ids, tokenizer.eos_token_id])

    loop = load_object(f"{FOLDER / 'lookup_loop.py'}:LookUpLoop")(SimpleNamespace(generate=generate), tokenizer)
    output = asyncio.run(loop.run({}, raw_prompt=ROW["prompt"], answer=SUM))
    assert (output.reward_score, output.num_turns) == (1.0, 3)
    sampled = [id for id, counts in zip(output.response_ids, output.response_mask, strict=True) if counts]
    assert tokenizer.decode(sampled) == "".join(one + tokenizer.eos_token for one in said)
    told = "".join(
        f"{one}{tokenizer.eos_token}<|tool|>{value(key)}<|assistant|>" for one, key in zip(said, KEYS, strict=False)
    )
    assert tokenizer.decode(output.response_ids) == told + said[-1] + tokenizer.eos_token
    assert asked == [asked[0], *(asked[0] + output.response_ids[: len(ids) - len(asked[0])] for ids in asked[1:])]
