"""Extra memory, as the docstrings state it: tensors by what torch allocates, all else by tracemalloc."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.engines.weights.buckets import Parts, Tensors, pack, whole
from headway.engines.weights.incoming_version import BackBuffer, InPlace
from headway.engines.weights.outgoing_version import Staged, Stream, Window
from headway.engines.weights.protocols import EndContext, Link, open_receiver, open_sender
from headway.engines.weights.weight_layout import buckets, build_manifest
from tests.engines.weights.ends import arrival
from tests.engines.weights.versions import hand_over
from tests.tiers import mostly_slow

MIB = 2**20
BUCKET = MIB
MANIFEST = build_manifest([("a", (3 * MIB,), torch.bfloat16), ("b", (1000, 1000), torch.float32)])
COPY = MANIFEST.nbytes
SMALL = MIB // 2
"""Whatever does not grow with the weights or the buckets: digests take 0.3 MiB, one small tensor after the other."""
SOURCE = {
    "a": torch.randn(3 * MIB, generator=torch.Generator().manual_seed(0)),
    "b": torch.zeros(1_000, 1_000),
}


class Allocations(TorchDispatchMode):
    """Counts the bytes of all new storages: those that are freed, too, so that the sum bounds the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known:
                self.nbytes += leaf.untyped_storage().nbytes()
        return result


class Extra:
    tensors = 0
    other = 0


@contextmanager
def measured() -> Iterator[Extra]:
    extra = Extra()
    tracemalloc.start()
    try:
        with Allocations() as allocations:
            yield extra
        extra.tensors, extra.other = allocations.nbytes, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module", autouse=True)
def _imports_are_done() -> None:
    """What torch imports when such a mode is first used is no part of any measurement."""
    with Allocations():
        torch.zeros(1)


def windows(change: float = 0.0) -> Iterator[Window]:
    """Version after version: the first element of each bucket of ``a`` differs."""
    SOURCE["a"][:: BUCKET // 2] = change
    return pack(MANIFEST, whole(SOURCE), list(buckets(COPY, BUCKET)))


def discard(outgoing: Stream) -> None:
    for _ in outgoing:
        pass


def test_the_measure_sees_tensors_and_arrays() -> None:
    with measured() as extra:
        torch.zeros(MIB, dtype=torch.uint8).clone()
        bytearray(3 * MIB)
    assert extra.tensors == 2 * MIB and 3 * MIB <= extra.other < 3 * MIB + SMALL


def test_a_stream_takes_one_bucket() -> None:
    with measured() as extra:
        discard(Stream(MANIFEST, windows()))
    assert BUCKET <= extra.tensors < BUCKET + SMALL
    assert extra.other < SMALL


def test_a_staged_copy_takes_one_copy_and_gathering_over_it_the_bucket_of_the_windows() -> None:
    with measured() as extra:
        staged = Staged(MANIFEST, BUCKET, with_delta=False)
    assert extra.tensors == COPY
    for version in (1, 2):
        with measured() as extra:
            staged.gather(version, windows(version))
            list(staged.outgoing(version, to=None))
        assert BUCKET <= extra.tensors < BUCKET + SMALL
        assert extra.other < SMALL


@pytest.mark.parametrize(("after", "at_most"), [(0.5, SMALL), (None, COPY)], ids=["few", "all"])
def test_deltas_take_what_they_send_and_at_the_most_a_copy(after: float | None, at_most: int) -> None:
    staged = Staged(MANIFEST, BUCKET, with_delta=True)
    staged.gather(1, windows())
    gathered = windows(after) if after is not None else pack(MANIFEST, _half_new(), list(buckets(COPY, BUCKET)))
    with measured() as extra:
        staged.gather(2, gathered)
        outgoing = staged.outgoing(2, to=1)
    sent = sum(chunk.payload.numel() for chunk in outgoing if chunk.header.base >= 0)
    assert sent <= at_most
    # One bucket's delta at a time may be dropped again; a block's worth of arrays is used to find it.
    assert extra.other < 1.125 * sent + 1.25 * BUCKET + MIB + SMALL


def _half_new() -> Parts:
    """Every other 16-bit unit of ``a`` differs."""
    values = SOURCE["a"].clone()
    values[::2] += 1
    return whole({**SOURCE, "a": values})


def test_a_back_buffer_takes_one_copy_and_filling_it_nothing_more() -> None:
    outgoing = _staged()
    with measured() as extra:
        back = BackBuffer(MANIFEST)
        back.fill(1, hand_over(outgoing))
    assert COPY <= extra.tensors < COPY + SMALL
    assert extra.other < SMALL
    with measured() as extra:
        back.fill(1, hand_over(outgoing))
        list(back.windows(BUCKET))
    assert extra.tensors < SMALL
    assert extra.other < SMALL


@mostly_slow("dtype", [torch.bfloat16, torch.float32], quick=[torch.float32])
def test_in_place_takes_one_bucket_of_the_senders(dtype: torch.dtype) -> None:
    served = {"a": torch.zeros(3 * MIB, dtype=dtype), "b": torch.zeros(1000, 1000, dtype=dtype)}
    target = InPlace(MANIFEST, Tensors(MANIFEST, whole(served)), window=64 * 1024)
    outgoing = _staged()
    with measured() as extra:
        target.fill(1, hand_over(outgoing))
    assert BUCKET <= extra.tensors < BUCKET + SMALL
    assert extra.other < SMALL


def _staged() -> Any:
    staged = Staged(MANIFEST, BUCKET, with_delta=False)
    staged.gather(1, windows())
    return staged.outgoing(1, to=None)


STAMP = 8
"""Bytes behind the weights in shared memory."""


@pytest.mark.parametrize(
    ("transport", "sender", "store"),
    [("object_store", COPY, True), ("shared_memory", COPY + STAMP, False), ("disk", 0, False)],
)
def test_stored_transports_keep_one_copy_outside_the_process_and_receivers_none(
    tmp_path: Path, transport: str, sender: int, store: bool
) -> None:
    kept: list[Any] = []

    def put(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    here = EndContext(put=put, fetch=lambda handles: [kept[handle] for handle in handles])
    link = Link(transport, MANIFEST, ("a",), 10, directory=tmp_path)
    sending, receiving = open_sender(link, here), open_receiver(link, "a", here)
    outgoing = _staged()
    with measured() as extra:
        stored = sending.send(1, outgoing)
    assert extra.tensors == sender, "object_store: what is handed to the store; shared_memory: what both ends map"
    assert extra.other < SMALL
    assert bool(kept) is store
    back = BackBuffer(MANIFEST)
    with measured() as extra:
        back.fill(1, arrival(receiving, 1, stored))
    mapped = sender if transport == "shared_memory" else 0
    assert COPY <= extra.tensors - mapped < COPY + SMALL, "the buffer itself"
    assert extra.other < SMALL
    sending.close()
