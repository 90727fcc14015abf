"""MCP servers' tools: by the SDK's transport in memory, by messages that are written, and by real servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.environment_loop import ToolLoop
from headway.agents.adapters.mcp_servers import McpServer, McpServerSpec, _McpConnection
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.tool import Toolbox, make_tool
from headway.errors import ProgramAway, ProgramFailed, Unavailable, UserCodeError
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.programs.scripted import Script, calling, play, start
from tests.agents.programs.served import served
from tests.tiers import mostly_slow

pytest.importorskip("mcp", reason="the extra mcp")

from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp.shared.memory import create_client_server_memory_streams
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    CallToolResult,
    ErrorData,
    ImageContent,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    TextContent,
)

SERVER = Path(__file__).parent / "a_server.py"


def digits() -> MCPServer:
    """A server with tools of each kind."""
    server = MCPServer("digits")

    @server.tool()
    def add(a: int, b: int = 2) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail() -> CallToolResult:
        """Fail."""
        return CallToolResult(content=[TextContent(type="text", text="the disk is full")], is_error=True)

    @server.tool()
    def draw() -> CallToolResult:
        """Draw."""
        return CallToolResult(content=[ImageContent(type="image", data="", mime_type="image/png")])

    @server.tool()
    def say(name: str) -> list[str]:
        """Say two things."""
        return [name, "é"]

    return server


def program(*servers: McpServer) -> ToolLoop:
    for server in servers:
        server.load()
    return ToolLoop(Toolbox(servers), "tools")


def in_memory(name: str = "digits", make: Callable[[], Any] = digits, **more: Any) -> McpServer:
    return McpServer(McpServerSpec(name, **more), target=make)


def heard(ask: Script) -> list[str]:
    return [content for role, content in ask.last if role == "tool"]


async def test_a_servers_tools_are_offered_with_its_own_schemas_and_called():
    loaded = program(in_memory())
    described = loaded.describe()
    assert (described.is_async, described.gives_reward) == (True, False)
    schemas = {tool["function"]["name"]: tool["function"] for tool in described.tools}
    assert list(schemas) == ["add", "fail", "draw", "say"]
    theirs = (await digits().list_tools())[0]
    assert schemas["add"] == {"name": "add", "description": "Add two numbers.", "parameters": theirs.input_schema}
    ask = Script(calling(("add", {"a": 1}), ("say", {"name": "x"})), "done")
    end = await play(loaded, ask)
    assert heard(ask) == ["3", "x\né"]
    assert end.tool_errors == 0


async def test_what_a_server_says_is_an_error_is_told_to_the_model_and_counted():
    ask = Script(calling(("fail", {}), ("add", {"a": "many"})), "done")
    end = await play(program(in_memory()), ask)
    assert heard(ask)[0] == "Error: fail failed: the disk is full"
    assert heard(ask)[1].startswith("Error: add failed: ")
    assert end.tool_errors == 2


async def test_an_image_is_no_text_and_ends_the_episode():
    with pytest.raises(
        ProgramFailed,
        match=r"agent\.mcp\.digits: .*tool 'draw' .*\bimage\b",
    ):
        await play(program(in_memory()), Script(calling(("draw", {})), "x"))


def test_a_server_may_offer_some_of_its_tools_alone():
    loaded = program(in_memory(tools=("say", "add")))
    assert [tool["function"]["name"] for tool in loaded.describe().tools] == ["add", "say"]
    with pytest.raises(UserCodeError, match=r"agent\.mcp\.digits\.tools: .*no tool sub; .*add, fail, draw, say"):
        in_memory(tools=("add", "sub")).load()


def test_a_name_that_two_have_is_refused_with_both():
    one, other = in_memory("one"), in_memory("other")
    both = r"agent\.mcp\.other: .*'add' already, of agent\.mcp\.one; .*\(agent\.mcp"
    with pytest.raises(UserCodeError, match=both):
        program(one, other)

    def add(a: int) -> int:
        """Add.

        Args:
            a: one
        """
        return a

    with pytest.raises(UserCodeError, match=r"agent\.mcp\.one: .*'add' already, of tools\.py:add"):
        Toolbox([make_tool(add, "tools.py:add"), one])


async def test_episodes_share_a_connection_unless_each_has_its_own():
    made = []

    def make() -> MCPServer:
        made.append(digits())
        return made[-1]

    for per_episode, connections in ((False, 1), (True, 2)):
        loaded = program(in_memory(make=make, per_episode=per_episode))
        made.clear()
        for _ in range(2):
            await play(loaded, Script(calling(("add", {"a": 1}), ("add", {"a": 1})), "done"))
        assert len(made) == connections


def test_without_the_sdk_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserCodeError, match=r"agent\.mcp .*\bmcp, 2 or later.* pip install 'headway\[mcp\]'"):
        in_memory().load()


# Messages that are written


def written(answers: dict[str, Any]) -> Callable[[], Any]:
    """A server that answers requests by method: with a result, an error, an exception for what cannot be read, some of
    these, or none."""

    @asynccontextmanager
    async def connect():
        async with create_client_server_memory_streams() as (client, (reads, writes)):

            async def serve() -> None:
                async for message in reads:
                    request = message.message
                    if not isinstance(request, JSONRPCRequest):
                        continue
                    answer = answers.get(request.method)
                    if callable(answer):
                        answer = answer()
                    for one in answer if isinstance(answer, list) else [answer]:
                        if isinstance(one, Exception):
                            await writes.send(one)
                        elif isinstance(one, ErrorData):
                            await writes.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request.id, error=one)))
                        elif one == "ends":
                            await writes.aclose()
                        elif one is not None:
                            result = JSONRPCResponse(jsonrpc="2.0", id=request.id, result=dict(one))
                            await writes.send(SessionMessage(result))

            serving = asyncio.ensure_future(serve())
            try:
                yield client
            finally:
                serving.cancel()

    return connect


GREETED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "written", "version": "1"},
}
PLACE = {
    "name": "place",
    "inputSchema": {"type": "object", "properties": {}},
    "outputSchema": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
}


@pytest.fixture
def on_a_virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`McpServer.load` runs on a virtual clock: only what never comes takes longer than its limit."""
    monkeypatch.setattr(asyncio, "run", run_virtual)


