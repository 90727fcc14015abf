"""The command line. Each command loads what it needs when it runs, so that ``--help`` answers at once.

headway COMMAND CONFIG [a.b=c ...] ─▶ load ─▶ diagnose ─▶ the command's own work
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import headway
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config.loading import LoadedConfig
    from headway.config.schema import Config

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

cli = typer.Typer(
    name="headway",
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of settings, like recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=c", help="Settings that replace the file's, like rollout.n=4.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the resolved settings and their summary, check reward and data, and stop."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@cli.command()
def train(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False, debug: Debug = False) -> None:
    """Train a model."""
    with errors_as_messages(debug):
        loaded = load_checked(config, overrides or [])
        if dry_run:
            from headway.preflight import check_inputs

            print_resolved(loaded)
            check_inputs(loaded.config)
            return
        from headway.app import train as run

        raise typer.Exit(run(loaded))


@cli.command()
def doctor(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Check settings and say what they amount to."""
    with errors_as_messages(debug):
        from headway.preflight import check_inputs

        loaded = load_checked(config, overrides or [])
        check_inputs(loaded.config)
        print_summary(loaded)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway {headway.__version__}")
        raise typer.Exit


@cli.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options that come before the command."""


@contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """End the command with one message on stderr and the error's exit code, without a traceback unless ``debug``."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, HeadwayError):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        typer.echo(f"error: unexpected {type(error).__name__}: {error}", err=True)
        if not debug:
            typer.echo("This should not happen. Run again with --debug to see where it did.", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def load_checked(path: Path, overrides: list[str]) -> LoadedConfig:
    """The configuration as the doctor passed it, with the doctor's notes. Raises `ConfigError` for anything wrong."""
    from headway.config.doctor import diagnose
    from headway.config.loading import load

    if "=" in str(path) and not path.exists():
        raise ConfigError(f"expected CONFIG, a YAML file, before the settings, but the first argument is {path}")
    loaded = load(path, overrides)
    return replace(loaded, notes=diagnose(loaded))


def print_resolved(loaded: LoadedConfig) -> None:
    """The configuration as a file that loads again: YAML, then the summary and the notes as comments."""
    from headway.config.loading import dump

    typer.echo(dump(loaded.config))
    for name, value in summary(loaded.config).items():
        typer.echo(f"# {name}: {value}")
    for note in loaded.notes:
        typer.echo(f"# note: {note}")


def print_summary(loaded: LoadedConfig) -> None:
    """What the settings amount to, as a table, and the notes."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in summary(loaded.config).items():
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    console.print(table)
    for note in loaded.notes:
        console.print(f"note: {note}")
    console.print("no problems found")


def summary(config: Config) -> dict[str, str]:
    """What the settings amount to, line by line: the numbers that follow from them, and who runs where."""
    from headway.config.placement import resolve_placement
    from headway.pipeline.staleness import admission_limit, lag_bound

    settings, b = config.async_training, config.groups_per_version
    eta, placement = settings.staleness_threshold, resolve_placement(config)
    bound, total = lag_bound(eta, b, config.window), config.rollout.total_rollout_steps
    lines = {
        "mode": config.mode,
        "model": config.model.path or f"made here ({config.model.make.architecture if config.model.make else ''})",
        "data": config.data.train or (config.data.task.name if config.data.task else ""),
        "B": f"{b} groups per version: fetches {settings.trigger_parameter_sync_step} × "
        f"mini-batches {settings.require_batches} × groups {config.actor.ppo_mini_batch_size}",
        "η": f"{float(eta):g}: at most {admission_limit(0, eta, b)} groups admitted and not trained",
        "lag": "no bound (order ready)" if bound is None else f"at most {bound} versions",
        "length": f"{config.data.epochs} epochs" if total is None else f"{total} groups = {total // b} versions",
        "backend": config.cluster.backend,
    }
    roles = {role: f"{len(on)} × ({device_range(on)})" for role, on in placement.devices.items()}
    return lines | roles | ({"idle": device_range(placement.idle)} if placement.idle else {})


def device_range(devices: tuple[int, ...]) -> str:
    """Consecutive device numbers in short: ``device 3`` or ``devices 0-3``."""
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def main() -> None:
    """Entry point of the ``headway`` command."""
    cli()
