"""Settings with their reasons, in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIVEN = "as given"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, and why it has its value."""

    key: str
    value: Any
    reason: str = ""
    main: bool = False
    """True where people who have not read the file should see it, too."""


class Choices:
    """Choices in the making: those that the user has made stand."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._made: dict[str, Choice] = {}

    def add(self, key: str, value: Any, reason: str = "", *, main: bool = False) -> Any:
        """Choose ``value``, unless ``key`` is given; returns what counts."""
        if key in self._given:
            value, reason = self._given[key], GIVEN
        self._made[key] = Choice(key, value, reason, main)
        return value

    def finished(self) -> list[Choice]:
        """Return all choices, with what was given and not asked for."""
        others = [Choice(key, value, GIVEN) for key, value in self._given.items() if key not in self._made]
        return [*self._made.values(), *others]
