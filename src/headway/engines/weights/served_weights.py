"""The memory behind the served weights: on the device, kept on the host, or given up.

    there ──move_out──▶ kept  (a copy on the host) ──restore──▶ there
      └───────drop────▶ gone ──allocate─────────────────────────▶ there, its values unspecified

Whole storages change their size in place, so that every view of them (projections that share one packed matrix, the
forward pass's own references, tied weights) is right again as soon as the memory is.

The weights that are served, and whether they may be computed with.

SERVED ──receive in place──▶ WRITING ──all of it──▶ ARRIVED ──activate──▶ SERVED
  ▲                             ├──error, nothing written──▶ as before
  │                             └──error────────────────▶ TORN ──receive in place──▶ WRITING
  └──swapped in── GONE ◀──given up in sleep── any but WRITING
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.devices import kind_of
from headway.engines.weights.buckets import Parts, Tensors, whole
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ModelError, RunError
from headway.models.weight_files import FileTensor, file_tensors


class Contents(StrEnum):
    """State of the served tensors: whether they hold one whole version that may be computed with."""

    SERVED = "served"
    """The tensors hold exactly one whole version; tokens sampled from it are stamped with its number."""
    WRITING = "writing"
    """Another thread writes a version over the tensors."""
    ARRIVED = "arrived"
    """The tensors hold one whole version that is not activated yet."""
    TORN = "torn"
    """The tensors hold parts of two versions."""
    GONE = "gone"
    """The tensors hold nothing: their memory was given up."""


class ServedWeights:
    """The model's own tensors, their memory, and what is in them.

    The decoding thread owns them, except while WRITING: then they are the receiving thread's.
    """

    def __init__(
        self,
        files: Sequence[FileTensor],
        parts: Parts,
        memory: WeightMemory,
        device: torch.device,
        name: str,
        tied: Collection[str] = (),
    ) -> None:
        """Serve version 0: weights as they are. Messages call their owner ``name``.

        Args:
            files: the tensors of the model's files.
            parts: what is served here of each, all of it or a rank's part.
            memory: the memory behind them.
            tied: names that the model has beside those of ``files``, for the same memory.
        """
        self.device, self.memory = device, memory
        self._name = name
        self._shapes = {file.name: file.shape for file in files}
        self._parts = parts
        self._tied = frozenset(tied)
        self.contents = Contents.SERVED
        self.version = 0
        """Number of the version that the tensors hold, whole or in part."""

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> ServedWeights:
        """Serve a ``model`` that is here as a whole."""
        parameters, files = dict(model.named_parameters()), file_tensors(model)
        parts = whole({file.name: file.of(parameters[file.parameter].detach()) for file in files})
        tied = model.state_dict().keys() - parameters.keys()
        return cls(files, parts, WeightMemory(model.parameters()), model.device, name, tied)

    def check_layout(self, manifest: Manifest) -> None:
        """Raise `ModelError` unless ``manifest`` has every tensor of the model's files once, in its own shape."""
        for slot in manifest.slots:
            shape = self._shapes.get(slot.name)
            if shape != slot.shape:
                found = "no such tensor" if shape is None else f"shape {shape}"
                if slot.name in self._tied:
                    found = "none of its own, since it ties together what it reads and what it says"
                raise ModelError(f"updates bring {slot.name!r} of shape {slot.shape}; the receiving model has {found}")
        there = {slot.name for slot in manifest.slots}
        missing = [name for name in self._shapes if name not in there]
        if missing:
            raise ModelError(
                f"updates leave out {len(missing)} of the receiving model's weights, such as {missing[0]!r}"
            )

    def target(self, manifest: Manifest) -> Tensors:
        """The tensors into which flat bytes in host memory are written."""
        if self.device.type != "cpu":
            return _ThroughDevice(manifest, self._parts, self.device)
        return Tensors(manifest, self._parts)

    @property
    def problem(self) -> str | None:
        """The reason why nothing may be computed with the tensors, and what to do; None while one whole version is
        served.
        """
        match self.contents:
            case Contents.SERVED:
                return None
            case Contents.WRITING:
                return f"version {self.version} is being written over its weights; wait for stage_weights to return"
            case Contents.ARRIVED:
                return f"its weights are version {self.version}'s, which is not active; call activate({self.version})"
            case Contents.TORN:
                return (
                    f"its weights are torn: only a part of version {self.version} was written over them; "
                    "stage and activate a whole version first"
                )
            case Contents.GONE:
                return "its weights were given up when it was put to sleep; stage and activate a version first"

    def check(self, doing: str) -> None:
        """Raise `RunError`, which says what could not be done (``doing``), unless one whole version is served."""
        if (problem := self.problem) is not None:
            raise RunError(f"{self._name} cannot {doing}: {problem}")

    def set(self, contents: Contents, version: int) -> None:
        self.version, self.contents = version, contents

    def check_unwritten(self, doing: str) -> None:
        """Raise `RunError`, which says what could not be done (``doing``), while another thread writes the weights."""
        if self.contents is Contents.WRITING:
            raise RunError(f"{self._name} cannot {doing}: {self.problem}")

    def sleep(self, *, keep: bool) -> None:
        """Give the device's memory back. With ``keep`` the values move to the host; on a CPU they stay in place."""
        if not keep:
            self.memory.drop()
            self.contents = Contents.GONE
        elif self.device.type != "cpu" and self.contents is not Contents.GONE:
            self.memory.move_out()
        release_cached(self.device)


class _ThroughDevice(Tensors):
    """Tensors on a device: what is written is brought there in one copy, and taken apart there."""

    def __init__(self, manifest: Manifest, parts: Parts, device: torch.device) -> None:
        super().__init__(manifest, parts)
        self._device = device

    def write(self, offset: int, data: torch.Tensor) -> None:
        super().write(offset, data.to(self._device))


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
