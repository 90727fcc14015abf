"""Dialect: one form in which clients ask for turns and get answers.

    wanted = CHAT_COMPLETIONS.read(b'{"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}', texts)
    wanted.request                                  # `TurnRequest`: what the episode is asked for
    CHAT_COMPLETIONS.answer(wanted, turn)           # the body of the answer, from a `MadeTurn`
    list(CHAT_COMPLETIONS.events(wanted, turn))     # the same in pieces, as server-sent events

A dialect only translates. The endpoint decides whose turn it is, which sampling holds and what is retried.

Messages and tools of all dialects become plain chat messages for the policy's template: a conversation is the same in
any dialect. The run's sampling holds, since training relies on it (`differences`). The agent may choose limits such as
``max_tokens`` or ``stop``, which change no distribution; a ``seed`` has no effect.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.agents.interface.program_messages import (
    MadeTurn,
    Message,
    ToolSchema,
    TurnNote,
    TurnRequest,
    finite,
    too_much_ends,
)
from headway.data.interfaces.rollout import SamplingParams
from headway.errors import HeadwayError, cut, shown


class RequestRefused(HeadwayError):
    """Error for a refused request; it becomes the answer.

    Attributes:
        status: HTTP's status.
        code: a word for programs, such as ``invalid_api_key``.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Text to token ids and back, by the policy's tokenizer: ids get its start (BOS), text shows special tokens."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request."""

    request: TurnRequest
    sampling: Mapping[str, Any]
    """vLLM's name of a sampling setting → its value in the request."""
    body: Any
    """The dialect's own data, for the answer."""
    texts: TextCodec


class Turns(Protocol):
    """One attempt at an episode, from which the endpoint gets turns."""

    name: str
    """Name of the episode in messages."""
    sampling: SamplingParams
    """Sampling of all its turns. A request cannot change it."""
    trains: bool
    """True if the episode is trained on, so that its samples must follow the run's distribution."""

    async def turn(self, request: TurnRequest) -> MadeTurn:
        """Let the policy make a turn. Cancelling gives the turn up; the same request later gets the same turn.

        Raises:
            EpisodeOver: a limit has ended the episode.
            UserError: the request cannot be used; says why.
        """

    async def count(self, request: TurnRequest) -> int:
        """Return the number of tokens of the context that the turn would have. No turn is made.

        Raises:
            UserError: the request cannot be used; says why.
        """

    def note(self, kind: TurnNote, reason: str) -> None:
        """Count a request that was not followed as sent, with the reason."""


TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class Body(BaseModel):
    """Fields that several dialects' requests have. Others are ignored, except those in `SETTINGS`."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    tools: list[dict[str, Any]] | None = None


B = TypeVar("B", bound=Body)


class Dialect(ABC):
    """One form of requests and answers."""

    path: str
    """Path of its requests: ``/v1/chat/completions``."""
    counts: str | None = None
    """Path at which only the tokens of a request are counted; None if there is none."""
    body: type[Body]
    """Form of its requests."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Field of requests that is not supported → what is expected in its place."""

    def read(self, body: bytes, texts: TextCodec) -> ParsedRequest:
        """Read a request's body. Raises `RequestRefused`, which says what was given, and what is expected."""
        asked = _read_body(self.body, body)
        given = dict(asked)
        for name, expected in self.refused.items():
            if given.get(name):
                raise wrong(name, given[name], expected)
        params = self.params(asked)
        stop = tuple(one for one in ([params.stop] if isinstance(params.stop, str) else params.stop or ()) if one)
        stop_ids = tuple(dict.fromkeys(params.stop_token_ids or ()))
        if (problem := too_much_ends(stop, stop_ids)) is not None:
            raise bad_body(problem)
        tools = _function_tools(asked.tools or ())
        request = TurnRequest(
            _named(self.messages(asked)),
            None if _type_of(given.get("tool_choice")) == "none" else tools,
            params.max_tokens,
            token_ids=self.token_ids(asked, texts),
            stop=stop,
            stop_token_ids=stop_ids,
        )
        return ParsedRequest(request, _settings(dict(params)), asked, texts)

    def params(self, asked: Any) -> Body:
        """Return the part of a request with its limits and its sampling."""
        return asked  # type: ignore[no-any-return]  # a `body`

    def messages(self, asked: Any) -> list[Message]:
        """Return the chat messages of a request."""
        return []

    def token_ids(self, asked: Any, texts: TextCodec) -> tuple[int, ...] | None:
        """Return the context of a request without chat messages."""
        return None

    @abstractmethod
    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        """Make the answer's body. ``id`` is unique among the turns of all episodes; put the dialect's prefix before
        it.
        """

    @abstractmethod
    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        """Make the answer as server-sent events."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Make the body of an error; here in the form of OpenAI's clients."""
        return openai_error(status, code, message)


def _read_body(kind: type[B], body: bytes) -> B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] in ("json_invalid", "missing") else f", given {cut(repr(first['input']), 80)}"
        raise bad_body(f"{f'{where}: ' if where else ''}{first['msg']}{given}") from None


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """Make an error in the form of OpenAI's clients."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Make a server-sent event."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def usage(turn: MadeTurn) -> dict[str, int]:
    """Return a turn's numbers of tokens, under the names of OpenAI's chat completions and vLLM."""
    sampled = len(turn.sampled.ids)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
    }


def token_logprobs(wanted: ParsedRequest, turn: MadeTurn) -> list[dict[str, Any]]:
    """Return log-probs (nats) of the sampled tokens under the policy that sampled them, with the tokens' texts."""
    content = []
    for id, logprob in zip(turn.sampled.ids.tolist(), turn.sampled.logprobs.tolist(), strict=True):
        text = wanted.texts.decode([id])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return content


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of a message → its name in templates."""
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text part → the field with the text."""


