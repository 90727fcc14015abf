"""The weights that are served, and whether they may be computed with.

SERVED ──receive in place──▶ WRITING ──all of it──▶ ARRIVED ──activate──▶ SERVED
  ▲                             ├──error, nothing written──▶ as before
  │                             └──error────────────────▶ TORN ──receive in place──▶ WRITING
  └──swapped in── GONE ◀──given up in sleep── any but WRITING
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

import torch
from transformers import PreTrainedModel

from headway.engines.weights.buckets import Parts, Tensors, whole
from headway.engines.weights.served.served_memory import WeightMemory, release_cached
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
