"""Command ``headway sync``: what a run's trackers lack, sent once the run is over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.common import EXIT_FAILED, Debug, errors_as_messages, say
from headway.errors import DataError, said_by

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]
Limit = Annotated[float, typer.Option("--limit", min=1.0, metavar="SECONDS", help="Seconds to wait for the trackers.")]


def sync(run: Run, limit: Limit = 600.0, debug: Debug = False) -> None:
    """Send W&B, MLflow and trackio what they lack of a run that is over."""
    with errors_as_messages(debug):
        from headway.config.loading import load
        from headway.errors import UserError
        from headway.reports.run_directory import RunDirectory, RunLock
        from headway.reports.trackers.tracker_checks import check_trackers
        from headway.reports.trackers.tracker_client import Say
        from headway.reports.trackers.tracker_set import KEPT, open_lacking

        directory = RunDirectory.existing(run)
        config = load(directory.config, environment=os.environ).config
        if not set(KEPT) & set(config.reports.trackers):
            raise UserError(
                f"{run}: reports.trackers names none of {', '.join(KEPT)}; name one in {directory.config}, and the run "
                "is sent to it"
            )
        lock = RunLock(directory.lock)
        lock.take()
        warnings: list[str] = []
        try:
            trackers = open_lacking(config, directory, Say(warn=warnings.append, note=typer.echo, phase=typer.echo))
            if not trackers.names:
                typer.echo("nothing to send: the trackers have all of this run")
                return
            check_trackers(config, trackers.names)
            summary = _summary(directory.summary)
            trackers.start()
            trackers.finish(summary, directory.model if directory.model.is_dir() else None, limit_s=limit)
        finally:
            lock.release()
        for warning in warnings:
            say(f"warning: {warning}")
        if warnings:
            raise typer.Exit(EXIT_FAILED)
        typer.echo(f"sent to {', '.join(trackers.names)}")


def _summary(path: Path) -> dict[str, Any]:
    """Return a run's summary; nothing for a run that was killed, which has none. Raises `DataError`."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as cause:
        raise DataError(
            f"{path} cannot be read ({said_by(cause)}); take it from a copy of the run, or remove it, to send the run "
            "without it, as one that did not say how it ended"
        ) from cause
    return summary
