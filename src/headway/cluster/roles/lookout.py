"""Looking at files that processes on several machines must see.

A mark is a small file with a text that nobody else would write: who reads that text sees the very directory in which
it was left, not one of the same path on another machine.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from headway.models.folder import fingerprint


class Lookout:
    """A process's look at files: every role and the driver have one. A thread looks, also while a worker computes."""

    def __init__(self, host: str) -> None:
        """``host``: this machine's address for the others."""
        self._host = host

    async def place(self) -> str:
        """The machine, as it calls itself and as others reach it."""
        return place(self._host)

    async def leave_mark(self, mark: Path, text: str, make_directory: bool = False) -> str | None:
        """Write ``text`` to the file ``mark``. Returns why that cannot be, or None."""
        return await asyncio.to_thread(_write, mark, text, make_directory)

    async def sees_mark(self, mark: Path, text: str) -> bool:
        """Tell whether the file ``mark`` is here, and holds ``text``."""
        return await asyncio.to_thread(_holds, mark, text)

    async def remove_mark(self, mark: Path) -> None:
        """Remove the file ``mark``, where it is here and can be removed."""
        await asyncio.to_thread(_remove, mark)

    async def model_files(self, path: str) -> dict[str, str] | None:
        """`fingerprint` of the model's folder at ``path``; None where there is none."""
        return await asyncio.to_thread(fingerprint, Path(path))


def place(host: str) -> str:
    """Name this machine for messages: its own name, and its address ``host``."""
    return f"{socket.gethostname()} ({host})"


def _write(mark: Path, text: str, make_directory: bool) -> str | None:
    try:
        if make_directory:
            mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(text, encoding="utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _holds(mark: Path, text: str) -> bool:
    try:
        return mark.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _remove(mark: Path) -> None:
    try:
        mark.unlink(missing_ok=True)
    except OSError:
        return  # some bytes under a hidden name are in nobody's way
