"""Conversations as rows of tokens. Only the assistant's tokens are trained.

rows of files and datasets    ─▶ `SftExamples`      (``headway sft``)
a task and its own solutions  ─▶ `solutions`      ┐
a function of the user's      ─▶ `demonstrations` ┴   (``model.warmup``, without end, never a held-out prompt)

Given conversations become rows by the same code as episodes:

messages ─▶ for each answer: its context ─▶ its ids, as the template writes it ─▶ ChatEpisodeTokens.answered ─▶ rows
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.chat.chat_messages import plain_messages
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.interface.program_messages import Message, ToolSchema, TurnRequest
from headway.config.schema import Config, TaskConfig
from headway.config.sections.model_section import GiveUpConfig, WarmupConfig
from headway.data.files import Messages, Record, Row, checked_prompt, read_chat, without_nulls
from headway.data.interfaces.rollout import Completion
from headway.data.tasks import COLLISION_TRIES, make_task
from headway.data.tokenize import LeftOut, LeftOutRows, PromptTokenizer, Reason, template_kwargs, tools_of
from headway.data.types import FinishReason, RowTokens, SampledTokens
from headway.errors import ConfigError, DataError, UserCodeError, boundary, shown
from headway.runtime.user_code import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def demonstrated(
    chats: Chats, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None = None
) -> list[RowTokens]:
    """Make the rows of a conversation, as if each answer in ``messages`` had been sampled with its end-of-turn token.

    ``tools``: tools that every turn offers.

    Raises:
        UserCodeError: ``messages`` are not chat messages, or no message after the first is an answer.
        DataError: the template refuses the messages, or does not write an answer after its prompt.
        ConfigError: the template does not end answers with one of the tokenizer's end-of-turn tokens.
    """
    chat, episode = plain_messages(messages), chats.new_episode()
    answers = [at for at, message in enumerate(chat) if message["role"] == "assistant" and at > 0]
    if not answers:
        roles = ", ".join(str(message["role"]) for message in chat)
        raise UserCodeError(f"there is nothing to learn from messages of {roles}: no answer of role assistant follows")
    for number, at in enumerate(answers):
        request = TurnRequest(chat[:at], list(tools) if tools else None)
        prompted = episode.context(request)
        ids = _answer_ids(chats.renderer, chat[: at + 1], tools)
        # Placeholders: the loss of supervised steps uses neither log-probs nor versions
        tokens = SampledTokens(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
        finished = Completion(at, len(ids), [[0, 0]], FinishReason.STOP, 0.0, 0.0, tokens)
        episode.answered(prompted, request, finished, number)
    return episode.rows()


def _answer_ids(
    renderer: ChatRenderer, chat: Sequence[Message], tools: Sequence[ToolSchema] | None
) -> NDArray[np.int32]:
    """Return the ids [T] of the last message of ``chat``, an answer, up to its end-of-turn token."""
    opening = renderer.render(chat[:-1], tools)
    text = renderer.render(chat, tools, generation_prompt=False)
    if not text.startswith(opening):
        raise DataError(
            f"the chat template writes {text!r}, which does not begin with the prompt of its last answer, {opening!r}; "
            "answers are learned as they are asked for, so use a template that writes them behind their prompt"
        )
    ids = renderer.encode(text[len(opening) :])
    ends = [n for n, id in enumerate(ids.tolist()) if id in renderer.end_ids]
    if not ends:
        raise ConfigError(
            f"the chat template writes an answer as {text[len(opening) :]!r}, without a token that ends it; let it end "
            "answers with {{ eos_token }}"
        )
    # Without the template's text after that token, such as a line break: a sampled answer ends with the token.
    return ids[: ends[0] + 1]


Example = tuple[RowTokens, ...]
"""Rows of one conversation: one, or several if the chat template changes earlier messages."""

CHATS = ("messages", "conversations")
"""Columns of whole conversations; the second is ShareGPT's."""
COMPLETIONS = ("completion", "response", "output")
"""Columns of completions with ``sft.completion_key=auto``."""


@dataclass(frozen=True, slots=True)
class SftConversation:
    """One row of data: chat messages, or a text prompt and its completion."""

    where: str
    """Place that the row was read from: file and line or row, or data set, split and row."""
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[ToolSchema] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's own variables of the chat template."""
    text: tuple[str, str] | None = None
    """Prompt and completion as text without a chat template; None for chat messages."""


