"""Shared parts of the commands: options, completion, standard output, output files, errors as one message.

Output files are checked before any work: they must be writable, and must not be inputs.

A failing standard output ends a command with one message; a pipe whose reader has left ends it silently.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headway.errors import EXIT_INTERRUPTED, ConfigError, HeadwayError, RunError, UserError
from headway.runtime.signals import terminations_as_interrupts


def complete_config(incomplete: str) -> Iterator[str]:
    """Yield names of recipes, and paths of YAML files and folders, that begin with ``incomplete``."""
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
    """Yield ``a.b=default`` for each key that begins with ``incomplete``. The value is empty if there is no default, or
    if a shell would split it.
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
"""Minimum similarity, in [0, 1], for an unknown option to be taken for a misspelled known one."""

STATIC = "--static"
"""Option behind ``--dry-run=static``, which stands for ``--dry-run --static``."""

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
    except typer.Exit:  # an Exception, too, and no failure
        raise
    except Exception as error:
        if is_of_stdout(error):
            raise typer.Exit(give_up_stdout(error)) from None
        if debug:
            traceback.print_exc()
        code = error.exit_code if isinstance(error, HeadwayError) else EXIT_FAILED
        if isinstance(error, HeadwayError):
            say(f"error: {error}")
        elif isinstance(error, PermissionError) and error.filename is not None:
            code = UserError.exit_code
            say(f"error: {error.filename}: {error.strerror}; give a path that you may use")
            if not debug:
                say("Run again with --debug to see where it is used.")
        else:
            say(f"error: unexpected {type(error).__name__}: {error}")
            if isinstance(error, MemoryError):
                say("This machine's memory ran out. Use a smaller model or shorter data, or more memory")
            elif not debug:
                say("This should not happen. Run again with --debug to see where it did.")
        for note in getattr(error, "__notes__", ()):
            say(note)
        raise typer.Exit(code) from error


def command(run: Callable[..., None]) -> Callable[..., None]:
    """Make ``run`` a command, with the option ``--debug`` and with errors as messages."""
    signature = inspect.signature(run, eval_str=True)

    @wraps(run)
    def with_messages(*args: Any, debug: bool = False, **options: Any) -> None:
        with errors_as_messages(debug):
            run(*args, **options, **({"debug": debug} if "debug" in signature.parameters else {}))

    others = [one for name, one in signature.parameters.items() if name != "debug"]
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    # Typer reads both, and evaluates the annotations of no signature that is given like this.
    with_messages.__signature__ = signature.replace(parameters=[*others, option])  # type: ignore[attr-defined]
    with_messages.__annotations__ = {**run.__annotations__, "debug": Debug}
    return with_messages


def is_of_stdout(error: BaseException) -> bool:
    """Tell whether standard output refused a write. What a command writes to files is reported by `writing`."""
    refused = (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in refused:
        return False
    # A file that cannot be opened is named by the error. One that refuses a write, or a socket, is not; but what stdout
    # refused is still in its buffer, and is refused again.
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return bool(getattr(sys.stdout, "write_through", False))  # without a buffer nothing tells


def give_up_stdout(error: BaseException) -> int:
    """Report a failure of standard output, except a reader that left (``| head``). Returns the exit code."""
    with suppress(OSError):  # the interpreter flushes last, and would fail over what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        why = getattr(error, "strerror", None) or error
        say(f"error: standard output cannot be written ({why}); send it to a place with room")
    return EXIT_FAILED


def say(text: str) -> None:
    """Print ``text`` on stderr. An error of stderr itself is ignored, so that the exit code stays the command's."""
    with suppress(OSError):
        typer.echo(text, err=True)


@contextmanager
def writing(option: str, path: Path, error: type[HeadwayError] = RunError, *, default: bool = False) -> Iterator[None]:
    """Raise ``error`` when writing ``path`` fails with an `OSError` in the block. ``option`` gave that path, or could
    have: it is the command's ``default``.
    """
    try:
        yield
    except OSError as cause:
        named, give = (path, f"with {option}, give") if default else (f"{option} {path}", "give")
        raise error(
            f"{named} cannot be written ({cause.strerror or cause}); {give} a file that you may write to, where there "
            "is room"
        ) from cause


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[Path] = (), defaults: Container[str] = ()
) -> None:
    """Check each option's file by `check_writable`, and that no two options name one file. Raises `ConfigError`.

    ``defaults``: options that were not given, whose files are the command's own choice.
    """
    taken: dict[object, tuple[str, Path]] = {}
    among = list(inputs)
    for option, path in outputs.items():
        check_writable(option, path, among, default=option in defaults)
        if path is None or (path.exists() and not path.is_file()):
            continue
        # By inode where the file is there: two names may lead to one file.
        other, same = taken.setdefault(_identity(path) or path.resolve(), (option, path))
        if other != option:
            raise ConfigError(f"{other} {same} and {option} {path} are one file; give two")


