"""A dialect: one form in which clients ask for turns, and are answered.

    wanted = CHAT_COMPLETIONS.read(b'{"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}', texts)
    wanted.request                                  # `TurnRequest`: what the episode is asked for
    CHAT_COMPLETIONS.answer(wanted, turn)           # the body of the answer, from a `MadeTurn`
    list(CHAT_COMPLETIONS.events(wanted, turn))     # the same in pieces, as server-sent events

A dialect translates, and decides nothing: whose turn it is, what sampling holds and what is retried is the endpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.agents.endpoint.turns import MadeTurn
from headway.agents.interface.program_messages import TurnRequest, too_much_ends
from headway.errors import HeadwayError, cut


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
class Wanted:
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


class Dialect(Protocol):
    """One form of requests and answers."""

    path: str
    """Path of its requests: ``/v1/chat/completions``."""
    counts: str | None
    """Path at which only the tokens of a request are counted, if there is one."""

    def read(self, body: bytes, texts: TextCodec) -> Wanted:
        """Read a request's body.

        Raises:
            Refused: it is none; says what was given, and what is expected.
        """

    def answer(self, wanted: Wanted, turn: MadeTurn, id: str) -> dict[str, Any]:
        """Make the answer's body. ``id`` names the turn among all of all episodes: put the dialect's prefix before."""

    def events(self, wanted: Wanted, turn: MadeTurn, id: str) -> Iterator[bytes]:
        """Make the answer as server-sent events."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Make the body of an answer that is an error."""


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
