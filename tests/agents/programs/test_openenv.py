"""Environments of OpenEnv by address, over a server that answers what a test has written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headway.agents.adapters.openenv import text_field, web_socket
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_chat import Program
from headway.errors import ProgramAway, ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, play, start

web = pytest.importorskip("aiohttp.web", reason="the server that is written")

GUESS = {
    "properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["guess"],
    "additionalProperties": False,
}


def observed(observation: Any, reward: Any = None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done, **more}}


def error(code: str, message: str = "so it is", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Server:
    """Answers messages one after the other, in each connection from the first answer on."""

    def __init__(self, *answers: Any, schema: Any = GUESS, status: int = 101) -> None:
        self.answers, self.schema, self.status = answers, schema, status
        self.heard: list[list[Any]] = []
        self.ended = asyncio.Event()

    async def socket(self, request: Any) -> Any:
        if self.status != 101:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.heard.append([])
        answers = list(self.answers)
        async for message in socket:
            self.heard[-1].append(json.loads(message.data))
            if self.heard[-1][-1]["type"] == "close":
                self.ended.set()
                continue
            answer = answers.pop(0) if answers else None
            answer = answer(len(self.heard)) if callable(answer) else answer
            if answer == "ends":
                await socket.close()
            elif answer is not None:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return socket

    async def tells_schema(self, request: Any) -> Any:
        if isinstance(self.schema, int):
            return web.Response(status=self.schema)
        return web.json_response({"action": self.schema} if isinstance(self.schema, dict) else self.schema)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/ws", self.socket), web.get("/schema", self.tells_schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def load(address: str, scheme: str = "ws", **params: Any) -> Program:
    spec = ProgramSpec(environment=f"{scheme}://{address}", params={"timeout_s": 60.0, **params})
    return await asyncio.to_thread(spec.resolved().load)  # the server is of this loop


async def test_an_episode_is_a_connection_that_is_reset_stepped_and_closed():
    server = Server(
        observed({"text": "Guess.", "metadata": {}}), observed({"text": "<"}, 0.25), observed({"text": "="}, True, True)
    )
    async with server.serving() as address:
        for scheme in ("ws", "http"):
            loaded = await load(address, scheme)
            described = loaded.describe()
            assert (described.is_async, described.gives_reward) == (True, True)
            assert loaded.who == f"environment {scheme}://{address}"
            begin = start("Play.", seed=7, level="easy")
            end = await play(loaded, ask := Script("3", "5"), begin)
            assert (end.turn_rewards, end.reward, end.metrics) == ((0.25, 1.0), None, {"bad_actions": 0})
            assert ask.last == [("user", "Play.\n\nGuess."), ("assistant", "3"), ("user", "<")]
        await server.ended.wait()
    reset = {"seed": 7, "episode_id": begin.name, "answer": "42", "level": "easy"}
    assert server.heard[0][:3] == [
        {"type": "reset", "data": reset},
        {"type": "step", "data": {"guess": "3"}},
        {"type": "step", "data": {"guess": "5"}},
    ]


async def test_a_column_seed_is_the_seed_and_an_observation_of_several_fields_is_json():
    server = Server(observed({"board": [1, 2], "said": "é"}), observed({}, 1, True), schema=404)
    async with server.serving() as address:
        await play(await load(address, action_field="move"), ask := Script("up"), start("", seed=7))
        assert ask.last == [("user", '{"board": [1, 2], "said": "é"}')]
        row = start("", seed=7)
        row.row["seed"] = 3
        await play(await load(address, observation_field="said", action_field="move"), ask := Script("up"), row)
        assert ask.last == [("user", "é")]
    assert [one[0]["data"]["seed"] for one in server.heard] == [7, 3]
    assert server.heard[0][1]["data"] == {"move": "up"}


async def test_where_an_action_is_no_text_the_model_writes_it_as_json_and_is_told_what_is_none():
    invalid = error("VALIDATION_ERROR", errors=[{"loc": ["x"], "msg": "Input should be a valid integer"}])
    server = Server(
        observed({"text": "Go."}), invalid, observed({"text": "ok"}, 1.0, True), schema={"required": ["x", "y"]}
    )
    async with server.serving() as address:
        end = await play(await load(address), ask := Script("left", "[1]", '{"x": "a"}', '{"x": 1, "y": 2}'))
    assert end.turn_rewards == (0.0, 0.0, 0.0, 1.0)
    assert end.metrics == {"bad_actions": 3}
    none = "Error: an action is a JSON object, and nothing else; this was none. Nothing was done."
    assert [content for role, content in ask.last if role == "user"][1:] == [
        none,
        none,
        "Error: the action does not fit: x: Input should be a valid integer. Nothing was done.",
    ]
    assert [one["type"] for one in server.heard[0][:3]] == ["reset", "step", "step"]


async def test_a_limit_leaves_the_rewards_and_closes_the_connection():
    server = Server(observed({"text": "Guess."}), observed({"text": "<"}, 0.25))
    async with server.serving() as address:
        end = await play(await load(address), Script("3"))
        assert end.turn_rewards == (0.25,)
        await server.ended.wait()


async def test_a_server_that_says_so_in_the_middle_of_an_episode_is_away():
    server = Server(observed({"text": "Guess."}), error("CAPACITY_REACHED", "8 of 8 sessions"))
    async with server.serving() as address:
        with pytest.raises(ProgramAway, match="8 of 8 sessions"):
            await play(await load(address), Script("3"))


async def test_a_server_without_room_is_asked_again_and_given_up_after_the_time_out(monkeypatch):
    monkeypatch.setattr("headway.agents.adapters.openenv.FULL_WAIT_S", 0.01)
    full = error("CAPACITY_REACHED", "8 of 8 sessions")
    server = Server(lambda n: full if n < 4 else observed({"text": "Guess."}), observed({"text": "="}, 1.0, True))
    async with server.serving() as address:
        assert (await play(await load(address), Script("3"))).turn_rewards == (1.0,)
        assert len(server.heard) == 4
        server.answers = (full,)
        with pytest.raises(ProgramAway, match=r"8 of 8 sessions; .*max_concurrent"):
            await play(await load(address, timeout_s=1.0), Script("3"))


FIRST = observed({"text": "Guess."})


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        (["ends"], ProgramAway, "reset: the server closed the connection"),
        pytest.param([FIRST, "ends"], ProgramAway, "step: the server closed the connection", marks=pytest.mark.slow),
        ([FIRST, None], ProgramAway, r"step within 0.3 s \(agent.params.timeout_s\) raised TimeoutError"),
        (
            [FIRST, "<html>"],
            ProgramFailed,
            'step: the server answered \'<html>\', expected {"type": "observation"',
        ),
        pytest.param([FIRST, "[]"], ProgramFailed, r"step: the server answered \[\], expected", marks=pytest.mark.slow),
        pytest.param(
            [{"type": "state", "data": {}}],
            ProgramFailed,
            "reset: the server answered {'type': 'state'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [observed("text")],
            ProgramFailed,
            "reset: the server answered {'type': 'observation'",
            marks=pytest.mark.slow,
        ),
        (
            [error("EXECUTION_ERROR", "no such level")],
            ProgramFailed,
            "reset: the server says: no such level",
        ),
        ([error("VALIDATION_ERROR")], ProgramFailed, "reset was refused: Error: the action does not fit: so it is"),
        ([FIRST, observed({"text": ""}, "much")], ProgramFailed, "the reward of a step is 'much', expected a finite"),
        pytest.param(
            [FIRST, error("FACTORY_ERROR")], ProgramFailed, "step: the server says: so it is", marks=pytest.mark.slow
        ),
    ],
)
async def test_a_server_that_is_away_has_the_episode_run_again_and_one_that_answers_wrongly_fails_it(
    answers, kind, message
):
    server = Server(*answers)
    async with server.serving() as address:
        loaded = await load(address)

        def first(_):
            loaded._timeout_s = 0.3  # of what comes behind this answer
            return answers[0]

        if answers[-1] is None:
            server.answers = (first, None)
        with pytest.raises(ProgramFailed, match=f"environment ws://127.0.0.1:[0-9]+: {message}") as failed:
            await play(loaded, Script("3", "5"))
    assert type(failed.value) is kind


async def test_an_episode_after_its_server_has_gone_is_to_be_run_again():
    async with Server(FIRST).serving() as address:
        loaded = await load(address)
    with pytest.raises(ProgramAway, match=r"connecting to .* raised ClientConnectorError"):
        await play(loaded, Script("3"))
    with pytest.raises(ProgramAway, match=r"asking http://127.0.0.1:[0-9]+/schema raised ClientConnectorError"):
        await load(address)


@pytest.mark.parametrize(
    ("schema", "params", "kind", "message"),
    [
        (
            GUESS,
            {"action_field": "move"},
            UserCodeError,
            "agent.params.action_field=move: an action has guess, metadata",
        ),
        (
            GUESS,
            {"level": 3},
            UserCodeError,
            "no agent.params.level; .*action_field, observation_field",
        ),
        (["x"], {}, UserCodeError, r"/schema says \['x'\], expected a dict"),
        (503, {}, ProgramAway, "answers with status 503"),
    ],
)
async def test_what_is_no_environment_of_openenvs_is_refused_before_the_run(schema, params, kind, message):
    async with Server(schema=schema).serving() as address:
        with pytest.raises(kind, match=message):
            await load(address, **params)


async def test_a_server_without_its_web_socket_is_told_where_it_belongs():
    async with Server(schema=404).serving() as address:
        loaded = await load(f"{address}/elsewhere")
        with pytest.raises(ProgramFailed, match="WebSocket, raised WSServerHandshakeError: 404"):
            await play(loaded, Script("3"))


@pytest.mark.parametrize("status", [429, 503])
async def test_an_episode_whose_server_has_too_much_to_do_is_to_be_run_again(status):
    async with Server(status=status).serving() as address:
        loaded = await load(address)
        with pytest.raises(ProgramAway, match=f"answers with status {status}"):
            await play(loaded, Script("3"))


@pytest.mark.parametrize(
    ("url", "at"),
    [
        ("ws://h:8000", "ws://h:8000/ws"),
        ("ws://h:8000/ws/", "ws://h:8000/ws"),
        ("http://h/", "ws://h/ws"),
        ("https://h/envs/echo", "wss://h/envs/echo/ws"),
    ],
)
def test_the_address_of_a_server_leads_to_its_web_socket(url, at):
    assert web_socket(url) == at


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (GUESS, "guess"),
        ({}, None),
        ({"required": ["a", "b"], "properties": {"a": {"type": "string"}}}, None),
        ({"required": ["a"], "properties": {"a": {"type": "integer"}}}, None),
        ({"required": ["metadata", "a"], "properties": {"a": {"type": "string"}}}, "a"),
    ],
)
def test_text_goes_to_the_one_field_that_an_action_needs(schema, field):
    assert text_field(schema) == field


def test_tools_are_not_called_beside_it(tools):
    spec = tools("def f() -> int:\n    '''Do.'''\n    return 1", "f")
    with pytest.raises(UserCodeError, match=r"agent\.tools beside environment ws://h"):
        ProgramSpec(environment="ws://h", tools=spec.tools).load()
