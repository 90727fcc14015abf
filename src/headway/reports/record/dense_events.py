"""Dense events: those that come with every answer, group or few seconds. Columns in files, beside ``events.jsonl``.

    dense event ─▶ events/000000000123.jsonl ──the version ends, in a thread──▶ events/000000000123.parquet
    any other   ─▶ events.jsonl: line 0, line 1, …

A *segment* is named by the number of lines that ``events.jsonl`` had before it. Each dense event tells the same number
as ``line``, which is its place among the others. A segment becomes columns once it is large enough, in one step; until
then, and where that fails, its lines are what there is. A small run has no segments: all is in ``events.jsonl``.
"""

from __future__ import annotations

import json
import math
import os
import types
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from headway import events
from headway.errors import DataError, shown
from headway.events import (
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    ReplicaActivity,
    StageChanged,
    TrajectoryFinished,
)
from headway.reports.record.file_access import Rewritten, Tail

if TYPE_CHECKING:
    import pyarrow as pa


REPAIR = "Take the file from a copy, or remove that line"
OTHER_VERSION = "Read the run with the version that wrote it"
RENAMED: dict[str, tuple[str, dict[str, str]]] = {"keeper.lost": ("episode_worker.lost", {"keeper": "worker"})}
"""Kind of event in records of older versions → its kind now, and its fields that have another name."""


def parse_event(line: str, where: str) -> Event:
    """Return the event of one line. Raises `DataError`, which begins with ``where``, for a line that holds none."""
    try:
        row = json.loads(line)
        kind, names = RENAMED.get(row["kind"], (row["kind"], {}))
        row = {names.get(name, name): value for name, value in row.items() if name != "kind"}
        event_type, hints = event_types()[kind]
        return event_type(**{name: typed(value, hints[name]) for name, value in row.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise DataError(f"{where} {_wrong_with(line)}") from cause


def line_prefixes(kinds: Collection[type[Event]]) -> tuple[str, ...]:
    """Return the beginnings of lines that hold an event of one of ``kinds``, in records of any version."""
    now = {kind.kind for kind in kinds}
    return tuple(f'{{"kind": "{kind}"' for kind in (*now, *(old for old, (new, _) in RENAMED.items() if new in now)))


def _wrong_with(line: str) -> str:
    """Say what is wrong with a line that holds no event, and what to do."""
    try:
        row = json.loads(line)
    except ValueError:
        return f"is damaged: it is not one whole JSON object. {REPAIR}"
    if not isinstance(row, dict) or not isinstance(kind := row.get("kind"), str):
        return f"is damaged: it is no object with a kind. {REPAIR}"
    has = "has other fields, or values of another kind" if kind in event_types() else "is none that it has"
    return f"is not an event of this version of Headway: {shown(kind)} {has}. {OTHER_VERSION}"


@cache
def event_types() -> dict[str, tuple[type[Event], dict[str, Any]]]:
    """Return kind → the event's class and the types of its fields."""
    found = (value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event))
    return {cls.kind: (cls, _hints(cls)) for cls in found if cls is not Event}


def _hints(event_type: type[Event]) -> dict[str, Any]:
    hints = get_type_hints(event_type)
    return {found.name: hints[found.name] for found in fields(event_type)}


def typed(value: Any, hint: Any) -> Any:
    """Undo what JSON did to ``value``: tuples became lists, integer keys strings, numbers not finite null."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return [typed(item, arguments[0]) for item in value]
    if origin is tuple:
        return tuple(typed(item, argument) for item, argument in zip(value, arguments, strict=True))
    if origin is dict:
        return {int(key) if arguments[0] is int else key: typed(item, arguments[1]) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return None if value is None else typed(value, next(a for a in arguments if a is not type(None)))
    if hint is float:
        return math.nan if value is None else float(value)
    return value


DENSE = (TrajectoryFinished, StageChanged, GroupAdmitted, GroupRewarded, GroupSettled, ReplicaActivity)
SEGMENT_BYTES = 2**20
"""Least bytes of ``events.jsonl`` before dense events go to segments, and of lines that become columns: a smaller
segment goes on into the next version."""
LINES, COLUMNS = ".jsonl", ".parquet"
ALL = 1 << 62
"""More lines than any record has."""
SHARED = ("order", "line", "number")
"""Columns of all kinds, ascending: place in the segment, number of lines before it, number of the group."""
KINDS = b"kinds"
"""Key of a file's metadata: kind → the first row with it, and the number of rows. Rows are sorted by kind."""


def folder_of(events: Path) -> Path:
    """Return the folder of the segments beside ``events.jsonl``."""
    return events.with_name("events")


def segment(folder: Path, line: int) -> Path:
    """Return the file for the lines of a segment that begins behind ``line`` lines of ``events.jsonl``."""
    return folder / f"{line:012d}{LINES}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, ``line`` lines behind the record's beginning, as lines or as columns."""

    stem: Path

    @property
    def line(self) -> int:
        return int(self.stem.name)

    def rows(self) -> int:
        """Number of its events. Raises `DataError` where it is damaged, and `OSError`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self.stem.with_suffix(COLUMNS)
        try:
            if columns.is_file():
                return int(pq.read_metadata(columns).num_rows)
        except pa.ArrowException as cause:
            raise DataError(f"{columns} is damaged: {cause}") from cause
        with self.stem.with_suffix(LINES).open("rb") as file:
            return sum(1 for _ in file)


def segments_of(events: Path) -> list[Segment]:
    """Return the segments beside ``events.jsonl``, in order."""
    files = (file for file in folder_of(events).glob("*[0-9].*") if file.suffix in (LINES, COLUMNS))
    return [Segment(stem) for stem in sorted({file.with_suffix("") for file in files})]


def seal(path: Path) -> None:
    """Turn the lines of a segment into columns, in one step. Raises `OSError`, `ValueError` and Arrow's errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, list[dict[str, Any]]] = {}
    with path.open("rb") as file:
        for order, line in enumerate(file):
            if line.endswith(b"\n"):
                row = json.loads(line)
                row["order"] = order
                found.setdefault(row["kind"], []).append(row)
    tables, kinds, first = [], {}, 0
    for kind, rows in found.items():
        hints = {"order": int, "line": int, **event_types()[kind][1]}
        columns = {name: _arrow(hint) for name, hint in hints.items() if name in rows[0]}
        arrays = {_column(kind, name): _array(_cells(rows, name), column) for name, column in columns.items()}
        tables.append(pa.table(arrays))
        kinds[kind], first = (first, len(rows)), first + len(rows)
    table = pa.concat_tables(tables, promote_options="default")
    table = table.replace_schema_metadata({KINDS: json.dumps(kinds).encode()})
    floats = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    draft = path.with_suffix(".tmp")
    try:
        pq.write_table(
            table,
            draft,
            row_group_size=len(table),
            compression="zstd",
            use_dictionary=[name for name in table.column_names if name not in (*SHARED, *floats)],
            use_byte_stream_split=floats,
            column_encoding={name: "DELTA_BINARY_PACKED" for name in SHARED if name in table.column_names},
        )
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path.with_suffix(COLUMNS))
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    path.unlink()


