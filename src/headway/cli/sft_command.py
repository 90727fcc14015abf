"""Command ``headway sft``: supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli.common import Debug, Overrides, Static, errors_as_messages
from headway.cli.train_command import OptionalConfig, Resume

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Read the data, try the first batch, print the settings and the number of steps, stop.",
    ),
]


def sft(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    static: Static = False,
    debug: Debug = False,
) -> None:
    """Fine-tune model.path on the conversations in data.train: [CONFIG] [a.b=c …], or --resume RUN [a.b=c …]."""
    with errors_as_messages(debug):
        from headway.api.python_settings import load_checked, load_resumed
        from headway.config.loading import check_changes, dump

        given = list(overrides or [])
        if config is not None and ("=" in str(config) and not config.exists()):
            given, config = [str(config), *given], None
        if resume is not None:
            if config is not None:
                raise typer.BadParameter(f"--resume RUN takes the settings that RUN was begun with; drop {config}")
            before, loaded = load_resumed(resume, given, supervised=True)
            check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
        else:
            loaded = load_checked(config, given, supervised=True)
        from headway.api.run.new_run import set_math_environment
        from headway.cluster.machine.worker_setup import importing

        set_math_environment(loaded.config)
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
