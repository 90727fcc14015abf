"""Buckets through memory that both ends map: for processes of one machine. It has no name in any file system."""

from __future__ import annotations

import torch

from headway.engines.weights.incoming_version import SharedBytes
from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Header,
    Link,
    OutgoingWeights,
    StoredReceiver,
    StoredSender,
    StoredVersion,
)


class SharedMemorySender(StoredSender):
    """The trainer's end of shared memory (`WeightSender`). Memory: one set of weights; two once one was sent again.

    A receiver that still reads the first sending of a version at its third has to read again: the digests tell.
    """

    def __init__(self, link: Link, here: EndContext) -> None:
        super().__init__(link, here)
        self._memories: dict[int, SharedBytes] = {}
        self._turn = 0
        self._version: int | None = None

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        if version == self._version:
            self._turn = 1 - self._turn  # who still reads what was sent before must not see it change
        self._version = version
        if self._turn not in self._memories:
            self._memories[self._turn] = SharedBytes.reserve(self._link.manifest.nbytes)
        return super().send(version, weights)

    def close(self) -> None:
        self._memories.clear()

    def _put(self, version: int, chunk: Chunk) -> str:
        memory = self._memories[self._turn]
        memory.flat[chunk.header.offset :][: chunk.header.payload_nbytes].copy_(chunk.payload)
        return str(memory.path)


class SharedMemoryReceiver(StoredReceiver):
    """A receiver's end of shared memory (`WeightReceiver`). The sender's memory stays mapped for the next version."""

    _mapped: SharedBytes | None = None

    def close(self) -> None:
        self._mapped = None

    def _get(self, version: int, header: Header, content: str, room: torch.Tensor) -> None:
        # Compared by the file and not by its path: a descriptor's number is used again after it was closed.
        if self._mapped is None or not self._mapped.is_at(content):
            self._mapped = SharedBytes.at(content, self._link.manifest.nbytes)
        room.copy_(self._mapped.flat[header.offset :][: header.payload_nbytes])


open_sender, open_receiver = SharedMemorySender, SharedMemoryReceiver
