"""Commands about runs: ``headway watch``, ``compare``, ``ctl`` (asks for a profile) and ``sync`` (trackers)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.common import EXIT_FAILED, check_outputs, command, files_of_run, say, writing
from headway.errors import ConfigError


@command
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, of a run that goes on or is over.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: any that is free.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")] = False,
) -> None:
    """Serve a run's live page: curves, timeline, groups, prompts and answers. Ctrl-C ends it."""
    from headway.reports.watch.watch_server import serve

    serve(
        run,
        port,
        lambda url: typer.echo(f"{url}\nCtrl-C ends it; whoever has this address can read the run"),
        open_,
        note=lambda text: typer.echo(text, err=True),
    )


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Directories of two runs or more.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page of their curves. Default: compare.html in the first RUN.")
    ] = None,
) -> None:
    """Say how runs differ: in their settings, in what they reached, and in what that cost."""
    from rich.console import Console

    from headway.reports.comparison import compared, print_comparison, read_runs, write_page
    from headway.reports.terminal import UNBOUNDED

    if len(runs) < 2:
        raise ConfigError(f"expected two runs or more to compare, and got {runs[0]} alone")
    check_outputs({"--html": html}, [file for run in runs for file in files_of_run(run)])
    found = compared(read_runs(runs))
    width = None if sys.stdout.isatty() else UNBOUNDED  # in a pipe rich would cut names and paths at 80 columns
    print_comparison(found, Console(highlight=False, width=width))
    path = html or runs[0] / "compare.html"
    with writing("--html", path, default=html is None):
        write_page(found, path)
    typer.echo(f"\ncurves: {path}")


ctl = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@ctl.callback()
def ask_of(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that goes on, its run.dir.")],
) -> None:
    """Send a command to a running job: headway ctl RUN COMMAND."""
    context.obj = run


@ctl.command()
@command
def profile(
    context: typer.Context,
    versions: Annotated[int, typer.Option("--versions", min=1, help="Versions to profile, from the next one on.")] = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Longest time of it, since traces grow by some 10 MB a second.")
    ] = 30.0,
) -> None:
    """Profile trainer and engines with torch's profiler, from the next version on; traces are in RUN/profiles."""
    from headway.api.profile_window import ask
    from headway.reports.run_directory import RunDirectory

    ask(RunDirectory.existing(context.obj), versions, seconds)
    typer.echo("asked: the window opens with the next version, and the run notes when the traces are in its profiles/")


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]
Limit = Annotated[float, typer.Option("--limit", min=1.0, metavar="SECONDS", help="Seconds to wait for the trackers.")]


@command
def sync(run: Run, limit: Limit = 600.0) -> None:
    """Send W&B, MLflow and trackio what they lack of a run that is over."""
    from headway.api.run_handle import load as load_run
    from headway.config.loading import load
    from headway.errors import UserError
    from headway.reports.run_directory import RunDirectory, RunLock
    from headway.reports.trackers.tracker_set import check_trackers, open_lacking
    from headway.reports.trackers.tracker_thread import TrackerMessages
    from headway.reports.trackers.tracker_tools import KEPT

    directory = RunDirectory.existing(run)
    config = load(directory.config, environment=os.environ).config
    if not set(KEPT) & set(config.reports.trackers):
        raise UserError(
            f"{run}: reports.trackers names none of {', '.join(KEPT)}; name one in {directory.config}, and the run "
            "is sent to it"
        )
    lock = RunLock(directory.lock)
    lock.take()  # refused while the run trains, and sends its rows itself
    warnings: list[str] = []
    try:
        trackers = open_lacking(
            config, directory, TrackerMessages(warn=warnings.append, note=typer.echo, phase=typer.echo)
        )
        if not trackers.names:
            typer.echo("nothing to send: the trackers have all of this run")
            return
        check_trackers(config, trackers.names)
        summary = load_run(run).summary
        trackers.start()
        trackers.finish(summary, directory.model if directory.model.is_dir() else None, limit_s=limit)
    finally:
        lock.release()
    for warning in warnings:
        say(f"warning: {warning}")
    if warnings:
        raise typer.Exit(EXIT_FAILED)
    typer.echo(f"sent to {', '.join(trackers.names)}")
