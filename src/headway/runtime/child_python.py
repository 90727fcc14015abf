"""Commands of Python processes that import the same modules as this process."""

from __future__ import annotations

import json
import os
import sys

IMPORTS_AS_HERE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); owner = int(sys.argv.pop()); "
"""Statements by which a program of `python_command` begins to import as the process that started it does, its owner."""


def guarded(grace_s: float = 0.0) -> str:
    """Return what begins a program that leaves nothing behind and ends with its owner: see
    `runtime.process_tree.run_guarded`.

    SIGTERM to the process that is started, its guard, ends all of it.
    """
    return f"{IMPORTS_AS_HERE}from headway.runtime.process_tree import run_guarded; run_guarded(owner, {grace_s}); "


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs ``program``: statements with `IMPORTS_AS_HERE` or `guarded` before what they import.

    To the program ``sys.argv[1:]`` are ``arguments``.
    """
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-c", program, *arguments, str(os.getpid()), path]