class SftExamples:
    """Rows of a data set as examples. Rows that cannot be used are left out and counted by reason.

    Example:
        data = SftExamples(rows, config, tokenizer, chats)
        examples = data.examples([4, 0, 2])             # examples of at most three rows
        data.left_out.counts                            # {"a": {"too_long": 1}}
    """

    def __init__(
        self, rows: Sequence[Row], config: Config, tokenizer: PreTrainedTokenizerBase, chats: Chats | None
    ) -> None:
        """Read the rows' columns. ``chats``: renderer of chats; None if the tokenizer has no chat template.

        Raises:
            DataError: there are no rows, or more than ``data.max_bad_rows`` of them have no conversation.
        """
        self._tokenizer, self._chats, self._source = tokenizer, chats, config.data.label
        data = config.data
        self._longest = config.sft.max_length or data.max_prompt_length + data.max_response_length
        self._prompts = PromptTokenizer(tokenizer, data.chat_template, self._longest, kwargs=data.chat_template_kwargs)
        self._read, self._max_bad_rows = len(rows), data.max_bad_rows
        self.left_out = LeftOutRows()
        """Rows left out so far, counted by reason."""
        self._met: set[str] = set()
        """Places of the rows that were left out so far."""
        completions = COMPLETIONS if config.sft.completion_key == "auto" else (config.sft.completion_key,)
        self._rows: list[SftConversation] = []
        for where, row in rows:
            try:
                self._rows.append(_conversation(where, row, data.prompt_key, completions, data.chat_template))
            except DataError as cause:
                self._leave_out(LeftOut(Reason.CONVERSATION, self._source, f"{where}: {cause}"), where)
        self.left_out.check(self._read, self._max_bad_rows)
        if not self._rows:
            raise DataError(f"{self._source}: there are no rows to learn from")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_text(self) -> bool:
        """True if some rows are plain text without a chat template."""
        return any(row.text is not None for row in self._rows)

    def examples(self, indices: Iterable[int]) -> list[Example]:
        """Return the examples of these rows. Rows that cannot be used are left out.

        Raises:
            DataError: more than ``data.max_bad_rows`` of all rows cannot be used.
        """
        found = [example for index in indices if (example := self._example(self._rows[index])) is not None]
        self.left_out.check(self._read, self._max_bad_rows)
        return found

    def _example(self, conversation: SftConversation) -> Example | None:
        where = conversation.where
        found = (
            self._of_messages(conversation) if conversation.text is None else self._of_text(where, *conversation.text)
        )
        if not isinstance(found, LeftOut):
            if all(len(row.prompt_ids) + len(row.ids) <= self._longest for row in found):
                return found
            found = LeftOut(Reason.TOO_LONG, self._source)
        self._leave_out(found, where)
        return None

    def _of_text(self, where: str, prompt: str, completion: str) -> Example | LeftOut:
        [rendered] = self._prompts([Record(prompt, None, self._source, where=where)])
        if isinstance(rendered, LeftOut):
            return rendered
        try:
            with boundary(f"{where}: the model's tokenizer cannot read {shown(completion)}", DataError):
                return (_answered(self._tokenizer, rendered[1], completion),)
        except DataError as cause:
            return LeftOut(Reason.TOKENIZER, self._source, str(cause))

    def _of_messages(self, conversation: SftConversation) -> Example | LeftOut:
        where = conversation.where
        if self._chats is None:
            raise DataError(f"{where}: chat messages need a chat template, and the model's tokenizer has none")
        try:
            chats = self._chats.with_options(conversation.template_kwargs)
            return tuple(demonstrated(chats, conversation.messages, conversation.tools))
        except (DataError, UserCodeError) as cause:
            reason = Reason.TEMPLATE if isinstance(cause, DataError) else Reason.CONVERSATION
            return LeftOut(reason, self._source, f"{where}: {cause}")

    def _leave_out(self, row: LeftOut, where: str) -> None:
        if where not in self._met:  # a row counts once, although each epoch reads it again
            self._met.add(where)
            self.left_out.add(row)


