"""Commands ``headway train``, ``sft``, ``demo`` and ``doctor``: checking settings, and training with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import Debug, Overrides, Static, command, complete_config, say
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.loading import LoadedConfig

A_CONFIG = "YAML file of settings, or the name of a recipe that comes with Headway, like demo."
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=A_CONFIG, autocompletion=complete_config)]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", help="Go on with the run in this directory, from its newest checkpoint."),
]
ResumeAnywhere = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with the run in this directory, or in this storage (a URL), from its newest checkpoint.",
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        min=0,
        metavar="N",
        help="Run in a process of its own, and where that fails or is killed go on from the newest checkpoint, N times "
        "at the most.",
    ),
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


@command
def train(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: ResumeAnywhere = None,
    restarts: Restarts = 0,
    dry_run: DryRun = False,
    static: Static = False,
    debug: Debug = False,
) -> None:
    """Train a model, or resume a run that ended early: CONFIG [a.b=c …], or --resume RUN [a.b=c …]."""
    if resume is not None:
        given = [] if config is None else [str(config)]
        _resume(resume, [*given, *(overrides or [])], dry_run, static, 0 if dry_run else restarts, debug)
    elif config is None:
        raise ConfigError("expected CONFIG, a YAML file or a recipe's name, like demo, or --resume RUN")
    else:
        _train(config, overrides or [], dry_run, static, 0 if dry_run else restarts, debug)


@command
def sft(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    static: Static = False,
) -> None:
    """Fine-tune model.path on the conversations in data.train: [CONFIG] [a.b=c …], or --resume RUN [a.b=c …]."""
    from headway.api.python_settings import load_checked, load_resumed
    from headway.config.loading import check_changes, dump

    given = list(overrides or [])
    # CONFIG may be left out: the first setting is then in its place.
    if config is not None and ("=" in str(config) and not config.exists()):
        given, config = [str(config), *given], None
    if resume is not None:
        if config is not None:
            raise typer.BadParameter(_resumed_without(config))
        before, loaded = load_resumed(resume, given, supervised=True)
        check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
    else:
        loaded = load_checked(config, given, supervised=True)
    from headway.api.run.new_run import set_math_environment
    from headway.cluster.machine.worker_setup import importing

    set_math_environment(loaded.config)  # before torch is imported
    with importing():
        from headway.api.sft.sft_run import check
        from headway.api.sft.sft_run import sft as run
    if dry_run:
        data = check(loaded.config)
        held_out = 0 if data.val is None else len(data.val)
        typer.echo(dump(loaded.config))
        typer.echo(f"# {len(data.train)} conversations, {held_out} held out, {data.steps} optimizer steps")
        for note in filter(None, [data.train.left_out.note(), *data.notes]):
            typer.echo(f"# {note}")
        return
    raise typer.Exit(run(loaded, resume))


@command
def demo(overrides: Overrides = None, dry_run: DryRun = False, static: Static = False) -> None:
    """Train the demonstration model: the recipe demo, wherever this is called."""
    from headway.config.recipes import recipes

    _train(recipes()["demo"], overrides or [], dry_run, static)


def _train(
    config: Path, overrides: list[str], dry_run: bool, static: bool, restarts: int = 0, debug: bool = False
) -> None:
    loaded = load_checked(config, overrides)
    if restarts and loaded.config.trainer.save_freq < 0:
        raise ConfigError(
            f"--restarts={restarts} has no effect with trainer.save_freq={loaded.config.trainer.save_freq}: a run that "
            "fails has no checkpoint then; let it save more often"
        )
    if restarts:
        from headway.cli.restarts import keep_going
        from headway.config.schema_keys import spelled
        from headway.reports.run_directory import free_names

        chosen = loaded.config.run
        # Chosen here, and given to the process: this one has to know which directory to resume.
        place = chosen.dir or next(path for path in free_names(chosen.name) if not path.exists())
        arguments = ["train", str(config), *overrides, f"run.dir={spelled(str(place))}"]
        raise typer.Exit(keep_going(arguments, place, restarts, debug=debug))
    if dry_run:
        _dry_run(loaded, static)
        return
    from headway.cluster.machine.worker_setup import importing

    with importing():
        from headway.api.run import train as run

    raise typer.Exit(run(loaded))


def _resume(given: str, overrides: list[str], dry_run: bool, static: bool, restarts: int, debug: bool) -> None:
    from headway.api.python_settings import load_resumed
    from headway.api.storage.stored_run import located
    from headway.config.loading import check_changes
    from headway.config.schema_keys import spelled

    if files := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"{_resumed_without(files[0])}, or give a.b=c")
    settings = dict(override.split("=", 1) for override in overrides)
    storage = settings.get("run.storage")
    run, url = located(given, None if storage == "null" else storage, settings.get("run.dir"), say)
    if url is not None:  # which the directory belongs to from now on, unless the user says otherwise
        overrides = [one for one in overrides if not one.startswith("run.dir=")]
        overrides += [] if storage is not None else [f"run.storage={spelled(url)}"]
    before, loaded = load_resumed(run, overrides)
    if restarts:
        from headway.cli.restarts import keep_going

        raise typer.Exit(keep_going(["train", "--resume", str(run), *overrides], run, restarts, debug=debug))
    if dry_run:
        from headway.api.run.new_run import check_incomplete
        from headway.pipeline.admission.run_journal import changed_since
        from headway.reports.run_directory import RunDirectory

        check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
        check_incomplete(run, before, loaded.config)
        if changed := changed_since(RunDirectory(run).journal, loaded.config):
            say(f"what the journal has is left out, and removed: {', '.join(changed)} changed")
        _dry_run(loaded, static)
        return
    from headway.api.run import resume

    raise typer.Exit(resume(run, before, loaded))


def _dry_run(loaded: LoadedConfig, static: bool) -> None:
    from headway.api.checks.trials import check_dry
    from headway.cli.settings_summary import print_resolved

    print_resolved(loaded)
    for note in check_dry(loaded.config, loads=not static, calls=not static):
        typer.echo(f"# note: {note}")


@command
def doctor(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check settings and print their summary."""
    from headway.api.checks.trials import check_dry
    from headway.cli.settings_summary import print_summary

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


def _resumed_without(given: str | Path) -> str:
    return f"--resume RUN takes the settings that RUN was begun with; drop {given}"
