"""A dialect: one form in which clients ask for turns, and are answered.

    wanted = CHAT_COMPLETIONS.read(b'{"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}', texts)
    wanted.request                                  # `TurnRequest`: what the episode is asked for
    CHAT_COMPLETIONS.answer(wanted, turn)           # the body of the answer, from a `MadeTurn`
    list(CHAT_COMPLETIONS.events(wanted, turn))     # the same in pieces, as server-sent events

A dialect translates, and decides nothing: whose turn it is, what sampling holds and what is retried is the endpoint's.

Messages and tools of all dialects become plain chat messages, which the policy's template takes: a conversation is
the same in any dialect. The run's sampling holds, since training reckons with it (`differences`). A limit such as
``max_tokens`` or ``stop`` changes no distribution, and is the agent's to choose; a ``seed`` has no effect.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.agents.endpoint.turns import MadeTurn
from headway.agents.interface.program_messages import Message, ToolSchema, TurnRequest, too_much_ends
from headway.data.interfaces.rollout import SamplingParams
from headway.errors import HeadwayError, cut, shown


class RequestRefused(HeadwayError):
    """A request that is answered with an error.

    Attributes:
        status: HTTP's status.
        code: a word for programs, such as ``invalid_api_key``.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Text to token ids and back, by the policy's tokenizer: nothing is added, special tokens are shown."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, read."""

    request: TurnRequest
    model: str | None
    """Name of the model that is asked for; None for any."""
    stream: bool
    sampling: Mapping[str, Any]
    """Settings of sampling by their names in vLLM: those that the request has."""
    body: Any
    """The dialect's own, for the answer."""
    texts: TextCodec


class Dialect(ABC):
    """One form of requests and answers."""

    path: str
    """Path of its requests: ``/v1/chat/completions``."""
    counts: str | None = None
    """Path at which only the tokens of a request are counted, if there is one."""

    @abstractmethod
    def read(self, body: bytes, texts: TextCodec) -> ParsedRequest:
        """Read a request's body. Raises `RequestRefused`, which says what was given, and what is expected."""

    @abstractmethod
    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        """Make the answer's body. ``id`` names the turn among all of all episodes: put the dialect's prefix before."""

    @abstractmethod
    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        """Make the answer as server-sent events."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Make the body of an answer that is an error; here as OpenAI's clients read it."""
        return openai_error(status, code, message)


class _SamplingField:
    """Mark of a field that says how to sample, or what else training reckons with."""


Setting = Annotated[Any, _SamplingField]
"""A field that the endpoint does not follow where it asks for something else than the run's
(`requested_sampling.py`)."""


class Body(BaseModel):
    """Fields that requests of several dialects have. What else they have changes no answer, and is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, _SamplingField] = None
    top_p: Annotated[float | None, _SamplingField] = None
    top_k: Annotated[int | None, _SamplingField] = None
    min_p: Annotated[float | None, _SamplingField] = None
    repetition_penalty: Annotated[float | None, _SamplingField] = None
    presence_penalty: Annotated[float | None, _SamplingField] = None
    frequency_penalty: Annotated[float | None, _SamplingField] = None
    logit_bias: Annotated[dict[str, float] | None, _SamplingField] = None
    n: Annotated[int | None, _SamplingField] = None
    best_of: Annotated[int | None, _SamplingField] = None
    min_tokens: Annotated[int | None, _SamplingField] = None
    parallel_tool_calls: Annotated[bool | None, _SamplingField] = None
    ignore_eos: Annotated[bool | None, _SamplingField] = None
    use_beam_search: Annotated[bool | None, _SamplingField] = None
    bad_words: Setting = None
    allowed_token_ids: Setting = None
    structured_outputs: Setting = None
    guided_json: Setting = None
    guided_regex: Setting = None
    guided_choice: Setting = None
    guided_grammar: Setting = None
    prompt_logprobs: Setting = None
    truncate_prompt_tokens: Setting = None
    thinking_token_budget: Setting = None
    logits_processors: Setting = None
    typical_p: Setting = None

    def sampling(self) -> dict[str, Any]:
        """The settings of sampling that the request has."""
        return {name: value for name in _settings(type(self)) if (value := getattr(self, name)) is not None}


@cache
def _settings(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, field in kind.model_fields.items() if _SamplingField in field.metadata)


Positive = Field(default=None, ge=1)
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]

B = TypeVar("B", bound=BaseModel)


def read_body(kind: type[B], body: bytes) -> B:
    """Read a request's body as ``kind``.

    Raises:
        Refused: it is no JSON, or has not the fields; names the first that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] in ("json_invalid", "missing") else f", given {cut(repr(first['input']), 80)}"
        raise RequestRefused(
            400, "invalid_request", f"the request's body: {f'{where}: ' if where else ''}{first['msg']}{given}"
        ) from None


