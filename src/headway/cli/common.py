"""What the commands share: options, and errors that end as one message."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headway.errors import EXIT_INTERRUPTED, ConfigError, HeadwayError, RunError

EXIT_FAILED = 1

A_TYPING_ERROR = 0.8
"""How alike an unknown option and one that there is must be for that one to be meant, in [0, 1]."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """End the command with one message on stderr and the error's exit code, without a traceback unless ``debug``."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, HeadwayError)
        _say(f"error: {error}" if expected else f"error: unexpected {type(error).__name__}: {error}")
        if isinstance(error, MemoryError):
            _say("This machine's memory ran out. Use a smaller model or shorter data, or more memory")
        elif not expected and not debug:
            _say("This should not happen. Run again with --debug to see where it did.")
        for note in getattr(error, "__notes__", ()):
            _say(note)
        raise typer.Exit(error.exit_code if isinstance(error, HeadwayError) else EXIT_FAILED) from error


def _say(text: str) -> None:
    """On stderr, or nowhere where that refuses: the exit code is the error's all the same."""
    with suppress(OSError):
        typer.echo(text, err=True)


@contextmanager
def writing(option: str, path: Path, error: type[HeadwayError] = RunError) -> Iterator[None]:
    """``error`` for whatever refuses to write ``path``, which ``option`` gave."""
    try:
        yield
    except OSError as cause:
        raise error(
            f"{option} {path} cannot be written ({cause.strerror or cause}); give a file that you may write to, where "
            "there is room"
        ) from cause


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """`check_writable` of each option's file, and that no two are one. Raises `ConfigError`."""
    taken: dict[object, tuple[str, Path]] = {}
    among = list(inputs)
    for option, path in outputs.items():
        check_writable(option, path, among)
        if path is None or (path.exists() and not path.is_file()):
            continue
        other, same = taken.setdefault(_identity(path) or path.resolve(), (option, path))
        if other != option:
            raise ConfigError(f"{other} {same} and {option} {path} are one file; give two")


def check_writable(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Before minutes are spent on what could not be written. Leaves ``path`` as it is, there or not.

    Raises `ConfigError` when it cannot be opened, and when it is one of the files ``inputs`` or a file that is in one
    of the folders among them already. Of a pipe or a device nothing is known before it is written to: a reader may take
    this for the end.
    """
    if path is None:
        return
    if path == Path("-"):
        raise ConfigError(f"{option} -: expected a file; nothing is written to standard output by this name")
    with writing(option, path, ConfigError):
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
        path.open("a").close()
        if not there:
            path.resolve().unlink()


def files_of_run(run: Path) -> tuple[Path, ...]:
    """Its own files and folders, there or not, for `check_writable`. What else lies in its directory is the user's."""
    from headway.reports.run_directory import RunDirectory

    own = RunDirectory(run)
    files = (own.config, own.events, own.metrics, own.summary, own.lock)
    return (*files, own.model, own.initial_model, own.checkpoints, own.tensorboard, own.logs)


def _is_of(path: Path, one: Path) -> bool:
    """Whether the file ``path`` is the file ``one``, or lies in the folder ``one``, by whatever names and links."""
    if (there := _identity(one)) is None:
        return False
    if not one.is_dir():
        return _identity(path) == there
    # Of a link, where it lies and where it leads: the hub's folders hold links, and links lead into folders.
    if any(_identity(folder) == there for way in (path.absolute(), path.resolve()) for folder in way.parents):
        return True
    return any(_identity(path) == _identity(child) for child in one.iterdir())


def _identity(path: Path) -> tuple[int, int] | None:
    """Equal for two names of one file; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # also for what can be no path: too long, or with a zero byte
        return None
    return found.st_dev, found.st_ino


class TakesSettings(TyperCommand):
    """A command with ``a.b=c`` arguments: to one that is typed as an option it says how a setting is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises click's errors of usage, as its base class does."""
        typed = list(args)  # the parser empties its own
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter:
            raise
        except Exception as error:  # typer does not export click's `NoSuchOption`, whose attributes these are
            name, options = getattr(error, "option_name", None), getattr(error, "possibilities", None) or ()
            if name is not None and not difflib.get_close_matches(name, options, n=1, cutoff=A_TYPING_ERROR):
                error.message = _as_a_setting(name, typed) or error.message  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


def _as_a_setting(option: str, typed: Sequence[str]) -> str:
    """What to say of ``--a.b=c`` or ``--a.b c`` where ``a.b=c`` is meant; empty where nothing is known to be."""
    from headway.config.messages import meant

    at = next((i for i, word in enumerate(typed) if word.startswith(option)), 0)
    name, equals, value = typed[at].partition("=")
    if not equals and at + 1 < len(typed) and not typed[at + 1].startswith("-") and "=" not in typed[at + 1]:
        value = typed[at + 1]
    if not (keys := meant(name.lstrip("-").replace("-", "_"))):
        return ""
    written = " or ".join(f"{key}={value or '…'}" for key in keys)
    return f"No such option: {name}. Settings have no dashes: {written}"
