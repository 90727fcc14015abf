"""Limits of a call in the sandbox, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
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
class Ran:
    """The outcome of one call."""

    stdout: str
    stderr: str
    code: int
    """The program's exit code; 128 + n where signal n ended it, as shells have it."""
    limit: Limit | None = None
    """The limit that ended the call; None where it ended by itself."""
