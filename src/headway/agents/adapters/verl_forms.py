"""Agent loops in verl's form: ``run(sampling_params, **row)`` over token ids, without verl.

class Loop:                                                    # as verl's AgentLoopBase is made: what it takes, by name
    def __init__(self, trainer_config, server_manager, tokenizer, **kwargs): ...
    async def run(self, sampling_params, **row):
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        said = await self.server_manager.generate(request_id="0", prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=ids, response_ids=said.token_ids, response_mask=[1] * len(said.token_ids), …)

Training uses the turns that ``generate`` made, with the engine's own log-probs and versions. Of the output only the
reward and the numbers are used. The tokens that it marks as sampled are checked against the turns.

Tools in the form of verl: objects with ``create``, ``execute``, ``calc_reward`` and ``release``.

class Checks:                                            # or a subclass of verl's BaseTool, unchanged
    def __init__(self, config, tool_schema): ...
    async def create(self, instance_id, **create_kwargs): return instance_id, None
    async def execute(self, instance_id, parameters, **kwargs): return "right", 1.0, {}
    async def calc_reward(self, instance_id, **kwargs): return 0.5
    async def release(self, instance_id, **kwargs): ...

Follows verl's ``tools/base_tool.py``, ``tools/schemas.py`` and ``experimental/agent_loop/tool_agent_loop.py`` of
January 2026, which make an instance for each call, and its earlier rollouts, which make one for each episode, as here.
Only ``execute`` is required. Nothing of verl is imported.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headway.agents.interface.program_chat import Chat, Program
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart
from headway.agents.interface.tool import OpenToolbox, Tool, ToolResult
from headway.agents.interface.user_calls import are_coroutines, called, close_quietly, failing, number
from headway.errors import ProgramFailed, UserCodeError, boundary, shown
from headway.runtime.user_code import Parameters, load_object, names_a_file

EXPECTED = (
    "expected an object with verl's fields prompt_ids, response_ids, response_mask and reward_score, or a list of these"
)


@dataclass(slots=True)
class TokenOutput:
    """The tokens of one turn, with the fields of verl's class of that name."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """verl's ``server_manager`` of one episode: its turns are the episode's."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.sampled: list[int] = []
        """All sampled tokens, in the order in which turns ended."""

    async def generate(
        self,
        request_id: Any = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Let the policy continue ``prompt_ids`` [P]. Of ``sampling_params`` only limits apply: ``max_tokens`` (or
        ``max_new_tokens``), ``stop`` and ``stop_token_ids``; the distribution is the run's.

        Raises:
            EpisodeOver: a limit has ended the episode.
            ProgramFailed: there are images or videos, or the stops are too many or too long.
        """
        if image_data or video_data:
            raise ProgramFailed("server_manager.generate() was given images or videos, and the policy reads text alone")
        asked = dict(sampling_params or {})
        stop = asked.get("stop") or ()
        answer = await self._chat.continued(
            [int(id) for id in prompt_ids],
            max_tokens=asked.get("max_tokens") or asked.get("max_new_tokens"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(dict.fromkeys(int(id) for id in asked.get("stop_token_ids") or ())),
        )
        self.sampled += answer.token_ids
        reason = "completed" if answer.finish_reason == "stop" else "length"
        return TokenOutput(list(answer.token_ids), list(answer.logprobs), stop_reason=reason)


class VerlLoop(Program):
    """An agent loop in verl's form. Each episode has a new object of the class."""

    def __init__(
        self, found: Any, who: str, params: Mapping[str, Any], model_path: str | None, prompt_length: int
    ) -> None:
        """Make the program of the loop ``found``, a class.

        Args:
            model_path: folder of the policy's tokenizer; None if the model does not exist yet.
            prompt_length: maximum number of tokens of a prompt.
        """
        self._found, self.who, self._params, self._prompt_length = found, who, dict(params), prompt_length
        run = found.run
        if not inspect.iscoroutinefunction(run):
            raise UserCodeError(
                f"{who}: its run() is a plain function; write async def run(self, sampling_params, **row)"
            )
        if not inspect.isclass(found):
            raise UserCodeError(f"{who}: it is an object, which episodes cannot share; name its class")
        self._tokenizer = None if model_path is None else _tokenizer(model_path)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        manager = ServerManager(chat)
        messages = [dict(message) for message in start.messages]
        output = await self._made(manager, start).run(dict(start.sampling), **{"raw_prompt": messages, **start.row})
        outputs = output if isinstance(output, list | tuple) else [output]
        if not outputs:
            raise ProgramFailed(f"{self.who}: run() returned {shown(output)}, {EXPECTED}")
        for one in outputs:
            self._check(one, manager.sampled)
        scores = [score for one in outputs if (score := _field(one, "reward_score")) is not None]
        return EpisodeEnd(
            reward=number(scores[-1], f"{self.who}: reward_score") if scores else None,
            metrics={name: value for one in outputs for name, value in _numbers(_field(one, "metrics"))},
        )

    def _made(self, manager: ServerManager, start: EpisodeStart) -> Any:
        config = _config(self._prompt_length, start.most_tokens, start.template_kwargs)
        given = {
            "trainer_config": SimpleNamespace(config=config),
            "config": config,
            "server_manager": manager,
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": None,
            "data_config": SimpleNamespace(config=config.data),
        }
        loop = self._found(**Parameters.of(self._found).given(given), **self._params)
        for name in ("server_manager", "tokenizer"):
            if not hasattr(loop, name):
                setattr(loop, name, given[name])
        return loop

    def _check(self, output: Any, sampled: Sequence[int]) -> None:
        """Check that ``output`` has verl's fields, and that the tokens with mask 1 were sampled, in this order."""
        ids, mask = _field(output, "response_ids"), _field(output, "response_mask")
        if ids is None or mask is None or len(ids) != len(mask):
            raise ProgramFailed(f"{self.who}: run() returned {shown(output)}, {EXPECTED}")
        left = iter(sampled)
        for at, (id, is_sampled) in enumerate(zip(ids, mask, strict=True)):
            if is_sampled and int(id) not in left:  # `in` also consumes the earlier tokens of `left`
                raise ProgramFailed(
                    f"{self.who}: response_mask is 1 at token {at} of response_ids ({int(id)}), which was not "
                    "sampled there; give the ids that server_manager.generate() returned, and mask 0 for all others"
                )


def is_verl_loop(found: Any) -> bool:
    """Tell whether ``found`` is an agent loop in verl's form: its ``run`` takes ``sampling_params`` first."""
    run = getattr(found, "run", None)
    return callable(run) and Parameters.of(run).order[:1] == ("sampling_params",)


def _config(prompt_length: int, most_tokens: int, template_kwargs: Mapping[str, Any]) -> Any:
    """Return the parts of verl's configuration that agent loops read, as far as they apply here.

    verl's response is everything after the prompt, in all turns, with the tools' results.
    """
    from omegaconf import OmegaConf

    response_length = most_tokens - prompt_length
    lengths = {"prompt_length": prompt_length, "response_length": response_length, "max_model_len": most_tokens}
    rollout = {**lengths, "multi_turn": {}, "agent": {}}
    model = {"path": None}
    data = {"apply_chat_template_kwargs": dict(template_kwargs), "max_prompt_length": prompt_length}
    data["max_response_length"] = response_length
    both = {"rollout": rollout, "model": model}
    return OmegaConf.create({"actor_rollout_ref": both, **both, "data": data})


def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _numbers(metrics: Any) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of ``metrics`` by name. Other values, which have no mean, are left out."""
    dump: Callable[[], Any] | None = getattr(metrics, "model_dump", None)
    plain = metrics if isinstance(metrics, Mapping) else dump() if dump is not None else {}
    for name, value in plain.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield str(name), float(value)


EXPECTED_SCHEMA = (
    'expected a tool_schema {"type": "function", "function": {"name": …, "description": …, "parameters": …}}: an '
    "attribute of the object, what its get_openai_tool_schema() returns, or a key of verl's tools.yaml"
)
RETURNS = "expected (text or a ToolResponse, the step's reward or None, a dict)"


class Attributes(dict[str, Any]):
    """A tool's schema as verl gives it to constructors: ``schema.function.name``, ``schema.model_dump()``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _attributes(self[name])
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the schema as a plain dict."""
        return dict(self)


class VerlTool:
    """A tool object in verl's form. It serves all episodes of its process, each by an instance id."""

    gives_reward = True

    def __init__(self, of: Any, who: str) -> None:
        """Make the tool of the object ``of``, called ``who`` in messages. Raises `UserCodeError` without a schema."""
        self.object, self.who = of, who
        schema = _schema_of(of, who)
        self.name: str = schema["function"]["name"]
        # All four methods: any of them that blocks holds the event loop.
        methods = [getattr(of, name, None) for name in ("create", "execute", "calc_reward", "release")]
        blocks = not are_coroutines(*[method for method in methods if method is not None])
        self.tools: Sequence[Tool] = (Tool(self.name, schema, of.execute, blocks=blocks, origin=who),)

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[OpenToolbox]:
        instance = _Instance(self, _kwargs_of(start.row, self.name))
        try:
            yield OpenToolbox(instance.tools, instance.end)
        finally:
            await close_quietly(instance.close)


class _Instance:
    """The instance of a tool for one episode, made before its first call."""

    def __init__(self, tool: VerlTool, kwargs: Mapping[str, Any]) -> None:
        self._tool, self._kwargs = tool, kwargs
        self._id: str | None = None
        self._making = asyncio.Lock()
        self._metrics: dict[str, float] = {}
        self.tools = (replace(tool.tools[0], function=self._execute),)

    async def _execute(self, /, **parameters: Any) -> ToolResult:
        async with self._making:  # calls of one answer run side by side
            if self._id is None:
                self._id = await self._create()
        more = self._given("execute_kwargs")
        value = await called(self._tool.object.execute, self._id, parameters, **more)
        who = f"{self._tool.who}: execute()"
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise ProgramFailed(f"{who} returned {shown(value)}, {RETURNS}")
        response, reward, metrics = value
        for name, one in metrics.items() if isinstance(metrics, Mapping) else ():
            if isinstance(one, bool | int | float) or hasattr(one, "dtype"):
                self._metrics[name] = self._metrics.get(name, 0.0) + number(one, f"{who}: its metric {name}")
        step = None if reward is None else number(reward, f"{who}: the reward of the step")
        return ToolResult(_text_of(response, who), reward=step)

    async def _create(self) -> str:
        id, create = uuid.uuid4().hex, getattr(self._tool.object, "create", None)
        if create is None:
            return id
        kwargs = self._given("create_kwargs")
        takes = Parameters.of(create)
        # verl's tools take these as single arguments, all in create_kwargs, or either way.
        if kwargs and ("create_kwargs" in takes.named or takes.takes_all):
            kwargs = takes.given({**kwargs, "create_kwargs": dict(kwargs)})
        with failing(f"{self._tool.who}: create()"):
            value = await called(create, id, **kwargs)
        given = value[0] if isinstance(value, tuple) and value else value
        return given if isinstance(given, str) and given else id

    async def end(self) -> EpisodeEnd:
        calc_reward = getattr(self._tool.object, "calc_reward", None)
        if self._id is None:  # never called: its reward is 0, and its methods need no call
            return EpisodeEnd(reward=0.0)
        if calc_reward is None:
            return EpisodeEnd(metrics=self._metrics)
        with failing(f"{self._tool.who}: calc_reward()"):
            value = await called(calc_reward, self._id, **self._given("calc_reward_kwargs"))
        if value is None or (isinstance(value, str | list | tuple | dict) and not value):  # no reward
            return EpisodeEnd(metrics=self._metrics)
        return EpisodeEnd(number(value, f"{self._tool.who}: what calc_reward() returned"), metrics=self._metrics)

    async def close(self) -> None:
        release = getattr(self._tool.object, "release", None)
        if self._id is not None and release is not None:
            await called(release, self._id, **self._given("release_kwargs"))

    def _given(self, name: str) -> dict[str, Any]:
        """Return the arguments ``name``, such as ``create_kwargs``, that the row has for this tool."""
        given = self._kwargs.get(name) or {}
        if not isinstance(given, Mapping):
            raise ProgramFailed(f"{self._tool.who}: the row has {shown(given)} for its {name}, expected a dict")
        return dict(given)


def is_tool_object(found: Any) -> bool:
    """Tell whether ``found``, a class or an object, is a tool in verl's form."""
    return callable(getattr(found, "execute", None)) and not inspect.isfunction(found)


def make_verl_tool(
    found: Any, who: str, config: Mapping[str, Any] | None = None, schema: Mapping[str, Any] | None = None
) -> VerlTool:
    """Return the tool of a class, constructed as verl does it, or of an object; ``who`` names it in messages.

    Raises:
        UserCodeError: the constructor raises, or there is no schema.
    """
    if not inspect.isclass(found):
        return VerlTool(found, who)
    arguments = {"config": dict(config or {}), "tool_schema": None if schema is None else _attributes(schema)}
    arguments = Parameters.of(found).given(arguments)  # a class without verl's base may take no arguments
    with boundary(f"{who}: making it, as {found.__name__}(config={{…}}, tool_schema=…)", UserCodeError):
        made: Any = found(**arguments)
    if schema is not None and getattr(made, "tool_schema", None) is None:
        made.tool_schema = _attributes(schema)
    return VerlTool(made, who)


def load_tool_config(path: str) -> list[VerlTool]:
    """Return the tools of verl's ``tools.yaml``: ``tools: [{class_name, config, tool_schema}]``.

    Raises:
        UserCodeError: the file cannot be read or has another form; a class is not found or cannot be made.
    """
    from omegaconf import OmegaConf  # as verl reads it, with its interpolations

    with boundary(f"agent.tools: {path} cannot be read", UserCodeError):
        read = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    entries = read.get("tools") if isinstance(read, dict) else None
    expected = "expected verl's form: tools: [{class_name: package.module.Class, config: {…}, tool_schema: {…}}]"
    if not isinstance(entries, list) or not entries:
        raise UserCodeError(f"agent.tools: {path} has no list of tools; {expected}")
    tools = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise UserCodeError(f"agent.tools: {path} has the entry {shown(entry)}; {expected}")
        config, who = entry.get("config") or {}, f"{Path(path).name}: {entry['class_name']}"
        if isinstance(config, dict) and config.get("type") == "mcp":
            raise UserCodeError(f"{who}: config.type=mcp; name the server in agent.mcp instead")
        found = _class_of(entry["class_name"], Path(path), who)
        if not is_tool_object(found):
            raise UserCodeError(f"{who}: it has no execute(), as a tool of verl's has")
        tools.append(make_verl_tool(found, who, config, entry.get("tool_schema")))
    return tools


def _class_of(name: str, path: Path, who: str) -> Any:
    if names_a_file(name):
        file = Path(name.rpartition(":")[0])
        return load_object(name if file.is_absolute() else f"{path.parent / file}:{name.rpartition(':')[2]}")
    module, _, of = name.rpartition(".")
    for folder in (path.parent.resolve(), Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # at the end: a file there must not hide an installed package
    with boundary(f"{who} cannot be imported; install its package, or write file.py:Class", UserCodeError):
        return getattr(importlib.import_module(module), of)


def _schema_of(of: Any, who: str) -> dict[str, Any]:
    """Return a tool's schema as plain data, without unset fields, as verl shows it to models."""
    schema = getattr(of, "tool_schema", None)
    if schema is None and callable(getattr(of, "get_openai_tool_schema", None)):
        with boundary(f"{who}: get_openai_tool_schema()", UserCodeError):
            schema = of.get_openai_tool_schema()
    if callable(getattr(schema, "model_dump", None)):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)  # type: ignore[union-attr]  # checked above
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserCodeError(f"{who}: its schema is {shown(schema)}; {EXPECTED_SCHEMA}")
    return {"type": "function", **dict(schema or {})}


def _kwargs_of(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the row's ``tools_kwargs[NAME]``, from the column ``tools_kwargs`` or from ``extra_info``."""
    extra = row.get("extra_info")
    given = row.get("tools_kwargs") or (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None)
    mine = given.get(name) if isinstance(given, Mapping) else None
    return mine if isinstance(mine, Mapping) else {}


def _text_of(response: Any, who: str) -> str:
    if isinstance(response, str):
        return response
    parts = response if isinstance(response, Mapping) else getattr(response, "__dict__", {})
    for kind in ("image", "video"):
        if parts.get(kind):
            raise ProgramFailed(f"{who} returned an {kind}, and Headway trains models of text alone")
    text = parts.get("text", getattr(response, "text", response))
    if text is None or isinstance(text, str):
        return text or ""
    raise ProgramFailed(f"{who} returned {shown(response)} for the model, {RETURNS}")


def _attributes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Attributes(value)
    return [_attributes(one) for one in value] if isinstance(value, list) else value
