"""Each version's numbers as TensorBoard scalars, by TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class TensorBoardFile:
    """Row sink; the step of every scalar is the version. A writer that fails is reported once and left alone."""

    def __init__(self, directory: Path, report: Callable[[str], None], *, purge_step: int | None = None) -> None:
        """``purge_step``: what earlier files have of this version, and of later ones, is undone."""
        from tensorboard.summary import Writer  # slow to import, and not needed when it is switched off

        self._directory = directory
        self._report = report
        if purge_step is not None:
            _purge(directory, purge_step)
        self._writer: Any = Writer(str(directory))

    def on_row(self, row: dict[str, Any]) -> None:
        scalars = {name: value for name, value in row.items() if name != "version" and _is_scalar(value)}
        self._attempt(
            lambda writer: [writer.add_scalar(name, value, row["version"]) for name, value in scalars.items()]
        )
        self._attempt(lambda writer: writer.flush())

    def close(self) -> None:
        self._attempt(lambda writer: writer.close())
        self._writer = None

    def _attempt(self, action: Callable[[Any], object]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except Exception as cause:  # the writer's own thread re-raises whatever happened to it
            self._writer = None
            self._report(f"cannot write to {self._directory}: {cause}; the run goes on without TensorBoard files")


def _purge(directory: Path, step: int) -> None:
    """Leave one file with all earlier points, as they were written.

    TensorBoard has an event for that (``SessionLog.START``); its Python reader shows the points all the same.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    earlier = sorted(directory.glob("*tfevents*"))
    with TemporaryDirectory(prefix=".purging-", dir=directory) as aside:
        writer = EventFileWriter(aside)
        for file in earlier:
            for event in EventFileLoader(str(file)).Load():
                if event.HasField("summary") and event.step < step:
                    writer.add_event(event)
        writer.close()
        (kept,) = Path(aside).iterdir()
        kept.rename(directory / kept.name)
    for file in earlier:
        file.unlink()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
