"""Files in memory that a call is given."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(content: bytes, held: ExitStack) -> int:
    """Descriptor, at its beginning, of a sealed file in memory that holds ``content``."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    held.callback(os.close, file)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file
