"""What `make test` tries of a longer list, and `make test-slow` tries of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

QUICK_SHARE = 0.25
"""How much of a random search the quick tests make: its first cases."""

a_share_and_all = pytest.mark.parametrize(
    "share", [pytest.param(QUICK_SHARE, id="a quarter"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
"""A random search in both tiers. Its test takes the ``share`` of the examples that it makes."""


def mostly_slow(cases: Iterable[T], *quick: T) -> list[object]:
    """Parameters of a test of which only the ``quick`` ones are in `make test`.

    Raises:
        ValueError: where one of ``quick`` is no case: it would be tested nowhere.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}; there are {cases}")
    return [case if case in quick else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: object) -> Sequence[object]:
    """The values of one case, which is a tuple where a test has several parameters."""
    return case if isinstance(case, tuple) else (case,)
