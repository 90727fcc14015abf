"""Copies between host and device: one copy for many arrays, from page-locked memory where that is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from headway.devices import CPU, DeviceStream, kind_of

if TYPE_CHECKING:
    from headway.devices import Device

log = logging.getLogger(__name__)


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return ``nbytes`` of host memory, dtype uint8. ``pinned``: page-locked if the system allows it."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as refused:  # above the limit of locked memory (`ulimit -l`), or out of memory
        if not pinned:
            raise
        log.warning("%.1f GB of host memory could not be page-locked, copies take longer: %s", nbytes / 1e9, refused)
        return torch.empty(nbytes, dtype=torch.uint8)


@cache
def _uploads(device: Device) -> DeviceStream | None:
    """Return the stream of copies to ``device``, always the same: memory freed on a stream is reused only there."""
    return kind_of(device).side_stream(device)


def to_device(arrays: Sequence[NDArray[Any]], device: Device, *, beside: bool = False) -> list[torch.Tensor]:
    """Copy ``arrays`` to ``device`` in one copy, from page-locked memory if that is faster, without waiting for it.

    ``beside``: copy on another stream, while the device goes on computing. Returns tensors of the arrays' shapes and
    dtypes. On a CPU they share the arrays' memory.
    """
    kind, parts = kind_of(device), [torch.from_numpy(array) for array in arrays]
    if kind is CPU or not parts:
        return parts
    ends = list(accumulate(-(-part.nbytes // 16) * 16 for part in parts))  # aligned for views of any dtype
    buffer = host_buffer(ends[-1], pinned=kind.pins_host_memory)
    places = [slice(start, start + part.nbytes) for start, part in zip([0, *ends], parts, strict=False)]
    for place, part in zip(places, parts, strict=True):
        buffer[place].view(part.dtype).view(part.shape).copy_(part)
    # Torch keeps the page-locked buffer until the copy is over.
    if beside and (stream := _uploads(device)) is not None:
        there = stream.bring(buffer)
    else:
        there = torch.empty_like(buffer, device=device).copy_(buffer, non_blocking=True)
    return [there[place].view(part.dtype).view(part.shape) for place, part in zip(places, parts, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Begin to copy ``tensors`` of one device to host memory, page-locked if that is faster, in one copy.

    Tensors of wider dtypes have to come first. Returns a function that waits, and returns one array per tensor.
    """
    kind = kind_of(device := tensors[0].device)
    if kind is CPU:
        return lambda: [tensor.numpy() for tensor in tensors]
    # As bytes, to join different dtypes; wider dtypes come first, or views of them would not be aligned.
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    buffer = host_buffer(joined.nbytes, pinned=kind.pins_host_memory)
    buffer.copy_(joined, non_blocking=True)
    wait = kind.mark(device)  # right after the copy: it does not wait for work that is queued later

    def arrays() -> list[NDArray[Any]]:
        wait()
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [part.view(of.dtype).view(of.shape).numpy() for part, of in zip(parts, tensors, strict=True)]

    return arrays
