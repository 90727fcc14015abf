"""The memory behind the served weights: on the device, kept on the host, or given up.

    there ──move_out──▶ kept  (a copy on the host) ──restore──▶ there
      └───────drop────▶ gone ──allocate─────────────────────────▶ there, its values unspecified

Whole storages change their size in place, so that every view of them (projections that share one packed matrix, the
forward pass's own references, tied weights) is right again as soon as the memory is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headway.devices import kind_of


def own_storages(model: nn.Module) -> None:
    """Move parameters out of memory that is not the process's own to resize: a weights file that is mapped."""
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.detach().clone()


class WeightMemory:
    """The distinct storages behind some tensors, each of which is resizable."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {(s := tensor.untyped_storage()).data_ptr(): s for tensor in tensors if tensor.numel()}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._kept: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that the storages hold on the device now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def there(self) -> bool:
        return self.nbytes == sum(self._sizes)

    def move_out(self) -> None:
        """Keep the values in (page-locked) host memory, and give the device's back. Nothing if that is done already."""
        if self.there:
            self._kept = [_to_host(storage) for storage in self._storages]
            self._release()

    def drop(self) -> None:
        """Give the device's memory back without keeping the values."""
        self._kept = None
        self._release()

    def allocate(self) -> None:
        """Take the device's memory again for values that are written next; values kept on the host are forgotten."""
        self._resize()
        self._kept = None

    def restore(self) -> None:
        """Take the device's memory again, and copy the values back if they were kept."""
        self._resize()
        if self._kept is not None:
            for storage, kept in zip(self._storages, self._kept, strict=True):
                _flat(storage).copy_(kept)
        self._kept = None

    def _resize(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)

    def _release(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def release_cached(device: torch.device) -> None:
    """Return the allocator's unused memory to the device, for other processes."""
    kind_of(device).release_cached()


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=kind_of(storage.device).pins_host_memory)
    return kept.copy_(_flat(storage))
