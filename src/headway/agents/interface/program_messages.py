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
"""A chat message as templates take it: ``role``, ``content``, and perhaps ``tool_calls`` and others."""
MOST_STOPS = 16
"""Most strings that may end an answer beside the run's own; OpenAI takes 4."""
LONGEST_STOP = 256
"""Most characters of one of them."""
MOST_STOP_IDS = 128
"""Most tokens that may end an answer beside the run's own."""
ToolSchema = Mapping[str, Any]
"""A tool as ``transformers.utils.get_json_schema`` describes it."""


def said(role: str, content: str) -> Message:
    """Make a message of text."""
    return {"role": role, "content": content}


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Make a tool call of a message. ``arguments``: an object, or JSON text of one."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_made(content: str, calls: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Message:
    """Make an assistant's message with tool calls, each of an id, a name and arguments."""
    made = [tool_call(id, name, dict(arguments)) for id, name, arguments in calls]
    return {**said("assistant", content), "tool_calls": made}


def tool_result(id: str, name: str, content: str) -> Message:
    """Make a message with the result of the call ``id`` of the tool ``name``."""
    return {**said("tool", content), "name": name, "tool_call_id": id}


def with_text(messages: Sequence[Message], text: str, between: str = "") -> list[Message]:
    """Append ``text`` to the last message where that is the user's, behind ``between`` if it says something already.

    Else the text is a user's message of its own. ``messages`` are left as they are.
    """
    if not messages or messages[-1].get("role") != "user":
        return [*messages, said("user", text)]
    content = messages[-1].get("content")
    joined: Any = [*content, {"type": "text", "text": text}] if isinstance(content, list) else text
    if isinstance(content, str) and content:
        joined = content + between + text
    return [*messages[:-1], {**messages[-1], "content": joined}]


def message_problem(message: Any) -> str | None:
    """Say what is wrong with a chat message, or with its content, which is text or parts of text. None for nothing."""
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
    """The tool's name; may be empty where the call is unreadable."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments by name, as the tool's schema has them; where there is a problem, as they were written."""
    problem: CallProblem | None = None
    """The reason why the call cannot be made; None where it can."""
    error: str = ""
    """Message for the model where there is a problem."""


