"""Buckets through a file in memory that both ends map: for processes of one machine.

The file lies in a directory of a memory file system, which the maker of the link removes. Its space is reserved as a
whole before anything is written, so that a full file system is an error and not a fault.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp

import numpy as np
import torch
from numpy.typing import NDArray

from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Header,
    OutgoingWeights,
    StoredReceiver,
    StoredSender,
    StoredVersion,
    TransportAddress,
    needs,
)
from headway.errors import UpdateFailed


@dataclass(frozen=True, slots=True)
class SharedMemoryLink:
    directory: Path
    nbytes: int


def make_link(meeting: TransportAddress) -> SharedMemoryLink:
    if meeting.directory is None:
        raise needs("shared_memory", "a directory in memory")
    return SharedMemoryLink(meeting.directory, meeting.manifest.nbytes)


def open_sender(link: SharedMemoryLink, here: EndContext) -> SharedMemorySender:
    return SharedMemorySender(link)


def open_receiver(link: SharedMemoryLink, name: str, here: EndContext) -> SharedMemoryReceiver:
    return SharedMemoryReceiver(name)


class SharedMemorySender(StoredSender):
    """The trainer's end of shared memory (`WeightSender`). Memory: one set of weights; two once one was sent again.

    A receiver that still reads the first sending of a version at its third has to read again: the digests tell.
    """

    def __init__(self, link: SharedMemoryLink) -> None:
        self._link = link
        self._files: dict[int, tuple[Path, torch.Tensor]] = {}
        self._turn = 0
        self._version: int | None = None

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        if version == self._version:
            self._turn = 1 - self._turn  # who still reads what was sent before must not see it change
        self._version = version
        if self._turn not in self._files:
            self._files[self._turn] = _create(self._link)
        return super().send(version, weights)

    def close(self) -> None:
        for path, _ in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()

    def _put(self, version: int, chunk: Chunk) -> str:
        path, memory = self._files[self._turn]
        memory[chunk.header.offset :][: chunk.header.payload_nbytes].copy_(chunk.payload)
        return str(path)


class SharedMemoryReceiver(StoredReceiver):
    """A receiver's end of shared memory (`WeightReceiver`). The sender's memory stays mapped for the next version."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._mapped: dict[str, NDArray[np.uint8]] = {}

    def close(self) -> None:
        self._mapped.clear()

    def _get(self, version: int, header: Header, content: str, room: torch.Tensor) -> None:
        np.copyto(room.numpy(), self._map(content, version)[header.offset :][: header.payload_nbytes])

    def _map(self, path: str, version: int) -> NDArray[np.uint8]:
        if path not in self._mapped:
            # A file that its sender has removed takes memory for as long as it is mapped.
            self._mapped = {known: memory for known, memory in self._mapped.items() if Path(known).exists()}
            try:
                self._mapped[path] = np.memmap(path, np.uint8, mode="r")
            except OSError as cause:
                raise UpdateFailed(
                    f"version {version}: {self._name} cannot map {path}: {cause.strerror}; "
                    "param_update.transport=shared_memory is for processes of one machine (broadcast, object_store and "
                    "disk go further)"
                ) from cause
        return self._mapped[path]


def _create(link: SharedMemoryLink) -> tuple[Path, torch.Tensor]:
    """Create and map a file for all weights. Raises `UpdateFailed` when there is no room for it."""
    nbytes = max(1, link.nbytes)  # nothing cannot be mapped
    path: Path | None = None
    try:
        # A name that no other file ever had: receivers keep what they have mapped.
        descriptor, name = mkstemp(prefix="weights-", dir=link.directory)
        path = Path(name)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError as cause:
        if path is not None:
            path.unlink(missing_ok=True)
        raise UpdateFailed(
            f"no shared memory for {nbytes} bytes of weights in {link.directory}: {cause.strerror}; give this "
            "machine (or container) more of it, or choose another param_update.transport"
        ) from cause
    return path, torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
