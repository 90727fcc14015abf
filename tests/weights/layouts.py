"""Every small pair of layouts, and a brute-force model of layers × columns to compare arithmetic with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from headway.weights.regroup import Layout, Placement

DEVICES = 16
Cells = frozenset[tuple[int, int]]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def small_layouts() -> Iterator[Layout]:
    for world in range(1, DEVICES + 1):
        for pp in divisors(world):
            for tp in divisors(world // pp):
                yield Layout(pp=pp, tp=tp, dp=world // (pp * tp))


def small_pairs() -> Iterator[tuple[Layout, Layout]]:
    """Every layout on at most `DEVICES` devices, with every generation layout whose degrees divide it."""
    for training in small_layouts():
        for pp, tp in product(divisors(training.pp), divisors(training.tp)):
            yield training, Layout(pp=pp, tp=tp, dp=training.world // (pp * tp))


LAYOUTS = list(small_layouts())
PAIRS = list(small_pairs())


@cache
def cells(layout: Layout, pp: int, tp: int) -> Cells:
    """Elements (layer, column) at a place of a model of world × world elements, which all of its layouts divide."""
    layers, columns = layout.world, layout.world
    return frozenset(
        (layer, column)
        for layer in range(layers)
        for column in range(columns)
        if layer * layout.pp // layers == pp and column * layout.tp // columns == tp
    )


def held(placement: Placement) -> list[Cells]:
    """What each rank holds, element by element."""
    return [cells(placement.layout, at.pp, at.tp) for at in placement.places]
