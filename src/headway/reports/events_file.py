"""The run's record, ``events.jsonl``: one JSON object a line, written as events happen, read back as typed events."""

from __future__ import annotations

import json
import math
import time
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints

import numpy as np

from headway import events
from headway.errors import DataError
from headway.events import Event

FLUSH_EVERY_S = 1.0


class JsonLines:
    """A file of JSON objects, one a line, appended and flushed at least every second while lines come.

    A disk that refuses is reported once through ``report``; later lines are then left out, and the run goes on.
    Numbers that are not finite become null, since JSON has no word for them.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._file: TextIO | None = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(to_json_line(row) + "\n")
            if time.monotonic() - self._flushed >= FLUSH_EVERY_S:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as cause:
            self._give_up(cause)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as cause:
                self._give_up(cause)
            self._file = None

    def _give_up(self, cause: OSError) -> None:
        self._file = None
        self._report(f"cannot write {self._path}: {cause.strerror or cause}; the run goes on without this file")


class EventsFile:
    """Observer that appends every event to ``path``."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._lines = JsonLines(path, report)

    def on_event(self, event: Event) -> None:
        self._lines.write(event.to_json())

    def close(self) -> None:
        self._lines.close()


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
            return {_key(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case np.generic() | np.ndarray():
            return _finite(value.tolist())
    return value


def _key(key: Any) -> Any:
    return key.item() if isinstance(key, np.generic) else key


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run, in order. A last line that was cut off (a run that was killed) is left out.

    Raises `DataError` when the file cannot be read or holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith("\n"):
                    yield _parse(line, f"{path}:{number}")
    except OSError as cause:
        raise DataError(f"cannot read the events of a run: {cause}") from cause


def _parse(line: str, where: str) -> Event:
    try:
        row = json.loads(line)
        event_type, hints = _event_types()[row.pop("kind")]
        return event_type(**{name: _typed(value, hints[name]) for name, value in row.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise DataError(f"{where} is not an event of this version of Headway: {cause!r}") from cause


@cache
def _event_types() -> dict[str, tuple[type[Event], dict[str, Any]]]:
    """Each kind's class and the types of its fields."""
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
