"""Memory of a complete version: shared by the processes of a machine, or on one process's device."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import torch

from headway.errors import UpdateFailed, boundary

NOTHING = -1
"""Stamp of bytes that are no whole version."""
_STAMP_BYTES = 8


class SharedBytes:
    """Bytes [nbytes] of memory that processes of one machine share, mapped into this process, and their stamp.

        one process   SharedBytes.reserve(n)  ─path─▶   others   SharedBytes.at(path, n)      each maps the same bytes

    The memory has no name in any file system, so nothing of it outlives the processes that map it, however they end.
    The stamp behind the bytes says which version they are: a reader sees by it that they were written over meanwhile.

    Example:
        >>> mine = SharedBytes.reserve(2)
        >>> theirs = SharedBytes.at(str(mine.path), 2)  # in another process
        >>> mine.flat[:] = 7
        >>> mine.stamp = 3
        >>> theirs.flat.tolist(), theirs.stamp
        ([7, 7], 3)
    """

    def __init__(self, file: FileIO, nbytes: int) -> None:
        """Map what was reserved for ``nbytes`` bytes. Raises `RuntimeError` when it cannot be mapped."""
        self._file = file
        size = _size(nbytes)
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self.flat = mapped[:nbytes]
        """The bytes: [nbytes] uint8, writable by all who map them."""
        self._stamp = mapped[size - _STAMP_BYTES :].view(torch.int64)

    @classmethod
    def reserve(cls, nbytes: int) -> SharedBytes:
        """Reserve new memory. Raises `UpdateFailed` when there is not enough."""
        try:
            file = FileIO(os.memfd_create("headway-weights"), "r+")
            # All of it before anything is written: memory that is short is an error here, and later a fault.
            os.posix_fallocate(file.fileno(), 0, _size(nbytes))
            made = cls(file, nbytes)
        except (OSError, RuntimeError) as cause:  # the latter from torch, when it cannot be mapped
            raise UpdateFailed(
                f"no shared memory for {nbytes} bytes of weights: {cause}; those who serve them read new weights "
                "from there. Give this machine (or container) more memory"
            ) from cause
        made.stamp = NOTHING
        return made

    @classmethod
    def at(cls, path: str, nbytes: int) -> SharedBytes:
        """Map what another process of this user and machine has reserved, at its `path`. Raises `UpdateFailed`."""
        try:
            file = FileIO(path, "r+")
            if (size := os.fstat(file.fileno()).st_size) != _size(nbytes):  # torch would make any file long enough
                raise OSError(f"{size} bytes are there, expected {_size(nbytes)}")
            return cls(file, nbytes)
        except (OSError, RuntimeError) as cause:
            raise UpdateFailed(
                f"the copy of the weights at {path} cannot be mapped: {cause}; the process that has it may have ended"
            ) from cause

    @property
    def path(self) -> Path:
        """The path at which other processes of this user and machine find the memory while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    @property
    def stamp(self) -> int:
        """The version that the bytes are; `NOTHING` while they are none, or being written."""
        return int(self._stamp.item())

    @stamp.setter
    def stamp(self, version: int) -> None:
        self._stamp.fill_(version)

    def is_at(self, path: str) -> bool:
        """Tell whether ``path`` leads to this very memory."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), Path(path).stat())
        except OSError:
            return False


class DeviceBytes:
    """Bytes [nbytes] of a device's memory, with a stamp as `SharedBytes` have: this process's alone."""

    path = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Take the memory. Raises `UpdateFailed` when there is not enough."""
        with boundary(f"no memory for {nbytes} bytes of new weights on {device}", UpdateFailed):
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.stamp = NOTHING

    def is_at(self, path: str) -> bool:
        return False


def memory_domain() -> str:
    """Name the processes that can map each other's `SharedBytes`: those of one user, kernel and container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes, network = (Path(f"/proc/self/ns/{kind}").readlink() for kind in ("pid", "net"))
    return f"{boot}/{processes}/{network}/{os.getuid()}"


def _size(nbytes: int) -> int:
    return nbytes + -nbytes % _STAMP_BYTES + _STAMP_BYTES
