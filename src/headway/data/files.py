"""Prompts from JSONL and Parquet files: one record per row, checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import DataError, boundary

Messages = list[dict[str, Any]]
"""A chat: ``{"role": …, "content": …}``, oldest first."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row before tokenising."""

    prompt: str | Messages
    answer: Any
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column."""


def read_records(path: str, *, prompt_key: str, answer_key: str) -> list[Record]:
    """All rows of a ``.jsonl`` or ``.parquet`` file, in order.

    ``source`` is the row's ``data_source`` column where it has one, else the file's name without its ending.

    Raises:
        DataError: the file is missing, empty, of another kind or unreadable, or a row lacks a column or holds a value
            of the wrong type; the message names the file and the row (for JSONL its line).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: no such file; data.train and data.val name a .jsonl or .parquet file")
    match file.suffix:
        case ".jsonl":
            rows = _jsonl_rows(file)
        case ".parquet":
            rows = _parquet_rows(file, (prompt_key, answer_key))
        case other:
            raise DataError(f"{path}: data files end in .jsonl or .parquet, not {other or 'nothing'!r}")
    records = list(_records(rows, file, prompt_key, answer_key))
    if not records:
        raise DataError(f"{path}: the file has no rows")
    return records


Row = tuple[str, Any]
"""Where it is (``file, line 3``), and what is there."""


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with boundary(f"{file} cannot be read", DataError), file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                try:
                    yield where, json.loads(line)
                except json.JSONDecodeError as cause:
                    raise DataError(f"{where}: not JSON: {cause}; each line is one object") from cause


def _parquet_rows(file: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    import pyarrow.parquet  # 0.2 s, for Parquet only

    with boundary(f"{file} cannot be read as Parquet", DataError):
        parquet = pyarrow.parquet.ParquetFile(file)
        _require(needed, parquet.schema_arrow.names, str(file))
        number = 0
        for batch in parquet.iter_batches():
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1


def _records(rows: Iterable[Row], file: Path, prompt_key: str, answer_key: str) -> Iterator[Record]:
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with columns, not {type(row).__name__}")
        _require((prompt_key, answer_key), row, where)
        source = row.get("data_source")
        yield Record(
            prompt=_checked_prompt(row[prompt_key], f"{where}, {prompt_key!r}"),
            answer=row[answer_key],
            source=source if isinstance(source, str) else file.stem,
            extra={name: value for name, value in row.items() if name not in (prompt_key, answer_key)},
        )


def _require(needed: tuple[str, ...], present: Iterable[str], where: str) -> None:
    names = list(present)
    if missing := [name for name in needed if name not in names]:
        raise DataError(
            f"{where}: there is no column {' or '.join(map(repr, missing))}; there are {', '.join(names) or 'none'}. "
            "Set data.prompt_key and data.answer_key to the columns that hold prompt and answer"
        )


def _checked_prompt(prompt: Any, where: str) -> str | Messages:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: a prompt is text or a list of chat messages, not {_shown(prompt)}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f'{where}: a chat message is {{"role": …, "content": …}}, not {_shown(message)}')
    return prompt


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
