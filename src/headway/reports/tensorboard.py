"""Each version's numbers as TensorBoard scalars, by TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


class TensorBoardFile:
    """Row sink; the step of every scalar is the version. A writer that fails is reported once and left alone."""

    def __init__(self, directory: Path, report: Callable[[str], None]) -> None:
        from tensorboard.summary import Writer  # slow to import, and not needed when it is switched off

        self._directory = directory
        self._report = report
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


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
