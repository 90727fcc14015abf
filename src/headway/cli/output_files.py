"""Files that a command writes: checked before any work (writable, none that it reads); an evaluation's answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, HeadwayError, RunError

if TYPE_CHECKING:
    from headway.api.eval.figures import Solved


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


class AnswersFile:
    """File of JSON lines, one for each answer; a problem's are on disk when the next problem's are written.

    A failure to write is reported once. The file then ends with the last problem of which it has all answers.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """Remember ``path``, which is replaced when the context is entered, and ``tell``, which reports a failure."""
        self._path, self._tell = path, tell
        self._problems = self._size = 0
        """Number of problems, and number of bytes, that were written."""
        self.whole = True
        """True until writing fails."""

    def __enter__(self) -> AnswersFile:
        """Open the file. Raises `RunError` when that fails."""
        with writing("--output", self._path):
            self._file = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as cause:  # a network's disk may refuse only now
            self._give_up(cause)

    def write(self, problem: Solved) -> None:
        if not self.whole:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in _rows(problem))
        text = lines.encode("utf-8", "backslashreplace")  # the spelling of JSON for a lone surrogate, too
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as cause:
            self._give_up(cause)
        else:
            self._problems, self._size = self._problems + 1, self._size + len(text)

    def _give_up(self, cause: OSError) -> None:
        self.whole = False
        with suppress(OSError):
            self._file.close()  # closed before the file is cut: this tries once more to write what was refused
        with suppress(OSError):
            os.truncate(self._path, self._size)
        self._tell(
            f"warning: --output {self._path} cannot be written any more ({cause.strerror or cause}); it has the "
            f"answers to the first {self._problems} problems, and the evaluation goes on without it"
        )


def _rows(problem: Solved) -> Iterator[dict[str, Any]]:
    """Yield the rows of the answers' file, one for each answer."""
    for answer in problem.answers:
        failure = answer.failure or problem.failure
        row = {
            "row": problem.row,
            "k": answer.k,
            "source": problem.source,
            "prompt": problem.prompt,
            "answer": problem.truth,
            "response": answer.text,
            "reward": None if failure is not None else answer.reward,
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }
        if len(answer.parts) > 1:
            row["parts"] = answer.parts
        if failure is not None:
            row["failure"] = failure
        yield row
