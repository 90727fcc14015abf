"""Reading a file that another process appends lines to, from where the last reading ended."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 4 * 2**20
"""Number of bytes that are read at once, more where a line is longer."""


class Rewritten(Exception):
    """Signal: the file is another one, or shorter, than the one that was read so far; it has to be read anew."""


@dataclass(slots=True)
class Tail:
    """Reader of the whole lines of ``path``. A file that does not exist yet has none."""

    path: Path
    offset: int = 0
    """Number of bytes before the next line."""
    _identity: tuple[int, int] | None = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield each further whole line with where it begins, one `CHUNK` of them.

        Raises `Rewritten`, and `OSError` where the file cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self._identity is not None:
                raise Rewritten(f"{self.path} is gone") from None
            return
        with file:
            found = os.fstat(file.fileno())
            identity = found.st_dev, found.st_ino
            if self._identity not in (None, identity) or found.st_size < self.offset:
                raise Rewritten(f"{self.path} was replaced while it was read")
            self._identity = identity
            file.seek(self.offset)
            chunk = file.read(CHUNK)
            while len(chunk) and b"\n" not in chunk and (more := file.read(CHUNK)):
                chunk += more
        for line in io.BytesIO(chunk[: chunk.rfind(b"\n") + 1]):  # `splitlines` would end one at a carriage return, too
            at, self.offset = self.offset, self.offset + len(line)
            yield at, line
