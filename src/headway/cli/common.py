"""Parts that the commands share: options, completion of recipes and settings, standard output, errors of one message.

A refused write raises `OutputRefused`, which ends a command as every error does. A pipe whose reader has left is not an
error: it raises `ReaderLeft`, and the command ends silently.
"""

from __future__ import annotations

import difflib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headway.errors import EXIT_INTERRUPTED, HeadwayError, OutputRefused
from headway.runtime.signals import terminations_as_interrupts


class ReaderLeft(BrokenPipeError):
    """Nobody reads standard output any more, as behind ``| head``."""


class Stdout(io.TextIOWrapper):
    def __init__(self, before: io.TextIOWrapper) -> None:
        """Replace the stream ``before``. Characters that its encoding lacks are printed as question marks."""
        super().__init__(
            before.buffer,
            encoding=before.encoding,
            errors="replace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        self._before = before
        """Stream that was replaced; referenced here because it would close the file when it is garbage-collected."""

    def write(self, text: str) -> int:
        if isinstance(text, str) and not text:  # click's probe, which takes any exception for "not a text file"
            return 0
        with self._refusing():
            return super().write(text)

    def flush(self) -> None:
        with self._refusing():
            super().flush()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as cause:
            self._go_nowhere()
            raise ReaderLeft(*cause.args) from cause
        except OSError as cause:
            self._go_nowhere()
            raise OutputRefused(
                f"standard output cannot be written ({cause.strerror or cause}); send it to a place with room"
            ) from cause

    def _go_nowhere(self) -> None:
        """Discard text that is still buffered; otherwise the interpreter, which flushes it last, would fail over it."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self.fileno())
            finally:
                os.close(nowhere)


def replace_stdout() -> None:
    """Make standard output a `Stdout` from now on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Stdout(sys.stdout)


def complete_config(incomplete: str) -> Iterator[str]:
    """Yield recipes' names and YAML files, and folders on the way to some, that begin with ``incomplete``."""
    from headway.config.recipes import recipes

    typed, files = incomplete[: incomplete.rfind("/") + 1], list[str]()
    with suppress(OSError, RuntimeError):  # no such folder, none that may be read, or no such user
        here = [(one, one.is_dir()) for one in sorted(Path(typed or ".").expanduser().iterdir())]
        files = [
            f"{typed}{one.name}{'/' * is_folder}"
            for one, is_folder in here
            if is_folder or one.suffix in (".yaml", ".yml")
        ]
    yield from (one for one in chain(recipes(), files) if one.startswith(incomplete))


def complete_setting(incomplete: str) -> Iterator[str]:
    """Yield ``a.b=default`` for each key that begins with ``incomplete``; no value where the default is none, or
    a shell would take it apart.
    """
    from headway.config.schema_keys import REQUIRED, keys

    none = (REQUIRED, "null")
    written = (
        f"{key.name}={'' if key.default in none or shlex.quote(key.default) != key.default else key.default}"
        for key in keys()
    )
    yield from (one for one in written if one.startswith(incomplete) and "[]" not in one and ".NAME" not in one)


def complete_key(incomplete: str) -> Iterator[str]:
    """Yield each section and each key that begins with ``incomplete``."""
    from headway.config.schema_keys import tables

    names = dict.fromkeys(chain.from_iterable((part.name, *(key.name for key in part.keys)) for part in tables()))
    yield from (name for name in names if name and name.startswith(incomplete))


EXIT_FAILED = 1

A_TYPING_ERROR = 0.8
"""Likeness, in [0, 1], from which on an unknown option is taken for a misspelled known one."""

STATIC = "--static"
"""Option that ``--dry-run=static`` is short for, with ``--dry-run``."""
FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Values of an option that is there or not, where it is typed as a setting."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="a.b=c",
        help="Settings, like rollout.n=4: they replace the file's, and what a command would choose.",
        autocompletion=complete_setting,
    ),
]
Static = Annotated[bool, typer.Option(STATIC, hidden=True)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """End the command with one message on stderr and the error's exit code, without a traceback unless ``debug``."""
    try:
        with terminations_as_interrupts():
            yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (typer.Exit, ReaderLeft):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, HeadwayError)
        say(f"error: {error}" if expected else f"error: unexpected {type(error).__name__}: {error}")
        if isinstance(error, MemoryError):
            say("This machine's memory ran out. Use a smaller model or shorter data, or more memory")
        elif not expected and not debug:
            say("This should not happen. Run again with --debug to see where it did.")
        for note in getattr(error, "__notes__", ()):
            say(note)
        raise typer.Exit(error.exit_code if isinstance(error, HeadwayError) else EXIT_FAILED) from error


