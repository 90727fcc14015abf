"""Commands ``headway train``, ``demo`` and ``doctor``: checking settings, and training with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import Debug, Overrides, Static, errors_as_messages
from headway.cli.completion import complete_config
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.loading import LoadedConfig
    from headway.config.schema import Config

A_CONFIG = "YAML file of settings, or the name of a recipe that comes with Headway, like demo."
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=A_CONFIG, autocompletion=complete_config)]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", help="Go on with the run in this directory, from its newest checkpoint."),
]
ConfigFile = Annotated[Path, typer.Argument(help=A_CONFIG, autocompletion=complete_config)]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the resolved settings, check the data, try reward, loss and program, and stop. --dry-run=static "
        "runs no user code.",
    ),
]


def train(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    static: Static = False,
    debug: Debug = False,
) -> None:
    """Train a model, or go on with a run that ended early: CONFIG [a.b=c …], or --resume RUN [a.b=c …]."""
    with errors_as_messages(debug):
        if resume is not None:
            given = [] if config is None else [str(config)]
            _resume(resume, [*given, *(overrides or [])], dry_run, static)
        elif config is None:
            raise ConfigError("expected CONFIG, a YAML file or a recipe's name, like demo, or --resume RUN")
        else:
            _train(config, overrides or [], dry_run, static)


def demo(overrides: Overrides = None, dry_run: DryRun = False, static: Static = False, debug: Debug = False) -> None:
    """Train the demonstration model: the recipe demo, wherever this is called."""
    from headway.config.recipes import recipes

    with errors_as_messages(debug):
        _train(recipes()["demo"], overrides or [], dry_run, static)


def _train(config: Path, overrides: list[str], dry_run: bool, static: bool) -> None:
    loaded = load_checked(config, overrides)
    if dry_run:
        _dry_run(loaded, static)
        return
    from headway.cluster.machine.worker_setup import importing

    with importing():
        from headway.api.run import train as run

    raise typer.Exit(run(loaded))


def _resume(run: Path, overrides: list[str], dry_run: bool, static: bool) -> None:
    from headway.api.python_settings import load_resumed
    from headway.config.resume_changes import check_changes

    if files := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"--resume RUN takes the settings that RUN was begun with; drop {files[0]}, or give a.b=c")
    before, loaded = load_resumed(run, overrides)
    if dry_run:
        check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
        _dry_run(loaded, static)
        return
    from headway.api.run import resume

    raise typer.Exit(resume(run, before, loaded))


def _dry_run(loaded: LoadedConfig, static: bool) -> None:
    from headway.api.checks.trials import check_dry

    print_resolved(loaded)
    for note in check_dry(loaded.config, loads=not static, calls=not static):
        typer.echo(f"# note: {note}")


def doctor(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Check settings and say what they amount to."""
    with errors_as_messages(debug):
        from headway.api.checks.trials import check_dry

        loaded = load_checked(config, overrides or [])
        notes = check_dry(loaded.config)
        print_summary(replace(loaded, notes=[*loaded.notes, *notes]))


def load_checked(path: Path, overrides: list[str]) -> LoadedConfig:
    """Return the configuration as the doctor passed it, with its notes. Raises `ConfigError` for anything wrong."""
    from headway.api.python_settings import load_checked

    try:
        return load_checked(path, overrides)
    except ConfigError:
        from headway.planner.profiles.profile_files import is_profile

        if not is_profile(path):
            raise
        text = f"{path} is a profile, which says what a job costs, and no recipe; give it to headway plan {path}"
        raise ConfigError(text) from None


def print_resolved(loaded: LoadedConfig) -> None:
    """Print the configuration as a file that loads again: YAML, then the summary and the notes as comments."""
    from headway.cli.memory_table import memory_in_short
    from headway.config.loading import dump

    typer.echo(dump(loaded.config))
    for name, value in summary(loaded.config).items():
        typer.echo(f"# {name}: {value}")
    if (memory := memory_in_short(loaded.config)) is not None:
        typer.echo(f"# memory: {memory}")
    for note in loaded.notes:
        typer.echo(f"# note: {note}")


def print_summary(loaded: LoadedConfig) -> None:
    """Print what the settings amount to, as a table, and the notes."""
    from rich.console import Console
    from rich.table import Table

    from headway.cli.memory_table import memory_lines

    table = Table.grid(padding=(0, 2))
    for name, value in summary(loaded.config).items():
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    console.print(table)
    for line in memory_lines(loaded.config):
        console.print(line, soft_wrap=True)
    for note in loaded.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print("no problems found")


def summary(config: Config) -> dict[str, str]:
    """Return the summary of the settings, line by line: the numbers that follow from them, and who runs where."""
    from headway.cli.node_drawing import nodes_drawn
    from headway.config.sizing.placement import ROLLOUT, concurrent, resolve_placement
    from headway.pipeline.admission.staleness import admission_limit, lag_bound

    settings, b = config.async_training, config.groups_per_version
    eta, placement = settings.staleness_threshold, resolve_placement(config)
    bound, total = lag_bound(eta, b, config.window, settings.max_lag), config.rollout.total_rollout_steps
    lines = {
        "mode": config.mode,
        "model": config.model.path or f"made here ({config.model.make.architecture if config.model.make else ''})",
        "data": config.data.label,
        "B": f"{b} groups per version: fetches {settings.trigger_parameter_sync_step} × "
        f"mini-batches {settings.require_batches} × groups {config.actor.ppo_mini_batch_size}",
        "η": f"{float(eta):g}: at most {admission_limit(0, eta, b)} groups admitted and not trained",
        "lag": "no bound (order ready)" if bound is None else f"at most {bound} versions",
        "length": f"{config.data.epochs} epochs" if total is None else f"{total} groups = {total // b} versions",
        "slots": f"{concurrent(config)} answers at once on each replica (rollout.max_concurrent"
        + (")" if config.rollout.max_concurrent is not None else ": null)"),
        "saves": checkpoints(config),
        "backend": config.cluster.backend,
    }
    each = {ROLLOUT: f"tp {placement.per_replica} "} if placement.per_replica > 1 else {}
    counts = {role: len(on) for role, on in placement.devices.items()} | {ROLLOUT: len(placement.replicas)}
    if config.cluster.backend == "inline":
        return lines | {role: f"{count} × {each.get(role, '')}(this process)" for role, count in counts.items()}
    roles = {
        role: f"{counts[role]} × {each.get(role, '')}({device_range(on)})" for role, on in placement.devices.items()
    }
    lines |= roles | ({"idle": device_range(placement.idle)} if placement.idle else {})
    return lines | nodes_drawn(placement, config.actor.parallel)


def checkpoints(config: Config) -> str:
    """Return the summary's line on checkpoints: how often they are saved, and how many are kept."""
    freq, keep = config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep
    if freq < 0:
        return "at the end: before that, a run that is killed cannot be resumed (trainer.save_freq)"
    often = "every version" if freq == 1 else f"every {freq} versions"
    return often if keep is None else f"{often}, the newest {keep} are kept"


def device_range(devices: tuple[int, ...]) -> str:
    """Return ascending device numbers in short: ``device 3``, ``devices 0-3`` or ``devices 0-1, 4``."""
    starts = [device for device in devices if device - 1 not in devices]
    ends = [device for device in devices if device + 1 not in devices]
    runs = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"device{'' if len(devices) == 1 else 's'} {', '.join(runs)}"
