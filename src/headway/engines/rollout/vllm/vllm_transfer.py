"""The transfer of new weights to vLLM's workers: a transfer backend of vLLM's own kind, over memory that both sides
map.

    init ──▶ start ──▶ receive: map the buffer, read every tensor, load it, repack what is packed ──▶ finish

Imported by vLLM's workers only. The engine has checked the bytes, and pauses vLLM around the three calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

BACKEND = "headway_shared_memory"


@dataclass
class BufferInfo(WeightTransferInitInfo):
    """Layout of the buffers that receive weights, as plain data for transfer."""

    nbytes: int
    slots: list[tuple[str, list[int], str, int, int]]
    """(name, shape, dtype, offset, nbytes) of each tensor."""


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """The version that the buffer at ``path`` holds now."""

    version: int
    path: str


class SharedMemoryTransfer(WeightTransferEngine):
    """Loads all tensors of a version from the mapped buffer, in the checkpoint's names and shapes."""

    init_info_cls = BufferInfo
    update_info_cls = VersionInfo

    def init_transfer_engine(self, init_info: BufferInfo) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._mapped: tuple[int, int] | None = None
        """Device and inode of the buffer that is mapped: a path may come to lead to another."""
        self._nbytes, self._slots = init_info.nbytes, init_info.slots
        # Asked while no reload is under way, which takes tied weights apart.
        self._wanted = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
            initialize_layerwise_reload,
        )

        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Load the version in shared memory into the model. Raises `ValueError`, naming a weight, if one is missing.

        After any error the model's values are parts of two versions, but another update can begin.
        """
        try:
            self._map(update_info.path)
            loaded = self.model.load_weights(self._tensors())
            if loaded is not None and (missing := sorted(self._wanted - set(loaded))):
                raise ValueError(f"version {update_info.version} leaves out {missing[0]} (of {len(missing)} weights)")
        except BaseException:
            self.finish_weight_update()  # or the next update would go on with what this one left
            raise

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._slots = []

    def _map(self, path: str) -> None:
        status = Path(path).stat()
        if self._mapped != (status.st_dev, status.st_ino):
            self._flat = torch.from_file(path, shared=True, size=self._nbytes, dtype=torch.uint8)
            self._mapped = (status.st_dev, status.st_ino)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype, offset, nbytes in self._slots:
            values = self._flat[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
            yield name, values.to(self.device)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Have a CPU's experts packed when they are loaded again.

    vLLM packs them where it makes their kernel, once: it would copy what is loaded later into packed memory as it is.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def repack(model: torch.nn.Module) -> None:
    """Pack anew what a CPU's matrix products read in place of ``weight``.

    A reload packs the modules that tensors were loaded into. An output head that is tied to the embedding is none of
    them: its packed copy would stay the old version's.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            from vllm.model_executor.layers.utils import (  # type: ignore[import-not-found]
                dispatch_cpu_unquantized_gemm,
            )

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
