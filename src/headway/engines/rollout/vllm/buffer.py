"""A back buffer that the engine's workers map: what has arrived is loaded from where it lies."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import gettempdir, mkstemp

import torch

from headway.errors import UpdateFailed
from headway.weights.incoming import BackBuffer
from headway.weights.layout import Manifest

SHARED_MEMORY = Path("/dev/shm")
"""Linux's memory file system."""


class SharedBackBuffer(BackBuffer):
    """A `BackBuffer` in a file that other processes of this machine map.

    The file lives as long as somebody has it mapped: call `unlink` once everybody has.
    """

    def __init__(self, manifest: Manifest, directory: Path | None = None) -> None:
        """``directory``: of a memory file system. Raises `UpdateFailed` when there is no room for the weights."""
        super().__init__(manifest)
        directory = directory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(gettempdir()))
        self.path = _reserve(directory, max(1, manifest.nbytes))
        mapped = torch.from_file(str(self.path), shared=True, size=max(1, manifest.nbytes), dtype=torch.uint8)
        self._flat = mapped[: manifest.nbytes]

    def unlink(self) -> None:
        """Leave no name behind: the memory is free again when the last process that maps it ends."""
        self.path.unlink(missing_ok=True)


def _reserve(directory: Path, nbytes: int) -> Path:
    path: Path | None = None
    try:
        descriptor, name = mkstemp(prefix="headway-weights-", dir=directory)
        path = Path(name)
        try:
            # All of it before anything is written: a full file system is an error here, and a fault later.
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError as cause:
        if path is not None:
            path.unlink(missing_ok=True)
        raise UpdateFailed(
            f"no shared memory for {nbytes} bytes of weights in {directory}: {cause.strerror}; vLLM's workers read "
            "new weights from there. Give this machine (or container) more of it"
        ) from cause
    return path
