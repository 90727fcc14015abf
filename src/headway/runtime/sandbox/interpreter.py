"""The interpreter of a room: the files that it is made of, and nothing else of the directory that it was installed to.

That may be a home (``./configure --prefix=$HOME``), so that a room never has all of it. It has the program, the
standard library without the packages in it, and the shared libraries that these load.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import ConfigError, cut

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories that are in each room anyway."""
ASKED_S = 30.0
"""Seconds for the interpreter to tell its library, and for the loader to tell what it loads."""
ISOLATED = ("-I", "-S", "-B", "-X", "utf8")
"""Options of the interpreter: no directory of the user's, no packages, UTF-8."""
ASK = "import json, sys; print(json.dumps(sys.path))"
"""Program that tells where the standard library is: without packages the path has nothing else."""
PACKAGES = ("site-packages", "dist-packages")
LOADED = re.compile(r"=> (/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The files of an interpreter that are not in /usr."""

    parts: Mapping[Path, Path] = field(default_factory=dict)
    """Places in a room → the files and directories there, links resolved."""
    hidden: tuple[Path, ...] = ()
    """Directories in them that it has empty: installed packages."""


def base_python() -> str:
    """The path of the interpreter that this process's venv is made from, links resolved."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


def interpreter(python: str) -> Interpreter:
    """Find what the interpreter with the path ``python`` needs in a room.

    Raises:
        ConfigError: it does not start without this process's environment, or its library is all of a home; says why.
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
    programs = [python, *(str(path) for where in library for path in sorted(where.glob("*.so")))]
    loaded = [] if shutil.which("ldd") is None else LOADED.findall(_said(["ldd", *programs], python, strict=False))
    files = [
        path for path in map(Path, map(os.path.normpath, [python, *loaded])) if not _is_in(path, [*SYSTEM, *library])
    ]
    hidden = tuple(where / name for where in library for name in PACKAGES if (where / name).is_dir())
    outermost = [path for path in library if not _is_in(path, [one for one in library if one != path])]
    return Interpreter({path: path.resolve() for path in (*outermost, *files)}, hidden)


def _is_in(path: Path, directories: Iterable[str | Path]) -> bool:
    return any(path.is_relative_to(one) for one in directories)


def _said(command: list[str], python: str, *, strict: bool = True) -> str:
    """Standard output of a command without this process's environment. Raises `ConfigError` where it fails."""
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
        f"environment, as a room has it: {said}; make the venv from another Python, such as the system's"
    )
