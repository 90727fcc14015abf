"""A back buffer that the engine's workers map: what has arrived is loaded from where it lies."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import torch

from headway.errors import UpdateFailed
from headway.weights.incoming import BackBuffer
from headway.weights.layout import Manifest


class SharedBackBuffer(BackBuffer):
    """A `BackBuffer` in memory that other processes of this machine map, by way of this one.

    The memory has no name in any file system, so nothing of it outlives the processes that map it, however they end.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Reserve memory for the weights of ``manifest``. Raises `UpdateFailed` when there is not enough."""
        nbytes = max(1, manifest.nbytes)
        self._file, mapped = _reserve(nbytes)
        super().__init__(manifest, memory=mapped[: manifest.nbytes])

    @property
    def path(self) -> Path:
        """The path at which other processes of this user find the memory until `close`."""
        return _path(self._file)

    def close(self) -> None:
        """Close the buffer's file: no further process can map it, and its memory is freed when the last mapping ends.

        Call it when every process has mapped it: `path` may then belong to another file.
        """
        self._file.close()


def _reserve(nbytes: int) -> tuple[FileIO, torch.Tensor]:
    """Reserve shared memory: its file, and its bytes [nbytes] mapped into this process."""
    try:
        file = FileIO(os.memfd_create("headway-weights"), "r+")
        try:
            # All of it before anything is written: memory that is short shows now, and not at the first update.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return file, torch.from_file(str(_path(file)), shared=True, size=nbytes, dtype=torch.uint8)
        except BaseException:
            file.close()
            raise
    except (OSError, RuntimeError) as cause:  # the latter from torch, when it cannot be mapped
        raise UpdateFailed(
            f"no shared memory for {nbytes} bytes of weights: {cause}; vLLM's workers read new weights from there. "
            "Give this machine (or container) more memory"
        ) from cause


def _path(file: FileIO) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
