"""Messages between a program and the worker of its episode: chat messages, tool calls, turns. Plain data that pickles.

worker ──EpisodeStart──▶ program ──TurnRequest──▶ worker ──TurnAnswer──▶ program ··· ──EpisodeEnd──▶ worker
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headway.errors import shown

if TYPE_CHECKING:
    from headway.data.types import SampledTokens

Message = dict[str, Any]
"""Chat message as templates take it: ``role``, ``content``, and perhaps others such as ``tool_calls``."""
MOST_STOPS = 16
"""Maximum number of strings that may end an answer beside the run's own; OpenAI takes 4."""
LONGEST_STOP = 256
"""Maximum number of characters of such a string."""
MOST_STOP_IDS = 128
"""Maximum number of tokens that may end an answer beside the run's own."""
ToolSchema = Mapping[str, Any]
"""A tool as ``transformers.utils.get_json_schema`` describes it."""


def said(role: str, content: str) -> Message:
    """Make a chat message of text."""
    return {"role": role, "content": content}


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Make a tool call for a message. ``arguments``: an object, or its JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_made(content: str, calls: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Message:
    """Make an assistant's message with tool calls, each given as id, name and arguments."""
    made = [tool_call(id, name, dict(arguments)) for id, name, arguments in calls]
    return {**said("assistant", content), "tool_calls": made}


def tool_result(id: str, name: str, content: str) -> Message:
    """Make a message with the result of the call ``id`` of the tool ``name``."""
    return {**said("tool", content), "name": name, "tool_call_id": id}


def with_text(messages: Sequence[Message], text: str, between: str = "") -> list[Message]:
    """Append ``text`` to the last message if it is the user's, after ``between`` if that message is not empty.

    Otherwise the text becomes a user's message. ``messages`` are not changed.
    """
    if not messages or messages[-1].get("role") != "user":
        return [*messages, said("user", text)]
    content = messages[-1].get("content")
    joined: Any = [*content, {"type": "text", "text": text}] if isinstance(content, list) else text
    if isinstance(content, str) and content:
        joined = content + between + text
    return [*messages[:-1], {**messages[-1], "content": joined}]


def message_problem(message: Any) -> str | None:
    """Return what is wrong with a chat message or its content (text, or parts of text); None if nothing is."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f'a chat message is {shown(message)}; expected a dict like {{"role": "user", "content": "…"}}'
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return None
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return (
                f"a chat message of {message['role']} has content {part!r:.80}; expected text, or parts "
                '{"type": "text", "text": "…"}: models read text'
            )
    return None


class CallProblem(StrEnum):
    """The reason why a tool call cannot be made."""

    UNREADABLE = "unreadable"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an answer of the model."""

    id: str
    name: str
    """Name of the tool; may be empty if the call is unreadable."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments by name, as the tool's schema has them; as they were written if there is a problem."""
    problem: CallProblem | None = None
    """Reason why the call cannot be made; None if it can."""
    error: str = ""
    """Message for the model if there is a problem."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access of one episode's agent to the policy over HTTP."""

    base_url: str
    """Address of the endpoint in the form of OpenAI's clients: it ends with ``/v1``."""
    api_key: str = field(repr=False)
    """Key of this attempt at the episode. It is refused once the attempt is over."""
    model: str = "policy"
    """Name of the policy in requests."""
    tokenizer: str = ""
    """Folder of the policy's tokenizer, or its name on the hub, for clients that make token ids themselves."""

    @property
    def tag(self) -> str:
        """Last part of the ids of all answers with this key. It does not reveal the key."""
        return hashlib.blake2b(self.api_key.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The task of one episode, given to its program."""

    name: str
    """Name of the episode in messages: its epoch, row, attempt and k."""
    messages: list[Message]
    """The prompt as chat messages."""
    row: Mapping[str, Any]
    """Columns of the data set's row by name, ``answer`` among them."""
    seed: int
    """Seed of the episode, below 2^32: equal in all attempts, different for each episode of a group."""
    access: Access | None = None
    """Address and key by which an agent reaches the policy; None for other programs, which have a chat."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling of the episode's turns, under names that vLLM also has."""
    most_tokens: int = 0
    """Maximum number of tokens of a conversation, its prompt included."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for programs that render it themselves."""
    text: str | None = None
    """The prompt as text, if the data have text; ``messages`` then has it as the user's message."""

    @property
    def row_seed(self) -> int:
        """Seed of an environment: the row's column ``seed`` if it is valid, so that a group plays the same; else
        `seed`.
        """
        given = self.row.get("seed")
        return given if type(given) is int and given >= 0 else self.seed

    def with_prompt(self) -> dict[str, Any]:
        """Return the row with its prompt: ``prompt``, as in the data, and ``messages``, as chat messages."""
        messages = [dict(message) for message in self.messages]
        return {"prompt": messages if self.text is None else self.text, "messages": messages, **self.row}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A program's request for one turn of the policy: an answer to ``messages``, or a continuation of ``token_ids``."""

    messages: list[Message]
    tools: list[ToolSchema] | None = None
    max_tokens: int | None = None
    """Maximum number of tokens to sample; None for the run's limit, which holds in any case."""
    rewards: tuple[float, ...] = ()
    """Rewards of the turns so far, by the turn's number."""
    token_ids: tuple[int, ...] | None = None
    """Context of the turn, [P], used unchanged; ``messages`` are then empty. None for a turn by messages."""
    stop: tuple[str, ...] = ()
    """Strings that end this turn, beside the run's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end this turn, beside the run's own and those that end every turn."""
    state: str | None = None
    """Name of the state in which the turn is taken; None for the messages since the last answer."""

    @property
    def ends(self) -> tuple[object, ...]:
        """Limits and stops of this turn's own; empty if it has none."""
        own = self.max_tokens, self.stop, self.stop_token_ids
        return own if any(own) else ()


def too_much_ends(stop: Sequence[str], token_ids: Sequence[int]) -> str | None:
    """Return which of the strings or tokens that end a turn are too many or too long; None if none are."""
    longest = max(map(len, stop), default=0)
    if len(stop) > MOST_STOPS or longest > LONGEST_STOP:
        return (
            f"there are {len(stop)} strings that end an answer, the longest of {longest} characters; give at most "
            f"{MOST_STOPS}, each of at most {LONGEST_STOP}"
        )
    if len(token_ids) > MOST_STOP_IDS:
        return f"there are {len(token_ids)} tokens that end an answer (stop_token_ids); give at most {MOST_STOP_IDS}"
    return None


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """One parsed turn of the policy."""

    text: str
    """The whole answer, without the token that ended it."""
    content: str
    """Text without the tool calls."""
    message: Message
    """The answer as the chat message to go on with."""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    """``stop``, or ``length`` if the answer was cut off."""
    error_role: str = "tool"
    """Role of the message that answers an unreadable call."""
    token_ids: tuple[int, ...] = ()
    """Sampled ids, [T], of a turn that was asked for by ids."""
    logprobs: tuple[float, ...] = ()
    """Log-probs (nats) of ``token_ids`` as sampled, [T]."""
    reasoning: str = ""
    """Thinking at the beginning of the answer, without its tags."""
    reply: str | None = None
    """Text without thinking and tool calls; None if it is ``content``."""

    @property
    def with_reasoning_apart(self) -> Message:
        """Return the message with its thinking in ``reasoning_content`` and not in its text, as the endpoint gives
        it.
        """
        if not self.reasoning or "reasoning_content" in self.message:
            return self.message
        content = self.content if self.reply is None else self.reply
        return {**self.message, "content": content, "reasoning_content": self.reasoning}

    def results(self, texts: Sequence[str]) -> list[Message]:
        """Make the messages with the results of the calls, one of ``texts`` for each of `calls`."""
        if "tool_calls" in self.message or self.error_role == "tool":
            pairs = zip(self.calls, texts, strict=True)
            return [tool_result(call.id, call.name or "unknown", text) for call, text in pairs]
        return [said(self.error_role, "\n".join(texts))]


class TurnNote(StrEnum):
    """Kinds of irregular requests of an agent, under their names in metrics."""

    REFUSED = "refused_requests"
    """Requests that were answered with an error."""
    OVERRIDDEN = "overridden_sampling"
    """Requests whose sampling was replaced by the run's."""
    REPEATED = "repeated_requests"
    """Requests that were sent again, and answered with the tokens sampled for the first one."""
    HUNG_UP = "hung_up_requests"
    """Requests whose client did not wait for the answer."""


@dataclass(frozen=True, slots=True)
class MadeTurn:
    """A turn of the policy."""

    number: int
    """Number of the turn among all that this attempt has asked for."""
    answer: TurnAnswer
    prompt_tokens: int
    sampled: SampledTokens
    """The tokens [T] as the engine sampled them."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Result of a program that ended by itself, or after a limit refused its last turn."""

    reward: float | None = None
    """The episode's reward; None if the program gave none."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of turns by turn number, from 0; empty if the program gave none to single turns. They are not in
    ``reward``, which is given in addition."""
    answer_rewards: tuple[float, ...] | Mapping[int, float] | None = None
    """An agent's rewards for its answers: one for each, in the order in which they were asked for, or some by turn
    number. Its episode worker makes ``turn_rewards`` of them."""
    tool_errors: int = 0
    """Number of tool calls that raised."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report, by name."""


def finite(value: Any) -> Any:
    """Copy ``value``, arguments of a call, into values that JSON can hold: 1e999 is read as infinity, which it
    lacks.
    """
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """Facts about a program that are known before its first episode."""

    is_async: bool
    """True if the program shares an event loop with others; else it blocks, and needs a separate process."""
    tools: tuple[ToolSchema, ...] = ()
    """Schemas of the tools that are known before the first episode."""
    gives_reward: bool | None = None
    """True if the program gives rewards; None if this is unknown before its episodes end."""
    columns: tuple[str, ...] = ()
    """Columns that every row of the data must have."""