def answering(call: Any, **others: Any) -> dict[str, Any]:
    return {
        "server/discover": {"resultType": "complete"},
        "initialize": GREETED,
        "tools/list": {"tools": [PLACE]},
        "tools/call": call,
        **others,
    }


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"content": [], "structuredContent": {"at": "a"}}, ProgramFailed, "with what is wrong: .*'a' is not"),
        ({"content": []}, ProgramFailed, "has an output schema but did not return structured content"),
        ({"content": "text"}, ProgramFailed, "with what is wrong: content: Input should be a valid list$"),
        ({"weather": "fine"}, ProgramFailed, "with what is wrong: content: Field required$"),
        (
            {"content": [{"type": "video"}]},
            ProgramFailed,
            r"with what is wrong: content\.0\.",
        ),
        ({"content": [{"type": "text"}]}, ProgramFailed, r"with what is wrong: content\.0\..*text: Field required$"),
        (ValueError("<html>"), ProgramAway, "'place' was waited for 0.2 s"),
        (None, ProgramAway, "'place' was waited for 0.2 s, and the server did not answer .agent.mcp.far.timeout_s"),
        ("ends", ProgramAway, "the server went away during the call of its tool 'place': Connection closed"),
        *(
            (
                ErrorData(code=code, message="no"),
                ProgramFailed,
                "'place' with what is not MCP: no$",
            )
            for code in (PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND)
        ),
    ],
)
@pytest.mark.usefixtures("on_a_virtual_clock")
def test_an_answer_that_is_wrong_fails_the_episode_and_one_that_does_not_come_has_it_run_again(call, error, message):
    loaded = program(in_memory("far", written(answering(call)), timeout_s=0.2))
    with pytest.raises(error, match=f"agent.mcp.far: .*{message}") as failed:
        run_virtual(play(loaded, Script(calling(("place", {})), "x")))
    assert type(failed.value) is error


async def test_what_structured_content_says_is_told_where_there_is_no_text():
    loaded = program(in_memory(make=written(answering({"content": [], "structuredContent": {"at": 3}}))))
    await play(loaded, ask := Script(calling(("place", {})), "x"))
    assert heard(ask) == ['{"at": 3}']


async def test_a_connection_that_does_not_come_in_time_or_is_given_up_is_ended():
    silent = written({"initialize": None})
    late = _McpConnection(McpServerSpec("far", timeout_s=0.05), silent)
    with pytest.raises(Unavailable, match=r"far: it was waited for 0\.05 s"):
        await late.open()
    assert late.holder.done()
    left = _McpConnection(McpServerSpec("far"), silent)
    opening = asyncio.create_task(left.open())
    await asyncio.sleep(0)  # until it waits
    opening.cancel()
    await asyncio.wait({opening, left.holder}, timeout=5)
    assert opening.cancelled() and left.holder.done()


