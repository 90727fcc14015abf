"""Numbers that a reward function tells beside its scores: they become metrics."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import isfinite
from statistics import fmean
from typing import Any

SCORES = ("score", "reward")
"""Keys of the score in a dictionary that a function returns, the first one that it has."""


def plain(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to lists and numbers of Python's own."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


class FurtherNumbers:
    """The further numbers of one group, by name. What is no finite number, or has no text as its name, is left out."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._values: dict[str, list[float | None]] = {}
        self._logged: dict[str, list[float]] = {}

    def take_from(self, value: Any, k: int) -> Any:
        """Return the score of what a function returned for response ``k``, and keep the rest of a dictionary."""
        key = next((key for key in SCORES if key in value), None) if isinstance(value, Mapping) else None
        if key is None:
            return value
        for name, one in value.items():
            if name != key and (number := _finite(name, one)) is not None:
                self._values.setdefault(name, [None] * self._n)[k] = number
        return value[key]

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a number of the whole group, as TRL's trainer does; of several under a name their mean."""
        if (number := _finite(name, value)) is not None:
            self._logged.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep nothing: TRL's trainer shows these columns beside its completions."""

    @property
    def values(self) -> dict[str, list[float | None]]:
        """Values [n] by name; None for a response without one."""
        return self._values | {name: [fmean(given)] * self._n for name, given in self._logged.items()}


def _finite(name: Any, value: Any) -> float | None:
    number = plain(value)
    if not isinstance(name, str) or not isinstance(number, numbers.Real | Decimal):
        return None
    try:
        return float(number) if isfinite(number) else None
    except OverflowError:  # a whole number beyond all floats
        return None
