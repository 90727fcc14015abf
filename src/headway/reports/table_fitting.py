"""Tables that fit their terminal: columns that do not come in another table below, behind the first one again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

TableOf = Callable[[Sequence[int]], Table]
"""Builds a table of the columns with these numbers."""


UNBOUNDED = 10_000
"""Width in which every table has its own."""


def print_fitting(console: Console, columns: int, table_of: TableOf, *, together: int = 1) -> None:
    """Print a table of ``columns`` columns as tables that fit ``console``, with an empty line between them.

    Columns that may wrap are broken between words before others move to another table. ``together``: number of columns
    beside column 0 that each table has at least, where there are so many.
    """
    rest = list(range(1, columns))
    while True:
        most = len(rest)
        while most > together and _narrowest(console, table_of([0, *rest[:most]])) > console.width:
            most -= 1
        console.print(table_of([0, *rest[:most]]))
        rest = rest[most:]
        if not rest:
            return
        console.print()


def _narrowest(console: Console, table: Table) -> int:
    """Return the width in which no word of ``table`` is broken, and no cell that may not wrap."""
    options = console.options.update(max_width=UNBOUNDED)
    width = console.measure(table, options=options).maximum
    for column in table.columns:
        if not column.no_wrap:
            sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            widest, word = max(size.maximum for size in sizes), max(size.minimum for size in sizes)
            width -= max(min(widest, column.max_width or widest) - word, 0)
    return width
