"""What `make test` tries of a longer list, and `make test-slow` tries of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature, signature
from itertools import product
from math import ceil
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings

T = TypeVar("T")

QUICK_SHARE = 0.1
"""How much of a random search the quick tests make: its first cases."""

a_share_and_all = pytest.mark.parametrize(
    "share", [pytest.param(QUICK_SHARE, id="a tenth"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
"""A random search in both tiers. Its test takes the ``share`` of the examples that it makes."""

a_twentieth_and_all = pytest.mark.parametrize(
    "share", [pytest.param(QUICK_SHARE / 2, id="a twentieth"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
"""The same for a search among whole runs, each of which looks at all that holds."""


def searched(examples: int, *strategies: Any, **named: Any) -> Callable[[Callable[..., None]], Any]:
    """`hypothesis.given` in both tiers: `make test` tries a fifth of so many ``examples``, `make test-slow` all."""

    def decorate(test: Callable[..., None]) -> Any:
        def search(share: float, **fixtures: Any) -> None:
            tried = settings(max_examples=ceil(share * examples), suppress_health_check=list(HealthCheck))
            tried(given(*strategies, **named)(test))(**fixtures)

        fixtures = signature(given(*strategies, **named)(test)).parameters.values()
        search.__signature__ = Signature([*fixtures, Parameter("share", Parameter.KEYWORD_ONLY)])
        search.__doc__ = test.__doc__
        tiers = [pytest.param(0.2, id="a fifth"), pytest.param(1, id="all", marks=pytest.mark.slow)]
        return pytest.mark.parametrize("share", tiers)(search)

    return decorate


def enough(times: float, share: float) -> float:
    """How often something happens at the least in a ``share`` of a search, if it does so many ``times`` in all of it.

    The first cases are small ones, in which less happens: a third of their share is asked for.
    """
    return times if share == 1 else times * share / 3


def mostly_slow(
    names: str | Sequence[str], cases: Iterable[T], *, quick: Sequence[T], ids: Any = None
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` of which only the ``quick`` cases are in `make test`.

    Raises:
        ValueError: where one of ``quick`` is no case: it would be tested nowhere.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}; there are {cases}")

    def param(case: Any) -> Any:
        values = (case,) if isinstance(names, str) else case
        return pytest.param(*values, marks=[] if case in quick else pytest.mark.slow)

    return pytest.mark.parametrize(names, [param(case) for case in cases], ids=ids)


def crossed(names: tuple[str, str], first: Iterable[Any], second: Iterable[Any]) -> pytest.MarkDecorator:
    """Every pair of a value of ``first`` and one of ``second``, of which `make test` has each value once or more."""
    one, other = list(first), list(second)
    quick = [(one[k % len(one)], other[k % len(other)]) for k in range(max(len(one), len(other)))]
    return mostly_slow(names, product(one, other), quick=quick)
