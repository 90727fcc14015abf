"""Search for bad training rows before a run: of rows that are alike, one is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.data.files import Record
from headway.data.left_out import LeftOut, LeftOutRows, Reason
from headway.data.rows import Rows
from headway.data.sources import prompt_tokenizer
from headway.data.tokenize import TEMPLATE_KWARGS, TOOLS, column_value
from headway.errors import writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.config.schema import Config


def check_rows(config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> list[str]:
    """Find the bad training rows that can be found in little time, and return what to tell of the data.

    Templates refuse chats for their roles and fields, tokenizers refuse lone surrogates: of rows that are alike in
    these one is tried, and the others where that one is bad. Problems of a task, which are made on demand, are not
    looked at.

    Raises:
        DataError: there are more than ``data.max_bad_rows`` of them, or no row can be rendered.
    """
    bad = LeftOutRows()
    if not isinstance(rows.train, list):
        return []
    prompts = prompt_tokenizer(config, tokenizer)
    alike: dict[Any, bool] = {}
    for record in rows.train:
        form = _form(record)
        if alike.get(form) is True:
            continue
        (one,) = prompts([record])
        is_bad = isinstance(one, LeftOut) and one.reason != Reason.TOO_LONG
        alike.setdefault(form, not is_bad)
        if isinstance(one, LeftOut) and is_bad:
            bad.add(one)
            bad.check(len(rows.train), config.data.max_bad_rows)
    notes = [] if (note := bad.note()) is None else [note]
    agent = config.agent
    shows_own = agent.program is None and agent.client is None and bool(agent.tools or agent.mcp)
    if shows_own and any(record.extra.get(TOOLS) for record in rows.train):
        notes.append("the column 'tools' is not shown to the model: its tools are agent.tools and agent.mcp")
    return [*notes, *prompts.notes]


def _form(record: Record) -> Any:
    """Features that templates or tokenizers may refuse: roles, field names, empty or non-UTF-8 contents."""
    columns = _shape(record.extra.get(TOOLS)), _shape(record.extra.get(TEMPLATE_KWARGS))
    if isinstance(record.prompt, str):
        return columns, _form_of_text(record.prompt)
    return columns, *((one["role"], *one, _form_of_text(one.get("content"))) for one in record.prompt)


def _shape(value: Any) -> Any:
    """Types and names of a value of a column, however deep, also as JSON text."""
    value = column_value(value)
    if isinstance(value, Mapping):
        return tuple((name, _shape(inner)) for name, inner in value.items())
    return tuple({_shape(inner) for inner in value}) if isinstance(value, list) else type(value).__name__


def _form_of_text(text: Any) -> str:
    if not isinstance(text, str):
        return "null"
    if not text.strip():
        return "blank" if text else "empty"
    return "text" if text.isascii() or writable(text) == text else "surrogate"
