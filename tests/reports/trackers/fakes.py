"""A tool that is scripted, behind the link of a tracker: it keeps what it is told, fails and hangs as a test says."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_client import TrackerApart, TrackerMessages
from headway.reports.trackers.tracker_process import TrackerLost
from headway.reports.trackers.tracker_queue import TrackerQueue

SOON_S = 30.0
"""Longest wait for another thread, which only a failing test waits out."""


@dataclass
class Tool:
    """The tool, whichever process talks to it. ``entries``: entry → what it was told, call by call."""

    hangs_at: str = ""
    """Call that is never answered."""
    problems: deque[str | None] = field(default_factory=deque)
    """What is wrong with the next rows; None for a row that is taken."""
    refuses: dict[str, str] = field(default_factory=dict)
    """What is always wrong, by the call, or by the version of a row."""
    account: dict[str, Any] = field(default_factory=dict)
    """What the next answer to a sample or a row says of samples."""
    loses_at: set[int] = field(default_factory=set)
    """Numbers of the calls, counted from 1, at which the tool finds that it has not kept what it took."""
    dies_at: set[int] = field(default_factory=set)
    """Numbers of the calls, counted from 1, at which the process ends."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    opened_with: list[dict[str, Any]] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    processes: int = 0
    asked: int = 0
    _news: threading.Condition = field(default_factory=threading.Condition)

    @property
    def rows(self) -> list[int]:
        return [value["version"] for call, value in self.calls if call == "on_row"]

    def link(self) -> Link:
        self.processes += 1
        return Link(self)

    def count(self) -> None:
        with self._news:
            self.asked += 1
            self._news.notify_all()

    def wait_for(self, asked: int) -> None:
        """Wait until so many questions were answered, in one way or another."""
        with self._news:
            assert self._news.wait_for(lambda: self.asked >= asked, SOON_S), f"{self.asked} of {asked}: {self.calls}"


class Link:
    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self.killed = threading.Event()

    def ask(self, call: str, value: Any) -> dict[str, Any]:
        tool = self._tool
        try:
            if tool.asked + 1 in tool.dies_at:
                raise TrackerLost("its process ended (SIGSEGV)")
            if call == tool.hangs_at:
                tool.hanging.set()
                assert self.killed.wait(SOON_S), "nobody ended a tracker that hangs"
                raise TrackerLost("its process ended (SIGKILL)")
            if tool.asked + 1 in tool.loses_at:
                return {"problem": "it could not be persisted", "kept": False}
            if problem := tool.refuses.get(f"row {value['version']}" if call == "on_row" else call):
                return {"problem": problem}
            if call == "on_row" and tool.problems and (problem := tool.problems.popleft()) is not None:
                return {"problem": problem}
            if call == "open":
                tool.opened_with.append(value)
                return {"entry": value["entry"] or "entry-1", "where": "http://tool/entry-1", "remedy": ""}
            tool.calls.append((call, value))
            return tool.account if call in ("on_sample", "on_row") else {}
        finally:
            tool.count()

    def kill(self) -> None:
        self.killed.set()


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


class Apart(TrackerApart):
    """A tracker whose run writes its rows to ``metrics.jsonl``."""

    metrics: Path

    def row(self, row: dict[str, Any]) -> None:
        write_row(self.metrics, row)
        self.on_row()


def apart(
    tool: Tool,
    told: Told,
    folder: Path,
    outbox: TrackerQueue | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    config: dict[str, Any] | None = None,
) -> Apart:
    """A tracker named ``tool`` over the scripted tool."""
    setting = TrackerSetting(project="p", name="n", folder=folder / "trackers", config=config or {})
    outbox = outbox or TrackerQueue(folder / "metrics.jsonl")
    tracker = Apart("tool", setting, outbox, tool.link, told.say, remedy="headway sync RUN", clock=clock)
    tracker.metrics = folder / "metrics.jsonl"
    return tracker
