"""Checks of files that processes on several machines must see.

A mark is a small file with a text that nobody else would write: a process that reads that text sees the very directory
in which it was left, not one of the same path on another machine.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from headway.models.model_folder import fingerprint


class FileProbe:
    """Access to files for every role and the driver, on another thread: also while a worker computes."""

    def __init__(self, host: str) -> None:
        """Remember ``host``, this machine's address for the others."""
        self._host = host

    async def place(self) -> str:
        """Return the name of this machine, and its address for the others."""
        return place(self._host)

    async def leave_mark(self, mark: Path, text: str, make_directory: bool = False) -> str | None:
        """Write ``text`` to the file ``mark``. Returns why that failed, or None."""
        return await asyncio.to_thread(_write, mark, text, make_directory)

    async def sees_mark(self, mark: Path, text: str) -> bool:
        """Tell whether the file ``mark`` is there, and holds ``text``."""
        return await asyncio.to_thread(_holds, mark, text)

    async def remove_mark(self, mark: Path) -> None:
        """Remove the file ``mark``, if it is there and can be removed."""
        await asyncio.to_thread(_remove, mark)

    async def model_files(self, path: str) -> dict[str, str] | None:
        """Return the `fingerprint` of the model's folder at ``path``; None where there is none."""
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
