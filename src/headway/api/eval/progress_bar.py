"""Progress of an evaluation: a bar on a terminal, else lines, or one line in a notebook's cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.text import Text

from headway.reports.live.live_view import Cell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FEWEST_FOR_A_LINE = 10
"""Minimum number of problems between two lines of progress."""


class ProgressDisplay(Protocol):
    """Shows how many problems are answered."""

    def start(self) -> None:
        """Show that answering begins."""

    def advance(self) -> None:
        """Show that one more problem is answered."""


class Tenths:
    """Progress as plain lines, where no terminal is attached: at the start, each tenth of the problems, and the end.

    Lines come at least `FEWEST_FOR_A_LINE` problems apart.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        self._every = max(FEWEST_FOR_A_LINE, -(-total // 10))

    def start(self) -> None:
        self._console.print(f"answering {self._total} problems", soft_wrap=True)

    def advance(self) -> None:
        self._done += 1
        if self._done % self._every == 0 or self._done == self._total:
            self._console.print(f"{self._done} of {self._total} problems", soft_wrap=True)


class Bar:
    """Progress as a bar on a terminal, which is removed at the end."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task("loading the model", total=None)

    def start(self) -> None:
        self._progress.update(self._task, description="answering", total=self._total)

    def advance(self) -> None:
        self._progress.advance(self._task)


class NotebookProgress:
    """Progress as one line of a notebook's cell."""

    def __init__(self, cell: Cell, total: int) -> None:
        self._cell, self._total, self._done = cell, total, 0

    def start(self) -> None:
        self._cell.show(Text(f"{self._done} of {self._total} problems answered"))

    def advance(self) -> None:
        self._done += 1
        self.start()


@contextmanager
def progress(console: Console, total: int) -> Iterator[ProgressDisplay]:
    """Show on ``console`` how many of ``total`` problems are answered, as long as the block lasts."""
    if isinstance(console, Cell):
        yield NotebookProgress(console, total)
        return
    if not console.is_terminal:
        yield Tenths(console, total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        yield Bar(bar, total)
