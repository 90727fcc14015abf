"""Disks that are full, for who writes in this process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may become larger than ``size`` bytes: whoever writes on is told "File too large".

    That holds for processes that it starts, too. None of them writes bytecode, which Python would leave cut off.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setattr(sys, "dont_write_bytecode", True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Callable[[bool], None]]:
    """A file system of ``size`` bytes at ``path``. Yields a function that fills it, or makes room again.

    The test is skipped where this process may not mount any.
    """
    path.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    if os.geteuid() or subprocess.run(("mount", *options), capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    hog = path / ".hog"

    def fill(full: bool) -> None:
        with hog.open("wb", buffering=0) as file, suppress(OSError):  # the end: no space is left
            while full:
                file.write(bytes(2**16))

    try:
        yield fill
    finally:
        subprocess.run(("umount", "-l", str(path)), check=True)