@pytest.mark.usefixtures("on_a_virtual_clock")
def test_after_a_server_has_hung_or_ended_the_next_call_connects_anew():
    fine = {"content": [{"type": "text", "text": "here"}], "structuredContent": {"at": 3}}
    answers = iter([None, "ends", fine])
    loaded = program(in_memory(make=written(answering(lambda: next(answers))), timeout_s=0.2))

    async def calls() -> list[str]:
        for _ in range(2):
            with pytest.raises(ProgramAway):
                await play(loaded, Script(calling(("place", {})), "x"))
        await play(loaded, ask := Script(calling(("place", {})), "x"))
        return heard(ask)

    assert run_virtual(calls()) == ["here"]


@pytest.mark.parametrize(("error", "connections"), [(RuntimeError, 1), (KeyError, 2)])
async def test_what_the_sdk_raises_in_a_call_costs_the_connection_unless_it_found_the_answer_wrong(
    error, connections, monkeypatch
):
    async def raises(*given: Any, **named: Any) -> None:
        raise error("by the SDK")

    made = []

    def make() -> MCPServer:
        made.append(digits())
        return made[-1]

    loaded = program(in_memory(make=make))
    made.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Client, "call_tool", raises)
        with pytest.raises(ProgramFailed, match="by the SDK"):
            await play(loaded, Script(calling(("add", {"a": 1})), "done"))
    await play(loaded, Script(calling(("add", {"a": 1})), "done"))
    assert len(made) == connections


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        (
            {"initialize": None},
            ProgramAway,
            "far: it was waited for 0.2 s, and did not answer",
        ),
        pytest.param(
            {"initialize": ValueError("hello")},
            ProgramAway,
            "did not answer .agent.mcp.far.timeout_s",
            marks=pytest.mark.slow,
        ),
        ({"initialize": {"name": "x"}}, UserCodeError, "cannot connect to it: capabilities: "),
        ({"tools/list": {"tools": "none"}}, UserCodeError, "wrong: tools: "),
        pytest.param(
            {"tools/list": None},
            ProgramAway,
            "list of tools .*0.2 s",
            marks=pytest.mark.slow,
        ),
        (
            {"tools/list": {"tools": [PLACE, PLACE]}},
            UserCodeError,
            "'place' already, of agent.mcp.far",
        ),
        ({"tools/list": {"tools": [PLACE | {"name": "a b"}]}}, UserCodeError, "name 'a b'; expected 1 to 128 of"),
        ({"tools/list": {"tools": []}}, UserCodeError, "has no tools"),
        pytest.param(
            {"tools/list": {"tools": [PLACE], "nextCursor": "1"}},
            UserCodeError,
            "no end: 100 pages",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("on_a_virtual_clock")
def test_what_is_no_server_of_tools_is_refused_before_the_run(others, error, message):
    with pytest.raises(error, match=message):
        program(in_memory("far", written(answering(None, **others)), timeout_s=0.2))


# A server's process


def process(*arguments: str, **more: Any) -> McpServerSpec:
    return McpServerSpec("digits", command=(sys.executable, str(SERVER), *arguments), **more)


@mostly_slow("deaths", [1, 2], quick=[1])
async def test_a_servers_process_is_called_and_started_anew_after_it_died(deaths, monkeypatch):
    """Servers are started two or three times, each of which imports the SDK."""
    monkeypatch.setenv("SECRET", "s3")
    spec = ProgramSpec(mcp=(process(env={"KEY": "it is $SECRET$$"}),))
    assert spec.shown == "tools agent.mcp.digits"
    loaded = spec.load()
    called = calling(("environment", {"name": "KEY"}), ("environment", {"name": "SECRET"}), ("look_up", {"key": "x"}))
    await play(loaded, ask := Script(called, calling(("look_up", {"key": "z"})), "done"))
    assert heard(ask) == ["it is s3$", "not set", "3", "Error: look_up failed: Error executing tool look_up"]
    for _ in range(deaths):
        await play(loaded, ask := Script(calling(("count", {})), "done"))
        assert heard(ask)[0].startswith("1 in ")
        with pytest.raises(ProgramAway, match=r"digits: .*went away .*tool 'die': Conn"):
            await play(loaded, Script(calling(("die", {})), "done"))


def test_commands_that_are_no_servers_are_refused_with_what_they_wrote(caplog):
    """Two are started, one of which is waited for."""
    with pytest.raises(UserCodeError, match=r"cannot connect to false: .*Connection closed"):
        McpServer(McpServerSpec("ends", command=("false",))).load()
    greeting = ("sh", "-c", "echo hello, I am no server; cat > /dev/null")
    with pytest.raises(UserCodeError, match=r"waited for 1 s\b"):
        McpServer(McpServerSpec("chatters", command=greeting, timeout_s=1.0)).load()
    assert [one for one in caplog.records if one.exc_info] == []  # the SDK's tracebacks
    assert "hello, I am no server" in caplog.text
    with pytest.raises(UserCodeError, match=r"agent\.mcp\.no\.command: .*'no-such-server'"):
        McpServer(McpServerSpec("no", command=("no-such-server",))).load()
    with pytest.raises(UserCodeError, match=r"agent\.mcp\.no\.command: .*'python'"):
        McpServer(McpServerSpec("no", command=("python",), env={"PATH": "/nowhere"})).load()
    with pytest.raises(UserCodeError, match=r"agent\.mcp\.no\.env: '\$UNSET'"):
        McpServer(McpServerSpec("no", command=("true",), env={"KEY": "$UNSET"})).load()


def test_files_of_a_command_are_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "server.py").touch()
    monkeypatch.chdir(tmp_path)
    spec = McpServerSpec("x", command=("python", "server.py", "--port", "3")).resolved()
    assert spec.command == ("python", f"{tmp_path}/server.py", "--port", "3")
    assert ProgramSpec(mcp=(spec,), tools=("tools.yaml",)).resolved().tools == (f"{tmp_path}/tools.yaml",)


