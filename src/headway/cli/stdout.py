"""Standard output that says, in one message, that it cannot be written: a full disk behind ``> FILE``, most often.

Whatever prints raises `OutputRefused` there, which ends a command as every error does. A pipe whose reader left is
nobody's mistake: it raises `BrokenPipeError` as usual, and the command ends without a word.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headway.errors import OutputRefused


class Stdout(io.TextIOWrapper):
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
        except BrokenPipeError:
            self._go_nowhere()
            raise
        except OSError as cause:
            self._go_nowhere()
            raise OutputRefused(
                f"standard output cannot be written ({cause.strerror or cause}); send it to a place with room"
            ) from cause

    def _go_nowhere(self) -> None:
        """What is still held goes nowhere, or the interpreter, which flushes it last, would fail over it."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self.fileno())
            finally:
                os.close(nowhere)


def replace_stdout() -> None:
    """From now on stdout is a `Stdout`. What its encoding lacks is printed as a question mark."""
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper):
        encoding, buffered, through = before.encoding, before.line_buffering, before.write_through
        sys.stdout = Stdout(
            before.detach(), encoding=encoding, errors="replace", line_buffering=buffered, write_through=through
        )