def _arrow(hint: Any) -> pa.DataType:
    """Return the column type of a field. A mapping is kept as JSON: its keys are its own."""
    import pyarrow as pa

    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _arrow(next(one for one in arguments if one is not type(None)))
    if origin in (list, tuple):
        return pa.list_(_arrow(arguments[0]))
    return {float: pa.float64(), int: pa.int64(), bool: pa.bool_()}.get(hint, pa.string())


def _array(cells: Sequence[Any], column: pa.DataType) -> pa.Array:
    """Return the cells as an array, made of its buffers: `pa.array` imports pandas, which takes the driver as long as
    ten thousand answers do.
    """
    import pyarrow as pa

    present = [cell is not None for cell in cells]
    buffers = [None if all(present) else np.packbits(present, bitorder="little")]
    children = []
    if pa.types.is_list(column):
        buffers.append(np.cumsum([0, *(len(cell or ()) for cell in cells)], dtype=np.int32))
        children.append(_array([item for cell in cells for item in cell or ()], column.value_type))
    elif pa.types.is_string(column):
        texts = [(cell or "").encode() for cell in cells]
        buffers += [np.cumsum([0, *map(len, texts)], dtype=np.int32), np.frombuffer(b"".join(texts), np.uint8)]
    else:
        values = np.array([cell or 0 for cell in cells], column.to_pandas_dtype())
        buffers.append(np.packbits(values, bitorder="little") if pa.types.is_boolean(column) else values)
    held = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(column, len(cells), held, children=children)


def _column(kind: str, name: str) -> str:
    """Return the name of a field's column: fields of two kinds may share a name, and nothing else."""
    return name if name in SHARED else f"{kind}/{name}"


def _cells(rows: list[dict[str, Any]], name: str) -> list[Any]:
    cells = [row[name] for row in rows]
    return [json.dumps(cell) if isinstance(cell, dict) else cell for cell in cells]


