"""Upgrade of records of earlier versions of Headway, when their run is opened.

events.jsonl ─┐                                             events/000000000123.jsonl, .parquet: events that came
              ├─▶ one file in the order of the run ─▶ events.jsonl          behind 123 lines of events.jsonl
events/… ─────┘
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, get_origin

from headway.errors import DataError
from headway.reports.record.event_lines import OTHER_VERSION, event_types
from headway.reports.record.file_access import whole_lines


def files_beside(events: Path) -> list[Path]:
    """Return the files of frequent events, in order. A file whose conversion to columns was cut off is there in both
    forms.
    """
    return sorted(events.with_name("events").glob("*[0-9].[jp]*"))


def is_earlier(events: Path) -> bool:
    """Return True if the record is of an earlier version, or its upgrade was killed."""
    return events.with_name("events.old").is_dir() or bool(files_beside(events))


def upgrade(events: Path) -> None:
    """Merge the frequent events beside ``events.jsonl`` into it. The next call finishes one that was killed.

    No process may write to the record. Raises `DataError` if a file is damaged or cannot be written.
    """
    folder, merged_folder = events.with_name("events"), events.with_name("events.old")
    draft = events.with_suffix(".new")
    try:
        with _alone(events.parent):
            if not is_earlier(events):  # another process has upgraded it meanwhile
                return
            if not merged_folder.is_dir():
                with draft.open("wb") as file:
                    file.writelines(_merged(events))
                    file.flush()
                    os.fsync(file.fileno())
                folder.rename(merged_folder)  # the draft is complete: the record is not merged a second time
            if draft.is_file():  # otherwise a killed call has done this
                draft.replace(events)
            shutil.rmtree(merged_folder)  # last: while it exists nothing is merged again
    except (OSError, ValueError, KeyError) as cause:
        raise DataError(
            f"{folder} has a part of the run's events, as earlier versions of Headway wrote. It could not be put into "
            f"{events.name}: {cause}. Copy the run to where it can be written. {OTHER_VERSION}"
        ) from cause


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Admit one process at a time to the block: two that open a run at once would write the same draft."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _merged(events: Path) -> Iterator[bytes]:
    segments = dict.fromkeys(file.with_suffix("") for file in files_beside(events))
    dense = ((row["line"], _line(row)) for segment in segments for row in _rows(segment))
    # At equal places frequent events come first: their number counts the lines before them.
    return (line for _, line in merge(dense, enumerate(whole_lines(events)), key=itemgetter(0)))


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in row.items() if name != "line"}).encode() + b"\n"


def _rows(segment: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a segment in order, as JSON objects with the lines before them as ``line``."""
    import pyarrow.parquet as pq

    if not (columns := segment.with_suffix(".parquet")).is_file():
        yield from map(json.loads, whole_lines(segment.with_suffix(".jsonl")))
        return
    table = pq.read_table(columns)
    rows: list[tuple[int, dict[str, Any]]] = []
    for kind, (first, count) in json.loads(table.schema.metadata[b"kinds"]).items():
        hints = event_types()[kind][1]
        for row in table.slice(first, count).to_pylist():
            columns_of = {name: name if name == "number" else f"{kind}/{name}" for name in hints}
            own = {name: row[column] for name, column in columns_of.items() if column in row}
            # Mappings are JSON in a column.
            own |= {name: json.loads(own[name]) for name in own if get_origin(hints[name]) is dict}
            rows.append((row["order"], {"kind": kind, **own, "line": row["line"]}))
    yield from (row for _, row in sorted(rows, key=lambda found: found[0]))
