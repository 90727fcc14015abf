"""Settings of vLLM, and its start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config.doctor import check_vllm_installed
from headway.devices import CPU, kind_here
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, ModelError, WorkerDied

PACKAGE = __name__.rpartition(".")[0]
KV_CACHE_GIB = 1.0
"""GiB of the KV cache on a CPU, where vLLM would take nearly all memory."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The settings that vLLM is started with."""

    model_path: Path
    slots: int
    max_context: int
    dtype: str
    """The dtype as torch spells it, without the prefix; ``auto``: the folder's."""
    max_batched_tokens: int | None = None
    """Tokens of one step, prompts and answers together. None: vLLM's own."""
    kv_cache_gib: float | None = None
    """Memory for keys and values. None: `KV_CACHE_GIB` on a CPU, a share of the device elsewhere."""
    enforce_eager: bool = False
    """Run without CUDA graphs; on a CPU that is always so."""
    trust_remote_code: bool = False
    sleep: bool = False
    """The device's memory is given back on demand; not on a CPU."""
    tensor_parallel: int = 1
    """Devices that divide each layer, those that this process sees first: each has a process of vLLM's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, by name."""


def prepare_environment(on_cpu: bool) -> None:
    """Set what vLLM reads from the environment when it is imported, and its processes when they start.

    Nothing that the user has set is changed. On a CPU, without compilation: a first request for log-probs would else
    compile for half a minute; and without binding to cores, which are shared with the trainer.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if on_cpu:
        variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)


def start(settings: VllmSettings, stat_logger: Callable[..., Any]) -> Any:
    """Start vLLM's processes and load the model, blocking: an ``AsyncLLM`` of the running loop.

    Raises `ConfigError` when vLLM is missing or refuses the settings, and `WorkerDied` when its processes end.
    """
    check_vllm_installed()
    on_cpu = kind_here() is CPU
    prepare_environment(on_cpu)
    from vllm.config import WeightTransferConfig  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

    from headway.engines.rollout.vllm.extension import BACKEND

    gib = settings.kv_cache_gib
    if gib is None and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        gib = KV_CACHE_GIB
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "tokenizer": str(settings.model_path),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.slots + 1,  # the probe has a place of its own beside requests that stand still
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # what the folder recommends must not change the distribution
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu or settings.enforce_eager,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{PACKAGE}.extension.WorkerExtension",
        "enable_sleep_mode": settings.sleep,
        "enable_logging_iteration_details": True,  # what a step computed is told to nobody else
    }
    arguments |= _batching(settings, on_cpu)
    if settings.tensor_parallel > 1:
        # By processes of its own: within Ray's placement groups vLLM would start actors, beside the run's.
        arguments |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
    if gib is not None:
        arguments["kv_cache_memory_bytes"] = int(gib * 2**30)
    try:
        engine_arguments = AsyncEngineArgs(**{**arguments, **settings.options})
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"vLLM does not take its settings: {cause}") from cause
    try:
        return AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[stat_logger])
    except ValueError as cause:  # pydantic's errors are among these
        raise ConfigError(f"vLLM does not take its settings: {cause}") from cause
    except RuntimeError as cause:
        raise WorkerDied(f"vLLM did not start: {cause}; its own output says why") from cause


def _batching(settings: VllmSettings, on_cpu: bool) -> dict[str, Any]:
    """The settings that bound one step of vLLM's.

    On a CPU a prompt is prefilled in one step, beside everything that decodes: vLLM turns a request's generator back
    for each step that takes only a part of its prompt, and a CPU's generator cannot be turned back.
    """
    given, slots = settings.max_batched_tokens, settings.slots
    if on_cpu:
        return {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(given or 0, settings.max_context + slots + 1),
        }
    if given is None:
        return {}
    return {"max_num_batched_tokens": max(slots + 1, min(given, slots * settings.max_context))}


def is_cpu_build() -> bool:
    """Tell whether the vLLM that is imported runs on a CPU."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    return bool(current_platform.is_cpu())


def is_roomy(llm: Any, slots: int) -> bool:
    """Tell whether vLLM's cache has a whole context per slot, so that it never preempts. False if that is unknown."""
    contexts = getattr(llm.vllm_config.cache_config, "kv_cache_max_concurrency", None)
    return bool(contexts and contexts > slots)  # just as many do not fit: one block is never given away


def check_manifest(manifest: Manifest, model_path: Path) -> None:
    """Raise `ModelError` unless ``manifest`` has each weight of the folder once, in its shape.

    A reload that lacks a weight, or has another, would leave vLLM with half a model. Folders without safetensors files
    are not looked at.
    """
    there = _shapes(model_path)
    if not there:
        return
    config = json.loads((model_path / "config.json").read_text())
    brought = {slot.name: slot.shape for slot in manifest.slots}
    for name, shape in brought.items():
        if there.get(name) != shape:
            found = f"shape {there[name]}" if name in there else "no such tensor"
            raise ModelError(f"updates bring {name!r} of shape {shape}; {model_path}, which vLLM serves, has {found}")
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if missing := [name for name in there if name not in brought and name not in tied]:
        raise ModelError(f"updates leave out {len(missing)} weights of {model_path}, such as {missing[0]!r}")


def _shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    return shapes
