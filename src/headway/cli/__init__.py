"""Command line of Headway. Each command imports its modules when it runs, so that ``--help`` answers at once.

headway COMMAND CONFIG [a.b=c ...] ─▶ load ─▶ diagnose ─▶ the command's own work

    train_command.py  train, sft, demo, doctor    plan_command.py    plan, profile, report
    watch_command.py  watch, compare, ctl, sync   init_command.py    init, import
    config_command.py config, recipes             any other command  its own NAME_command.py
"""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import Annotated

import typer

import headway
from headway.cli.common import EXIT_FAILED, TakesSettings, give_up_stdout, is_of_stdout
from headway.cli.config_command import config, recipes
from headway.cli.eval_command import evaluate
from headway.cli.init_command import import_files, init
from headway.cli.plan_command import plan, profile, report
from headway.cli.show_command import show
from headway.cli.train_command import demo, doctor, sft, train
from headway.cli.watch_command import compare, ctl, sync, watch

EXIT_S = 5.0
"""Limit in seconds for the process to end after its command if a tracker does not answer."""

cli = typer.Typer(
    name="headway",
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, sft, demo):
    cli.command(cls=TakesSettings)(command)
for command in (plan, profile, report, show, watch, compare):
    cli.command()(command)
cli.command(cls=TakesSettings)(doctor)
cli.command("eval", cls=TakesSettings)(evaluate)
cli.command(cls=TakesSettings)(init)
cli.add_typer(ctl, name="ctl")
for command in (sync, recipes, config):
    cli.command()(command)
cli.command("import")(import_files)


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


def main() -> None:
    """Entry point of the ``headway`` command.

    Characters that stdout cannot encode are printed as question marks; on stderr Python itself prints their escapes.
    """
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            cli()
        finally:
            # Before the flush, which may fail: the tracker's thread is there in any case
            _limit_exit(sys.exc_info()[1])
            sys.stdout.flush()
    except OSError as error:  # outside of a command, like --version, or by the last flush
        if not is_of_stdout(error):
            raise
        sys.exit(give_up_stdout(error))


def _limit_exit(ended: BaseException | None) -> None:
    """End the process after `EXIT_S` if a tracker was given up: its library's exit handlers may wait for minutes."""
    if any(thread.name.startswith("tracker-") for thread in threading.enumerate()):
        code = ended.code if isinstance(ended, SystemExit) else EXIT_FAILED
        left = threading.Timer(EXIT_S, os._exit, [code if isinstance(code, int) else EXIT_FAILED if code else 0])
        left.daemon = True
        left.start()


def _open_what_is_closed() -> None:
    """Replace stdin (empty) and stdout and stderr (lost) that were closed (``>&-``), here and for child processes.

    Otherwise Python has None in their place, and the next opened file gets their number: output of a library or a child
    process would be written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order each gets its own number
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)  # Python opens files for this process alone
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
