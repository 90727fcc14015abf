"""Base class of trackers, their arguments, and conversions of the data that they get."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config.layers import flatten
from headway.errors import RunError, cut

LONGEST_TEXT = 4000
"""Maximum characters of a prompt or an answer in a sample for trackers."""
MOST_EPISODES = 16
"""Maximum episodes of a group in a sample for trackers."""


def scalars(row: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the finite numbers of a metrics row, without its version: histograms and missing values are left out."""
    return {name: value for name, value in row.items() if name != "version" and is_number(value)}


def is_number(value: Any) -> bool:
    """Return True if ``value`` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values of nested mappings under dotted names: ``groups.trained``. Lists become JSON, null is left out."""
    for name, value in flatten(values):
        if value not in (None, {}):
            yield name, json.dumps(value, default=str) if isinstance(value, list | tuple) else value


def trimmed(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of ``samples.jsonl`` without data per token, and with texts cut to `LONGEST_TEXT`."""
    episodes = [
        {name: _short(value) for name, value in episode.items() if name not in ("rows", "conversation")}
        for episode in sample["episodes"][:MOST_EPISODES]
    ]
    return {name: _short(value) for name, value in sample.items() if name not in ("messages", "episodes")} | {
        "episodes": episodes
    }


def _short(value: Any) -> Any:
    return cut(value, LONGEST_TEXT) if isinstance(value, str) else value


def table(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a sample as rows of a table by the names of its columns, one row for each episode.

    ``number`` is the group's, or the held-out problem's; ``truth``: the ground truth.
    """
    held_out, answer = "validation" in sample, sample.get("answer")
    group = {
        "version": sample["validation" if held_out else "version"],
        "kind": "validation" if held_out else "training",
        "number": sample["problem" if held_out else "group"],
        "source": sample.get("source"),
        "fate": None if held_out else sample.get("fate"),
        "prompt": sample.get("prompt"),
        "truth": answer if answer is None or isinstance(answer, str) else json.dumps(answer, default=str),
    }
    of_episode = ("k", "reward", "parts", "text", "turns", "length", "finish")
    return [
        group | {name: one.get(name) for name in of_episode} | {"parts": json.dumps(one.get("parts") or {})}
        for one in sample["episodes"]
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return rows of a `table` as Markdown text, one episode after the other."""
    return "\n\n".join(
        "\n".join(f"**{name}** {_fenced(value)}" for name, value in row.items() if value is not None) for row in rows
    )


def _fenced(value: Any) -> str:
    text = str(value)
    return f"\n\n```\n{text}\n```\n" if "\n" in text or len(text) > 60 else text + "  "


@dataclass(frozen=True, slots=True)
class TrackerSetting:
    """Arguments of a tracker: the run, and its entry in the tracker."""

    project: str
    """Name of the project; in MLflow, of the experiment."""
    name: str
    """Name of the run in the tracker."""
    folder: Path
    """Folder in the run's directory for the tracker's own files; it exists."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings by dotted key."""
    entry: str = ""
    """Id of the entry in which a resumed run goes on; empty for a new one."""
    undone_from: int | None = None
    """First version that a resumed run repeats; None for a new run. Only TensorBoard deletes its points."""
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 0


class NotKept(RunError):
    """Error of a tracker that lost data: it is created again, and all is sent again."""


class Tracker:
    """Writer of one run into one tool. By default each call does nothing.

        tracker = MlflowTracker(setting)                 a new entry, or the one of ``setting.entry``
        tracker.on_settings(setting.config)              once, after the entry is there
        tracker.on_row({"version": 0, …})                as versions end, in order
        tracker.on_sample([{"number": 17, …}, …])        a group's or a held-out problem's answers, as rows of a `table`
        tracker.on_summary(summary)                      once, at the end
        tracker.on_model(folder)                         the exported model, where ``reports.log_model`` is set
        tracker.close("completed")

    Calls come from one thread, one after the other. Each may raise anything; all but `on_sample` are then made again
    later. The constructor raises nothing after it has made a new entry: the entry's id would be lost, and another entry
    made. A call that raises `NotKept` says that everything since the constructor was lost.
    A call may take long: a caller that must not wait keeps the tracker in a thread (`TrackerThread`).
    A row's version may be lower than that of the row before: a validation that ended late has a row of its own.
    """

    entry = ""
    """Id by which a resumed run finds its entry; empty for a tracker without ids."""
    where = ""
    """Place to look at the run: a URL, or a folder with the command that shows it."""
    remedy = ""
    """Command that sends what the tracker has not delivered yet; empty for the usual command."""

    def on_settings(self, config: dict[str, Any]) -> None:
        """Take the run's settings by dotted key. Rows come whether or not they were taken."""

    def on_row(self, row: dict[str, Any]) -> None: ...

    def on_sample(self, rows: list[dict[str, Any]]) -> None: ...

    def on_summary(self, summary: dict[str, Any]) -> None: ...

    def on_model(self, folder: Path) -> None: ...

    def close(self, status: str) -> None:
        """End the entry. ``status``: the run's, ``completed``, ``interrupted`` or ``failed``."""