# Streamable HTTP


async def test_a_server_is_called_over_http_with_the_headers_that_it_wants(monkeypatch):
    """A server of the SDK's, in a thread; before and after it the port is closed."""
    monkeypatch.setenv("KEY", "s3")
    server = digits()
    app, keys = server.streamable_http_app(), []

    async def asks_for_a_key(scope, receive, send):
        if scope["type"] == "http":
            keys.append(dict(scope["headers"]).get(b"authorization"))
        await app(scope, receive, send)

    with served(asks_for_a_key) as address:
        spec = McpServerSpec("far", url=f"http://{address}/mcp", headers={"Authorization": "Bearer $KEY"}, timeout_s=10)
        loaded = await asyncio.to_thread(ProgramSpec(mcp=(spec,)).load)
        await play(loaded, ask := Script(calling(("add", {"a": 1}), ("fail", {})), "done"))
        assert heard(ask) == ["3", "Error: fail failed: the disk is full"]
        assert set(keys) == {b"Bearer s3"}
        page = r"agent.mcp.page: cannot connect to http://.*/elsewhere: MCPError: Not Found$"
        with pytest.raises(UserCodeError, match=page):
            await asyncio.to_thread(McpServer(McpServerSpec("page", url=f"http://{address}/elsewhere")).load)
    with pytest.raises(ProgramAway, match=r"agent.mcp.far: cannot connect to|agent.mcp.far: the server"):
        await play(loaded, Script(calling(("add", {"a": 1})), "done"))
    with pytest.raises(ProgramAway, match=f"agent.mcp.far: cannot connect to http://{address}/mcp: ConnectError"):
        await asyncio.to_thread(McpServer(spec).load)


async def test_tools_of_a_server_stand_beside_the_methods_of_an_environment(environment):
    spec = environment(
        """
        class Game:
            async def reset(self, **row): return " Go."
            async def look(self) -> str:
                '''Look.'''
                return "dark"
            async def get_reward(self): return 1.0
        """
    )
    server = in_memory(tools=("add",))
    server.load()
    loaded = spec.load()
    loaded._tools = Toolbox([server])
    ask = Script(calling(("look", {}), ("add", {"a": 1})), "done")
    end = await play(loaded, ask, start("Play."))
    assert (heard(ask), end.reward) == (["dark", "3"], 1.0)


def named(name: str) -> MCPServer:
    server = MCPServer("named")
    server.add_tool(lambda: 1, name=name, description="Do.")
    return server


def test_a_tool_of_a_server_and_a_method_of_an_environment_have_names_of_their_own(environment):
    loaded = environment("class Game:\n    def reset(self): ...\n    def look(self) -> str:\n        'Look.'").load()
    server = in_memory("two", make=lambda: named("look"))
    server.load()
    loaded._tools = Toolbox([server])
    with pytest.raises(UserCodeError, match=r"game\.py:Game: .*tool named 'look' already, of agent\.mcp\.two"):
        loaded.describe()
