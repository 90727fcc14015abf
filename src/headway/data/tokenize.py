"""Tokenisation of records: chat templates, then the tokenizer, then the length limit.

A row that cannot be tokenised is left out, with the reason. A fault of every row is an error.

record ─▶ PromptTokenizer ─▶ prompt, or LeftOut ─▶ counted by source and reason ─▶ too many bad rows: `DataError`
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import NO_VARIABLES
from headway.data.files import Messages, Record
from headway.errors import DataError, boundary, shown, writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 64
"""Number of first rows of which one must be good: if all are bad, the data are wrong as a whole."""
Counts = Mapping[str, Mapping[str, int]]
"""Source → reason → number of rows that are left out."""


class Reason(StrEnum):
    """Reason why a row is left out. Rows with a reason other than ``too_long`` are *bad*."""

    TOO_LONG = "too_long"
    """More tokens than ``data.max_prompt_length``."""
    TEMPLATE = "template"
    """The tokenizer's chat template raises, or does not show the row's tools."""
    COLUMNS = "columns"
    """The row's ``tools`` or ``chat_template_kwargs`` have another form."""
    TOKENIZER = "tokenizer"
    """The tokenizer cannot encode the text, such as a lone surrogate."""
    EMPTY = "empty"
    """The prompt has no tokens."""
    TASK = "task"
    """The task raises, or returns no problem."""
    CONVERSATION = "conversation"
    """The row has no conversation to learn from (``headway sft``)."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row without a prompt."""

    reason: Reason
    source: str
    why: str = ""
    """Fault and its row, in one line; empty for a prompt that is too long."""


@dataclass(slots=True)
class LeftOutRows:
    """Counts of the rows left out, and an example of each reason.

    Example:
        >>> rows = LeftOutRows()
        >>> rows.add(LeftOut(Reason.EMPTY, "train", "line 3: no tokens"))
        >>> rows.note()
        '1 training row cannot be used and is left out (empty 1): line 3: no tokens'
    """

    counts: Counts = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, row: LeftOut) -> None:
        """Count a row. `counts` is replaced, so that a cursor keeps its own."""
        reasons = dict(self.counts.get(row.source, {}))
        reasons[row.reason] = reasons.get(row.reason, 0) + 1
        self.counts = {**self.counts, row.source: reasons}
        self.examples.setdefault(row.reason, row.why)

    def check(self, rows: int, share: Fraction, what: str = "rows") -> None:
        """Raise `DataError` with the commonest reason if more than ``share`` of ``rows`` are bad."""
        if (bad := bad_rows(self.counts)) > share * rows:
            raise self.error(f"{bad} of {rows} {what}, more than data.max_bad_rows={float(share):g} of them,")

    def note(self, part: str = "training") -> str | None:
        """Describe the left-out rows of a ``part``, by reason; None if there are none."""
        if not (count := total(self.counts)):
            return None
        example = next((f": {why}" for why in self.examples.values() if why), "")
        rows = "row cannot be used and is" if count == 1 else "rows cannot be used and are"
        return f"{count} {part} {rows} left out ({reasons_told(self.counts, too_long=True)}){example}"

    def error(self, which: str) -> DataError:
        """Return the error for rows that cannot be used, with the commonest reason."""
        example = next((why for reason, _ in _bad(self.counts).most_common() if (why := self.examples.get(reason))), "")
        return DataError(
            f"{which} cannot be used ({reasons_told(self.counts)}){f': {example}' if example else ''}. Mend or remove "
            "such rows, or raise data.max_bad_rows"
        )


def bad_rows(counts: Counts) -> int:
    """Return the number of left-out rows, except those that are too long."""
    return _bad(counts).total()


def reasons_told(counts: Counts, *, too_long: bool = False) -> str:
    """Return the reasons of bad rows, the commonest first, in one line: ``template 3, empty 1``.

    ``too_long``: include rows that are too long.
    """
    return ", ".join(f"{reason} {count}" for reason, count in _bad(counts, too_long=too_long).most_common())


def _bad(counts: Counts, *, too_long: bool = False) -> Counter[str]:
    found = Counter[str]()
    for reasons in counts.values():
        found.update({str(reason): n for reason, n in reasons.items() if too_long or reason != Reason.TOO_LONG})
    return found


def total(counts: Counts) -> int:
    """Return the number of left-out rows."""
    return sum(sum(reasons.values()) for reasons in counts.values())


