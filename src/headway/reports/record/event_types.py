"""Events as JSON: what a line of a record holds, as a typed event again."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Collection
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from headway import events
from headway.errors import DataError, shown
from headway.events import Event

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
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str):
        return f"is damaged: it is no object with a kind. {REPAIR}"
    foreign = f"is not an event of this version of Headway: {shown(kind)}"
    if kind not in event_types():
        return f"{foreign} is none that it has. {OTHER_VERSION}"
    known = {found.name: found for found in fields(event_types()[kind][0])}
    needed = {name for name, found in known.items() if found.default is MISSING and found.default_factory is MISSING}
    if missing := sorted(needed - row.keys()):
        return f"{foreign} lacks {', '.join(missing)}. {OTHER_VERSION}"
    if unknown := sorted(row.keys() - known.keys() - {"kind"}):
        return f"{foreign} has no {shown(', '.join(unknown))}. {OTHER_VERSION}"
    return f"{foreign} has values of another kind. {OTHER_VERSION}"


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
