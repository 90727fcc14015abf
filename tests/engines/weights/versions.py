"""Small weights of many shapes and dtypes, in any number of versions, and ways to spoil them on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from headway.engines.weights.buckets import pack, slot_dtype, whole
from headway.engines.weights.incoming_version import BackBuffer, Receive
from headway.engines.weights.outgoing_version import Stream, Window
from headway.engines.weights.protocols import Chunk, HostCopy, IncomingWeights, OutgoingWeights, WeightSink
from headway.engines.weights.weight_layout import Manifest, TensorSlot, buckets, build_manifest

BUCKET = 512
"""Bytes of the sender's buckets: each of the larger tensors of `weights` needs several."""

Weights = Mapping[str, torch.Tensor]
Change = Callable[[list[Chunk]], Sequence[Chunk]]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Version n differs from the others in the first element of each tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "norm": torch.randn(16, generator=generator).bfloat16(),
        "embed": torch.randn(25, 16, generator=generator),
        "empty": torch.zeros(0, 4),
        "scale": torch.tensor(0.5),
        "odd": torch.arange(3, dtype=torch.uint8),
        "head": torch.randn(33, 17, generator=generator).bfloat16(),
        "steps": torch.arange(7),
    }
    for tensor in tensors.values():
        tensor.view(-1)[:1] += version
    return tensors


def view(slot: TensorSlot, flat: torch.Tensor) -> torch.Tensor:
    """The slot's tensor as a view into ``flat`` ([all bytes] uint8)."""
    return flat[slot.offset : slot.end].view(slot_dtype(slot)).view(slot.shape)


def manifest_of(tensors: Weights) -> Manifest:
    return build_manifest((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


MANIFEST = manifest_of(weights(0))


def windows(tensors: Weights, manifest: Manifest = MANIFEST, bucket: int = BUCKET) -> Iterator[Window]:
    spans = ((manifest.start + start, manifest.start + stop) for start, stop in buckets(manifest.nbytes, bucket))
    return pack(manifest, whole(tensors), spans)


def stream(version: int) -> Stream:
    return Stream(MANIFEST, windows(weights(version)))


def put(outgoing: OutgoingWeights, sink: WeightSink) -> None:
    """What a transport does, without one."""
    for chunk in outgoing:
        sink.room(chunk.header).copy_(chunk.payload)
        sink.filled(chunk.header)
    sink.ended(outgoing.digests)


def hand_over(*shares: OutgoingWeights) -> Receive:
    """Each sender's share, one after the other."""

    def receive(incoming: IncomingWeights) -> None:
        for outgoing, sink in zip(shares, incoming.expect(incoming.manifest.shares()), strict=True):
            put(outgoing, sink)

    return receive


@dataclass(frozen=True)
class Wrapped:
    """A version whose sinks are ``wrap``ped."""

    inner: IncomingWeights
    wrap: Callable[[WeightSink], WeightSink]

    @property
    def manifest(self) -> Manifest:
        return self.inner.manifest

    def expect(self, shares: Sequence[Manifest]) -> Sequence[WeightSink]:
        return [self.wrap(sink) for sink in self.inner.expect(shares)]

    def found(self, copy: HostCopy) -> None:
        self.inner.found(copy)


def contents(back: BackBuffer) -> dict[str, torch.Tensor]:
    """The tensors of the staged version, in the layout's order."""
    flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(data for _, data in back.windows(BUCKET))])
    return {slot.name: view(slot, flat) for slot in back.manifest.slots}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal also where values are NaN or of another sign of zero."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_same(received: Weights, sent: Weights) -> None:
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert same_bits(received[name].contiguous(), tensor), name


@dataclass(frozen=True)
class Spoilt:
    """An `OutgoingWeights` whose chunks are changed on their way."""

    inner: OutgoingWeights
    change: Change

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.change([Chunk(chunk.header, chunk.payload.clone()) for chunk in self.inner]))

    @property
    def digests(self) -> tuple[int, ...]:
        return self.inner.digests


def flipped(chunks: list[Chunk]) -> list[Chunk]:
    """One bit of the second bucket is not what it was; it lies in `embed`."""
    chunks[1].payload[100] ^= 1
    return chunks


def lost(chunks: list[Chunk]) -> list[Chunk]:
    return chunks[:1] + chunks[2:]


def cut_off(chunks: list[Chunk]) -> list[Chunk]:
    return chunks[:-1]


def twice(chunks: list[Chunk]) -> list[Chunk]:
    return chunks[:2] + chunks[1:]


def overtaken(chunks: list[Chunk]) -> list[Chunk]:
    return [chunks[0], chunks[2], chunks[1], *chunks[3:]]


def shifted(chunks: list[Chunk]) -> list[Chunk]:
    """A header that lies about where its bucket belongs."""
    header = chunks[1].header
    chunks[1] = Chunk(replace(header, offset=header.offset + 64), chunks[1].payload)
    return chunks


@dataclass(frozen=True)
class GivesUp:
    """An `OutgoingWeights` that fails after ``after`` chunks."""

    inner: OutgoingWeights
    error: BaseException
    after: int = 1

    def __iter__(self) -> Iterator[Chunk]:
        source = iter(self.inner)
        for _ in range(self.after):
            yield next(source)
        raise self.error

    @property
    def digests(self) -> tuple[int, ...]:
        raise AssertionError("the digests are asked for before the end")
