"""Command ``headway ctl``: sends a command to a live run.

    headway ctl RUN COMMAND …  ─▶  RUN/control.sock  ─▶  the process that trains the run

A further command is one function here, and one entry in `headway.api.control_socket`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.common import Debug, errors_as_messages, say

ctl = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@ctl.callback()
def ask_of(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that goes on, its run.dir.")],
) -> None:
    """Ask a run that goes on for something: headway ctl RUN COMMAND."""
    context.obj = run


@ctl.command()
def profile(
    context: typer.Context,
    versions: Annotated[int, typer.Option("--versions", min=1, help="Versions to profile, from the next one on.")] = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Longest time of it, since traces grow by some 10 MB a second.")
    ] = 30.0,
    debug: Debug = False,
) -> None:
    """Profile trainer and engines with torch's profiler, from the next version on; traces are in RUN/profiles."""
    with errors_as_messages(debug):
        try:
            _ask(context.obj, {"command": "profile", "versions": versions, "seconds": seconds})
        except KeyboardInterrupt:
            say("the run goes on with the profile all the same")
            raise


def _ask(run: Path, message: dict[str, Any]) -> None:
    """Print what the run answers to ``message``, line by line."""
    from headway.api.control_socket import ask
    from headway.reports.run_directory import RunDirectory

    for line in ask(RunDirectory.existing(run), message):
        typer.echo(line)
