"""The way to an interpreter that other users cannot reach, for it is in a closed home: root's, in most containers.

Root makes a mount namespace, once, in which the closed directory has nothing but the parts of the interpreter. A room
is made within it, as a user who could not get there otherwise. Nothing else on the machine sees a change.
"""

from __future__ import annotations

import select
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import IO

from headway.errors import ConfigError, SandboxFailed, cut

MADE_S = 30.0
"""Seconds for the namespace to be made."""
ASIDE = "/sys"
"""Directory of the namespace in which the parts are kept while the closed directories are covered."""


def closed_way_to(part: Path) -> Path | None:
    """The first directory on the way to ``part`` that other users cannot enter; None where they can get there."""
    closed = [path for path in part.parents if not path.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def open_way_to(parts: Sequence[Path]) -> IO[bytes] | None:
    """Make the namespace, and return a file that keeps it: what is at ``/proc/PID/fd/N`` of it may be entered.

    Args:
        parts: files and directories of the interpreter.

    Returns:
        None where all users reach all of them.

    Raises:
        ConfigError: a program is missing; says what to install.
        SandboxFailed: it was refused; says why.
    """
    ways = {part: closed for part in parts if (closed := closed_way_to(part)) is not None}
    if not ways:
        return None
    programs = {name: shutil.which(name) for name in ("unshare", "nsenter", "mount")}
    if missing := [name for name, path in programs.items() if path is None]:
        raise ConfigError(f"sandbox: there is no {' and no '.join(missing)} here; install util-linux and mount")
    where = " and ".join(sorted({str(way) for way in ways.values()}))
    command = [str(programs["unshare"]), "--mount", "/bin/sh", "-c", " && ".join(_steps(ways))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}
    ) as maker:
        try:
            assert maker.stdout is not None
            if not select.select([maker.stdout], [], [], MADE_S)[0]:
                raise SandboxFailed(f"the way to the interpreter in {where} was not opened within {MADE_S:g} s")
            if maker.stdout.readline() != b"made\n":
                said = maker.communicate(timeout=MADE_S)[1].decode(errors="replace")
                raise SandboxFailed(
                    f"the interpreter is in {where}, which other users cannot enter, and no way to it could be opened:"
                    f" {cut(' '.join(said.split()), 300)}"
                )
            return Path(f"/proc/{maker.pid}/ns/mnt").open("rb", buffering=0)
        finally:
            maker.kill()


def _steps(ways: dict[Path, Path]) -> list[str]:
    """Commands that leave nothing in the closed directories but the parts, and stay until their input ends."""
    aside = {part: Path(ASIDE, str(place)) for place, part in enumerate(ways)}
    steps = ["umask 022", f"mount -t tmpfs tmpfs {ASIDE}"]
    steps += [step for part, kept in aside.items() for step in _bound(part, kept, is_directory=part.is_dir())]
    covered = sorted({str(way) for way in ways.values()})
    steps += [f"mount -t tmpfs -o mode=755,size=256k tmpfs {quote(way)}" for way in covered]
    steps += [step for part, kept in aside.items() for step in _bound(kept, part, is_directory=part.is_dir())]
    return [*steps, "echo made", "read -r end"]


def _bound(source: Path, target: Path, *, is_directory: bool) -> list[str]:
    where = quote(str(target))
    made = f"mkdir -p {where}" if is_directory else f"mkdir -p {quote(str(target.parent))} && : >{where}"
    return [made, f"mount --bind {quote(str(source))} {where}"]
