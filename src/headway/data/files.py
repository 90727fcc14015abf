"""Read rows of JSONL, CSV and Parquet files, and convert rows of any source to checked records.

file ─▶ (where, row) ─▶ `records_of` ─▶ Record          (rows of Hugging Face datasets: `headway.data.hub`)
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import DataError, boundary, shown

Messages = list[dict[str, Any]]
"""A chat: ``{"role": …, "content": …}``, oldest first."""
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""ShareGPT's name of a role, from ``{"from": …, "value": …}`` → the role."""

ANSWER_KEYS = ("reward_model.ground_truth", "answer")
"""Default keys of the ground truth; the first one in a row counts. The first is verl's."""


FILE_ENDINGS = (".jsonl", ".csv", ".parquet")
"""Endings of the files that can be read."""
ARCHIVES = (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz")
COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of compressed files."""
CHAT_AS_TEXT = re.compile(
    r"""\s*(?:array\()?\s*\[\s*\{\s*(['"])(?:role|content|from|value|name|tool_calls|tool_call_id)\1\s*:"""
)
"""Pattern for the beginning of chat messages that are text: in JSON, or in Python's or NumPy's form."""
A_ROLE = re.compile(r"""(['"])(?:role|from)\1\s*:""")
LONGEST_FIELD = 2**31 - 1
"""Maximum characters of a CSV field. Python's default, 128 K, is too small for some prompts."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of a source and of its columns of prompts and ground truths."""

    prompt: str = "prompt"
    answer: str = "auto"
    """Column of the ground truth, or with dots a value inside a column. ``auto``: the row's first of `ANSWER_KEYS`, or
    the last message of a chat, if it is the assistant's: it is then not part of the prompt."""
    name: str | None = None
    """Name of the source; None: rows name it themselves."""

    @property
    def answers(self) -> tuple[str, ...]:
        return ANSWER_KEYS if self.answer == "auto" else (self.answer,)


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a source before tokenising."""

    prompt: str | Messages
    answer: Any
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, unchanged."""
    where: str = field(default="", compare=False)
    """Place that the row was read from, for messages."""


Row = tuple[str, Any]
"""A row as it was read: its place (``file, line 3``), and its value."""


def read_records(path: str, columns: Columns) -> list[Record]:
    """Return the rows of a ``.jsonl``, ``.csv`` or ``.parquet`` file, in order. Values of a CSV file stay texts.

    ``source`` is ``columns.name`` if given, else the row's column ``data_source`` if it has one, else the file's name
    without its ending.

    Raises:
        DataError: the file is missing, empty, of another kind or unreadable, or a row lacks a column or holds a value
            of the wrong type; the message names the file and the row (for JSONL and CSV its line).
    """
    file = Path(path).expanduser()
    rows = file_rows(path, columns)
    records = list(records_of(rows, columns, default_source=file.stem, columnar=file.suffix.lower() == ".parquet"))
    if not records:
        raise DataError(f"{path}: the file has no rows; expected one for each prompt")
    return records


def file_kind(path: str) -> str:
    """Return the ending of a data file, in lower case. Raises `DataError` if it is missing, or of another kind."""
    if not path.strip():
        raise DataError(f"data: got {path!r}, expected the name of a .jsonl, .csv or .parquet file")
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(
            f"{path}: a folder, not a file; name a .jsonl, .csv or .parquet file in it, or, to read it as a Hugging "
            f"Face dataset, {{dataset: {path}}}"
        )
    if not file.is_file():
        what = "not a file" if file.exists() else "no such file"
        raise DataError(f"{path}: {what}; data.train and data.val name a .jsonl, .csv or .parquet file")
    if (kind := file.suffix.lower()) not in FILE_ENDINGS:
        way_out = "unpack it" if kind in ARCHIVES else "convert it: JSONL has one JSON object on each line"
        raise DataError(f"{path}: data files end in .jsonl, .csv or .parquet, not {kind or 'nothing'!r}; {way_out}")
    return kind


def file_rows(path: str, columns: Columns | None = None) -> Iterator[Row]:
    """Yield the rows of a file unchanged, in order. ``columns``: columns that a row needs; None: any.

    Raises:
        DataError: the file is missing, of another kind or unreadable, or lacks a column.
    """
    kind, file = file_kind(path), Path(path).expanduser()
    if kind == ".jsonl":
        return _jsonl_rows(file)
    return _csv_rows(file, columns) if kind == ".csv" else _parquet_rows(file, columns)


def records_of(
    rows: Iterable[Row], columns: Columns, default_source: str, *, columnar: bool = False
) -> Iterator[Record]:
    """Turn rows into checked records. Raises `DataError` for one that lacks a column or holds another type.

    ``columnar``: True if all values of a column have the same fields; fields that are null are then removed.
    """
    plain = without_nulls if columnar else lambda value: value
    for where, row in rows:
        if not isinstance(row, dict):
            like = '{"prompt": …, "answer": …}'
            raise DataError(
                f"{where}: expected an object with columns, not {type(row).__name__}; each row is one, like {like}"
            )
        check_columns(row, columns, where)
        prompt = read_chat(row[columns.prompt], f"{where}, {columns.prompt!r}")
        answer_key, answer = _answer({**row, columns.prompt: prompt}, columns, where)
        # The answer is the chat's last message: if it stayed, the prompt would show it to the model.
        if answer_key is None:
            prompt = prompt[:-1]
        given = columns.name or row.get("data_source")
        yield Record(
            prompt=checked_prompt(prompt, f"{where}, {columns.prompt!r}", plain),
            answer=plain(answer),
            source=given if isinstance(given, str) and given else default_source,
            extra={name: plain(value) for name, value in row.items() if name not in (columns.prompt, answer_key)},
            where=where,
        )


def check_columns(present: Iterable[str], columns: Columns | None, where: str) -> None:
    """Check that the columns of the prompt and the ground truth exist, if ``columns`` names them.

    If the ground truth's column is not named, it may be a chat's last message, which is checked for each row. Raises
    `DataError` with the existing columns.
    """
    if columns is None:
        return
    names = list(present)
    missing = [] if columns.prompt in names else [columns.prompt]
    within = columns.answer == "auto" and not missing
    if not within and not any(key in names or key.partition(".")[0] in names for key in columns.answers):
        missing += columns.answers
    if missing:
        raise _missing(missing, names, where, columns)


def _within(row: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return the dotted keys that exist beside the first missing part of each of ``keys``, for messages."""
    found: list[str] = []
    for key in keys:
        value: Any = row
        path = ""
        for step in key.split("."):
            if not isinstance(value, Mapping) or step not in value:
                break
            value, path = value[step], f"{path}{step}."
        if path and isinstance(value, Mapping):
            found += [f"{path}{name}" for name in value]
    return found


def _missing(keys: Sequence[str], present: Iterable[str], where: str, columns: Columns) -> DataError:
    key = columns.answers[-1]
    unneeded = f'. Where no answer is needed, give each row an empty one, "{key}": ""' if key in keys else ""
    return DataError(
        f"{where}: there is no column {' or '.join(map(repr, keys))}; there are {', '.join(present) or 'none'}. "
        "Set data.prompt_key and data.answer_key, or prompt_key and answer_key of the source, to the columns that hold "
        f"prompt and answer{unneeded}"
    )


def _answer(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[str | None, Any]:
    """Return the ground truth's key and value. A column whose own name has dots takes precedence over a value inside.

    The key is None if the ground truth is the last message of the prompt's chat.
    """
    for key in columns.answers:
        value: Any = row
        for step in (key,) if key in row else key.split("."):
            if not isinstance(value, Mapping) or step not in value:
                break
            value = value[step]
        else:
            return key, value  # no step of the key was missing
    if columns.answer == "auto" and (last := answer_within(row[columns.prompt])) is not None:
        return None, last
    raise _missing(columns.answers, [*row, *_within(row, columns.answers)], where, columns)


def _text_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line of a file. Raises `DataError` for a line that is not UTF-8."""
    with boundary(f"{file} cannot be read", DataError), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                # A byte-order mark, as Excel writes it, would be a part of the first column's name
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as cause:
                found = f"byte {line[cause.start]:#04x} at position {cause.start + 1} is not UTF-8"
                way_out = "unpack the file, it is compressed" if line.startswith(COMPRESSED) else "save it as UTF-8"
                raise DataError(f"{where} cannot be read: UnicodeDecodeError: {found}; {way_out}") from None
            yield where, text


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for where, text in _text_lines(file):
        with boundary(f"{where} cannot be read", DataError):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as cause:
                at = f"{cause.msg} at character {cause.pos + 1}"
                raise DataError(f"{where}: not JSON: {at}; each line is one object") from cause
        yield where, row


def _csv_lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each line of a CSV file, with the number of the line."""
    # newline="": the csv module finds line ends itself, and keeps those inside quotes as they are.
    with boundary(f"{file} cannot be read as CSV", DataError), file.open(encoding="utf-8-sig", newline="") as text:
        # For the whole process: some prompts have more than 128 K characters
        csv.field_size_limit(LONGEST_FIELD)
        try:
            separator = _separator(text.readline())
            text.seek(0)
            lines = csv.reader(text, strict=True, delimiter=separator)
            for fields in lines:
                yield lines.line_num, fields
        except csv.Error as cause:
            way_out = "a text with quotes in it is quoted, and they are written twice"
            raise DataError(f"{file}, line {lines.line_num}: not CSV: {cause}; {way_out}") from cause
        except UnicodeDecodeError:
            deque(_text_lines(file), maxlen=0)  # it names the line
            raise


def _separator(names: str) -> str:
    """Return a CSV file's separator: the most frequent of comma, semicolon and tab in its first line."""
    return max(",;\t", key=names.count)  # the first of equally frequent ones


def _csv_rows(file: Path, columns: Columns | None) -> Iterator[Row]:
    lines = _csv_lines(file)
    _, names = next(lines, (1, []))
    # One unnamed column is allowed: pandas writes an index so.
    if names.count("") > 1:
        nameless = ", ".join(str(number) for number, name in enumerate(names, start=1) if not name)
        raise DataError(f"{file}, line 1: columns {nameless} have no name; name them, or drop their separators")
    if len(set(names)) < len(names):
        raise DataError(f"{file}, line 1: two columns have one name; there are {', '.join(names)}")
    check_columns(names, columns, f"{file}, line 1")
    for number, fields in lines:
        where = f"{file}, line {number}"
        if len(fields) not in (0, len(names)):  # an empty line has no fields
            raise DataError(
                f"{where}: {len(fields)} fields, and the first line names {len(names)} columns; a text with "
                "separators or line breaks needs quotes"
            )
        row = dict(zip(names, fields, strict=False))
        if row:
            yield where, row


def _parquet_rows(file: Path, columns: Columns | None) -> Iterator[Row]:
    import pyarrow.parquet  # 0.2 s, for Parquet only

    with boundary(f"{file} cannot be read as Parquet", DataError):
        parquet = pyarrow.parquet.ParquetFile(file)
        check_columns(parquet.schema_arrow.names, columns, str(file))
        number = 0
        for batch in parquet.iter_batches():
            # Batch by batch: the whole table as Python objects takes many times its size
            for row in plain_rows(batch, file, number):
                yield f"{file}, row {number}", row
                number += 1


def plain_rows(batch: Any, file: Path, first: int) -> Iterator[Any]:
    """Yield the rows of an Arrow batch as plain Python values. ``first``: number of its first row in ``file``.

    Raises `DataError`, naming the row, if a row cannot be converted.
    """
    try:
        yield from batch.to_pylist()  # converts all rows first: if it fails, none was yielded
    except (ValueError, ArithmeticError):  # the whole batch does not tell which row it is
        for i in range(len(batch)):
            with boundary(f"{file}, row {first + i} cannot be read", DataError):
                batch.slice(i, 1).to_pylist()
        raise


def without_nulls(value: Any) -> Any:
    """Copy ``value`` without the null fields of dictionaries, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_chat(prompt: Any, where: str) -> Any:
    """Return the chat messages in a text in JSON's or Python's form; other values are returned unchanged.

    Raises `DataError` for messages in another form, such as NumPy's.
    """
    if not isinstance(prompt, str) or not CHAT_AS_TEXT.match(prompt):
        return prompt
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
            chat = read(prompt)
            roles = isinstance(chat, list) and all(isinstance(one, dict) and {"role", "from"} & {*one} for one in chat)
            return chat if roles else prompt
    if A_ROLE.search(prompt):
        raise DataError(
            f"{where}: chat messages as text that is neither JSON nor Python's spelling of a list of dictionaries: "
            f"{shown(prompt)}; save them as lists in JSONL or Parquet, or as JSON text"
        )
    return prompt


def checked_prompt(prompt: Any, where: str, plain: Callable[[Any], Any]) -> str | Messages:
    """Return text, or chat messages ready to be rendered. ``plain``: function that is applied to messages' values.

    Raises `DataError` for anything else.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: a prompt is text or a list of chat messages, not {shown(prompt)}")
    prompt = [plain_message(message) for message in prompt]
    for message in prompt:
        if not _is_message(message):
            raise DataError(f'{where}: a chat message is {{"role": …, "content": …}}, not {shown(message)}')
        for part in message["content"] if isinstance(message["content"], list) else ():
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f'{where}: parts of a message are {{"type": "text", "text": …}}, not {shown(part)}: models here '
                    "read text only"
                )
    # In Parquet all messages have the same fields: a message's missing ones are null, which templates would print.
    return [
        {k: _text(v) if k == "content" else plain(v) for k, v in message.items() if v is not None or k == "content"}
        for message in prompt
    ]


def plain_message(message: Any) -> Any:
    """Return a message of ShareGPT's form with ``role`` and ``content``; any other value as it is."""
    if not isinstance(message, dict) or "role" in message or "value" not in message:
        return message
    role = SPEAKERS.get(str(message.get("from")))
    return {"role": role, "content": message["value"]} if role is not None else message


def answer_within(chat: Any) -> str | None:
    """Return the text of a chat's last message if it is the assistant's; else None."""
    last = plain_message(chat[-1]) if isinstance(chat, list) and chat else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return None
    return last["content"] if isinstance(last.get("content"), str) else None


def _text(content: Any) -> Any:
    """Join the parts of a message into one text: most templates of text models would print the list."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _is_message(message: Any) -> bool:
    """Tell whether ``message`` has a role, and as ``content`` text, null or a list of parts."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and "content" in message
        and (message["content"] is None or isinstance(message["content"], str | list))
    )