def alternatives(name: str, most: int | None) -> dict[str, Any]:
    """The setting of a request that asks for log-probs of tokens that were not sampled: the most for each that was."""
    return {name: most} if most is not None and most > 1 else {}


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """Make an error as OpenAI's clients read it."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Ends(TypedDict):
    """Fields of a `TurnRequest` that end its turn."""

    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


def ends(stop: str | Sequence[str] | None, token_ids: Sequence[int] | None = None) -> Ends:
    """Read what ends an answer, from fields such as ``stop`` and ``stop_token_ids``; empty strings end nothing.

    Raises:
        Refused: there are too many of them, or one is too long.
    """
    strings = tuple(one for one in ([stop] if isinstance(stop, str) else stop or ()) if one)
    ids = tuple(dict.fromkeys(token_ids or ()))
    if (problem := too_much_ends(strings, ids)) is not None:
        raise RequestRefused(400, "invalid_request", f"the request's body: {problem}")
    return Ends(stop=strings, stop_token_ids=ids)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Make a server-sent event."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def usage(turn: MadeTurn) -> dict[str, int]:
    """Numbers of tokens of a turn, as OpenAI's chat completions and vLLM name them."""
    sampled = len(turn.sampled.ids)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
    }


def openai_events(
    head: dict[str, Any], choices: Iterable[dict[str, Any]], wanted: ParsedRequest, turn: MadeTurn
) -> Iterator[bytes]:
    """Make the stream of an answer as OpenAI and vLLM have it, with the numbers of tokens where they are asked for."""
    for choice in choices:
        yield event({**head, "choices": [choice]})
    if (wanted.body.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(turn)})
    yield b"data: [DONE]\n\n"


def token_logprobs(wanted: ParsedRequest, turn: MadeTurn) -> list[dict[str, Any]]:
    """Log-probs (nats) of the sampled tokens under the policy that sampled them, by their texts."""
    content = []
    for id, logprob in zip(turn.sampled.ids.tolist(), turn.sampled.logprobs.tolist(), strict=True):
        text = wanted.texts.decode([id])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return content


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages, and what templates call them."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field that has it."""


def wrong(where: str, given: Any, expected: str) -> RequestRefused:
    """Make the error for what stands at ``where`` in a request's body."""
    return RequestRefused(400, "invalid_request", f"the request's body: {where} is {shown(given)}; expected {expected}")


def role_of(message: Mapping[str, Any], where: str) -> str:
    """The role of a message, as templates know it. Raises `RequestRefused` for one that there is not."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    return ROLES[role]


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, parts of text, or nothing. Raises `RequestRefused` for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, content, "text, or a list of parts of type text")
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise wrong(f"{where}.{n}", part, "a part of type text: the policy reads text alone, no images or files")
        texts.append(text)
    return "".join(texts)


def name_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The field ``name``, which is text that is not empty. Raises `RequestRefused` for anything else."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", value, "text")
    return value


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Make a tool call of a message. ``arguments``: an object, or JSON text of one."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tools(tools: Iterable[tuple[str, Any, Any, Any]]) -> list[ToolSchema] | None:
    """Make the schemas of tools, each given as where it stands, its name, description and parameters; None of none.

    Raises:
        Refused: one has no name or no schema, or there are two of a name.
    """
    schemas: dict[str, ToolSchema] = {}
    for where, name, description, parameters in tools:
        if not isinstance(name, str) or not name:
            raise wrong(f"{where}.name", name, "the function's name")
        if name in schemas:
            raise RequestRefused(
                400, "invalid_request", f"the request's body: {where}: there is a tool named {name!r} already"
            )
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong(f"{where}.parameters", parameters, 'a JSON schema such as {"type": "object", "properties": {}}')
        schemas[name] = {
            "type": "function",
            "function": {
                "name": name,
                "description": description if isinstance(description, str) else "",
                "parameters": parameters or {"type": "object", "properties": {}},
            },
        }
    return list(schemas.values()) or None


def named(messages: Sequence[Message]) -> list[Message]:
    """Give results of tools the names of their tools, from the calls before them: some templates write these."""
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


_ANY = object()
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": 1,
    "top_logprobs": 0,  # engines tell the log-probs of sampled tokens alone
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "typical_p": 1.0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "verbosity": "medium",
    "text.verbosity": "medium",
    "thinking": "adaptive",  # as the policy likes
    "truncation": "disabled",
    "add_generation_prompt": True,
    "ignore_eos": False,
    "use_beam_search": False,
    "bad_words": [],
}
"""Settings that no run has → the values that change nothing."""


def differences(asked: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """Say of each setting of ``asked`` that is another one than ``sampling``'s what was asked for, and what holds."""
    found = []
    for name, value in asked.items():
        ours = _of_the_run(name, sampling)
        if not (value == ours or (name == "top_k" and {value, ours} <= {-1, 0})):
            held = "not done" if ours is _ANY else f"here {shown(ours)}"
            found.append(f"{name}={shown(value)} ({held})")
    return found


def _of_the_run(name: str, sampling: SamplingParams) -> Any:
    if name == "logit_bias":
        return {str(token): bias for token, bias in sampling.logit_bias}
    if name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"):
        return getattr(sampling, name)
    return _NEUTRAL.get(name, _ANY)
