"""The way to an interpreter that other users cannot reach, for it is in a closed home: root's, in most containers.

Root makes a mount namespace, once, in which the closed directory has nothing but the way to the interpreter. A room is
made within it, as a user who could not get there otherwise. Nothing else on the machine sees a change.
"""

from __future__ import annotations

import select
import shutil
import subprocess
from pathlib import Path
from typing import IO

from headway.errors import ConfigError, SandboxFailed, cut

MADE_S = 30.0
"""Seconds for the namespace to be made."""
MAKE = (
    'umask 022; mount --bind "$1" /sys && mount -t tmpfs -o mode=755,size=64k tmpfs "$2" && mkdir -p "$1" && '
    'mount --bind /sys "$1" && echo made && read -r end'
)
"""Program that leaves nothing in the closed directory ``$2`` but the way to ``$1``, and stays until its input ends."""


def closed_way_to(prefix: Path) -> Path | None:
    """The first directory on the way to ``prefix`` that other users cannot enter; None where they can get there."""
    closed = [path for path in prefix.parents if not path.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def open_way_to(prefix: Path, closed: Path) -> IO[bytes]:
    """Make the namespace, and return a file that keeps it: what is at ``/proc/PID/fd/N`` of it may be entered.

    Raises:
        ConfigError: a program is missing; says what to install.
        SandboxFailed: it was refused; says why.
    """
    programs = {name: shutil.which(name) for name in ("unshare", "nsenter", "mount")}
    if missing := [name for name, path in programs.items() if path is None]:
        raise ConfigError(f"sandbox: there is no {' and no '.join(missing)} here; install util-linux and mount")
    command = [str(programs["unshare"]), "--mount", "/bin/sh", "-c", MAKE, "sh", str(prefix), str(closed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}
    ) as maker:
        try:
            assert maker.stdout is not None
            if not select.select([maker.stdout], [], [], MADE_S)[0]:
                raise SandboxFailed(f"the way to {prefix} was not opened within {MADE_S:g} s")
            if maker.stdout.readline() != b"made\n":
                said = maker.communicate(timeout=MADE_S)[1].decode(errors="replace")
                raise SandboxFailed(
                    f"the interpreter is in {closed}, which other users cannot enter, and no way to it could be opened:"
                    f" {cut(' '.join(said.split()), 300)}"
                )
            return Path(f"/proc/{maker.pid}/ns/mnt").open("rb", buffering=0)
        finally:
            maker.kill()
