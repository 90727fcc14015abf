"""The run as lines of text: on the console where no terminal is attached, and in the driver's log.

On the console there is one line per phase, version and validation, and one for start and end. The log has the few
events that somebody who looks for a cause reads, as lines of standard logging.
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
        """Version below which every version had its line before the run was resumed."""

    def phase(self, text: str, detail: str = "") -> None:
        self._line(f"{text}: {detail}" if detail else text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def note(self, text: str) -> None:
        self._line(text)

    def on_event(self, event: Event) -> None:
        match event:
            case events.RunStarted():
                self._line(started_line(event))
            case events.ValidationFinished():
                self._line(validation_line(event))
            case events.PromptsLeftOut():
                self._line(left_out_line(event))
            case events.ReplicaLost() | events.EpisodeWorkerLost() | events.CheckpointFailed() | events.RanksLost():
                self._line(f"warning: {lost_line(event)}")
            case events.RanksRestarted():
                self._line(restarted_line(event))
            case events.Note():
                self._line(event.text if event.level == "info" else f"{event.level}: {event.text}")
            case events.RunResumed():
                self._told_below = event.version
            case events.RunFinished(status="failed"):
                self._line(f"failed at version {event.version}")  # why is said once, by the error that ends the command
            case events.RunFinished():
                self._line(f"{event.status}" + (f": {event.reason}" if event.reason else ""))

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
            if filtered := progress.metrics.tally.fates["filtered"]:
                parts.append(f"{human.count(filtered)} filtered")
            if (seconds := progress.seconds_left) is not None:
                parts.append(f"{human.duration(seconds)} left")
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        self._console.print(Text(f"{stamp}  {text}"), soft_wrap=True)


def started_line(event: events.RunStarted) -> str:
    total = "" if event.total_groups is None else f" of {human.count(event.total_groups)}"
    bound = "no bound on lag" if event.lag_bound is None else f"lag at most {event.lag_bound}"
    return (
        f"training starts: {event.mode}, seed {event.seed}, {human.count(event.groups_per_version)} groups per "
        f"version{total}, {event.order}, {bound}, {human.count(sum(event.slots.values()))} answers at once"
    )


def restarted_line(event: events.RanksRestarted) -> str:
    seconds = event.span[1] - event.span[0]
    back = f"{events.ranks_named(event.role)} is back at version {event.version} after {seconds:.1f} s"
    return f"{back}, {event.batches} batches done again"


def lost_line(
    event: events.ReplicaLost | events.EpisodeWorkerLost | events.CheckpointFailed | events.RanksLost,
) -> str:
    match event:
        case events.ReplicaLost():
            return f"{event.replica} is lost, what it was generating runs again elsewhere: {event.reason}"
        case events.EpisodeWorkerLost():
            return f"{event.worker} is lost, the groups that it had not handed on are made again: {event.reason}"
        case events.RanksLost():
            who = events.ranks_named(event.role)
            return f"{who} is lost, its ranks are started again and replicas go on: {event.reason}"
        case events.CheckpointFailed():
            return f"the checkpoint of version {event.version} was not saved, and training goes on: {event.reason}"


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
WARNINGS = (
    events.ReplicaLost,
    events.EpisodeWorkerLost,
    events.UpdateRetried,
    events.CheckpointFailed,
    events.RanksLost,
)
TOLD = (
    events.RunStarted,
    events.RunResumed,
    events.VersionReached,
    events.CheckpointSaved,
    events.RanksRestarted,
    events.ReplicaJoined,
    events.RunFinished,
)


class EventLog:
    """An observer that logs events to ``driver.log`` in the folder ``logs`` of the run's directory ``run``."""

    def __init__(self, run: Path) -> None:
        self._log = DriverLog(run / "logs", run.resolve().name)

    def on_event(self, event: Event) -> None:
        match event:
            case events.Note(level=level, text=text):
                logger.log(logging.INFO if level == "info" else logging.WARNING, text)
            case events.RunFinished(status="failed"):
                logger.error("%s", event)
            case _ if isinstance(event, WARNINGS):
                logger.warning("%s", event)
            case _ if isinstance(event, TOLD):
                logger.info("%s", event)

    def close(self) -> None:
        """Leave the log open: what fails as the run ends is logged, too. See `end`."""

    def end(self) -> None:
        """Close the log."""
        self._log.close()
