"""Checks of the files that a command writes: that they can be written, before any work, and are none that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headway.errors import ConfigError, HeadwayError, RunError


@contextmanager
def writing(option: str, path: Path, error: type[HeadwayError] = RunError) -> Iterator[None]:
    """Raise ``error`` when writing ``path``, which ``option`` gave, fails with an `OSError` in the block."""
    try:
        yield
    except OSError as cause:
        raise error(
            f"{option} {path} cannot be written ({cause.strerror or cause}); give a file that you may write to, where "
            "there is room"
        ) from cause


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Check each option's file by `check_writable`, and that no two options name one file. Raises `ConfigError`."""
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
    """Check that ``path`` can be written, before minutes of work that could not be saved. Leaves ``path`` unchanged.

    Raises `ConfigError` when it cannot be opened, and when it is one of the files ``inputs`` or a file already in one
    of the folders among them. A pipe or a device is not checked: a reader may take that for the end.
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
    # For a link: where it lies and where it leads. The hub's folders hold links, and links lead into folders.
    if any(_identity(folder) == there for way in (path.absolute(), path.resolve()) for folder in way.parents):
        return True
    return any(_identity(path) == _identity(child) for child in one.iterdir())


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, equal for two names of one file; None where there is no such file."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # raised also for what can be no path: too long, or with a zero byte
        return None
    return found.st_dev, found.st_ino
