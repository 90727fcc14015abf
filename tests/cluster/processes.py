"""Watching processes by descriptors that stay valid, so that a number given to somebody else is never mistaken."""

from __future__ import annotations

import os
import select
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Process ids of everything that ``pid`` started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, open_ends = [], [pid]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


class Family:
    """The processes that this one has started by now, with ``title`` in their command lines."""

    def __init__(self, title: str = "") -> None:
        self._descriptors: dict[int, int] = {}
        for pid in descendants(os.getpid()):
            try:
                if title in Path(f"/proc/{pid}/cmdline").read_text():
                    self._descriptors[pid] = os.pidfd_open(pid)
            except (ProcessLookupError, FileNotFoundError):
                continue

    def __len__(self) -> int:
        return len(self._descriptors)

    def left_after(self, seconds: float) -> list[int]:
        """Those that have not ended after so long at most."""
        left = []
        for pid, descriptor in self._descriptors.items():
            if not select.select([descriptor], [], [], seconds)[0]:
                left.append(pid)
            os.close(descriptor)
        return left
