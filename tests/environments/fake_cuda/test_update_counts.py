"""Bytes of an update that pass through host memory, from GPU to GPU: none, with ``local`` and with ``broadcast``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headway.engines.weights import incoming_version
from headway.engines.weights.buckets import pack, whole
from headway.engines.weights.incoming_version import SharedBytes
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Header,
    IncomingWeights,
    Link,
    OutgoingWeights,
)
from headway.engines.weights.served_weights import ServedWeights
from headway.engines.weights.transports import broadcast
from headway.engines.weights.transports.broadcast import BroadcastReceiver, BroadcastSender
from headway.engines.weights.transports.local import done_on, take
from headway.engines.weights.weight_layout import buckets, build_manifest
from headway.models.weight_files import FileTensor
from tests.environments.fake_cuda.counting import CUDA, Counts, on_fake_cuda

SHAPES = {"embedding": (5000, 64), "layer": (64, 256), "norm": (64,), "odd": (3, 7)}
MANIFEST = build_manifest((name, shape, torch.bfloat16) for name, shape in SHAPES.items())
BUCKET = 2**16
FEW = 2**12
"""Bytes that the host may read of a whole update: a header for each bucket, and the digests."""


class Group:
    """Stands in for a group of NCCL's: what rank 0 sends is noted, and given to the other one afterwards."""

    sent: list[Tensor]

    def __init__(self, link: Link, rank: int, host: str | None) -> None:
        self._rank = rank

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.device == CUDA
        if self._rank == 0:
            Group.sent.append(tensor.clone())
        else:
            tensor.copy_(Group.sent.pop(0))

    def meet(self) -> None: ...

    def note(self, progress: str) -> None: ...

    def close(self) -> None: ...


class Noted:
    """An `OutgoingWeights` that notes its headers: numbers that are sent as tensors are lost, where these are fake."""

    def __init__(self, inner: OutgoingWeights) -> None:
        self.inner = inner
        self.headers: list[Header] = []

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.inner:
            self.headers.append(chunk.header)
            yield chunk

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def digests(self) -> tuple[int, ...]:
        return self.inner.digests


def by_broadcast(weights: OutgoingWeights, incoming: IncomingWeights) -> None:
    Group.sent, outgoing, (sink,) = [], Noted(weights), incoming.expect([incoming.manifest])
    link = Link("broadcast", MANIFEST, ("replica",), 1.0, address=("nowhere", 1), device="cuda:0")
    BroadcastSender(link, EndContext()).send(1, outgoing)
    due = iter([*outgoing.headers, outgoing.digests])

    class Receiver(BroadcastReceiver):
        def _next(self, version: int, index: int) -> Header | tuple[int, ...]:
            Group.sent.pop(0)
            return next(due)

    Receiver(link, "replica", EndContext()).receive(1, sink)


def by_local(outgoing: OutgoingWeights, incoming: IncomingWeights) -> None:
    """What both ends do, one after the other: what counts sees one thread alone."""
    (sink,) = incoming.expect([incoming.manifest])
    for chunk in outgoing:
        done_on(chunk.payload)
        take(sink, chunk)
    sink.ended(outgoing.digests)


def made(name: str) -> tuple[dict[str, Tensor], ServedWeights]:
    tensors = {key: torch.zeros(shape, dtype=torch.bfloat16, device=CUDA) for key, shape in SHAPES.items()}
    files = [FileTensor(key, shape, key, (0,) * len(shape), tuple(range(len(shape)))) for key, shape in SHAPES.items()]
    return tensors, ServedWeights(files, whole(tensors), CUDA, name)


def moved(counts: Counts) -> int:
    """Bytes between device and host."""
    return sum(event.nbytes for event in (*counts.uploads, *counts.downloads))


@pytest.mark.parametrize("in_place", [False, True], ids=["second buffer", "in place"])
@pytest.mark.parametrize("carry", [by_local, by_broadcast])
def test_from_gpu_to_gpu_no_byte_passes_through_host_memory(
    carry: Callable[[OutgoingWeights, IncomingWeights], None], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "StoreGroup", Group)
    monkeypatch.setattr(incoming_version, "host_buffer", pytest.fail)
    monkeypatch.setattr(SharedBytes, "reserve", pytest.fail)
    with on_fake_cuda() as counts, torch.no_grad():
        source, _ = made("trainer")
        _, served = made("replica")
        updates = served.updates(MANIFEST, lambda *_: None, BUCKET, in_place=in_place, on_device=True)
        spans = list(buckets(MANIFEST.nbytes, BUCKET))
        buffer = torch.empty(BUCKET, dtype=torch.uint8, device=CUDA)
        outgoing = Stream(MANIFEST, pack(MANIFEST, whole(source), spans, buffer))
        counts.clear()
        report = updates.intake.fill(1, lambda incoming: carry(outgoing, incoming))
        updates.load(1)
        assert report.nbytes == MANIFEST.nbytes and served.state.served == 1
        assert report.path is None
        assert moved(counts) <= FEW < MANIFEST.nbytes / 100
        assert not counts.of("pin")
        updates.close()


def test_a_copy_for_sending_beside_training_comes_to_the_host_once() -> None:
    with on_fake_cuda() as counts, torch.no_grad():
        source, _ = made("trainer")
        staged = Staged(MANIFEST, BUCKET, with_delta=False, pinned=True)
        buffer = torch.empty(BUCKET, dtype=torch.uint8, device=CUDA)
        counts.clear()
        staged.gather(1, pack(MANIFEST, whole(source), list(buckets(MANIFEST.nbytes, BUCKET)), buffer))
        assert moved(counts) == MANIFEST.nbytes
