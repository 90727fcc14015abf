"""The run's record, ``events.jsonl``: one JSON object a line, written as events happen, read back as typed events.

    … version.reached (2) … version.reached (3) … killed │ run.resumed (2) … version.reached (3) …
                          └──────── undone ──────────────┘

A run that is resumed goes on in the same file. Its *surviving history* is what led to the weights that it has: all but
what was told between the boundary that it went back to and its return. Nothing is ever removed from the file.
"""

from __future__ import annotations

import json
import math
import os
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from headway import events
from headway.errors import DataError, shown
from headway.events import Event, RunFinished, RunResumed, VersionReached

FLUSH_EVERY_S = 1.0
KEPT_BYTES = 64 * 2**20
"""Most bytes of lines that are kept while a disk refuses them: minutes of a large run."""
REPAIR = "Take the file from a copy, or remove that line"
OTHER_VERSION = "Read the run with the version that wrote it"
AT_ONCE = (VersionReached, RunResumed)
"""Events that are flushed when they happen: a checkpoint, and whoever reads the file after a kill, relies on them."""


class JsonLines:
    """A file of JSON objects, one a line, appended and flushed at least every second while lines come.

    What a disk refuses is kept and tried again at each flush, so that the file has no gap. It is given up at the end,
    or where it becomes more than `KEPT_BYTES`; the run goes on without it. Either is reported once through ``report``.
    Numbers that are not finite become null, since JSON has no word for them.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        given_up: Callable[[], str] = lambda: "it stays incomplete",
    ) -> None:
        """Open the file. ``given_up`` returns words for the user on what becomes of it after writing failed."""
        self._path = path
        self._report = report
        self._given_up = given_up
        self._file: int | None = None
        self._end: int | None = None
        """Size of the file in bytes; None before it is opened, and after it was given up."""
        self._waiting = bytearray()
        """Lines not written yet, after those that are being written."""
        self._ended = False
        self._refused: str | None = None
        self._flushed = time.monotonic()
        self._flush()

    @property
    def whole(self) -> bool:
        """True if everything written so far is in the file."""
        return self._end is not None and not self._waiting

    @property
    def size(self) -> int:
        """Number of bytes that are in the file."""
        return self._end or 0

    def write(self, row: dict[str, Any], *, at_once: bool = False) -> None:
        if self._ended:
            return
        self._waiting += to_json_line(row).encode() + b"\n"
        if at_once or time.monotonic() - self._flushed >= FLUSH_EVERY_S:
            self._flush()
            if len(self._waiting) > KEPT_BYTES:
                self._give_up()

    def close(self) -> None:
        if not self._ended:
            self._flush()
            try:
                self._close_file()
            except OSError as cause:  # some file systems say only now that there was no room
                self._refused, self._end = cause.strerror or str(cause), None
            if not self.whole:
                self._give_up()
            self._ended = True

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        try:
            self._append()
        except OSError as cause:
            with suppress(OSError):
                self._close_file()  # one that is opened anew may work again
            if self._refused is None:
                self._report(
                    f"cannot write {self._path}: {cause.strerror or cause}; trying again while the run goes on"
                )
            self._refused = cause.strerror or str(cause)

    def _append(self) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._end is None:
            self._end = os.lseek(self._file, 0, os.SEEK_END)
        while self._waiting:
            # At its place: an interrupt before the next line only has the same bytes written there again.
            written = os.pwrite(self._file, self._waiting, self._end)
            self._end += written
            del self._waiting[:written]

    def _give_up(self) -> None:
        self._ended, self._end = True, None
        self._waiting.clear()
        with suppress(OSError):
            self._close_file()
        self._report(f"cannot write {self._path}: {self._refused}; {self._given_up()}")

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class EventsFile:
    """Observer that appends every event to ``path``."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._reached = -1
        self.told = -1
        """The newest version whose boundary, and all events before it, are in the file; -1 for none."""
        self._lines = JsonLines(path, report, self._without_the_rest)

    def on_event(self, event: Event) -> None:
        self._lines.write(event.to_json(), at_once=isinstance(event, AT_ONCE))
        if isinstance(event, AT_ONCE):
            self._reached = event.version
        if self._lines.whole:
            self.told = self._reached

    def close(self) -> None:
        self._lines.close()

    def _without_the_rest(self) -> str:
        later = "" if self.told < 0 else f" from a later version than {self.told}"
        return f"it stays incomplete, and the run cannot be resumed{later}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return _finite(value.tolist())
    return str(value)


_STRICT = json.JSONEncoder(default=_plain, allow_nan=False)


def to_json_line(value: Any) -> str:
    """``value`` as strict JSON on one line; numpy scalars and arrays, paths and fractions are spelled plainly."""
    try:
        return _STRICT.encode(value)
    except (ValueError, TypeError):  # a number that is not finite, or a numpy number as a key
        return _STRICT.encode(_finite(value))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key.item() if isinstance(key, np.generic) else key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case np.generic() | np.ndarray():
            return _finite(value.tolist())
    return value


