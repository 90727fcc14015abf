"""Command ``headway import``: files of other projects become a recipe, with a report of what became of each setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import Debug, errors_as_messages
from headway.cli.output_files import check_writable, writing
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import Config


def import_files(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="A shell script, a YAML, TOML or Python file, a command line in quotes, or - for standard input. "
            "Of several, later ones lie on earlier ones.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the recipe there; default: print it.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--from", metavar="PROJECT", help="verl, trl, areal, prime-rl or openrlhf; default: by the keys."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Turn a file of verl, TRL, AReaL, prime-rl or OpenRLHF into a recipe, and say what became of each setting."""
    with errors_as_messages(debug):
        from headway.config.migration.migration_report import recipe, report
        from headway.config.migration.settings_files import read
        from headway.config.migration.translation import recognise, translate

        sources = [read(file) for file in files]
        found = translate(recognise(sources, project), sources)
        found.open += lacking_here(found.config)
        if output is None:
            typer.echo(report(found), nl=False, err=True)
            typer.echo(recipe(found, None), nl=False)
            return
        check_writable("--output", output, [Path(source.name) for source in sources])
        with writing("--output", output):
            output.write_text(recipe(found, str(output)), encoding="utf-8")
        typer.echo(report(found), nl=False)
        typer.echo(f"\nrecipe: {output}\nnow: headway doctor {output}")


def lacking_here(config: Config) -> Iterator[str]:
    """Yield what the doctor says of packages that the settings ask for, and that are not installed."""
    from headway.config.doctor.machine_advice import check_vllm_installed
    from headway.reports.trackers.tracker_checks import check_packages

    for check in (lambda: check_packages(config), *([check_vllm_installed] if config.rollout.name == "vllm" else [])):
        try:
            check()
        except ConfigError as error:
            yield str(error)
