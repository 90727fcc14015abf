"""Tokens of one episode: the contexts of its turns, and the sampled tokens.

    TurnRequest ─▶ EpisodeTokens.prompt ─▶ TurnContext (ids, key) ─▶ a call ─▶ EpisodeTokens.answered ─▶ TurnAnswer
                        │                                                                └──▶ rows to train on
                        └ messages, tool results among them, become ids in `Conversations.prompt`

    [context 1][sampled 1][tail][sampled 2]        one row: turn 2 continues all of it
    [context 1][samp][another tail][sampled 3]     a further row: turn 3 forks where its ids differ

A turn continues a row if its context begins with all tokens of the row; otherwise it begins a new row. Each sampled
token is trained exactly once, in the row that its turn continues or begins; in all other rows it is context.

Shape suffixes: P tokens of a context, T sampled tokens of one call, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.agents.chat.chat_messages import message_key, plain_messages, reasoning_of, split_thinking, untagged
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.chat.conversations import ChatPrompt, Conversations
from headway.agents.chat.tool_call_formats import HARMONY_MARK, harmony
from headway.agents.chat.tool_calls import AUTO, ToolParser, choose_parser
from headway.agents.interface.program_messages import TurnAnswer, TurnRequest, said
from headway.data.interfaces.rollout import Completion
from headway.data.types import FinishReason, RowAt, RowTokens, SampledTokens, TurnSpan
from headway.errors import RunError
from headway.runtime.task_groups import off_loop


@dataclass(frozen=True, slots=True)
class TurnContext:
    """The context of one turn."""

    ids: NDArray[np.int32]
    """[P] the token ids to call the policy with."""
    key: int
    """Key of the call within its episode: never 0, and equal each time that the program is run."""
    chat: Any = None
    """Data beside the ids that `EpisodeTokens.answered` needs."""
    state: int | None = None
    """Key of the state in which the turn is taken (`headway.data.types.TurnSpan`); None: made of the ids."""
    opened: str = ""
    """Tag of the thought in which the context ends; empty for none."""


class EpisodeTokens(Protocol):
    """Tokens of one episode, as its worker uses them."""

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> TurnContext:
        """Make the context of the turn that ``request`` asks for. Nothing is stored.

        Long texts are encoded in a thread. The context continues the turns that were answered before this call.

        ``taken``: keys of other turns' calls. A repeated context with the same limits and stops gets its first free
        key.

        Raises:
            HeadwayError: ``messages`` are no chat messages, or the template refuses them.
        """

    def answered(self, prompted: TurnContext, request: TurnRequest, finished: Completion, number: int) -> TurnAnswer:
        """Store the result of a call as turn ``number`` of the episode, and parse it for the program."""

    def rows(self) -> Sequence[RowTokens | RowAt]:
        """Return the rows to train on; only their lengths if tokens are simulated."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the episode, by name."""


class Chats:
    """The chat template and the tool parser of a run, shared by its episodes."""

    def __init__(self, renderer: ChatRenderer, parser: str = AUTO) -> None:
        """``parser``: name of the tool-call parser, ``agent.tool_parser``; it is looked up at the first tool."""
        self.renderer = renderer
        self._choice = parser
        self._others: dict[str, Chats] = {}
        """Further template variables → the chats with them."""

    @cached_property
    def parser(self) -> ToolParser:
        """The parser of tool calls.

        Raises:
            ConfigError: the template does not show tools, or no parser reads its calls.
        """
        self.renderer.demand_tools()
        return choose_parser(self.renderer, self._choice)

    def with_options(self, options: Mapping[str, Any] | None) -> Chats:
        """Return the chats whose template gets ``options`` on top of the run's variables."""
        if not options:
            return self
        key = repr(sorted(options.items()))
        if key not in self._others:
            self._others[key] = Chats(self.renderer.with_options(options), self._choice)
        return self._others[key]

    def new_episode(self, options: Mapping[str, Any] | None = None) -> ChatEpisodeTokens:
        """Begin an episode. Its template gets ``options`` on top of the run's variables."""
        return ChatEpisodeTokens(self.with_options(options))


