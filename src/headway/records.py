"""Records: dataclasses that are passed between processes and to observers, and the base class of all events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

T = TypeVar("T")


def pickled_by_fields(record: type[T]) -> type[T]:
    """Make a dataclass pickle as its class and its field values, in order. It needs at least two fields.

    By default, loops in Python pickle and unpickle a dataclass with slots. They took a third of the time that episode
    worker and driver spend on an answer.
    """
    of_record = fields(record)  # type: ignore[arg-type]
    if len(of_record) < 2 or any(field.kw_only or not field.init for field in of_record):
        raise TypeError(f"{record.__name__}: two fields or more, all of them by position")
    values = attrgetter(*(field.name for field in of_record))

    def __reduce__(self: Any) -> tuple[type[T], tuple[Any, ...]]:
        return record, values(self)

    record.__reduce__ = __reduce__  # type: ignore[method-assign]
    return record


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(plain: type[T]) -> type[T]:
    """Make a dataclass with slots that type checkers treat as frozen, `pickled_by_fields` unless it has ``__reduce__``.

    At run time it is not frozen: creating an instance of a frozen class takes five times as long.
    """
    made = dataclass(slots=True)(plain)
    return made if "__reduce__" in vars(made) else pickled_by_fields(made)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def _named_record(plain: type[T]) -> type[T]:
    """Make a keyword-only dataclass that type checkers treat as frozen; see `record`."""
    return dataclass(slots=True, kw_only=True)(plain)


@_named_record
class Event:
    """Base class of all events."""

    kind: ClassVar[str] = "event"
    on_clock: ClassVar[tuple[str, ...]] = ("time",)
    """Names of the fields that hold times of the clock: numbers, spans, or lists of spans."""
    names: ClassVar[tuple[str, ...]] = ("time",)
    """Names of all fields."""
    time: float

    def to_json(self) -> dict[str, Any]:
        """Return the event as one flat JSON object, ``kind`` first. The values are the event's own, not copies."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.names}}

    def later(self, seconds: float) -> Self:
        """Return a copy of the event whose times are ``seconds`` later."""
        return replace(self, **{name: _later(getattr(self, name), seconds) for name in self.on_clock})


def _later(moment: Any, seconds: float) -> Any:
    if isinstance(moment, tuple | list):
        return type(moment)(_later(part, seconds) for part in moment)
    return moment + seconds


E = TypeVar("E", bound=Event)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def event(kind: str, *on_clock: str) -> Callable[[type[E]], type[E]]:
    """Make a class the event ``kind``. ``on_clock``: names of its fields, besides ``time``, that hold times."""

    def made(plain: type[E]) -> type[E]:
        found = _named_record(plain)
        found.kind, found.on_clock = kind, ("time", *on_clock)
        found.names = tuple(each.name for each in fields(found))
        return found

    return made
