"""What the machine itself can do with as many bytes: one Gloo broadcast between two processes, and one memcpy.

    this process ──pipe: what comes next──▶ peer
    rank 0       ══════ group ═════════════▶ rank 1        both idle between two measurements

The ``broadcast`` transport is measured between the same two processes, too: what it takes without decoding and training
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType

import torch

from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.transports.broadcast import BroadcastLink, BroadcastReceiver, BroadcastSender
from headway.engines.weights.transports.links import Address
from headway.engines.weights.transports.process_group import StoreGroup, open_store
from headway.engines.weights.weight_layout import Manifest, bucket_bytes, buckets, build_manifest

HOST = "127.0.0.1"
REPEATS = 5
TIMEOUT_S = 60.0
BUCKET_BYTES = bucket_bytes(64)
ELEMENTS_PER_TENSOR = 2**20
END_S = 10.0
"""For the peer to end."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Medians, in seconds, for ``nbytes``."""

    nbytes: int
    broadcast_s: float
    """Until the other side has everything."""
    transport_s: float
    """The transport's send phase, the processes doing nothing else."""
    memcpy_s: float


class Pair(AbstractContextManager["Pair"]):
    """This process and a peer, on one thread each."""

    def __enter__(self) -> Pair:
        torch.set_num_threads(1)
        self._store, port = open_store(HOST, TIMEOUT_S)  # held: the store lives as long as this object
        self._address: Address = (HOST, port)
        self._meetings = 0
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._peer = context.Process(target=_peer, args=(theirs, self._address), daemon=True)
        self._peer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._peer.join(END_S)
        if self._peer.is_alive():
            self._peer.kill()

    def measure(self, nbytes: int) -> Raw:
        self._meetings += 1
        self._pipe.send((nbytes, self._meetings))
        source = torch.zeros(nbytes, dtype=torch.uint8)
        return Raw(nbytes, self._broadcast(source), self._transport(source), _memcpy(source))

    def _broadcast(self, source: torch.Tensor) -> float:
        group = _group(self._address, self._meetings, rank=0)

        def once() -> float:
            group.meet()  # both begin together
            started = time.perf_counter()
            _broadcast_once(group, source)
            return time.perf_counter() - started

        seconds = _median(once)
        group.close()
        return seconds

    def _transport(self, source: torch.Tensor) -> float:
        sender = BroadcastSender(_link(self._address, self._meetings))
        manifest = _manifest(source.numel())
        versions = iter(range(REPEATS + 1))

        def once() -> float:
            windows = ((start, source[start:stop]) for start, stop in buckets(source.numel(), BUCKET_BYTES))
            stream = Stream(manifest, windows)
            started = time.perf_counter()
            sender.send(next(versions), stream)
            return time.perf_counter() - started - stream.gather_s

        seconds = _median(once)
        sender.close()
        return seconds


def _peer(pipe: Connection, address: Address) -> None:
    """Take part in measurements until the other end of ``pipe`` is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            nbytes, meeting = pipe.recv()
        except EOFError:
            return
        group, room = _group(address, meeting, rank=1), torch.zeros(nbytes, dtype=torch.uint8)
        for _ in range(REPEATS + 1):
            group.meet()
            _broadcast_once(group, room)
        group.close()
        receiver, buffer = BroadcastReceiver(_link(address, meeting), 0), BackBuffer(_manifest(nbytes))
        for version in range(REPEATS + 1):
            buffer.fill(version, partial(_receive, receiver, version))
        receiver.close()


def _receive(receiver: BroadcastReceiver, version: int, incoming: IncomingWeights) -> None:
    (sink,) = incoming.shares
    receiver.receive(version, sink)


def _broadcast_once(group: StoreGroup, buffer: torch.Tensor) -> None:
    group.broadcast(buffer)
    group.meet()


def _memcpy(source: torch.Tensor) -> float:
    target = torch.empty_like(source)

    def once() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    return _median(once)


def _median(once: Callable[[], float]) -> float:
    """Of `REPEATS`, after one that touches all memory for the first time."""
    return median([once() for _ in range(REPEATS + 1)][1:])


def _group(address: Address, meeting: int, *, rank: int) -> StoreGroup:
    return StoreGroup(
        address, prefix=f"raw/{meeting}", members=("this", "peer"), rank=rank, timeout_s=TIMEOUT_S, host=HOST
    )


def _link(address: Address, meeting: int) -> BroadcastLink:
    return BroadcastLink(address, "this", ("peer",), TIMEOUT_S, generation=meeting)


def _manifest(nbytes: int) -> Manifest:
    """As many bytes in bfloat16 tensors of a usual size."""
    elements = nbytes // torch.bfloat16.itemsize
    sizes = [min(ELEMENTS_PER_TENSOR, elements - first) for first in range(0, elements, ELEMENTS_PER_TENSOR)]
    return build_manifest((str(index), (size,), torch.bfloat16) for index, size in enumerate(sizes))
