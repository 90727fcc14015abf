"""What a run holds, looked at all through it: memory of its processes by kind, shared memory, and bytes of its files.

    growth = Growth(lambda: descendants(pid), directory)   # a thread looks every `EVERY_S`
    ...
    growth.close()
    print(markdown(growth.table()))

A process counts once it is `SETTLED_S` old: before that it fills its caches. Of several of one kind the largest counts.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression
from typing import Any

EVERY_S = 5.0
SETTLED_S = 60.0
FEWEST = 12
"""Looks from which on a slope is told."""
SHARED_MEMORY = Path("/dev/shm")
RAY_S_OWN = ("raylet", "gcs_server", "dashboard", "runtime_env", "log_monitor", "monitor.py")
_WORKER = re.compile(r"ray::([a-z-]+?)-\d")


def kind_of(title: str) -> str:
    """Return which process of a run has this command line."""
    if found := _WORKER.match(title):
        return found[1]
    if "exec(eval" in title:
        return "user-code worker"
    if "headway" in title and " train " in title:
        return "driver"
    return next((f"Ray: {name}" for name in RAY_S_OWN if name in title), "other")


class Growth:
    """A thread that looks at a run's processes and files until `close`."""

    def __init__(self, pids: Callable[[], Iterable[int]], directory: Path) -> None:
        self._pids, self._directory = pids, directory
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        """Process → when it was first seen."""
        self.looks: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """What → pairs of seconds since the start and MiB."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_always, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def look(self) -> None:
        now = time.monotonic() - self._began
        largest: dict[str, float] = {}
        for pid in self._pids():
            with suppress(OSError, IndexError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                if now - self._first.setdefault(pid, now) >= SETTLED_S:
                    kind = kind_of(title)
                    largest[kind] = max(largest.get(kind, 0.0), resident / 2**20)
        shared = os.statvfs(SHARED_MEMORY)
        largest["/dev/shm"] = (shared.f_blocks - shared.f_bfree) * shared.f_frsize / 2**20
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        largest["files"] = sum(_size(path) for path in files) / 2**20
        largest["files of the record"] = sum(_size(path) for path in files if _is_record(path)) / 2**20
        for what, mib in largest.items():
            self.looks[what].append((now, mib))

    def table(self) -> list[dict[str, Any]]:
        """Return a line for each kind of process, for shared memory and for files."""
        return [
            {
                "what": what,
                "looks": len(looks),
                "first MiB": looks[0][1],
                "last MiB": looks[-1][1],
                "most MiB": max(mib for _, mib in looks),
                "MiB an hour": 3600 * linear_regression(*zip(*looks, strict=True)).slope
                if len(looks) >= FEWEST
                else None,
            }
            for what, looks in sorted(self.looks.items())
        ]

    def _look_always(self) -> None:
        while not self._closing.wait(EVERY_S):
            self.look()


def _is_record(path: Path) -> bool:
    return path.name.startswith(("events", "metrics"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