@dataclass(frozen=True, slots=True)
class Access:
    """The way of one episode's agent to the policy, over HTTP."""

    base_url: str
    """Address of the endpoint as OpenAI's clients take it: it ends with ``/v1``."""
    api_key: str = field(repr=False)
    """Key of this attempt at the episode. It is refused once the attempt is over."""
    model: str = "policy"
    """Name under which the policy is asked for."""
    tokenizer: str = ""
    """Folder of the policy's tokenizer, or its name on the hub, for clients that make token ids themselves."""

    @property
    def tag(self) -> str:
        """The end of the ids of all answers with this key, which does not tell the key."""
        return hashlib.blake2b(self.api_key.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The task of one episode, given to its program."""

    name: str
    """Name of the episode in messages for people: its epoch, row, attempt and k."""
    messages: list[Message]
    """The prompt as chat messages."""
    row: Mapping[str, Any]
    """Columns of the data set's row by name, ``answer`` among them."""
    seed: int
    """Seed of the episode, below 2^32: the same at every try, another one for each episode of a group."""
    access: Access | None = None
    """Address and key by which an agent reaches the policy; None for other programs, which have a chat."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling of the episode's turns, by names that vLLM has, too."""
    most_tokens: int = 0
    """Most tokens of a conversation, its prompt included."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for programs that render it themselves."""
    text: str | None = None
    """The prompt as text, if the data have text; ``messages`` then has it as the user's message."""

    @property
    def row_seed(self) -> int:
        """Seed of an environment: the row's column ``seed`` where it is one, so that all of a group play the same."""
        given = self.row.get("seed")
        return given if type(given) is int and given >= 0 else self.seed

    def with_prompt(self) -> dict[str, Any]:
        """The row with its prompt: as the data have it, ``prompt``, and as chat messages, ``messages``."""
        messages = [dict(message) for message in self.messages]
        return {"prompt": messages if self.text is None else self.text, "messages": messages, **self.row}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A program's request for one turn of the policy: what answers ``messages``, or continues ``token_ids``."""

    messages: list[Message]
    tools: list[ToolSchema] | None = None
    max_tokens: int | None = None
    """Most tokens to sample; None for what the run allows, which is the bound in any case."""
    rewards: tuple[float, ...] = ()
    """Rewards of the turns so far, by the turn's number."""
    token_ids: tuple[int, ...] | None = None
    """The context of the turn [P] as it is, in place of ``messages``, which are empty then."""
    stop: tuple[str, ...] = ()
    """Strings that end this turn, beside the run's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end this turn, beside the run's own and those that end every turn."""
    state: str | None = None
    """Name of the state that the turn is taken in; None for what the policy is told since its last answer."""

    @property
    def ends(self) -> tuple[object, ...]:
        """The limits and stops that are this turn's own; empty where it has none."""
        own = self.max_tokens, self.stop, self.stop_token_ids
        return own if any(own) else ()


def too_much_ends(stop: Sequence[str], token_ids: Sequence[int]) -> str | None:
    """Say what is too much of the strings and tokens that are to end a turn, which are looked for at each token."""
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
    """One turn of the policy, read."""

    text: str
    """All of the answer, without the token that ended it."""
    content: str
    """Text beside the tool calls."""
    message: Message
    """The answer as the chat message to go on with."""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    """``stop``, or ``length`` where the answer was cut off."""
    error_role: str = "tool"
    """Role of the message that answers a call which cannot be read."""
    token_ids: tuple[int, ...] = ()
    """The sampled ids [T], of a turn that was asked for by ids."""
    logprobs: tuple[float, ...] = ()
    """Their log-probs (nats) as sampled [T]."""
    reasoning: str = ""
    """The thinking that the answer begins with, without its tags."""
    reply: str | None = None
    """Text beside thinking and tool calls; None where that is ``content``."""

    @property
    def with_reasoning_apart(self) -> Message:
        """The message with its thinking in ``reasoning_content``, out of its text, as the endpoint gives it."""
        if not self.reasoning or "reasoning_content" in self.message:
            return self.message
        content = self.content if self.reply is None else self.reply
        return {**self.message, "content": content, "reasoning_content": self.reasoning}

    def results(self, texts: Sequence[str]) -> list[Message]:
        """Make the messages that tell the model what came of its calls, one of ``texts`` for each of `calls`."""
        if "tool_calls" in self.message or self.error_role == "tool":
            pairs = zip(self.calls, texts, strict=True)
            return [tool_result(call.id, call.name or "unknown", text) for call, text in pairs]
        return [said(self.error_role, "\n".join(texts))]


class TurnNote(StrEnum):
    """Irregular requests of an agent, counted in metrics by these names."""

    REFUSED = "refused_requests"
    """Requests that were answered with an error."""
    OVERRIDDEN = "overridden_sampling"
    """Requests whose sampling was replaced by the run's."""
    REPEATED = "repeated_requests"
    """Requests that were asked again, and answered with what was sampled for the first one."""
    HUNG_UP = "hung_up_requests"
    """Requests whose client did not wait for the answer."""


@dataclass(frozen=True, slots=True)
class MadeTurn:
    """A turn of the policy."""

    number: int
    """Number of the turn among all that this try has asked for."""
    answer: TurnAnswer
    prompt_tokens: int
    sampled: SampledTokens
    """The tokens [T] as the engine sampled them."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The result of a program that has ended by itself, or after its last turn was refused for a limit."""

    reward: float | None = None
    """The episode's reward; None where the program gave none."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of turns by the turn's number, from 0; empty where the program gave none to single turns. They are not
    in ``reward``: where there are both, the reward is given on top."""
    answer_rewards: tuple[float, ...] | Mapping[int, float] | None = None
    """An agent's rewards of its answers: one for each, in the order in which they were asked for, or some by the turn's
    number. Its episode worker makes ``turn_rewards`` of them."""
    tool_errors: int = 0
    """Number of calls of tools that raised."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report, by name."""


def finite(value: Any) -> Any:
    """Copy ``value``, arguments of a call, as JSON can have it, which has no infinity: 1e999 is read as one."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """The facts of a program that are known before its first episode."""

    is_async: bool
    """True where the program shares an event loop with others; else it blocks, and needs a separate process."""
    tools: tuple[ToolSchema, ...] = ()
    """Schemas of the tools that are known beforehand."""
    gives_reward: bool | None = None
    """True where the program gives rewards; None where only its episodes tell."""
    columns: tuple[str, ...] = ()
    """Columns that every row of the data has to have."""
