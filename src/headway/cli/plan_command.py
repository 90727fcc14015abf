"""Commands ``headway plan``, ``profile`` and ``report``: a job's best settings, its costs, and a run's timeline."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import check_outputs, check_writable, command, files_of_run, say, writing
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.planner.planner import PlanResult, Progress
    from headway.planner.profiles.job_profile import Profile

ProfileFile = Annotated[Path | None, typer.Argument(metavar="PROFILE", help="YAML file of what the job costs.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]

TOLD_EVERY_S = 10.0
"""Seconds between two lines of progress if stderr is not a terminal."""


@command
def plan(
    profile: ProfileFile = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Replay what this run recorded, instead of a profile.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices altogether; default: the profile's.")] = None,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds of processor time to spend.")] = 60.0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="All combinations of preset, split, η and trigger; raise --budget with it.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every row.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline of a row: the recommended one, or --row.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Which row --html shows, counted from the quickest.")
    ] = None,
) -> None:
    """Say how to divide devices, and whether asynchrony will help."""
    from rich.console import Console

    from headway.planner import planner
    from headway.planner.plan_table import print_plan

    if row is not None and html is None:
        raise ConfigError(f"--row {row} chooses the row that --html shows, and --html is not given")
    read = [*([profile] if profile is not None else []), *(files_of_run(from_run) if from_run is not None else [])]
    check_outputs({"--json": json_file, "--html": html}, read)
    job = _profile(profile, from_run)
    found = planner.plan(job, devices=gpus, budget_s=budget, sweep=sweep, progress=_progress())
    print_plan(found, Console(highlight=False))
    if json_file is not None:
        text = json.dumps(planner.to_json(found), indent=1, ensure_ascii=False) + "\n"
        with writing("--json", json_file):
            json_file.write_text(text, encoding="utf-8")
        typer.echo(f"rows: {json_file}")
    if html is not None:
        _write_timeline(found, row, html)


@command
def profile(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there instead of printing it.")
    ] = None,
) -> None:
    """Turn a run's record into a profile for headway plan."""
    from headway.planner.profile_fitting.run_profiler import profile_run
    from headway.planner.profiles.profile_files import dump_profile

    check_writable("--output", output, files_of_run(run))
    text = dump_profile(profile_run(run))
    if output is None:
        typer.echo(text, nl=False)
        return
    with writing("--output", output):
        output.write_text(text, encoding="utf-8")
    typer.echo(f"profile: {output}\nnow: headway plan {output}")


@command
def report(
    run: Run,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: timeline.html in RUN.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: trace.json in RUN.")] = None,
    versions: Annotated[
        str | None, typer.Option(metavar="A:B", help="Versions to draw. Default: all, of a large run the newest.")
    ] = None,
) -> None:
    """Draw where a run's time went: a page, and a trace for ui.perfetto.dev."""
    from headway.reports.report import places
    from headway.reports.report import report as write

    wanted = places(run, html, trace)
    defaults = [option for option, given in {"--html": html, "--trace": trace}.items() if given is None]
    check_outputs({"--html": wanted.html, "--trace": wanted.trace}, files_of_run(run), defaults)
    written = write(run, html, trace, versions)
    typer.echo(f"page: {written.html}\ntrace, for ui.perfetto.dev: {written.trace}")
    if not written.adds_up:
        say(
            f"warning: the groups in {run / 'events.jsonl'} do not add up: lines of it are missing, and the "
            "figures are wrong. Take the file from a copy"
        )
    if written.damaged:
        say(f"damaged lines of {run / 'samples.jsonl'}, which are left out: {written.damaged}")


def _profile(path: Path | None, run: Path | None) -> Profile:
    if (path is None) == (run is None):
        given = "neither is given" if path is None else "both are given"
        raise ConfigError(f"expected either PROFILE, a YAML file, or --from RUN, but {given}")
    if path is not None:
        from headway.planner.profiles.profile_files import read_profile

        return read_profile(path)
    from headway.planner.profile_fitting.run_profiler import profile_run

    assert run is not None
    return profile_run(run, replay=True)


def _progress() -> Progress:
    """Return a function that shows progress: one changing line on a terminal, else a line every `TOLD_EVERY_S`."""
    from rich.console import Console

    from headway.planner.plan_rows import PlanRow

    console, told = Console(stderr=True, highlight=False), time.monotonic()

    def show(row: PlanRow, still_open: int) -> None:
        nonlocal told
        text = f"simulated {row.setting}: {row.step_s:.3g} s a version; {still_open} to go"
        if console.is_terminal:
            # Padded over the longer line before; a full last column would break the line on some terminals.
            console.print(text[: console.width - 1].ljust(console.width - 1), end="\r")
        elif time.monotonic() - told >= TOLD_EVERY_S:
            told = time.monotonic()
            say(text)

    return show


def _write_timeline(plan: PlanResult, number: int | None, path: Path) -> None:
    from headway.planner.plan_table import write_timeline

    if not plan.rows:
        raise ConfigError("--html: nothing was simulated to the end, so there is no row to show; raise --budget")
    if number is not None and number > len(plan.rows):
        raise ConfigError(f"--row: got {number}, expected at most {len(plan.rows)}, the number of rows")
    row = plan.rows[number - 1] if number is not None else plan.advice.recommended or plan.rows[0]
    with writing("--html", path):
        write_timeline(plan.profile, row.setting, path)
    typer.echo(f"timeline of {row.setting}: {path}")
