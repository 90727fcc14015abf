"""Commands ``headway watch`` and ``headway compare``: one live or ended run; several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.common import Debug, errors_as_messages
from headway.cli.output_files import check_outputs, files_of_run, writing
from headway.errors import ConfigError


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, of a run that goes on or is over.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: any that is free.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a run's page, which goes on with the run: curves, timeline, groups, what was said. Ctrl-C ends it."""
    with errors_as_messages(debug):
        from headway.reports.watch.watch_server import serve

        serve(
            run,
            port,
            lambda url: typer.echo(f"{url}\nCtrl-C ends it; whoever has this address can read the run"),
            open_,
            note=lambda text: typer.echo(text, err=True),
        )


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Directories of two runs or more.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page of their curves. Default: compare.html in the first RUN.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Say how runs differ: in their settings, in what they reached, and in what that cost."""
    with errors_as_messages(debug):
        from rich.console import Console

        from headway.reports.comparison import compared, print_comparison, read_runs, write_page

        if len(runs) < 2:
            raise ConfigError(f"expected two runs or more to compare, and got {runs[0]} alone")
        check_outputs({"--html": html}, [file for run in runs for file in files_of_run(run)])
        found = compared(read_runs(runs))
        print_comparison(found, Console(highlight=False))
        path = html or runs[0] / "compare.html"
        with writing("--html", path):
            write_page(found, path)
        typer.echo(f"\ncurves: {path}")
