"""A tool that is scripted, behind a tracker: it keeps what it is told, fails and hangs as a test says."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.reports.run_directory import RunDirectory
from headway.reports.trackers.tracker import NotKept, Tracker, TrackerSetting
from headway.reports.trackers.tracker_thread import TrackerMessages, TrackerState, TrackerThread

SOON_S = 30.0
"""Longest wait for another thread, which only a failing test waits out."""


@dataclass
class Tool:
    """The tool, whichever tracker talks to it."""

    hangs_at: str = ""
    """Call that is never answered."""
    problems: deque[str | None] = field(default_factory=deque)
    """What is wrong with the next rows; None for a row that is taken."""
    refuses: dict[str, str] = field(default_factory=dict)
    """What is always wrong, by the call, or by the version of a row."""
    loses_at: set[int] = field(default_factory=set)
    """Numbers of the calls, counted from 1, at which the tool finds that it has not kept what it took."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    opened_with: list[TrackerSetting] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    """Ends a call that hangs."""
    asked: int = 0
    _news: threading.Condition = field(default_factory=threading.Condition)

    @property
    def rows(self) -> list[int]:
        return [value["version"] for call, value in self.calls if call == "on_row"]

    def make(self, name: str, setting: TrackerSetting) -> Scripted:
        return Scripted(self, setting)

    def answer(self, call: str, value: Any) -> None:
        try:
            if call == self.hangs_at:
                self.hanging.set()
                assert self.released.wait(SOON_S), "nobody released a tracker that hangs"
            if self.asked + 1 in self.loses_at:
                raise NotKept("it could not be persisted")
            if problem := self.refuses.get(f"row {value['version']}" if call == "on_row" else call):
                raise ConnectionError(problem)
            if call == "on_row" and self.problems and (problem := self.problems.popleft()) is not None:
                raise ConnectionError(problem)
            if call == "open":
                self.opened_with.append(value)
            else:
                self.calls.append((call, value))
        finally:
            with self._news:
                self.asked += 1
                self._news.notify_all()

    def wait_for(self, asked: int) -> None:
        """Wait until so many questions were answered, in one way or another."""
        with self._news:
            assert self._news.wait_for(lambda: self.asked >= asked, SOON_S), f"{self.asked} of {asked}: {self.calls}"


class Scripted(Tracker):
    """A tracker that does what its tool's script says."""

    def __init__(self, tool: Tool, setting: TrackerSetting) -> None:
        self._tool = tool
        tool.answer("open", setting)
        self.entry, self.where = setting.entry or "entry-1", "http://tool/entry-1"

    def on_settings(self, config: dict[str, Any]) -> None:
        self._tool.answer("on_settings", config)

    def on_row(self, row: dict[str, Any]) -> None:
        self._tool.answer("on_row", row)

    def on_sample(self, rows: list[dict[str, Any]]) -> None:
        self._tool.answer("on_sample", rows)

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._tool.answer("on_summary", summary)

    def on_model(self, folder: Path) -> None:
        self._tool.answer("on_model", folder)

    def close(self, status: str) -> None:
        self._tool.answer("close", status)


@dataclass
class Told:
    """What the user was told."""

    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    @property
    def say(self) -> TrackerMessages:
        return TrackerMessages(self.warnings.append, self.notes.append, self.phases.append)


def write_row(metrics: Path, row: dict[str, Any]) -> None:
    with metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")


class Threaded(TrackerThread):
    """A tracker whose run writes its rows to ``metrics.jsonl``."""

    def row(self, row: dict[str, Any]) -> None:
        write_row(self._run.metrics, row)
        self.on_row()


def threaded(
    tool: Tool,
    told: Told,
    folder: Path,
    state: TrackerState | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    config: dict[str, Any] | None = None,
) -> Threaded:
    """A tracker named ``wandb`` over the scripted tool."""
    run = RunDirectory(folder)
    setting = TrackerSetting(project="p", name="n", folder=run.trackers, config=config or {})
    return Threaded("wandb", setting, run, told.say, state, make=tool.make, clock=clock)
