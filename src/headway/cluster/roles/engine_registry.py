"""Rollout engines by name (``rollout.name``), as a replica starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.config.schema import Config
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.placement import concurrent
from headway.config.sizing.run_memory import ReplicaRoom, replica_room
from headway.devices import CPU, kind_of
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.weight_layout import Manifest, bucket_bytes
from headway.errors import ConfigError

Receive = Callable[[int, IncomingWeights], None]


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Facts that a replica knows before its engine starts."""

    config: Config
    model_path: str
    name: str
    device: str
    decode: Callable[[Sequence[int]], str]
    dtype: str
    """Dtype of the served weights, as torch spells it without the prefix."""
    receive: Receive | None
    """Function that receives weights; None, as ``manifest``, where the replica's weights never change."""
    manifest: Manifest | None
    clock: Callable[[], float]

    @property
    def common(self) -> dict[str, Any]:
        """Arguments that every engine takes."""
        data, rollout = self.config.data, self.config.rollout
        return {
            "name": self.name,
            "seed": self.config.run.seed,
            "slots": concurrent(self.config),
            "max_context": data.max_prompt_length + data.max_response_length,
            "max_batched_tokens": rollout.max_batched_tokens,
            "enforce_eager": rollout.enforce_eager,
            "receive": self.receive,
            "manifest": self.manifest,
            "temperature": rollout.temperature,
            "clock": self.clock,
        }

    def room(self) -> ReplicaRoom | None:
        """Return what the replica may take of each of its GPUs; None on a CPU, and where sizes are not known.

        Raises `ConfigError` where there is no room for one whole answer.
        """
        from headway.models.pretrained import load_config

        kind = kind_of(self.device)
        if kind is CPU or (nbytes := kind.memory_listed()) is None:
            return None
        model = load_config(self.model_path, trust_remote_code=self.config.model.trust_remote_code)
        shape = ModelShape.of(model.get_text_config().to_dict())
        return None if shape is None else replica_room(self.config, shape, nbytes)


async def start_native(replica: ReplicaSpec) -> Any:
    import torch

    from headway.engines.rollout.native.engine import NativeEngine
    from headway.models.pretrained import load_model

    config = replica.config
    cache_bytes = None if config.rollout.kv_cache_gib is None else int(config.rollout.kv_cache_gib * 2**30)
    if cache_bytes is None and (room := replica.room()) is not None:
        cache_bytes = room.cache_bytes
    dtype, remote = getattr(torch, replica.dtype), config.model.trust_remote_code
    load = partial(load_model, replica.model_path, dtype=dtype, trust_remote_code=remote)
    model = (await asyncio.to_thread(load)).to(replica.device)
    return NativeEngine(
        model,
        decode=replica.decode,
        dual_buffer=config.rollout.enable_dual_buffer and config.cluster.placement == "split",
        kv_cache_bytes=cache_bytes,
        consume_bucket_bytes=bucket_bytes(config.rollout.param_update_consume_bucket_size_mb),
        **replica.common,
    )


async def start_vllm(replica: ReplicaSpec) -> Any:
    from headway.engines.rollout.vllm import VllmEngine

    config = replica.config
    options = config.rollout.engine_kwargs
    if config.cluster.placement == "shared" and (room := replica.room()) is not None and room.share > 0:
        # By default vLLM wants nearly all of the device, which after the first training step it finds taken.
        options = {"gpu_memory_utilization": room.share, **options}
    engine = VllmEngine(
        Path(replica.model_path),
        dtype=replica.dtype,
        kv_cache_gib=config.rollout.kv_cache_gib,
        trust_remote_code=config.model.trust_remote_code,
        sleep=config.cluster.placement == "shared",
        tensor_parallel=config.rollout.tensor_model_parallel_size,
        options=options,
        **replica.common,
    )
    try:
        await engine.start()
    except BaseException:  # nobody else knows of the engine
        await engine.close()
        raise
    return engine


ENGINES = {"native": start_native, "vllm": start_vllm}


async def start_engine(replica: ReplicaSpec) -> Any:
    """Start the engine of ``rollout.name`` and return it. Raises `ConfigError` for an unknown name."""
    name = replica.config.rollout.name
    if name not in ENGINES:
        raise ConfigError(f"rollout.name={name}: no such rollout engine; known: {', '.join(sorted(ENGINES))}")
    return await ENGINES[name](replica)