class ChatEpisodeTokens:
    """`EpisodeTokens` of chat messages, by a tokenizer's template. Sampled tokens are kept as they are."""

    def __init__(self, run: Chats) -> None:
        self._run = run
        self._chats = Conversations(run.renderer)
        self._rows = TokenRows()
        self._calls = 0
        self._problems = 0

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> TurnContext:
        """See `EpisodeTokens.prompt`."""
        size = sum(len(str(one.get("content"))) for one in request.messages)  # text, or a list of parts
        return await off_loop(size, self.context, request, taken)

    def context(self, request: TurnRequest, taken: Container[int] = ()) -> TurnContext:
        """Make a context like `prompt`, without a thread. Raises as `EpisodeTokens.prompt`."""
        if request.token_ids is not None:
            ids = self._run.renderer.checked(request.token_ids)
            return TurnContext(ids, call_key(ids, taken, request.ends))
        if request.tools:
            self._run.parser  # noqa: B018 - raises before the call, not after it
        chat = self._chats.prompt(request.messages, request.tools)
        return TurnContext(chat.ids, call_key(chat.ids, taken, request.ends), chat, _state(request), chat.opened)

    def answered(self, prompted: TurnContext, request: TurnRequest, finished: Completion, number: int) -> TurnAnswer:
        """See `EpisodeTokens.answered`."""
        chat, tokens = prompted.chat, finished.tokens
        if tokens is None:
            raise RunError("a chat needs tokens, and this engine only simulates them")
        self._rows.add(prompted.ids, tokens, number, prompted.state)
        renderer = self._run.renderer
        text = renderer.text_before(tokens.ids, request.stop, request.stop_token_ids)
        finish_reason = "stop" if finished.finish_reason is FinishReason.STOP else "length"
        if chat is None:
            return TurnAnswer(
                text,
                text,
                said("assistant", text),
                finish_reason=finish_reason,
                token_ids=tuple(tokens.ids.tolist()),
                logprobs=tuple(tokens.logprobs.tolist()),
            )
        assert isinstance(chat, ChatPrompt)
        if request.tools:
            answer = self._run.parser.parse(text, request.tools, self._calls)
            answer = replace(answer, error_role=renderer.error_role)
        elif HARMONY_MARK in text:  # gpt-oss's template refuses channels in a message
            written = harmony(text)
            answer = TurnAnswer(text, written.content, said("assistant", written.content), reasoning=written.reasoning)
            answer = replace(answer, message=answer.with_reasoning_apart)
        else:
            answer = TurnAnswer(text, text, said("assistant", text))
        self._calls += len(answer.calls)
        self._problems += sum(call.problem is not None for call in answer.calls)
        answer = replace(_with_reasoning(answer, renderer), finish_reason=finish_reason)
        self._chats.answered(chat, tokens.ids, answer.message, answer.with_reasoning_apart)
        return answer

    def rows(self) -> list[RowTokens]:
        """See `EpisodeTokens.rows`."""
        return self._rows.rows()

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of forks, and of tool calls that could not be made."""
        return {"forks": self._rows.forks, "tool_call_problems": self._problems}


def _with_reasoning(answer: TurnAnswer, renderer: ChatRenderer) -> TurnAnswer:
    """Split the thinking off ``answer``, unless its parser has done so."""
    if reasoning := reasoning_of(answer.message):
        return replace(answer, reasoning=reasoning)
    thinking, rest = split_thinking(answer.content, renderer.generation_prompt)
    return replace(answer, reasoning=untagged(thinking), reply=rest.strip()) if thinking else answer


def _state(request: TurnRequest) -> int:
    """Return the key of a turn's state: the state that its program names, or the messages since the last answer.

    It depends on texts, not on ids: a template may rewrite the past at each turn, and tool calls have numbered ids.
    """
    if request.state is not None:
        return state_key(request.state.encode(errors="surrogatepass"))
    messages = request.messages
    new = next((n for n in range(len(messages), 0, -1) if messages[n - 1].get("role") == "assistant"), 0)
    told = plain_messages(messages[new:] or messages)
    texts = [message_key({name: value for name, value in one.items() if name != "tool_call_id"}) for one in told]
    return state_key("\n".join(texts).encode(errors="surrogatepass"))


def spans_of(calls: Sequence[Completion]) -> list[list[int]]:
    """Return ``[[start, version], …]`` of the tokens of consecutive calls."""
    spans: list[list[int]] = []
    offset = 0
    for call in calls:
        for start, version in call.version_spans:
            if not spans or spans[-1][1] != version:
                spans.append([offset + start, version])
        offset += call.length
    return spans


NO_VERSION = -1
"""Version of tokens that are not trained in a row."""


@dataclass(slots=True, eq=False)
class _GrowingRow:
    """A row that later turns may continue."""

    ids: NDArray[np.int32]
    """[L] all tokens that the policy read and wrote."""
    turns: list[tuple[TurnSpan, SampledTokens]] = field(default_factory=list)


class TokenRows:
    """One episode's turns, and the rows to train on. Not safe for threads.

    Example:
        >>> def sampled(*ids):
        ...     n = len(ids)
        ...     return SampledTokens(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
        >>> tokens = TokenRows()
        >>> tokens.add([1, 2], sampled(3)), tokens.add([1, 2, 3, 4], sampled(5)), tokens.add([1, 9], sampled(6))
        (False, True, False)
        >>> [row.ids[row.loss_mask].tolist() for row in tokens.rows()]  # the third turn forks
        [[3, 5], [6]]
    """

    def __init__(self) -> None:
        self._rows: list[_GrowingRow] = []
        self.turns = 0
        """Number of turns."""

    @property
    def forks(self) -> int:
        """Number of turns after the first one that continued no row. Each further conversation counts as one."""
        return max(0, len(self._rows) - 1)

    def add(
        self,
        context: Sequence[int] | NDArray[np.int32],
        tokens: SampledTokens,
        number: int | None = None,
        state: int | None = None,
    ) -> bool:
        """Add a turn: ``tokens`` [T], sampled after ``context`` [P]. Returns whether it continues a row.

        Args:
            number: the turn's number in its episode; None: the number of turns added so far.
            state: key of the state that the turn was taken in (`state_key`); None: made of the ids that ``context``
                adds to the row.
        """
        ids = np.asarray(context, np.int32)
        begun = [row for row in self._rows if np.array_equal(row.ids, ids[: len(row.ids)])]
        # The longest matching row: it leaves the fewest ids as context of this turn alone.
        row = max(begun, key=lambda row: len(row.ids), default=None)
        continues, known = row is not None, 0 if row is None else len(row.ids)
        if row is None:
            row = _GrowingRow(ids)
            self._rows.append(row)
        row.ids = np.concatenate([ids, np.asarray(tokens.ids, np.int32)])
        number = self.turns if number is None else number
        state = state_key(ids[known:].tobytes()) if state is None else state
        row.turns.append((TurnSpan(number, len(ids), len(row.ids), state), tokens))
        self.turns += 1
        return continues

    def rows(self) -> list[RowTokens]:
        """Return the rows to train on. The tokens before a row's first trained one are its prompt.

        Turns are numbered anew, without gaps. A row in which no token was sampled is left out.
        """
        numbers = sorted(turn.number for row in self._rows for turn, _ in row.turns)
        places = {number: place for place, number in enumerate(numbers)}
        return [_row(row, places) for row in self._rows if any(len(tokens.ids) for _, tokens in row.turns)]


def _row(row: _GrowingRow, places: Mapping[int, int]) -> RowTokens:
    first = row.turns[0][0].start
    n = len(row.ids) - first
    mask, logprobs, versions = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, NO_VERSION, np.int32)
    turns = []
    for turn, tokens in row.turns:
        turns.append(turn._replace(number=places[turn.number], start=turn.start - first, stop=turn.stop - first))
        here = slice(turn.start - first, turn.stop - first)
        mask[here], logprobs[here], versions[here] = True, tokens.logprobs, tokens.versions
    return RowTokens(row.ids[:first], row.ids[first:], logprobs, versions, mask, tuple(turns))


def call_key(
    context: Sequence[int] | NDArray[np.int32], taken: Container[int] = (), ends: tuple[object, ...] = ()
) -> int:
    """Return the key of a call with the context [P]: 64 bits, never 0, equal in all processes and on all machines.

    A context has a series of keys; each further call with it takes the first one that is not in ``taken``. ``ends``:
    limits and stops of this call's own (`TurnRequest.ends`).
    """
    # Byte order and width are fixed: other processes and machines have to get the same key.
    whole = xxhash.xxh3_64(np.asarray(context, "<i4").tobytes())
    if ends:
        whole.update(repr(ends).encode(errors="surrogatepass"))
    return next(key for occurrence in count() if (key := _key(whole, occurrence)) not in taken)


def _key(context: xxhash.xxh3_64, occurrence: int) -> int:
    digest = context.copy()  # a copy: the next occurrence begins from ``context``, too
    digest.update(occurrence.to_bytes(8, "little"))
    return digest.intdigest() or 1  # 0 is the first call's


def state_key(said: bytes) -> int:
    """Return the key of the state that ``said`` describes: 64 bits with a sign, equal on all machines."""
    return int.from_bytes(xxhash.xxh3_64_digest(said), "big", signed=True)
