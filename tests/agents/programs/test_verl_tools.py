"""Tools in verl's form: made as verl makes them, one instance for each episode, with their rewards, and released."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.program_loader import ProgramSpec, load_tools
from headway.agents.interface.program_chat import Program
from headway.agents.interface.tool import Toolbox
from headway.errors import ProgramAway, ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, calling, play, start

CHECKS = '''
import json
from pydantic import BaseModel

LOG = []

class Function(BaseModel):
    name: str
    description: str
    parameters: dict = {}
    strict: bool = False

class Schema(BaseModel):
    type: str
    function: Function

class Response(BaseModel):
    text: str | None = None
    image: list | None = None

class BaseTool:
    """As verl's own: it looks into the schema, and prints it."""

    def __init__(self, config: dict, tool_schema):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name
        print(json.dumps(self.tool_schema.model_dump(exclude_unset=True, exclude_none=True), indent=2))

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        return instance_id, Response()

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        pass

class Checks(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.answers, self.said = {}, {}

    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
        return Schema(type="function", function=Function(name="check", description="Check.", parameters=parameters))

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        assert kwargs in ({}, {"create_kwargs": {"ground_truth": ground_truth}}), kwargs
        self.answers[instance_id], self.said[instance_id] = ground_truth, []
        LOG.append("create")
        return instance_id, Response()

    async def execute(self, instance_id, parameters, scale=1.0, **kwargs):
        if parameters["answer"] == "raise":
            raise ValueError("no number")
        right = parameters["answer"] == self.answers[instance_id]
        self.said[instance_id].append(right)
        text = f"{right} {self.config.get('unit', '')}".strip()
        return Response(text=text), right * scale, {"checks": 1, "note": "x"}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.5 * any(self.said[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.answers[instance_id], self.said[instance_id]
        LOG.append("release")

AN_OBJECT = Checks({"unit": "m"})
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "checks.py"
    path.write_text(CHECKS)
    return path


def for_tool(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"index": 3, "tools_kwargs": {name: kwargs, "another": None}}}


def load(*specs: str) -> Program:
    return ProgramSpec(tools=specs).load()


def log_of(loaded: Program) -> list[str]:
    [tool] = loaded._tools._given
    return type(tool.object).execute.__globals__["LOG"]


@pytest.mark.parametrize(("name", "unit"), [("Checks", ""), ("AN_OBJECT", " m")])
async def test_a_tool_of_verls_serves_each_episode_by_an_instance_and_rewards_turns_and_episode(file, name, unit):
    loaded = load(f"{file}:{name}")
    described = loaded.describe()
    assert (described.is_async, described.gives_reward) == (True, None)
    assert described.tools[0]["function"] == {
        "name": "check",
        "description": "Check.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    }
    row = for_tool("check", create_kwargs={"ground_truth": "7"}, execute_kwargs={"scale": 2.0})
    for _ in range(2):
        ask = Script(
            calling(("check", {"answer": "3"})),
            calling(("check", {"answer": "7"}), ("check", {"answer": "7"}), ("check", {"answer": "raise"})),
            "7",
        )
        end = await play(loaded, ask, start(**row))
        assert [content for role, content in ask.last if role == "tool"] == [
            f"False{unit}",
            f"True{unit}",
            f"True{unit}",
            "Error: check failed: ValueError: no number",
        ]
        assert (end.reward, end.turn_rewards, end.tool_errors) == (0.5, (0.0, 4.0, 0.0), 1)
        assert end.metrics == {"checks": 3.0}
    assert log_of(loaded) == ["create", "release"] * 2


async def test_calls_of_one_answer_make_one_instance_and_an_episode_without_calls_makes_none(file):
    loaded = load(f"{file}:Checks")
    row = for_tool("check", create_kwargs={"ground_truth": "7"})
    await play(loaded, Script(calling(*[("check", {"answer": "7"})] * 3), "done"), start(**row))
    assert log_of(loaded) == ["create", "release"]
    end = await play(loaded, Script("7"), start(**row))
    assert (end.reward, end.turn_rewards, log_of(loaded)) == (0.0, (), ["create", "release"])


async def test_an_instance_is_released_whatever_ends_its_episode(file):
    loaded = load(f"{file}:Checks")
    once = calling(("check", {"answer": "7"}))
    end = await play(
        loaded, Script(once, limit="turns"), start(tools_kwargs={"check": {"create_kwargs": {"ground_truth": "7"}}})
    )
    assert (end.reward, end.turn_rewards) == (0.5, (1.0,)), "a limit leaves the rewards"
    with pytest.raises(ProgramFailed):
        await play(loaded, Script(once, lambda request: 1 / 0))
    never = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def ask(request: Any) -> Any:
        if len(request.messages) > 1:
            asked.set()
            await never
        return once

    episode = asyncio.ensure_future(loaded.serve(start(), ask))
    await asked.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert log_of(loaded) == ["create", "release"] * 3


CONFIG = """
tools:
  - class_name: "checks.Checks"
    config: {type: native, unit: m}
    tool_schema:
      type: "function"
      function:
        name: "judge"
        description: "Judge."
        parameters: {type: "object", properties: {answer: {type: "string"}}, required: ["answer"]}
  - class_name: "checks.py:Checks"
    config: {unit: "${tools.0.config.unit}m"}
"""


async def test_verls_tool_config_is_read_with_its_schemas(file):
    config = file.with_name("tools.yaml")
    config.write_text(CONFIG)
    loaded = load(str(config))
    assert loaded.who == "tools tools.yaml"
    schemas = [tool["function"] for tool in loaded.describe().tools]
    assert [schema["name"] for schema in schemas] == ["judge", "check"]
    assert schemas[0]["description"] == "Judge."
    assert type(schemas[0]["parameters"]["properties"]) is dict
    json.dumps(schemas)
    ask = Script(calling(("judge", {"answer": "7"}), ("check", {"answer": "7"})), "done")
    await play(loaded, ask, start(**for_tool("judge", create_kwargs={"ground_truth": "7"})))
    assert [content for role, content in ask.last if role == "tool"] == ["True m", "False mm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: 3", "tools.yaml has no list of tools"),
        ("tools: [checks.Checks]", "tools.yaml has the entry 'checks.Checks'"),
        ("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]", "Gsm8kTool cannot be imported"),
        ("tools: [{class_name: checks.Nobody}]", "tools.yaml: checks.Nobody cannot be imported; .*Nobody"),
        (
            "tools: [{class_name: checks.Schema}]",
            r"tools\.yaml: checks\.Schema: .*no execute\(\)",
        ),
        (
            "tools: [{class_name: checks.Checks, config: {type: mcp}}]",
            "config.type=mcp; name the server in agent.mcp",
        ),
        (
            "tools: [{class_name: checks.Checks}, {class_name: checks.Checks}]",
            "'check' already, of tools.yaml: checks.Checks",
        ),
        ("tools: [", "tools.yaml cannot be read: "),
    ],
)
def test_a_tool_config_that_cannot_be_used_is_refused_with_the_reason(file, text, message):
    config = file.with_name("tools.yaml")
    config.write_text(text)
    with pytest.raises(UserCodeError, match=message):
        Toolbox(load_tools([str(config)]))


SMALL = """
    SCHEMA = {"type": "function", "function": {"name": "go", "description": "Go.", "parameters": {"type": "object"}}}

    class Small:
        tool_schema = SCHEMA
        def execute(self, instance_id, parameters):
            return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "'text'",
            r"tools\.py:Small: execute\(\) returned 'text', expected \(.*ToolResponse",
        ),
        ("('text', 'much', {})", r"reward of the step is 'much'"),
        ("(3, 0.0, {})", r"execute\(\) returned 3 for the model"),
        ("({'image': [1]}, 0.0, {})", r"execute\(\) returned an image"),
        ("('text', 0.0, {'x': float('nan')})", r"its metric x is nan"),
    ],
)
async def test_what_a_tool_returns_that_it_must_not_fails_the_episode(tools, returned, message):
    with pytest.raises(ProgramFailed, match=message):
        await play(tools(SMALL.replace("RETURNED", returned), "Small"), Script(calling(("go", {})), "done"))


@pytest.mark.parametrize(
    ("returned", "text"), [("'é', None, None", "é"), ("{'text': 'a'}, 1, {}", "a"), ("None, 0, {}", "")]
)
async def test_execute_alone_is_a_tool_and_a_blocking_one_may_run_a_loop_of_its_own(tools, returned, text):
    code = SMALL.replace(
        "return RETURNED", f"__import__('asyncio').run(__import__('asyncio').sleep(0)); return {returned}"
    )
    loaded = tools(code, "Small").load()
    assert not loaded.is_async
    end = await play(loaded, ask := Script(calling(("go", {})), "done"))
    assert ask.last[-1] == ("tool", text)
    assert end.reward is None


@pytest.mark.parametrize(
    ("create", "kwargs", "message"),
    [
        ("instance_id, image", {}, r"create\(\) raised TypeError: .*'image'"),
        ("instance_id, create_kwargs=None", {"image": "x"}, None),
        ("instance_id, image, **more", {"image": "x"}, None),
        ("instance_id, **kwargs", {"image": "x"}, None),
        ("instance_id, image", {"image": "x"}, None),
    ],
)
async def test_create_is_given_what_the_row_has_for_it(tools, create, kwargs, message):
    code = SMALL.replace("RETURNED", "self.seen, None, None") + (
        f"        def create(self, {create}):\n"
        "            known = {k: v for k, v in locals().items() if k not in ('self', 'instance_id')}\n"
        "            self.seen = 'x' if 'x' in str(known) else 'nothing'\n"
    )
    episode = play(
        tools(code, "Small"), ask := Script(calling(("go", {})), "done"), start(**for_tool("go", create_kwargs=kwargs))
    )
    if message is None:
        await episode
        assert ask.last[-1] == ("tool", "x")
    else:
        with pytest.raises(ProgramFailed, match=message):
            await episode


async def test_a_reward_that_is_none_is_left_out_and_a_peer_that_is_away_has_the_episode_run_again(tools):
    code = (
        SMALL.replace("RETURNED", "'', None, None")
        + """
    class Empty(Small):
        def calc_reward(self, id): return []
    class Wrong(Small):
        def calc_reward(self, id): return "much"
    class Far(Small):
        def create(self, id): raise ConnectionError("no route")
    """
    )
    names = {name: tools(code, name) for name in ("Empty", "Wrong", "Far")}
    assert (await play(names["Empty"], Script(calling(("go", {})), "done"))).reward is None
    with pytest.raises(ProgramFailed, match=r"calc_reward\(\) returned is 'much'"):
        await play(names["Wrong"], Script(calling(("go", {})), "done"))
    with pytest.raises(ProgramAway, match=r"tools.py:Far: create\(\) raised ConnectionError: no route"):
        await play(names["Far"], Script(calling(("go", {})), "done"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tool_schema = None", "its schema is None; expected a tool_schema"),
        ("def __init__(self, config, tool_schema): raise KeyError('url')", "making it, as .*: KeyError: 'url'"),
        ("tool_schema = {'function': {}}", "its schema is {'function': {}}; expected a tool_schema"),
    ],
)
def test_a_class_that_cannot_be_made_or_has_no_schema_is_refused(tools, body, message):
    code = f"""
    class Broken:
        {body}
        def execute(self, instance_id, parameters): ...
    """
    with pytest.raises(UserCodeError, match=rf"tools.py:Broken: {message}"):
        tools(code, "Broken").load()
