"""A tokenizer's chat template: chat messages to text and ids, and where an answer ends in the text.

Marks show where the template ends an answer: the chat is rendered with a mark after the answer's text (and in place of
its calls' arguments), and the tail is the text after the mark (`headway.agents.chat.conversations`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.chat.chat_messages import MARK, MarkedAnswer, reasoning_of
from headway.agents.interface.program_messages import Message, ToolSchema, calls_made, said, tool_result
from headway.errors import ConfigError, DataError, boundary, cut, writable
from headway.models.tokenizer import eos_ids, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NUMBERED_ID = "call{number:05d}"
"""Form of call ids that most templates take: Mistral's want nine letters and digits."""
CALL_ID = NUMBERED_ID.format(number=0)
KIMI_ID = "functions.{name}:{number}"
"""Ids of Kimi's calls, which its template writes in place of their names."""
LONG = 8
"""Characters per allowed token above which a text is encoded in pieces; ordinary text has 2 to 5."""
MOST_CUTS = 64
"""Extra tokens that encoding in pieces may give, beside an eighth of the allowed number."""


@dataclass(eq=False, repr=False)
class ChatRenderer:
    """A tokenizer's chat template, with the text and tokens that end an assistant's turn.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that cannot render a question and its answer.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, as ``{"enable_thinking": False}``."""
    stop_ids: Collection[int] = ()
    """Further tokens that end a turn, beside the template's own and the end of sequence."""
    most_tokens: int | None = None
    """Maximum number of tokens of a context; a longer text is not encoded completely."""

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template, and turns of chat messages need one; use an instruct "
                "model, or give the tokenizer a template (tokenizer.chat_template, chat_template.jinja in its folder)"
            )
        self._turn_end, self._turn_end_id = self._find_turn_end()
        turn_end = [] if self._turn_end_id is None else [self._turn_end_id]
        self.end_ids: frozenset[int] = frozenset((*turn_end, *eos_ids(self.tokenizer), *self.stop_ids))
        """Tokens that end a turn. One of them, sampled last, stands for the template's own end of the turn."""

    def with_options(self, options: Mapping[str, Any]) -> ChatRenderer:
        """Return the renderer with further template variables, on top of its own."""
        return replace(self, options={**self.options, **options}, stop_ids=self.end_ids)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None, generation_prompt: bool = True
    ) -> str:
        """Return the text that the template makes of the whole chat.

        Raises:
            DataError: the template refuses the messages; says why.
        """
        roles = ", ".join(str(message.get("role")) for message in messages)
        with boundary(f"the tokenizer's chat template fails on messages of {cut(roles)}", DataError):
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    # As text: the template's ids would cover the whole chat, and sampled ids must stay as they are.
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.options,
                )
            )

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids [N] of rendered text. Nothing is added; characters that UTF-8 cannot encode are spelled out.

        For a text with clearly more than ``most_tokens``, they may be only its beginning, with more than
        ``most_tokens``.

        Raises:
            DataError: the tokenizer has no tokens for the text.
        """
        most = self.most_tokens
        if most is None or len(text) <= LONG * most:
            return self._all(text)
        # In pieces: a megabyte takes a second or more, and a beginning is enough to see that it is too long.
        pieces: list[NDArray[np.int32]] = []
        tokens, length = 0, LONG * most // 2
        for start in range(0, len(text), length):
            pieces.append(self._all(text[start : start + length]))
            tokens += len(pieces[-1])
            if tokens > most + most // 8 + MOST_CUTS:
                return np.concatenate(pieces)
        return self._all(text)

    def _all(self, text: str) -> NDArray[np.int32]:
        with boundary(f"the tokenizer cannot encode {cut(repr(text[:120]), 120)}", DataError):
            # The template writes special tokens itself: added here, too, there would be two beginnings.
            return np.asarray(self.tokenizer.encode(writable(text), add_special_tokens=False), np.int32)

    def ended(self, ids: Sequence[int] | NDArray[np.int32]) -> bool:
        """Tell whether sampled ``ids`` [T] end their turn; False if they were cut off."""
        return len(ids) > 0 and int(ids[-1]) in self.end_ids

    def text(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Return the text of sampled ``ids`` [T] with special tokens, without the token that ends the turn."""
        return self.decode(ids[:-1] if self.ended(ids) else ids)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Return the text of all ``ids`` [N], with special tokens."""
        kept = [int(id) for id in ids]
        # clean_up would remove spaces before full stops: the text would differ from what was sampled.
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_before(
        self, ids: Sequence[int] | NDArray[np.int32], stop: Sequence[str], stop_ids: Collection[int] = ()
    ) -> str:
        """Return the text of sampled ``ids`` [T] up to the string of ``stop``, or the last token, of ``stop_ids``, that
        ended them, if one did.
        """
        if len(ids) and not self.ended(ids) and int(ids[-1]) in stop_ids:
            return self.text(ids[:-1])
        text = self.text(ids)
        if not stop or self.ended(ids):
            return text
        # The string may begin in earlier tokens, but ends in the last one: an older occurrence did not end the turn.
        before = len(self.text(ids[:-1]))
        found = [at for one in stop if (at := text.find(one, max(0, before - len(one)))) >= 0]
        return text[: min(found)] if found else text

    def checked(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """Check the context ``ids`` [P], given from outside, and return it.

        Raises:
            DataError: there are none, or the tokenizer lacks one of them.
        """
        size = len(self.tokenizer)
        if (wrong := next((id for id in ids if not 0 <= id < size), None)) is not None:
            raise DataError(f"token {wrong} is none of the model's tokenizer, whose tokens are 0 to {size - 1}")
        if not ids:
            raise DataError("there are no token ids to continue; give at least one")
        return np.asarray(ids, np.int32)

    @cached_property
    def generation_prompt(self) -> str:
        """Text with which the template opens an answer; empty if it writes nothing."""
        question = [said("user", "x")]
        before = self.render(question, generation_prompt=False)
        text = self.render(question)
        return text[len(before) :] if text.startswith(before) else ""

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template shows tools, and their results, to the model."""
        name = f"{MARK}tool"
        call = calls_made("", [(CALL_ID, name, {})])
        try:
            text = self.render(
                [said("user", "x"), call, tool_result(CALL_ID, name, f"{MARK}result")], [probe_tool(name)]
            )
        except DataError:
            return False
        return text.count(name) > 1 and f"{MARK}result" in text

    def demand_tools(self) -> None:
        """Raise `ConfigError` if the template does not show tools, with what to do about it."""
        if not self.shows_tools:
            raise ConfigError(
                "there are tools, but the model's chat template does not show them to the model, or has no place for "
                "their results; use a model that was trained with tools, give its tokenizer a template for them, or "
                "describe the tools in the prompt and leave agent.tools and chat.turn(tools=…) out"
            )

    @cached_property
    def error_role(self) -> str:
        """Role of the message that reports an unreadable call to the model, in an answer without other calls: ``tool``,
        or ``user`` if the template wants a call before each result.
        """
        answered = [said("assistant", "ok"), tool_result(CALL_ID, "look_up", MARK)]
        try:
            return "tool" if self.render([said("user", "x"), *answered, *answered]).count(MARK) == 2 else "user"
        except DataError:
            return "user"

    def example_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return a call as the template writes it in an answer; None if it writes none."""
        return self._example_call(name, arguments, CALL_ID) or self._example_call(
            name, arguments, KIMI_ID.format(name=name, number=0)
        )

    def _example_call(self, name: str, arguments: Mapping[str, Any], id: str) -> str | None:
        question, call = [said("user", "x")], calls_made("", [(id, name, arguments)])
        tools = [probe_tool(name)]
        try:
            text = self.render([*question, call], tools, generation_prompt=False)
            openings = [self.render(question, tools), self.render(question, tools, generation_prompt=False)]
        except DataError:
            return None
        answer = next((text[len(opening) :] for opening in openings if text.startswith(opening)), text)
        if name not in answer:
            return None
        return answer.partition(self._turn_end)[0] if self._turn_end_id is not None else answer

    def tail(self, start: int, chat: str, answer: Message, marks: MarkedAnswer) -> str | None:
        """Return the part of a rendered ``chat`` after an answer; None if the text at ``start`` is not the answer.

        Args:
            start: position of the answer, after the generation prompt.
            chat: the rendered chat with the marked answer and everything after it.
            answer: the answer's message, without marks.
            marks: the answer's marks.
        """
        if not marks.marks:
            return None
        at = start
        for n, mark in enumerate(marks.marks):
            if (found := chat.find(mark, at)) < 0:
                return None
            if n == 0 and not _says(chat[start:found], answer, alone=marks.text is not None):
                return None
            at = found + len(mark)
        end = chat.find(self._turn_end, at) if self._turn_end_id is not None else at
        if marks.calls and self._turn_end_id is None:  # where a call ends cannot be told from text alone
            return None
        if end < 0 or (not marks.calls and chat[at:end].strip()) or MARK in chat[end:]:
            return None
        return chat[end:]

    def behind(self, tail: NDArray[np.int32], answer: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids of a tail after the sampled ids of ``answer``, which ended its turn or was cut off."""
        # The tail begins with the end of the turn, which the sampled ids have already.
        return tail[1:] if self._turn_end_id is not None and self.ended(answer) else tail

    def _find_turn_end(self) -> tuple[str, int | None]:
        """Return the text with which the template ends an answer, and its id if it is a special token."""
        chat = [said("user", "x"), said("assistant", MARK)]
        try:
            alone = self.render(chat, generation_prompt=False)
            followed = self.render([*chat, said("user", "y")])
        except DataError as error:
            raise ConfigError(f"{error}; turns of chat messages need a template that renders these") from error
        if MARK not in alone or MARK not in followed:
            raise ConfigError(
                "the tokenizer's chat template leaves an answer out of the chat; turns of chat messages need a "
                "template that renders them"
            )
        text = _common(alone.partition(MARK)[2], followed.partition(MARK)[2])
        first = int(ids[0]) if len(ids := self.encode(text)) else None
        if first is not None and first in self.tokenizer.added_tokens_decoder:
            token = str(self.tokenizer.added_tokens_decoder[first].content)
            if text.startswith(token):
                return token, first
        return text, None