def say(text: str) -> None:
    """Print ``text`` on stderr. An error of stderr itself is ignored, so that the exit code stays the command's."""
    with suppress(OSError):
        typer.echo(text, err=True)


class TakesSettings(TyperCommand):
    """Command with ``a.b=c`` arguments: of these ``n=8`` means ``--n 8`` where the command has such an option.

    A setting that is typed as an option is answered with how settings are written.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's arguments. Raises click's errors of usage, as the base class does."""
        args = [word for one in args for word in (["--dry-run", STATIC] if one == "--dry-run=static" else [one])]
        typed = list(args)  # a copy: the parser empties its own
        try:
            rest = super().parse_args(ctx, args)
            meant = self._with_options(ctx, typed)
            return rest if meant == typed else super().parse_args(ctx, meant)
        except typer.BadParameter:
            raise
        except Exception as error:  # typer does not export click's `NoSuchOption`, whose attributes these are
            name, options = getattr(error, "option_name", None), getattr(error, "possibilities", None) or ()
            if name is not None and not difflib.get_close_matches(name, options, n=1, cutoff=A_TYPING_ERROR):
                error.message = _as_a_setting(name, typed) or error.message  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def _with_options(self, ctx: Any, typed: list[str]) -> list[str]:
        """Return the words that were ``typed``, with options in the place of settings that are the command's options.

        The words were parsed before: a value of an option, like a file's name, is no setting.
        """
        options = {name.lstrip("-"): one for one in self.params for name in one.opts if name.startswith("--")}
        given = [ctx.params.get(one.name) for one in self.params if one.param_type_name == "argument"]
        settings = [str(word) for value in given for word in (value if isinstance(value, list) else [value])]
        words = list(typed)
        for text in settings:
            name, equals, value = text.partition("=")
            option = options.get(name.replace("_", "-"))
            if not equals or option is None or Path(text).exists():
                continue
            at = len(words) - 1 - words[::-1].index(text)  # the last one: an option's value may be the same text
            is_flag = getattr(option, "is_flag", False)
            if is_flag and value.lower() not in FLAGS:
                raise typer.BadParameter(f"got {text}, expected {name}=true or {name}=false")
            del words[at]
            before = words.index("--") if "--" in words[:at] else at  # behind it nothing is an option
            if not is_flag:
                words[before:before] = [option.opts[0], value]
            elif FLAGS[value.lower()]:
                words.insert(before, option.opts[0])
        return words


def _as_a_setting(option: str, typed: Sequence[str]) -> str:
    """Return a hint for ``--a.b=c`` or ``--a.b c`` where ``a.b=c`` is meant; empty where no setting resembles it."""
    from headway.config.schema_messages import meant, of_another_project

    at = next((i for i, word in enumerate(typed) if word.startswith(option)), 0)
    name, equals, value = typed[at].partition("=")
    if not equals and at + 1 < len(typed) and not typed[at + 1].startswith("-") and "=" not in typed[at + 1]:
        value = typed[at + 1]
    plain = name.lstrip("-").replace("-", "_")
    if not (keys := meant(plain)):
        return ""
    written = " or ".join(f"{key}={value or '…'}" for key in keys)
    theirs = of_another_project(plain, keys)
    return f"No such option: {name}. {f'{theirs}; settings' if theirs else 'Settings'} have no dashes: {written}"
