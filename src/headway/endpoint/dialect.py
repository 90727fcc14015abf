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
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.endpoint.turns import MadeTurn
from headway.errors import HeadwayError, cut
from headway.programs.messages import TurnRequest


class Refused(HeadwayError):
    """A request that is answered with an error.

    Attributes:
        status: HTTP's status.
        code: a word for programs, such as ``invalid_api_key``.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Texts:
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
    texts: Texts


class Dialect(Protocol):
    """One form of requests and answers."""

    path: str
    """Path of its requests: ``/v1/chat/completions``."""
    counts: str | None
    """Path at which only the tokens of a request are counted, if there is one."""

    def read(self, body: bytes, texts: Texts) -> Wanted:
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


class Body(BaseModel):
    """Fields that requests of several dialects have. What else they have is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    best_of: int | None = None
    min_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def sampling(self) -> dict[str, Any]:
        """The settings of sampling that the request has."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "n", "best_of", "min_tokens", "parallel_tool_calls", "ignore_eos", "use_beam_search", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
Positive = Field(default=None, ge=1)
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
MOST_STOPS = 16
"""Most strings that may end an answer; OpenAI takes 4."""
LONGEST_STOP = 256
"""Most characters of one of them."""

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
        raise Refused(
            400, "invalid_request", f"the request's body: {f'{where}: ' if where else ''}{first['msg']}{given}"
        ) from None


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """Make an error as OpenAI's clients read it."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The strings that end an answer, from a field such as ``stop``; empty ones end nothing.

    Raises:
        Refused: there are more than `MOST_STOPS`, or one is longer than `LONGEST_STOP`: all are looked for at each
            token.
    """
    found = tuple(one for one in ([stop] if isinstance(stop, str) else stop or ()) if one)
    longest = max(map(len, found), default=0)
    if len(found) > MOST_STOPS or longest > LONGEST_STOP:
        raise Refused(
            400,
            "invalid_request",
            f"the request's body: there are {len(found)} strings that end an answer, the longest of {longest} "
            f"characters; give at most {MOST_STOPS}, each of at most {LONGEST_STOP}",
        )
    return found
