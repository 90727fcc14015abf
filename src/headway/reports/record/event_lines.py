"""One event as one line of JSON, and the line as a typed event."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from headway import events
from headway.errors import shown
from headway.events import Event

REPAIR = "Take the file from a copy, or remove that line"
OTHER_VERSION = "Read the run with the version that wrote it"
RENAMED: dict[str, tuple[str, dict[str, str]]] = {"keeper.lost": ("episode_worker.lost", {"keeper": "worker"})}
"""Kind of event in records of older versions -> current kind, and old -> current names of its fields."""


def parse_event(line: bytes) -> Event:
    """Return the event of one line. Raises `ValueError`, with advice, for a line without a valid event."""
    try:
        row = json.loads(line.decode())  # `loads` alone lets half a character of bytes pass
        kind, names = RENAMED.get(row["kind"], (row["kind"], {}))
        row = {names.get(name, name): value for name, value in row.items() if name != "kind"}
        event_type, hints = event_types()[kind]
        return event_type(**{name: typed(value, hints[name]) for name, value in row.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise ValueError(_wrong_with(line)) from cause


def line_prefixes(kinds: Collection[type[Event]]) -> tuple[bytes, ...]:
    """Return the prefixes of lines with an event of one of ``kinds``, in records of any version."""
    now = {kind.kind for kind in kinds}
    names = (*now, *(old for old, (new, _) in RENAMED.items() if new in now))
    return tuple(f'{{"kind": "{kind}"'.encode() for kind in names)


def _wrong_with(line: bytes) -> str:
    """Return a message on the defect of a line without a valid event, with advice."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as cause:
        return f"is damaged: it is not UTF-8 (byte {cause.start + 1}). {REPAIR}"
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
