"""The run as lines of text: on the console where no terminal is attached, and in the driver's log.

On the console there is one line per phase, version and validation, and one for start and end. The log has the few
events that help to find a cause, as lines of standard logging.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headway import events
from headway.events import Event
from headway.reports import human
from headway.reports.live.panel import RunProgress
from headway.runtime.logs import DriverLog


class PlainView:
    """A `ConsoleView` of lines that begin with the wall clock. ``clock`` is Unix time in seconds."""

    def __init__(self, console: Console, progress: RunProgress, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._progress = progress
        self._clock = clock
        self._told_below = 0
        """Versions below this one had their line before the run was resumed."""

    def phase(self, text: str, detail: str = "") -> None:
        self._line(f"{text}: {detail}" if detail else text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def note(self, text: str) -> None:
        self._line(text)

    def on_event(self, event: Event) -> None:
        # Rows of versions that survived a resume come again, but were already printed.
        if isinstance(event, events.RunResumed):
            self._told_below = event.version
        if (told := words(event)) is not None and told[0] != "log":
            self._line(told[1] if told[0] == "info" else f"{told[0]}: {told[1]}")

    def on_row(self, row: dict[str, Any]) -> None:
        self._progress.on_row(row)
        if "reward/mean" in row and row["version"] >= self._told_below:
            self._line(self._version_line(row))

    def close(self) -> None:
        """Do nothing: the view holds no resources."""

    def _version_line(self, row: dict[str, Any]) -> str:
        progress, started = self._progress, self._progress.metrics.started
        parts = [f"version {row['version']}", f"reward {human.score(row['reward/mean'])}"]
        if "lag/mean" in row:
            parts.append(f"lag mean {row['lag/mean']:.2f} max {row['lag/max']}")
        parts += [f"{side} idle {human.share(row.get(f'{side}/idle_ratio'))}" for side in ("trainer", "rollouter")]
        if "num_turns/mean" in row:
            parts.append(f"turns {row['num_turns/mean']:.1f}")
            if failed := row["episodes/failed_ratio"]:
                parts.append(f"episodes failed {human.share(failed)}")
        if started is not None:
            of = "" if started.total_groups is None else f"/{human.count(started.total_groups)}"
            parts.append(f"{human.count(progress.trained)}{of} groups")
            fates = progress.metrics.tally.fates
            parts += [f"{human.count(fates[fate])} {fate}" for fate in ("filtered", "failed") if fates[fate]]
            if (seconds := progress.seconds_left) is not None:
                parts.append(f"{human.duration(seconds)} left")
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        self._console.print(Text(f"{stamp}  {text}"), soft_wrap=True)


def words(event: Event) -> tuple[str, str] | None:
    """Return an event's level (``info``, ``warning``, or ``log`` for only the log) and its text.

    Returns None for an event without a text.
    """
    match event:
        case events.Note(level=level, text=text):
            return level, text
        case events.RunStarted():
            total = "" if event.total_groups is None else f" of {human.count(event.total_groups)}"
            bound = "no bound on lag" if event.lag_bound is None else f"lag at most {event.lag_bound}"
            return "info", (
                f"training starts: {event.mode}, seed {event.seed}, {human.count(event.groups_per_version)} groups per "
                f"version{total}, {event.order}, {bound}, {human.count(sum(event.slots.values()))} answers at once"
            )
        case events.ValidationFinished():
            return "info", validation_line(event)
        case events.PromptsLeftOut():
            return "info", left_out_line(event)
        case events.ReplicaLost(replica=who, reason=why):
            return "warning", f"{who} is lost, what it was generating runs again elsewhere: {why}"
        case events.EpisodeWorkerLost(worker=who, reason=why):
            return "warning", f"{who} is lost, the groups that it had not handed on are made again: {why}"
        case events.RanksLost(role=role, reason=why):
            who = events.ranks_named(role)
            return "warning", f"{who} is lost, and its ranks are started again: {why}"
        case events.RanksRestarted(role=role):
            seconds = event.span[1] - event.span[0]
            back = f"{events.ranks_named(role)} is back at version {event.version} after {seconds:.1f} s"
            fewer = f", with {event.ranks} of {event.of} ranks" if event.ranks < event.of else ""
            return "warning" if fewer else "info", f"{back}{fewer}, {event.batches} batches done again"
        case events.CheckpointFailed(version=version, reason=why):
            return "warning", f"the checkpoint of version {version} was not saved, and training goes on: {why}"
        case events.RunFinished(status="failed"):
            return "info", f"failed at version {event.version}"  # why is said once, by the error that ends the command
        case events.RunFinished(status=status, reason=why):
            return "info", f"{status}: {why}" if why else status
        case events.VersionReached(version=version):
            return "log", f"version {version} is reached"
        case events.CheckpointSaved(version=version, path=path):
            return "log", f"the checkpoint of version {version} is in {path}"
        case events.RunResumed(version=version):
            return "log", f"the run goes on from version {version}"
        case events.ReplicaJoined(replica=who, version=version):
            return "log", f"{who} joins, with version {version}"
        case events.UpdateRetried():
            receivers = ", ".join(event.receivers)
            return "log", f"version {event.version} is sent to {receivers} again: {event.reason}"
    return None


def left_out_line(event: events.PromptsLeftOut) -> str:
    if event.reason != "too_long":
        rows = "row was" if event.count == 1 else "rows were"
        why = f": {event.why}" if event.why else ""
        return f"{human.count(event.count)} {event.part} {rows} left out ({event.reason}; {event.source}){why}"
    were = "prompt was" if event.count == 1 else "prompts were"
    return (
        f"{human.count(event.count)} {event.part} {were} left out: more than {human.count(event.max_tokens)} tokens "
        f"({event.source})"
    )


def validation_line(event: events.ValidationFinished) -> str:
    failed = f", {human.count(event.failed)} failed" if event.failed else ""
    if event.failed_episodes:
        failed += f", failed episodes not counted: {human.count(event.failed_episodes)}"
    sources = ", ".join(f"{name} {human.score(mean)}" for name, mean in event.by_source.items())
    several = f" (answered by {event.versions[0]} to {event.versions[-1]})" if len(event.versions) > 1 else ""
    return (
        f"validation of version {event.version}{several}: mean reward {human.score(event.accuracy)} on "
        f"{human.count(event.problems)} problems{f' ({sources})' if sources else ''}{failed}, "
        f"{human.duration(event.span[1] - event.span[0])}"
    )


logger = logging.getLogger(__name__)


class EventLog:
    """An observer that logs events to ``driver.log`` in the folder ``logs`` of the run's directory ``run``."""

    def __init__(self, run: Path) -> None:
        self._log = DriverLog(run / "logs", run.resolve().name)

    def on_event(self, event: Event) -> None:
        if isinstance(event, events.RunFinished) and event.status == "failed":
            logger.error("failed at version %d: %s", event.version, event.reason)
        elif (told := words(event)) is not None:
            warns = told[0] == "warning" or isinstance(event, events.UpdateRetried)
            logger.log(logging.WARNING if warns else logging.INFO, told[1])

    def close(self) -> None:
        """Leave the log open, since failures at the run's end are logged, too; `end` closes it."""

    def end(self) -> None:
        """Close the log."""
        self._log.close()
