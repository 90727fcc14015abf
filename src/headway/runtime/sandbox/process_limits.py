"""Isolation of a call without bubblewrap: only limits, a new session and a new directory.

What runs so has the user's rights: it reads the user's files, reaches the network, signals the user's processes. A
process that leaves its session outlives the call.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from headway.errors import ConfigError
from headway.runtime.sandbox.bubblewrap import rlimits
from headway.runtime.sandbox.sandbox_call import ENDS_S, sealed
from headway.runtime.sandbox.sandbox_limits import (
    Limit,
    ProcEntry,
    SandboxLimits,
    exceeded,
    processes_in,
    used_by_directory,
)

TELLS = (
    "sandbox=process_limits: what the model writes runs as this user, without a sandbox. It can read this user's "
    "files, reach the network, and signal this user's processes; only its time, memory and output are bounded"
)
"""What the user of `ProcessLimits` is told at the start."""
PAUSE_S = 0.005


def prlimit() -> str:
    """The path of prlimit(1). Raises `ConfigError` where there is none."""
    found = shutil.which("prlimit")
    if found is None:
        raise ConfigError("sandbox=process_limits: there is no prlimit here; install util-linux")
    return found


class ProcessLimits:
    """Surroundings that are limits alone."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._limits = SandboxLimits()
        self._directory = Path()
        self._session = -1

    def start(
        self, program: Sequence[str], limits: SandboxLimits, stdin: bytes, held: ExitStack
    ) -> subprocess.Popen[bytes]:
        self._limits = limits
        self._directory = Path(tempfile.mkdtemp(prefix="headway-sandbox-"))
        held.callback(shutil.rmtree, self._directory, ignore_errors=True)
        for name, content in self._files.items():
            (self._directory / name).write_bytes(content)
        here = str(self._directory)
        process = subprocess.Popen(
            [prlimit(), *rlimits(limits, counts_processes=False), "--", *program],
            stdin=sealed(stdin, held),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"},
            cwd=here,
            start_new_session=True,
        )
        self._session = process.pid
        return process

    @property
    def tells(self) -> int | None:
        return None

    def hear(self) -> bool:
        return False

    def exceeded(self) -> Limit | None:
        if used_by_directory(self._directory) > self._limits.scratch_mib << 20:
            return "scratch"
        return exceeded(self._members(), "", self._limits)

    def end(self) -> bool:
        if self._session < 0:
            return True
        until = time.monotonic() + ENDS_S
        while True:
            with suppress(ProcessLookupError):
                os.killpg(self._session, signal.SIGKILL)
            left = [one for one in self._members() if not one.is_zombie]
            if not left:
                break
            for one in left:  # of the session, but not of its first group
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            if time.monotonic() > until:
                break
            time.sleep(PAUSE_S)
        self._session = -1
        return not left

    def code(self, returned: int, said: str) -> int:
        return returned if returned >= 0 else 128 - returned

    def _members(self) -> list[ProcEntry]:
        return [one for one in processes_in("/proc") if one.session == self._session]