ChatTemplate = Literal["auto", "always", "never"]
Tokenised = tuple[str, NDArray[np.int32]]
"""Text of a prompt as the model reads it, and its token ids [P]."""
TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
"""Columns of a row that its chat template gets: schemas of tools, and variables of the template."""


PROBED = 64
"""Number of characters of the sample text around which a tokenizer's special tokens are found."""


class TextStart:
    """Special tokens that a tokenizer puts before a text, such as BOS.

    A text gets them once, even if it spells them out itself, and never gets the tokens after a text (EOS): an answer is
    to follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._start: list[int] | None = None
        self.notes: dict[str, str] = {}
        """Kind of deviation of the tokenizer → a note on it for the user."""

    def added(self, ids: list[int], text: str) -> list[int]:
        """Put the special tokens before ``text``'s ids [N], encoded without any, unless it has them, or N is 0."""
        if not ids:
            return ids
        if self._start is None:
            self._start = self._found(text[:PROBED])
        if not self._start:
            return ids
        # Templates of instruct models often write BOS themselves: a second one costs accuracy, without any error
        if ids[: len(self._start)] == self._start:
            shown = self._tokenizer.decode(self._start)
            self.notes["twice"] = f"prompts begin with {shown}, which the tokenizer would add again; they have it once"
            return ids
        return [*self._start, *ids]

    def _found(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        whole: list[int] = self._tokenizer(text)["input_ids"]
        at = next((i for i in range(len(whole)) if ids and whole[i : i + len(ids)] == ids), None)
        if at is None:  # the text is tokenised differently after the special tokens
            bos = self._tokenizer.bos_token_id
            return [bos] if bos is not None and whole[:1] == [bos] else []
        if end := whole[at + len(ids) :]:
            self.notes["end"] = (
                f"the tokenizer puts {self._tokenizer.decode(end)} behind a text (as with add_eos_token); prompts are "
                "without it, since their answer follows"
            )
        return whole[:at]


def template_kwargs(run: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables for a row's chat template: the run's, overridden by the row's.

    Raises:
        DataError: the row's value is not a mapping of names to values, or a name is not that of a variable.
    """
    of_row = column_value(extra.get(TEMPLATE_KWARGS)) or {}  # null if only other rows have any
    if not isinstance(of_row, Mapping) or NO_VARIABLES & of_row.keys():
        raise DataError(
            f"the column {TEMPLATE_KWARGS!r} has {shown(of_row)}; expected variables of the chat template, like "
            '{"enable_thinking": false}. Rename the column if it is something else'
        )
    return {**run, **of_row}


def column_value(given: Any) -> Any:
    """Return the value of a column, decoded if it is JSON text."""
    if isinstance(given, str):
        with suppress(ValueError):
            return json.loads(given)
    return given


def tools_of(row: Mapping[str, Any], named: str) -> list[dict[str, Any]] | None:
    """Return the schemas of tools in the columns of a ``row``; None without any. ``named``: its name in messages.

    Raises:
        DataError: they have another form.
    """
    given = row.get(TOOLS)
    if given is None or not (tools := column_value(given)):
        return None
    # In a list of texts each schema may be JSON text.
    tools = [column_value(tool) for tool in tools] if isinstance(tools, list) else [tools]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"the column {TOOLS!r} of {named} has {shown(tool)}; expected a list of schemas, like "
                '{"type": "function", "function": {"name": …, "parameters": {…}}}. Rename the column if it is '
                "something else"
            )
    return tools


class PromptTokenizer:
    """Renders and tokenises prompts of at most ``max_length`` tokens.

    With a chat template the text is the template's, generation prompt included, and the tokenizer adds nothing to it.
    The template gets the row's columns ``tools`` and ``chat_template_kwargs``. Plain text gets the special tokens that
    the tokenizer puts before a text of its model (`TextStart`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: ChatTemplate,
        max_length: int,
        *,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        with_tools: bool = True,
    ) -> None:
        """``kwargs``: variables of the template. ``with_tools``: False if a program shows its tools itself."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.max_length = max_length
        self._kwargs, self._with_tools = kwargs, with_tools
        self._start = TextStart(tokenizer)
        self._unused: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the prompts tokenised so far."""
        return [*self._start.notes.values(), *self._unused.values()]

    def __call__(self, records: Sequence[Record]) -> list[Tokenised | LeftOut]:
        """Return the text and token ids [P] of each record, or the reason why it has none.

        Raises:
            DataError: messages without a template to render them.
        """
        texts = [self._text(record) for record in records]
        readable = [(record, *text) for record, text in zip(records, texts, strict=True) if isinstance(text, tuple)]
        encoded = iter(self._encoded(readable))
        return [next(encoded) if isinstance(text, tuple) else text for text in texts]

    def _text(self, record: Record) -> tuple[str, bool] | LeftOut:
        """Return the text of a record, and True if the template wrote it."""
        chat = self._as_messages(record)
        if chat is None and self._with_tools:
            self._note_unused(record)
            return str(record.prompt), False
        try:
            tools = tools_of(record.extra, _named(record)) if self._with_tools else None
            kwargs = self._template_kwargs(record)
        except DataError as wrong:
            return LeftOut(Reason.COLUMNS, record.source, str(wrong))
        if chat is None:  # a program makes a chat of it
            return str(record.prompt), False
        if not self._tokenizer.chat_template:
            raise DataError(
                f"prompts of {_named(record)} need a chat template (data.chat_template={self._chat_template}), and the "
                "model's tokenizer has none; use an instruct model, or text prompts with data.chat_template=auto"
            )
        try:
            with boundary(f"the tokenizer's chat template fails on a prompt of {_named(record)}", DataError):
                rendered = self._tokenizer.apply_chat_template(
                    chat, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
                )
        except DataError as refused:
            return LeftOut(Reason.TEMPLATE, record.source, str(refused))
        text = str(rendered)
        # A template without tools ignores them silently.
        if not all(tool["function"]["name"] in text for tool in tools or ()):
            why = (
                f"a prompt of {_named(record)} has tools, and the model's chat template does not show them to the "
                f"model; use a model that was trained with tools, or rename the column {TOOLS!r}"
            )
            return LeftOut(Reason.TEMPLATE, record.source, why)
        return text, True

    def _template_kwargs(self, record: Record) -> dict[str, Any]:
        try:
            kwargs = template_kwargs(self._kwargs, record.extra)
        except DataError as error:
            raise DataError(f"{_named(record)}: {error}") from None
        for name in kwargs:
            if name not in str(self._tokenizer.chat_template):
                self._unused[name] = f"the model's chat template has no variable {name} ({TEMPLATE_KWARGS})"
        return kwargs

    def _note_unused(self, record: Record) -> None:
        """Note columns that only a chat template would use, if the record is plain text."""
        columns = [name for name in (TOOLS, TEMPLATE_KWARGS) if record.extra.get(name)]
        for name in [*columns, *(["data.chat_template_kwargs"] if self._kwargs else [])]:
            self._unused[name] = f"{name} has no effect on prompts that are text; use data.chat_template=always"

    def _encoded(self, prompts: Sequence[tuple[Record, str, bool]]) -> list[Tokenised | LeftOut]:
        """Return the ids of records' texts; texts that no template wrote also get the tokenizer's special tokens."""
        if not prompts:
            return []
        record, text, _ = prompts[0]
        doing = f"the model's tokenizer cannot read a prompt of {_named(record)}: {shown(text)}"
        try:
            with boundary(doing, DataError):
                found = self._tokenizer([text for _, text, _ in prompts], add_special_tokens=False)["input_ids"]
                return [
                    self._checked(record, text, ids if templated else self._start.added(ids, text))
                    for (record, text, templated), ids in zip(prompts, found, strict=True)
                ]
        except DataError as refused:
            if len(prompts) > 1:  # the batch's error does not say which prompt it was
                return [one for prompt in prompts for one in self._encoded([prompt])]
            why = str(refused) if writable(text) == text else f"{doing}: half of a surrogate pair is no text"
            return [LeftOut(Reason.TOKENIZER, record.source, why)]

    def _as_messages(self, record: Record) -> Messages | None:
        """Return the record as a chat to render, or None for plain text."""
        if isinstance(record.prompt, str):
            return [{"role": "user", "content": record.prompt}] if self._chat_template == "always" else None
        if self._chat_template == "never":
            raise DataError(
                f"prompts of {_named(record)} are chat messages, and data.chat_template=never renders none; "
                "use auto, or give the prompts as text"
            )
        return record.prompt

    def _checked(self, record: Record, text: str, ids: list[int]) -> Tokenised | LeftOut:
        if not ids:
            return LeftOut(Reason.EMPTY, record.source, f"a prompt of {_named(record)} has no tokens: {text!r}")
        if len(ids) > self.max_length:
            return LeftOut(Reason.TOO_LONG, record.source)
        return text, np.asarray(ids, dtype=np.int32)


def _named(record: Record) -> str:
    """Return a name for a record: its source, and its row if known."""
    return f"{record.source} ({record.where})" if record.where else record.source