def answer_decoder(
    tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False
) -> Callable[[Sequence[int]], str]:
    """Return a function from an answer's ids to its text, as rewards and samples have it.

    Special tokens are kept, except those that end an answer: the end of sequence, and the template's end of a turn.
    ``skip_special_tokens``: leave all of them out.
    """
    if skip_special_tokens:
        return text_of(tokenizer, skip_special_tokens=True)
    try:
        ends = ChatRenderer(tokenizer).end_ids
    except ConfigError:  # no template, or none for turns
        ends = eos_ids(tokenizer)
    return text_of(tokenizer, ends)


def _common(one: str, other: str) -> str:
    """Return the common beginning of both texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def probe_tool(name: str) -> ToolSchema:
    """Make a tool called ``name``, to try a template with."""
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


def _says(region: str, answer: Message, *, alone: bool) -> bool:
    """Tell whether ``region``, written by a template, has everything that ``answer`` says, white space aside.

    ``alone``: it must have nothing else, except what surrounds thinking that the message has apart from its text.
    """
    written, text, reasoning = (_squeezed(part) for part in (region, answer.get("content", ""), reasoning_of(answer)))
    if not alone:
        return reasoning in written
    return written == text if not reasoning else written.endswith(text) and reasoning in written


def _squeezed(text: str) -> str:
    return "".join(text.split())
