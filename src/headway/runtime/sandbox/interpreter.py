"""Interpreter of a sandbox: its files, and access to them for users who cannot reach them.

The interpreter may be installed in a home (``./configure --prefix=$HOME``), so a sandbox never gets the whole
directory. It gets the program, the standard library without the packages in it, and the shared libraries that these
load. Other users cannot enter some homes (root's, in most containers). For these, root makes a mount namespace once, in
which the closed directory contains only the parts of the interpreter. Sandboxes are made within it. Nothing changes for
the rest of the machine.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shlex import quote
from typing import IO

from headway.errors import ConfigError, SandboxFailed, cut

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories that each sandbox has anyway."""
ASKED_S = 30.0
"""Limit in seconds for the interpreter to list its library, and for the loader to list its shared libraries."""
ISOLATED = ("-I", "-S", "-B", "-X", "utf8")
"""Options of the interpreter: no user directories, no packages, UTF-8."""
ASK = "import json, sys; print(json.dumps(sys.path))"
"""Program that prints the import path: without packages, this is the standard library."""
PACKAGES = ("site-packages", "dist-packages")
LOADED = re.compile(r"=> (/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)


def programs(*names: str, kind: str = "sandbox", packages: str = "util-linux") -> dict[str, str]:
    """Return the paths of programs by name. Raises `ConfigError` if one is missing, with the packages to install."""
    found = {name: path for name in names if (path := shutil.which(name)) is not None}
    if missing := [name for name in names if name not in found]:
        raise ConfigError(f"{kind}: there is no {' and no '.join(missing)} here; install {packages}")
    return found


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Files of an interpreter outside /usr."""

    parts: Mapping[Path, Path] = field(default_factory=dict)
    """Places in a sandbox → the files and directories there, links resolved."""
    hidden: tuple[Path, ...] = ()
    """Directories that are empty in the sandbox: installed packages."""


def base_python() -> str:
    """Return the path of the interpreter from which this process's venv is made, links resolved."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@cache
def interpreter(python: str) -> Interpreter:
    """Find the files that the interpreter with the path ``python`` needs in a sandbox.

    Raises:
        ConfigError: it does not start without this process's environment, or its library is a whole home; says why.
    """
    if Path(python).is_relative_to("/usr"):
        return Interpreter()
    library = [Path(path) for path in json.loads(_said([python, *ISOLATED, "-c", ASK], python)) if Path(path).exists()]
    wide = [path for path in library if Path(python).is_relative_to(path) or Path.home().is_relative_to(path)]
    if wide or not library:
        raise ConfigError(
            f"sandbox: the interpreter {python} has its standard library in {wide[0] if wide else 'no directory'}, "
            "which is not a directory of its own; make Headway's venv from another Python"
        )
    binaries = [python, *(str(path) for where in library for path in sorted(where.glob("*.so")))]
    loaded = [] if shutil.which("ldd") is None else LOADED.findall(_said(["ldd", *binaries], python, strict=False))
    files = [
        path for path in map(Path, map(os.path.normpath, [python, *loaded])) if not _is_in(path, [*SYSTEM, *library])
    ]
    hidden = tuple(where / name for where in library for name in PACKAGES if (where / name).is_dir())
    outermost = [path for path in library if not _is_in(path, [one for one in library if one != path])]
    return Interpreter({path: path.resolve() for path in (*outermost, *files)}, hidden)


def _is_in(path: Path, directories: Iterable[str | Path]) -> bool:
    return any(path.is_relative_to(one) for one in directories)


def _said(command: list[str], python: str, *, strict: bool = True) -> str:
    """Return the output of a command without this process's environment. Raises `ConfigError` if it fails."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=ASKED_S, check=False
        )
        said = f"it ended with code {done.returncode}: {cut(' '.join(done.stderr.split()), 300)}"
        if done.returncode == 0 or not strict:
            return done.stdout
    except (OSError, subprocess.TimeoutExpired) as cause:
        said = str(cause)
    raise ConfigError(
        f"sandbox: the interpreter {python}, from which Headway's venv is made, does not start without this process's "
        f"environment, as a sandbox has it: {said}; make the venv from another Python, such as the system's"
    )


MADE_S = 30.0
"""Limit in seconds for making the namespace."""
ASIDE = "/sys"
"""Directory of the namespace in which the parts are kept while the closed directories are covered."""


def closed_way_to(part: Path) -> Path | None:
    """Return the first directory on the way to ``part`` that other users cannot enter; None if they can get there."""
    closed = [path for path in part.parents if not path.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def open_way_to(parts: Sequence[Path]) -> IO[bytes] | None:
    """Make the namespace, and return a file that keeps it; processes enter it by ``/proc/PID/fd/N``.

    Args:
        parts: files and directories of the interpreter.

    Returns:
        None if all users can reach all of them.

    Raises:
        ConfigError: a program is missing; says what to install.
        SandboxFailed: the namespace was refused; says why.
    """
    ways = {part: closed for part in parts if (closed := closed_way_to(part)) is not None}
    if not ways:
        return None
    unshare = programs("unshare", "nsenter", "mount", packages="util-linux and mount")["unshare"]
    where = " and ".join(sorted({str(way) for way in ways.values()}))
    command = [unshare, "--mount", "/bin/sh", "-c", " && ".join(_steps(ways))]
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
            # Opened while its maker lives: the namespace lasts as long as this file.
            return Path(f"/proc/{maker.pid}/ns/mnt").open("rb", buffering=0)
        finally:
            maker.kill()


def _steps(ways: dict[Path, Path]) -> list[str]:
    """Return commands that empty the closed directories except for the parts, and stay until their input ends."""
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
