"""Command ``headway sync``: what a run's trackers lack, sent once the run is over."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.common import EXIT_FAILED, Debug, errors_as_messages, say

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]
Limit = Annotated[float, typer.Option("--limit", min=1.0, metavar="SECONDS", help="Seconds to wait for the trackers.")]


def sync(run: Run, limit: Limit = 600.0, debug: Debug = False) -> None:
    """Send W&B, MLflow and trackio what they lack of a run that is over."""
    with errors_as_messages(debug):
        from headway.config.loading import load
        from headway.errors import UserError
        from headway.reports.run_directory import RunDirectory, RunLock
        from headway.reports.trackers.apart import Say
        from headway.reports.trackers.check import check_trackers
        from headway.reports.trackers.trackers import KEPT, open_lacking

        directory = RunDirectory.existing(run)
        config = load(directory.config).config
        if not set(KEPT) & set(config.reports.trackers):
            raise UserError(
                f"{run}: reports.trackers names none of {', '.join(KEPT)}; name one in {directory.config}, and the run "
                "is sent to it"
            )
        check_trackers(config, KEPT)
        lock = RunLock(directory.lock)
        lock.take()
        warnings: list[str] = []
        try:
            trackers = open_lacking(config, directory, Say(warn=warnings.append, note=typer.echo, phase=typer.echo))
            if not trackers.names:
                typer.echo("nothing to send: the trackers have all of this run")
                return
            trackers.start()
            summary = {}
            with suppress(OSError, ValueError):  # none of a run that was killed
                summary = json.loads(directory.summary.read_text(encoding="utf-8"))
            trackers.finish(summary, directory.model if directory.model.is_dir() else None, limit_s=limit)
        finally:
            lock.release()
        for warning in warnings:
            say(f"warning: {warning}")
        if warnings:
            raise typer.Exit(EXIT_FAILED)
        typer.echo(f"sent to {', '.join(trackers.names)}")