def _conversation(
    where: str, row: Any, prompt_key: str, completions: Sequence[str], chat_template: str
) -> SftConversation:
    """Read a row. Raises `DataError` for one without a conversation."""
    if not isinstance(row, Mapping):
        raise DataError(f"a row is an object with columns, not {type(row).__name__}")
    tools, kwargs = tools_of(row, "the row") or (), template_kwargs({}, row)
    if (column := next((name for name in CHATS if row.get(name)), None)) is not None:
        if isinstance(chat := _read(row[column], column), str):
            raise DataError(f"{column}: expected a list of chat messages, not {shown(chat)}")
        return SftConversation(where, chat, tools, kwargs)
    completion_key = next((name for name in completions if row.get(name) is not None), None)
    if row.get(prompt_key) is None or completion_key is None:
        raise DataError(
            f"columns {', '.join(map(str, row))}: expected {' or '.join(CHATS)}, or {prompt_key} with "
            f"{' or '.join(completions)} (data.prompt_key, sft.completion_key)"
        )
    asked, said = _read(row[prompt_key], prompt_key), _read(row[completion_key], completion_key)
    if isinstance(asked, str) and isinstance(said, str) and chat_template != "always":
        return SftConversation(where, text=(asked, said))
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    said = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    return SftConversation(where, [*asked, *said], tools, kwargs)


def _read(value: Any, column: str) -> str | Messages:
    return checked_prompt(read_chat(value, column), column, without_nulls)


def _answered(tokenizer: PreTrainedTokenizerBase, prompt: Any, text: str) -> RowTokens:
    """Return the row of a prompt's ids [P] and an answer, with the end-of-sequence token at its end."""
    ids = np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
    return RowTokens.answer(prompt, SampledTokens(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)))


# ---------------------------------------------------------------------------------------------- a task's solutions


def solutions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptTokenizer,
    task: TaskConfig,
    config: WarmupConfig,
    held_out: Set[str],
    seed: int,
) -> Iterator[Example]:
    """Yield the task's problems with a teacher's answers. ``config.params`` override the task's.

    ``held_out``: texts of prompts to leave out.
    """
    problems = make_task(task.name, {**task.params, **config.params}, seed=seed)
    rng = random.Random(seed)
    for index in count():
        problem = problems.problem(index)
        # Compared by rendered text, like held-out prompts: two problems may render to the same text
        [rendered] = prompts([Record(problem.prompt, problem.answer, task.name)])
        if isinstance(rendered, LeftOut) or rendered[0] in held_out:
            continue
        yield (_answered(tokenizer, rendered[1], _solution(problem.answer, config.give_up, rng)),)


def _solution(answer: str, give_up: GiveUpConfig | None, rng: random.Random) -> str:
    """Return the solution that the model learns: the answer, or sometimes a give-up mark for a long answer."""
    if give_up is not None and len(answer) > give_up.above and rng.random() < give_up.rate:
        return "?"
    return answer


# ---------------------------------------------------------------------------------------------- demonstrations


def demonstrations(
    chats: Chats,
    spec: str,
    tools: Sequence[ToolSchema],
    held_out: Set[str],
    *,
    seed: int,
    conversations: int,
    longest: int,
) -> Iterator[Example]:
    """Yield ``conversations`` conversations of the function ``spec``, made one by one; then repeat them for ever, each
    time in another order.

    Args:
        chats: the chat template that renders them.
        tools: schemas of the tools that the assistant may call.
        held_out: texts of prompts to leave out.
        longest: largest number of tokens of a row.

    Raises:
        UserCodeError: the function fails, or returns something other than a conversation, one that is too long, or only
            ones with held-out prompts.
    """
    function, rng = load_function(spec), random.Random(seed)
    made: list[Example] = []
    for _ in range(conversations):
        for _ in range(COLLISION_TRIES):
            with boundary(f"{spec} failed", UserCodeError):
                messages = function(rng)
            if not isinstance(messages, list | tuple):
                raise UserCodeError(f"{spec} returned {shown(messages)}, expected a list of chat messages")
            with boundary(f"{spec}: a conversation that it returned cannot be learned from", UserCodeError):
                rows = demonstrated(chats, messages, tools)
            if held_out.isdisjoint(_first_prompt(chats, messages)):
                break
        else:
            raise UserCodeError(
                f"{spec}: {COLLISION_TRIES} conversations in a row began with a held-out prompt; draw from more prompts"
            )
        for length in (len(row.prompt_ids) + len(row.ids) for row in rows):
            if length > longest:
                raise UserCodeError(
                    f"{spec}: a conversation has {length} tokens, more than the model's {longest} positions; make it "
                    "shorter, or raise model.make.max_position_embeddings"
                )
        made.append(tuple(rows))
        yield made[-1]
    while True:
        rng.shuffle(made)
        yield from made


def _first_prompt(chats: Chats, messages: Sequence[Any]) -> set[str]:
    """Return the texts by which the conversation's first prompt may be held out: rendered, and the bare text."""
    first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
    alone = {str(messages[0]["content"])} if first == 1 else set()
    return {chats.renderer.render(messages[:first])} | alone
