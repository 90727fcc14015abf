"""Consoles that never fail, tables that fit them, and text that no terminal obeys."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

UNBOUNDED = 10_000
"""Width in which every table has its own."""


def print_fitting(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[RenderableType]],
    *,
    styles: Sequence[str | None] = (),
    **looks: Any,
) -> None:
    """Print a table as tables that fit ``console``, with an empty line between them, each with the first column.

    Columns that may wrap are broken between words before others move to another table. ``styles``: one for each row;
    ``looks``: further arguments of the tables.
    """
    looks = {"box": None, "header_style": "bold"} | looks

    def table_of(numbers: Sequence[int]) -> Table:
        # Copies: a column of rich holds the cells of its table.
        table = Table(*(columns[number].copy() for number in numbers), pad_edge=False, **looks)
        for row, style in zip(rows, styles or [None] * len(rows), strict=True):
            table.add_row(*(row[number] for number in numbers), style=style)
        return table

    rest = list(range(1, len(columns)))
    while True:
        most = len(rest)
        while most > 1 and _narrowest(console, table_of([0, *rest[:most]])) > console.width:
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


class Unfailing:
    """A text file to print to that never raises `OSError`: once it refuses, what is written to it is lost.

    So a pipe whose reader left, or a full disk behind ``> run.log``, ends what is shown of a run, not the run.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._refused:
            return
        try:
            action()
        except OSError:
            self._refused = True
            # What the file still holds goes nowhere, or the interpreter, which flushes it last, would fail over it.
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())


def stdout_console() -> Console:
    """A console on this process's output that never fails."""
    if sys.stdout is None:  # closed before the interpreter started: rich prints nowhere
        return Console()
    return Console(file=cast(IO[str], Unfailing(sys.stdout)))


def visible(text: str) -> str:
    """Return ``text`` with its control and format characters spelled, but for ends of lines, tabs, and joiners.

    What a model says may hold any of them, and a terminal obeys some. Joiners are part of emoji and of some scripts.
    """
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in _OBEYED or c in _HARMLESS else f"<0x{ord(c):02X}>" for c in text)


_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_HARMLESS = "\n\t\u200c\u200d"