@dataclass(slots=True)
class Record:
    """The lines of a record that survived, as ranges, and how the run stands."""

    lines: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [from, to) of line indices, in order."""
    boundaries: dict[int, int] = field(default_factory=dict)
    """Version → index of its `VersionReached` that survived."""
    resumed: int = 0
    """Number of times that the run was resumed, undone ones included."""
    ended: str | None = None
    """The status that the run ended with; None where it did not say."""

    def back_to(self, version: int, now: int) -> None:
        """Undo the lines between the boundary of ``version`` and the line ``now``."""
        end = self.boundaries[version] + 1
        self.lines = [(first, min(last, end)) for first, last in self.lines if first < end]
        self.boundaries = {reached: line for reached, line in self.boundaries.items() if line < end}
        self.lines.append((now, now))


def look_through(path: Path) -> Record:
    """Find the surviving lines of a record. Raises `DataError` for an unreadable file or an unknown resume point."""
    record = Record(lines=[(0, 0)])
    kinds = {f'{{"kind": "{event.kind}"': event for event in (VersionReached, RunResumed, RunFinished)}
    prefixes = tuple(kinds)
    for index, line in complete_lines(path):
        if line.startswith(prefixes):
            match event := parse_event(line, f"{path}:{index + 1}"):
                case VersionReached():
                    record.boundaries[event.version] = index
                case RunFinished():
                    record.ended = event.status
                case RunResumed():
                    if event.version not in record.boundaries:
                        raise DataError(f"{path}:{index + 1}: the run went back to a version that it did not reach")
                    record.back_to(event.version, index)
                    record.resumed, record.ended = event.times, None
        record.lines[-1] = (record.lines[-1][0], index + 1)
    return record


def read_events(path: Path, *, until: int | None = None, about: Callable[[str], bool] | None = None) -> Iterator[Event]:
    """The surviving history of a run, in order; only up to the boundary of the version ``until``, where that is given.

    A last line that was cut off (a run that was killed) is left out. ``about`` looks at each line and says whether its
    event is wanted: the others are not parsed, which takes most of the time.

    Raises `DataError` when the file cannot be read, holds something else, or has no such boundary.
    """
    record = look_through(path)
    if until is not None:
        if until not in record.boundaries:
            raise DataError(f"{path} has no boundary of version {until}")
        record.back_to(until, 0)
    ranges = iter(record.lines)
    first, last = next(ranges)
    for index, line in complete_lines(path):
        while index >= last:
            if (following := next(ranges, None)) is None:
                return
            first, last = following
        if index >= first and (about is None or about(line)):
            yield parse_event(line, f"{path}:{index + 1}")


def cut_off_half_line(path: Path) -> None:
    """Cut off a last line without an end, which a killed process may have left, so that nothing continues it."""
    with path.open("rb+") as file:
        end = position = file.seek(0, 2)
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            if (found := file.read(position - start).rfind(b"\n")) >= 0:
                position = start + found + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def complete_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the complete lines of a record, each with its index. Raises `DataError` for what cannot be read."""
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file):
                if line.endswith(b"\n"):
                    yield index, line.decode("utf-8")
    except OSError as cause:
        raise DataError(f"cannot read the events of a run: {cause}") from cause
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}:{index + 1} is damaged: it is not UTF-8 (byte {cause.start + 1}). {REPAIR}") from cause


def parse_event(line: str, where: str) -> Event:
    """Return the event of one line. Raises `DataError`, which begins with ``where``, for a line that holds none."""
    try:
        row = json.loads(line)
        event_type, hints = _event_types()[row.pop("kind")]
        return event_type(**{name: _typed(value, hints[name]) for name, value in row.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise DataError(f"{where} {_wrong_with(line)}") from cause


def _wrong_with(line: str) -> str:
    """Say what is wrong with a line that holds no event, and what to do."""
    try:
        row = json.loads(line)
    except ValueError:
        return f"is damaged: it is not one whole JSON object. {REPAIR}"
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str):
        return f"is damaged: it is no object with a kind. {REPAIR}"
    foreign = f"is not an event of this version of Headway: {shown(kind)}"
    if kind not in _event_types():
        return f"{foreign} is none that it has. {OTHER_VERSION}"
    known = {found.name: found for found in fields(_event_types()[kind][0])}
    needed = {name for name, found in known.items() if found.default is MISSING and found.default_factory is MISSING}
    if missing := sorted(needed - row.keys()):
        return f"{foreign} lacks {', '.join(missing)}. {OTHER_VERSION}"
    if unknown := sorted(row.keys() - known.keys() - {"kind"}):
        return f"{foreign} has no {shown(', '.join(unknown))}. {OTHER_VERSION}"
    return f"{foreign} has values of another kind. {OTHER_VERSION}"


@cache
def _event_types() -> dict[str, tuple[type[Event], dict[str, Any]]]:
    """Return kind → the event's class and the types of its fields."""
    found = (value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event))
    return {cls.kind: (cls, get_type_hints(cls)) for cls in found if cls is not Event}


def _typed(value: Any, hint: Any) -> Any:
    """Undo what JSON did to ``value``: tuples became lists, integer keys strings, numbers not finite null."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return [_typed(item, arguments[0]) for item in value]
    if origin is tuple:
        return tuple(_typed(item, argument) for item, argument in zip(value, arguments, strict=True))
    if origin is dict:
        return {int(key) if arguments[0] is int else key: _typed(item, arguments[1]) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return None if value is None else _typed(value, next(a for a in arguments if a is not type(None)))
    if hint is float:
        return math.nan if value is None else float(value)
    return value