def bad_body(problem: str, code: str = "invalid_request") -> RequestRefused:
    """Make the error for a request's body that has a ``problem``."""
    return RequestRefused(400, code, f"the request's body: {problem}")


def wrong(where: str, given: Any, expected: str) -> RequestRefused:
    """Make the error for the value at ``where`` in a request's body."""
    return bad_body(f"{where} is {shown(given)}; expected {expected}")


def role_of(message: Mapping[str, Any], where: str) -> str:
    """Return the role of a message, as templates name it. Raises `RequestRefused` for an unknown role."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    return ROLES[role]


def text_of(content: Any, where: str, texts: Mapping[str, str] = TEXTS) -> str:
    """Return the text of a message's content: text, parts of the types of ``texts``, or nothing.

    Raises `RequestRefused` for anything else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, content, "text, or a list of parts of type text")
    found = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(texts[kind]) if isinstance(kind, str) and kind in texts else None
        if not isinstance(text, str):
            raise wrong(f"{where}.{n}", part, "a part of type text: the policy reads text alone, no images or files")
        found.append(text)
    return "".join(found)


def name_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return the field ``name``, a text that is not empty. Raises `RequestRefused` for anything else."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", value, "text")
    return value


def made_calls(turn: MadeTurn) -> list[tuple[str, str, Any]]:
    """Return id, name and arguments of each tool call of a turn, as JSON can have them."""
    calls = [(one["id"], one["function"]) for one in turn.answer.message.get("tool_calls", ())]
    # Infinity is not JSON: clients could not read such a call, and it was not recognised when sent back.
    return [(id, function["name"], finite(function["arguments"])) for id, function in calls]


def _function_tools(tools: Sequence[Mapping[str, Any]]) -> list[ToolSchema] | None:
    """Return the schemas of tools in any dialect's form; None if there are none."""
    schemas: dict[str, ToolSchema] = {}
    for n, tool in enumerate(tools):
        where, function = f"tools.{n}", tool.get("function", tool)
        kinds = (None, "function", "custom") if "input_schema" in tool else (None, "function")
        if tool.get("type") not in kinds or not isinstance(function, dict):
            raise wrong(where, tool, "a function with a name and parameters: there are no tools of the server here")
        name = name_of(function, "name", where)
        if name in schemas:
            raise bad_body(f"{where}: there is a tool named {name!r} already")
        parameters = function.get("parameters", function.get("input_schema"))
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong(f"{where}.parameters", parameters, 'a JSON schema such as {"type": "object", "properties": {}}')
        schemas[name] = {
            "type": "function",
            "function": {
                "name": name,
                "description": text if isinstance(text := function.get("description"), str) else "",
                "parameters": parameters or {"type": "object", "properties": {}},
            },
        }
    return list(schemas.values()) or None


def _named(messages: Sequence[Message]) -> list[Message]:
    """Add to results of tools the names of their tools, from the calls before them: some templates write these."""
    names: dict[Any, str] = {}
    result = []
    for message in messages:
        for one in message.get("tool_calls", ()):
            names[one["id"]] = one["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            result.append({**message, "name": names[message["tool_call_id"]]})
        else:
            result.append(message)
    return result


_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "logit_bias")
_NOT_DONE = (
    *("reasoning_effort", "reasoning.effort", "output_config.effort", "thinking_token_budget"),
    *("output_format", "output_config.format", "structured_outputs", "logits_processors", "allowed_token_ids"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_logprobs", "truncate_prompt_tokens"),
    *("audio", "web_search_options", "chat_template", "documents", "context_management", "container"),
)
SETTINGS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys((*_OF_THE_RUN, *_NOT_DONE), ()),
    "n": (1,),
    "best_of": (1,),
    "logprobs": (0, 1),
    "top_logprobs": (0,),  # engines tell the log-probs of sampled tokens alone
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "typical_p": (1,),
    "tool_choice": ("auto", "none"),
    "tool_choice.disable_parallel_tool_use": (False,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "text.verbosity": ("medium",),
    "text.format": ("text",),
    "response_format": ("text",),
    "thinking": ("adaptive",),  # as the policy likes
    "truncation": ("disabled",),
    "add_generation_prompt": (True,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
}
"""Field that affects sampling, or anything else that training relies on → the values that change nothing."""


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request that may change something."""
    found = {}
    for name, neutral in SETTINGS.items():
        value: Any = given
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        value = _type_of(value)
        if value is not None and value not in neutral:
            found[name] = value
    return found


def _type_of(value: Any) -> Any:
    return value["type"] if isinstance(value, Mapping) and "type" in value else value


def differences(asked: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """Return a text for each setting of ``asked`` that differs from ``sampling``: what was asked for, and what
    holds.
    """
    found = []
    for name, value in asked.items():
        if name not in _OF_THE_RUN:
            held = f"here {shown(SETTINGS[name][0])}" if SETTINGS[name] else "not done"
            found.append(f"{name}={shown(value)} ({held})")
            continue
        ours: Any = getattr(sampling, name)
        if name == "logit_bias":
            ours = {str(token): bias for token, bias in ours}
        if value != ours and not (name == "top_k" and value in (-1, 0) and ours in (-1, 0)):
            found.append(f"{name}={shown(value)} (here {shown(ours)})")
    return found