class DenseReader:
    """Reads the dense events of a run in order, a segment at a time, also during the run.

    ``kinds``: only these; ``number``: only those of that group. Others are not even decoded.
    """

    def __init__(
        self, events: Path, *, kinds: Collection[type[Event]] | None = None, number: int | None = None, line: int = 0
    ) -> None:
        """``line``: begin behind so many lines of ``events.jsonl``."""
        self._events, self._folder = events, folder_of(events)
        self._kinds = None if kinds is None else {kind.kind for kind in kinds}
        self._number = number
        self._from = line
        self._ready: deque[tuple[int, Event]] = deque()
        self._at: str | None = None
        """Stem of the segment that is being read."""
        self._rows = 0
        """Number of rows of it that were read."""
        self._tail: Tail | None = None
        """Reader of its lines; None where it has columns, which are read as a whole."""
        self._stems: list[str] = []
        self.list_segments()

    def list_segments(self) -> None:
        """List the segments again: a running run may have added some."""
        wanted = self._kinds is None or any(kind.kind in self._kinds for kind in DENSE)
        self._stems = [segment.stem.name for segment in segments_of(self._events)] if wanted else []

    def until(self, line: int) -> Iterator[tuple[int, Event]]:
        """Yield the events behind at most ``line`` lines of ``events.jsonl``, each with that number of lines.

        Raises `DataError` for a damaged segment, and `OSError`.
        """
        while True:
            while self._ready and self._ready[0][0] <= line:
                yield self._ready.popleft()
            if self._ready or not self._more(line):
                return

    def _more(self, line: int) -> bool:
        """Read on, or go to the next segment. Return whether there may be more."""
        following = self._following()  # before the lines: no more of them come once there is one
        if self._tail is not None:
            before = self._rows
            with suppress(Rewritten):
                for _, text in self._tail.read():
                    self._take(text.decode("utf-8", "replace"))
            if self._rows > before:
                return True
            if (columns := self._columns()).is_file():  # it became columns meanwhile
                self._tail = None
                self._ready += read_columns(columns, self._kinds, self._number, self._rows, self._from)
                return True
        if following is None or int(following) > line:
            return False
        self._at, self._rows, self._tail = following, 0, None
        if self._columns().is_file():
            self._ready += read_columns(self._columns(), self._kinds, self._number, 0, self._from)
        else:
            self._tail = Tail(self._folder / f"{self._at}{LINES}")
        return True

    def _columns(self) -> Path:
        return self._folder / f"{self._at}{COLUMNS}"

    def _following(self) -> str | None:
        """Return the stem of the next segment, or of the first in which wanted events may be."""
        if self._at is None:
            before = sum(int(stem) <= self._from for stem in self._stems)
            return next(iter(self._stems[max(before - 1, 0) :]), None)
        return next(iter(self._stems[bisect_right(self._stems, self._at) :]), None)

    def _take(self, text: str) -> None:
        self._rows += 1
        if self._kinds is not None and not text.startswith(tuple(f'{{"kind": "{kind}"' for kind in self._kinds)):
            return
        if self._number is not None and f'"number": {self._number},' not in text:
            return
        where = f"{self._folder.name}/{self._at}{LINES}:{self._rows}"
        event, _, line = text.rpartition(', "line": ')
        found = parse_event(event + "}", where)
        if (behind := int(line.rstrip("}\n"))) >= self._from:
            self._ready.append((behind, found))


def read_columns(
    path: Path, kinds: Collection[str] | None, number: int | None, order: int, line: int
) -> list[tuple[int, Event]]:
    """Return a segment's events with their ``line``, from the row ``order`` on, and behind at least ``line`` lines.

    Raises `DataError` where it is damaged, and `OSError`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[tuple[int, int, Event]] = []
    try:
        with pq.ParquetFile(path) as file:
            if number is not None and not _may_hold(file, number):
                return []
            held = json.loads(file.schema_arrow.metadata[KINDS])
            wanted = [kind for kind in held if kinds is None or kind in kinds]
            names = file.schema_arrow.names
            table = file.read(columns=[name for name in names if name in SHARED or name.partition("/")[0] in wanted])
        for kind in wanted:
            part = table.slice(*held[kind])
            part = part.filter(pc.and_(pc.greater_equal(part["order"], order), pc.greater_equal(part["line"], line)))
            if number is not None:
                part = part.filter(pc.equal(part["number"], number))
            event_type, hints = event_types()[kind]
            own = [name for name in hints if _column(kind, name) in names]
            cells = zip(*(_values(part[_column(kind, name)], hints[name]) for name in own), strict=True)
            events = (event_type(**dict(zip(own, row, strict=True))) for row in cells)
            found += zip(part["order"].to_pylist(), part["line"].to_pylist(), events, strict=True)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as cause:
        raise DataError(f"{path} is damaged, or of another version of Headway: {cause}. {OTHER_VERSION}") from cause
    return [(line, event) for _, line, event in sorted(found, key=lambda one: one[0])]


def _may_hold(file: Any, number: int) -> bool:
    place = file.schema_arrow.get_field_index("number")
    bounds = file.metadata.row_group(0).column(place).statistics if place >= 0 else None
    return bounds is None or not bounds.has_min_max or bounds.min <= number <= bounds.max


def _values(column: pa.ChunkedArray, hint: Any) -> list[Any]:
    origin = get_origin(hint)
    values: list[Any] = column.to_pylist()
    if origin is dict:
        values = [json.loads(value) for value in values]
    if hint in (int, str, bool, list[list[int]]) or (hint is float and not column.null_count):
        return values
    return [typed(value, hint) for value in values]
