"""A run in Python: its directory, read at each access, while it trains and afterwards.

Tables are pandas' if it is installed, else a small class with a similar interface.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.loading import load as load_config
from headway.config.schema import Config
from headway.errors import DataError, UserError, shown
from headway.reports import human
from headway.reports.record.file_access import whole_lines
from headway.reports.run_directory import RunDirectory, is_trained
from headway.reports.samples.samples_file import read_samples

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 60
"""Maximum number of rows in a table's text; the first ones are shown."""


class Table:
    """A table without pandas: ``table["reward"]`` is a column, ``columns`` are their names, ``len(table)`` its rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        """Make a table of ``rows``. ``columns``: names of the first columns, which exist even without rows."""
        self.rows = [dict(row) for row in rows]
        self.columns = list(dict.fromkeys(chain(columns, *rows)))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the columns, as pandas does."""
        return iter(self.columns)

    def __getitem__(self, column: str) -> list[Any]:
        """Return a column, with None for rows without it. Raises `KeyError` for a column that no row has."""
        if column not in self.columns:
            raise KeyError(column)
        return [row.get(column) for row in self.rows]

    def __repr__(self) -> str:
        lines = [self.columns, *([_cell(row.get(name)) for name in self.columns] for row in self.rows[:SHOWN])]
        more = [f"… {len(self) - SHOWN} more rows"] if len(self) > SHOWN else []
        return "\n".join(["\t".join(cells) for cells in lines] + more)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> pd.DataFrame | Table:
    """Return ``rows`` as a ``DataFrame`` of pandas; as a `Table` without pandas. ``columns``: the first ones."""
    small = Table(rows, columns)
    try:
        import pandas as pd
    except ImportError:
        return small
    return pd.DataFrame(small.rows, columns=small.columns)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_ANSWER = ("source", "prompt", "answer", "k", "response", "reward", "length", "finish")
LEFT_AT_ONCE = "left at once"
"""Reason of a run that was interrupted in the middle of a version."""


class Run:
    """A run. ``path`` is its absolute directory; everything else is read from its files at each access."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the run in the directory ``path``. Raises `UserError` if there is none."""
        self.path = Path(path).expanduser().absolute()
        self._directory = RunDirectory.existing(self.path)

    @property
    def config(self) -> Config:
        """The run's resolved configuration. Raises `ConfigError` if its file is damaged."""
        return load_config(self._directory.config).config

    @property
    def status(self) -> str:
        """Status: ``running``, ``completed``, ``interrupted``, ``failed``; ``killed`` if it ended without a report.

        Raises `DataError` for files that cannot be read.
        """
        if (told := self.summary.get("status")) is not None:
            return str(told)
        return "killed" if is_trained(self._directory.lock) is False else "running"  # None: the lock does not tell

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``; empty before the run has ended. Raises `DataError` for a damaged file."""
        try:
            found = json.loads(self._directory.summary.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it holds no object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as cause:
            raise DataError(
                f"{self._directory.summary} cannot be read ({cause}); take it from a copy of the run, or remove it"
            ) from cause
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics, a dictionary for each version, as in ``metrics.jsonl`` (docs/metrics.md has their names).

        Raises `DataError` for a damaged file.
        """
        rows: dict[int, dict[str, Any]] = {}
        for row in _lines(self._directory.metrics):
            rows.setdefault(int(row["version"]), {}).update(row)  # late values of a version are on another line
        return [rows[version] for version in sorted(rows)]

    @property
    def metrics(self) -> pd.DataFrame | Table:
        """The metrics, a row for each version: a ``DataFrame`` where pandas is installed, else a `Table`.

        Raises `DataError` for a damaged file.
        """
        return table(self.rows)

    def samples(self, *, validation: bool = False) -> pd.DataFrame | Table:
        """Return the answers of the run's sampled groups, or of its held-out problems: a row for each answer.

        A ``DataFrame`` where pandas is installed, else a `Table`. Columns: ``version``; ``group`` and ``fate``, or
        ``problem``; ``source``, ``prompt``, ``answer``, ``k``, ``response``, ``reward``, ``length`` in tokens and
        ``finish``. Tokens and their numbers are in ``samples.jsonl`` (docs/samples.md).

        Raises `DataError` for a damaged file.
        """
        path = self._directory.samples
        what = "validation" if validation else "group"
        samples = read_samples(path, what=what) if path.is_file() else ()
        last = {(sample[what], sample.get("problem")): sample for sample in samples}  # a resume may have undone others
        columns = ("version", "problem", *_ANSWER) if validation else ("version", "group", "fate", *_ANSWER)
        return table([row for sample in last.values() for row in _answers(sample)], columns)

    @property
    def model(self) -> Path | None:
        """Folder of the exported model, which `transformers` opens; None before there is one."""
        return self._directory.model if self._directory.model.is_dir() else None

    def __repr__(self) -> str:
        return f"<Run {_short(self.path)}: {', '.join(f'{name} {value}' for name, value in self._told().items())}>"

    def _told(self) -> dict[str, str]:
        summary, rows = self.summary, self.rows
        told = {"status": self.status, "version": str(summary.get("version", rows[-1]["version"] if rows else 0))}
        if evaluations := summary.get("eval"):
            scores = [human.score(evaluations[at]["accuracy"]) for at in (0, -1)]
            told["validation reward"] = scores[0] if len(evaluations) == 1 else " → ".join(scores)
        if self.model is not None:
            told["model"] = _short(self.model)
        return told


def load(run: str | os.PathLike[str] | Run) -> Run:
    """Return the run in a directory, whether it trains or has ended. Raises `UserError` if there is none."""
    if isinstance(run, Run):
        return run
    if not isinstance(run, str | os.PathLike):
        raise UserError(f"RUN: got {shown(run)}, expected a run, or its directory, the run.dir of a headway train")
    return Run(run)


def _short(path: Path) -> str:
    """Return the path for display: relative if it is below the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines. A missing file has none; a line that is being written is skipped."""
    try:
        yield from map(json.loads, whole_lines(path))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as cause:
        raise DataError(f"{path} cannot be read: {cause}") from cause


def _answers(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "group" in sample:
        head = {"version": sample["version"], "group": sample["group"], "fate": sample["fate"]}
    else:
        head = {"version": sample["validation"], "problem": sample["problem"]}
    head |= {name: sample[name] for name in _ANSWER[:3]}
    for episode in sample["episodes"]:
        yield head | {name: episode["text" if name == "response" else name] for name in _ANSWER[3:]}
