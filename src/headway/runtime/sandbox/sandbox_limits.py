"""Limits of a call in the sandbox, what its processes take of them according to /proc, and its outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Limit = Literal["wall", "cpu", "memory", "processes", "output", "scratch"]
"""A limit that ended a call: ``wall_s``, ``cpu_s``, ``memory_mib``, ``processes``, ``output_kib``, ``scratch_mib``."""
MOST_FILES = 20_000
"""Files and directories that a call may have in the scratch space: removing more would hold up its end."""
Kind = Literal["bubblewrap", "process_limits"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one call, over all of its processes together."""

    wall_s: float = 10.0
    """Seconds from start to end."""
    cpu_s: float = 10.0
    """Seconds of processors."""
    memory_mib: int = 512
    """Memory in MiB, files in the scratch space included."""
    processes: int = 32
    """Processes and threads at once."""
    output_kib: int = 64
    """Standard output and standard error together, in KiB."""
    scratch_mib: int = 64
    """Files in the scratch space, in MiB."""

    def said(self, limit: Limit) -> str:
        """Say which limit ended a call: ``it took longer than 10 s``."""
        return {
            "wall": f"it took longer than {self.wall_s:g} s",
            "cpu": f"it took more than {self.cpu_s:g} s of processor time",
            "memory": f"it took more than {self.memory_mib} MiB of memory",
            "processes": f"it had more than {self.processes} processes and threads",
            "output": f"it printed more than {self.output_kib} KiB",
            "scratch": f"its files took more than {self.scratch_mib} MiB, or were more than {MOST_FILES}",
        }[limit]


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The sandbox of a run: its kind, and the limits of a call that names none. Pickles."""

    kind: Kind = "bubblewrap"
    limits: SandboxLimits = SandboxLimits()


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The outcome of one call."""

    stdout: str
    stderr: str
    code: int
    """The program's exit code; 128 + n where signal n ended it, as shells have it."""
    limit: Limit | None = None
    """The limit that ended the call; None where it ended by itself."""


TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SOCKET = 320 << 10
"""Bytes of the kernel's that a socket may hold, with what it takes to keep them."""
INODE = 1024
"""Bytes of the kernel's that a file takes at least, even an empty one."""
SPARE = 2
"""Processes of a call that are not the program's: those that set it up."""


@dataclass(frozen=True, slots=True)
class ProcEntry:
    """One process, as its directory in /proc tells."""

    place: str
    is_zombie: bool
    session: int
    threads: int
    seconds: float
    """Seconds of processor time, those of children that it has waited for included."""
    resident: int
    """Bytes in memory, those that it shares with others included."""

    @property
    def pid(self) -> int:
        """The process's number, where its /proc is mounted."""
        return int(self.place.rpartition("/")[2])


def processes_in(proc: str) -> list[ProcEntry]:
    """The processes of the mounted ``proc``; those that end meanwhile are left out."""
    found = []
    with suppress(OSError):
        for name in os.listdir(proc):  # noqa: PTH208  # many times a second
            if name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    found.append(_process(f"{proc}/{name}"))
    return found


def _process(place: str) -> ProcEntry:
    stat = _text(f"{place}/stat").rpartition(")")[2].split()
    seconds = sum(map(int, stat[11:15])) / TICKS
    return ProcEntry(place, stat[0] == "Z", int(stat[3]), int(stat[17]), seconds, int(stat[21]) * PAGE)


def exceeded(processes: Iterable[ProcEntry], scratch: str, limits: SandboxLimits) -> Limit | None:
    """The limit that the processes of one call, with the files of its scratch space, have gone beyond; or None."""
    processes = list(processes)
    if sum(one.threads for one in processes) > limits.processes + SPARE:
        return "processes"
    if sum(one.seconds for one in processes) > limits.cpu_s:
        return "cpu"
    number, files = used_by_files(scratch)
    if number > MOST_FILES:
        return "scratch"
    most = limits.memory_mib << 20
    files += SOCKET * sum(map(_sockets, processes))
    if files + sum(one.resident for one in processes) <= most:
        return None
    # Forked processes share pages: only the exact figure counts, which is slower to get.
    return "memory" if files + sum(map(_exact, processes)) > most else None


def _sockets(process: ProcEntry) -> int:
    """Number of open sockets."""
    count = 0
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"{process.place}/fd"):  # noqa: PTH208  # as above
            with suppress(OSError):
                count += os.readlink(f"{process.place}/fd/{name}").startswith("socket:")  # noqa: PTH115  # as above
    return count


def used_by_files(scratch: str) -> tuple[int, int]:
    """Number of files in the file system ``scratch``, and the bytes of memory they take; 0 where it is not seen."""
    try:
        info = os.statvfs(scratch)
    except OSError:
        return 0, 0
    number = info.f_files - info.f_ffree
    return number, (info.f_blocks - info.f_bfree) * info.f_frsize + number * INODE


def used_by_directory(directory: Path) -> int:
    """Bytes of the files in ``directory``, as far as it can be read."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{where}/{name}").st_blocks * 512
    return total


def _exact(process: ProcEntry) -> int:
    """Bytes in memory, of shared pages a process's share."""
    with suppress(OSError, ValueError, StopIteration):
        lines = _text(f"{process.place}/smaps_rollup").splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0  # it has ended


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # as above
        return file.read()
