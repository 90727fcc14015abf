"""What the machine itself can do with as many bytes: one Gloo broadcast between two processes, and one memcpy.

    this process ──pipe: what comes next──▶ peer (``python -m benchmarks.update_raw PORT``)
    rank 0       ══════ group ═════════════▶ rank 1        both idle between two measurements

The ``broadcast`` transport is measured between the same two processes, too: what it takes without decoding and training
beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.runner import Worker, serve
from benchmarks.table import OUT
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.transports.broadcast import BroadcastLink, BroadcastReceiver, BroadcastSender
from headway.engines.weights.transports.process_group import StoreGroup, open_store
from headway.engines.weights.weight_layout import Manifest, bucket_bytes, buckets, build_manifest

HOST = "127.0.0.1"
REPEATS = 5
TIMEOUT_S = 60.0
BUCKET_BYTES = bucket_bytes(64)
ELEMENTS_PER_TENSOR = 2**20


@dataclass(frozen=True, slots=True)
class Raw:
    """Medians, in seconds, for ``nbytes``."""

    nbytes: int
    broadcast_s: float
    """Until the other side has everything."""
    transport_s: float
    """The transport's send phase, the processes doing nothing else."""
    memcpy_s: float


class Pair:
    """This process and a peer, on one thread each."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._store, self._port = open_store(HOST, TIMEOUT_S)  # held: the store lives as long as this object
        self._meetings = 0
        self._peer = Worker([sys.executable, "-m", "benchmarks.update_raw", str(self._port)], OUT / "update-peer.log")

    def close(self) -> None:
        self._peer.stop()

    def measure(self, nbytes: int) -> Raw:
        self._meetings += 1
        self._peer.tell([nbytes, self._meetings])
        source = torch.zeros(nbytes, dtype=torch.uint8)
        broadcast_s = self._broadcast(source)
        transport_s = self._transport(source)
        self._peer.answer(TIMEOUT_S)
        target = torch.empty_like(source)
        return Raw(nbytes, broadcast_s, transport_s, _median(lambda: _timed(lambda: target.copy_(source))))

    def _broadcast(self, source: torch.Tensor) -> float:
        group = _group(self._port, self._meetings, rank=0)

        def once() -> float:
            group.meet()  # both begin together
            return _timed(lambda: _broadcast_once(group, source))

        seconds = _median(once)
        group.close()
        return seconds

    def _transport(self, source: torch.Tensor) -> float:
        sender, versions = BroadcastSender(_link(self._port, self._meetings)), iter(range(REPEATS + 1))
        manifest = _manifest(source.numel())

        def once() -> float:
            windows = ((start, source[start:stop]) for start, stop in buckets(source.numel(), BUCKET_BYTES))
            stream = Stream(manifest, windows)
            return _timed(lambda: sender.send(next(versions), stream)) - stream.gather_s

        seconds = _median(once)
        sender.close()
        return seconds


def peer(port: int, nbytes: int, meeting: int) -> None:
    """Take part in one measurement of the process that has the store at ``port``."""
    group, room = _group(port, meeting, rank=1), torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(REPEATS + 1):
        group.meet()
        _broadcast_once(group, room)
    group.close()
    receiver, buffer = BroadcastReceiver(_link(port, meeting), 0), BackBuffer(_manifest(nbytes))
    for version in range(REPEATS + 1):
        buffer.fill(version, partial(_receive, receiver, version))
    receiver.close()


def _receive(receiver: BroadcastReceiver, version: int, incoming: IncomingWeights) -> None:
    (sink,) = incoming.shares
    receiver.receive(version, sink)


def _broadcast_once(group: StoreGroup, buffer: torch.Tensor) -> None:
    group.broadcast(buffer)
    group.meet()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(once: Callable[[], float]) -> float:
    """Of `REPEATS`, after one that touches all memory for the first time."""
    return median([once() for _ in range(REPEATS + 1)][1:])


def _group(port: int, meeting: int, *, rank: int) -> StoreGroup:
    members = ("this", "peer")
    return StoreGroup((HOST, port), prefix=f"raw/{meeting}", members=members, rank=rank, timeout_s=TIMEOUT_S, host=HOST)


def _link(port: int, meeting: int) -> BroadcastLink:
    return BroadcastLink((HOST, port), "this", ("peer",), TIMEOUT_S, generation=meeting)


def _manifest(nbytes: int) -> Manifest:
    """As many bytes in bfloat16 tensors of a usual size."""
    elements = nbytes // torch.bfloat16.itemsize
    sizes = [min(ELEMENTS_PER_TENSOR, elements - first) for first in range(0, elements, ELEMENTS_PER_TENSOR)]
    return build_manifest((str(index), (size,), torch.bfloat16) for index, size in enumerate(sizes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda: lambda question: peer(int(sys.argv[1]), *question))
