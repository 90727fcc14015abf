"""File of an evaluation's answers, as JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.output_files import writing

if TYPE_CHECKING:
    from headway.api.eval.figures import Solved


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
