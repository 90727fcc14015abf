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
"""Errors of a disk without room, for all users or for this one."""
CHUNK = 4 * 2**20
"""Number of bytes read at once, more if a line is longer."""


class Rewritten(Exception):
    """Signal that the file was replaced or shortened, and must be read again from its beginning."""


@dataclass(slots=True)
class Tail:
    """Reader of the complete lines of ``path``. A file that does not exist yet counts as empty."""

    path: Path
    offset: int = 0
    """Number of bytes before the next line."""
    _identity: tuple[int, int] | None = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the next complete lines, up to a `CHUNK` of bytes, each with its offset.

        Raises `Rewritten`, and `OSError` if the file cannot be read.
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
            # Not by size: a thinned or resumed file is a different file under the same name.
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
    """Yield the complete lines of a file. Raises `OSError`."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def draft_of(path: Path) -> Path:
    """Return the path of the draft that will replace ``path``."""
    return path.with_name(f"{path.name}.tmp")


def replace_file(path: Path, text: str) -> None:
    """Replace a file by ``text`` as `whole_file` does. Raises `OSError`."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file to replace it atomically: readers see the old one or the new one, even after a crash.

    If the block fails, the old file stays. Raises `OSError`.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a terminal, a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    # In the same folder: a rename from another file system is a copy, of which readers may see half.
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            # Before the rename: otherwise a power cut may leave an empty file under the new name.
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
