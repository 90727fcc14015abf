"""Folders in which commands that Headway starts for the user are looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def path_of_commands() -> str:
    """Make the ``PATH`` of the user's commands: the folder of this interpreter comes first, as when its environment is
    activated, so that ``python`` and what is installed beside it are those of Headway's.

    Where Python has no environment of its own and is on the path, the order of the path is left as it is.
    """
    folder, path = str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath
    if sys.prefix == sys.base_prefix and folder in path.split(os.pathsep):
        return path
    return os.pathsep.join((folder, path))