def check_writable(option: str, path: Path | None, inputs: Iterable[Path] = (), *, default: bool = False) -> None:
    """Check that ``path`` can be written, before minutes of work that could not be saved. Leaves ``path`` unchanged.

    Raises `ConfigError` when it cannot be opened, or when it exists and is a file of ``inputs`` or in a folder among
    them. A pipe or a device is not opened: its reader could take that for the end. ``default``: as in `writing`.
    """
    if path is None:
        return
    if path == Path("-"):
        raise ConfigError(f"{option} -: expected a file; nothing is written to standard output by this name")
    with writing(option, path, ConfigError, default=default):
        there = path.exists()
        if there and not path.is_file() and not path.is_dir():
            return
        for one in inputs if there else ():
            if path.is_file() and _is_of(path, one):
                named = f"a file of {one}" if one.is_dir() else one
                raise ConfigError(
                    f"{option} {path} would overwrite {named}, which belongs to what this command reads; give another "
                    "file"
                )
        # Appending: what is in the file stays until there is something to write
        path.open("a").close()
        if not there:
            # What a link leads to: the link itself was there before
            path.resolve().unlink()


def files_of_run(run: Path) -> tuple[Path, ...]:
    """Return a run's own files and folders, existing or not, for `check_writable`. Others there are the user's."""
    from headway.reports.run_directory import RunDirectory

    own = RunDirectory(run)
    files = (own.config, own.events, own.metrics, own.samples, own.summary, own.lock)
    return (*files, own.model, own.initial_model, own.checkpoints, own.tensorboard, own.trackers, own.logs)


def _is_of(path: Path, one: Path) -> bool:
    """Tell whether the file ``path`` is the file ``one``, or lies in the folder ``one``, by any name or link."""
    if (there := _identity(one)) is None:
        return False
    if not one.is_dir():
        return _identity(path) == there
    # Check a link's own place and its target: the hub's folders hold links, and links may lead into folders.
    if any(_identity(folder) == there for way in (path.absolute(), path.resolve()) for folder in way.parents):
        return True
    return any(_identity(path) == _identity(child) for child in one.iterdir())


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, equal for two names of one file; None if there is no such file."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # raised also for what can be no path: too long, or with a zero byte
        return None
    return found.st_dev, found.st_ino


class TakesSettings(TyperCommand):
    """Command with ``a.b=c`` arguments. If a setting is typed as an option, the error shows the right form.

    Also parses ``--dry-run=static``, the only option with two forms.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's arguments. Raises click's errors of usage, as the base class does."""
        args = [word for one in args for word in (["--dry-run", STATIC] if one == "--dry-run=static" else [one])]
        typed = list(args)  # a copy: the parser empties its own
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer does not export click's `NoSuchOption`, whose attributes these are
            name, options = getattr(error, "option_name", None), getattr(error, "possibilities", None) or ()
            if name == "--dry-run" and any(name in each.opts for each in self.params):
                error.message = "--dry-run takes no value but static: --dry-run=static"  # type: ignore[attr-defined]
                raise
            if name is not None and not difflib.get_close_matches(name, options, n=1, cutoff=A_TYPING_ERROR):
                error.message = _as_a_setting(name, typed) or error.message  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


def _as_a_setting(option: str, typed: Sequence[str]) -> str:
    """Return a hint for ``--a.b=c`` or ``--a.b c`` instead of ``a.b=c``; empty if no setting is similar."""
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
