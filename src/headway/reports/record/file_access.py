"""Files of a run: replaced as a whole, repaired after a kill, and read while another process appends lines."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room left, for anybody or for this user."""
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
        """Yield the next whole lines, one `CHUNK` of bytes of them, each with the offset at which it begins.

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
            # The same size is no proof: a thinned or resumed file is another one under the name.
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


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that have an end. Raises `OSError`."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def draft_of(path: Path) -> Path:
    """Return the path of the file that is to take the place of ``path``."""
    return path.with_name(f"{path.name}.tmp")


def replace_file(path: Path, text: str) -> None:
    """Replace a file by ``text`` as `whole_file` does. Raises `OSError`."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file to replace it atomically: readers see the old one or the new one, even after a crash.

    Where the block fails the old one stays. Raises `OSError`.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a terminal, a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    # In the same folder: a rename from another file system is a copy, which readers see half of.
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            # Before the rename: after a power cut some file systems have the new name on an empty file.
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):  # not every file system has folders that can be synchronised
            os.fsync(folder)
        os.close(folder)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
