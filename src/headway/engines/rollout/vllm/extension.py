"""Headway's code in vLLM's workers: a class that vLLM mixes into its worker's, scoring for the probe, and a weight
transfer backend over memory that both sides map.

    init ──▶ start ──▶ receive: map the buffer, read every tensor, load it, repack what is packed ──▶ finish

Importing this module registers the backend; vLLM looks it up by name, in the engine's process and in each worker. The
engine has checked the bytes, and pauses vLLM around the three calls.

A paused engine runs no request, and interrupted requests must not advance for a probe. So each context of a probe is
one step of its own, with keys and values in the cache's block 0, which no request ever owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput  # type: ignore[import-not-found]

NULL_BLOCK = 0
"""vLLM's null block: no request owns it, and nothing reads from it."""
_serial = count()


def score(worker: Any, context: Sequence[int], token: int, temperature: float) -> float | None:
    """The log-prob (nats) of ``token`` behind ``context``, as it would be sampled at ``temperature`` (above 0).

    None on a worker that does not sample. Raises `ValueError` for a context that is longer than a block.
    """
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    room = min(group.kv_cache_spec.block_size for group in groups)
    if len(context) > room:
        raise ValueError(f"a context of {len(context)} tokens; the one block that is free for it takes {room}")
    request = f"headway-probe-{next(_serial)}"
    params = SamplingParams(
        max_tokens=1, temperature=temperature, logprobs=0, logprob_token_ids=[token], ignore_eos=True, detokenize=False
    )
    new = NewRequestData(
        req_id=request,
        prompt_token_ids=list(context),
        mm_features=[],
        sampling_params=params,
        pooling_params=None,
        block_ids=tuple([NULL_BLOCK] for _ in groups),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=list(context),
    )
    try:
        output = worker.execute_model(_step(new=new, tokens={request: len(context)}))
        if output is None:
            output = worker.sample_tokens(None)  # `execute_model` only computes; sampling is a separate call
        if hasattr(output, "get_output"):
            output = output.get_output()
    finally:
        worker.execute_model(_step(finished={request}))  # after an error, too: vLLM keeps the request until then
    if output is None or output.logprobs is None:
        return None
    row = output.req_id_to_index[request]
    of_token = output.logprobs.logprob_token_ids[row] == token
    return float(output.logprobs.logprobs[row][of_token][0])


def _step(
    *, new: NewRequestData | None = None, tokens: dict[str, int] | None = None, finished: set[str] | None = None
) -> SchedulerOutput:
    tokens = tokens or {}
    return SchedulerOutput(
        scheduled_new_reqs=[new] if new is not None else [],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=finished or set(),
        free_encoder_mm_hashes=[],
    )


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
        """Device and inode of the mapped buffer: a path may later lead to another buffer."""
        self._nbytes, self._slots = init_info.nbytes, init_info.slots
        # Checked while no reload is under way, which separates tied weights.
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
            self.finish_weight_update()  # or the next update would continue this failed one
            raise

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)  # after the reload, which only packs modules that got tensors

    def shutdown(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._slots = []

    def _map(self, path: str) -> None:
        status = Path(path).stat()
        # By the file, not by its path: a descriptor's number is used again after it was closed.
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
    """Rebuild the packed copies that a CPU's matrix products read instead of ``weight``.

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


# vLLM's kernel for a mixture's experts in bfloat16 uses AMX tiles without asking Linux for permission: without this the
# worker ends with SIGILL at the first token.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()


class WorkerExtension:
    """Methods for ``collective_rpc``: plain data in, plain data out."""

    def headway_score(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], temperature: float
    ) -> list[float]:
        """The log-prob of each of ``tokens`` behind its context; empty on a worker that does not sample."""
        scores = [score(self, context, token, temperature) for context, token in zip(contexts, tokens, strict=True)]
        return [value for value in scores if value is not None]
