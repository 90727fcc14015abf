"""Role of one replica: the engine that generates, and the receiver of its weights; alone, or with a training rank.

Engines are started by name (``rollout.name``): `ENGINES`.

FusedRole ──▶ actor: a training rank       its methods are called as ``actor.train_step``, …
          └─▶ rollout: a replica           … and ``rollout.engine.pause``

Both use one device, in turns. Weights stay in the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.cluster.roles.role import Role
from headway.cluster.roles.training_roles import ActorRole
from headway.cluster.roles.weight_roles import Left, WeightInbox
from headway.cluster.worker_group import Dispatch, register
from headway.config.schema import Config
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.placement import concurrent
from headway.config.sizing.run_memory import ReplicaRoom, replica_room
from headway.config.transport_facts import WITHIN_PROCESS
from headway.data.interfaces.rollout import Capabilities, RolloutEngine
from headway.data.interfaces.weights import ReceiveReport
from headway.devices import CPU, kind_of
from headway.engines.weights.protocols import Address, IncomingWeights, Link
from headway.engines.weights.weight_layout import Manifest, bucket_bytes
from headway.models.dtypes import served_dtype
from headway.models.tokenizer import text_of

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
    """Function that receives weights. It and ``manifest`` are None if the replica's weights never change."""
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

    @property
    def in_one_process(self) -> bool:
        """True if the trainer runs in this process, and so on the replica's device."""
        return self.config.cluster.backend == "inline" and self.receive is not None

    def room(self) -> ReplicaRoom | None:
        """Return the memory that the replica may use of each of its GPUs; None on a CPU, or if sizes are unknown.

        Raises `ConfigError` if there is no room for one whole answer.
        """
        from headway.models.pretrained import load_config

        kind = kind_of(self.device)
        if kind is CPU or (nbytes := kind.memory_listed()) is None:
            return None
        model = load_config(self.model_path, trust_remote_code=self.config.model.trust_remote_code)
        shape = ModelShape.of(model.get_text_config().to_dict())
        return None if shape is None else replica_room(self.config, shape, nbytes, in_one_process=self.in_one_process)


async def start_native(replica: ReplicaSpec) -> Any:
    import torch

    from headway.engines.rollout.native.engine import NativeEngine
    from headway.models.pretrained import load_model

    config = replica.config
    cache_bytes = None if config.rollout.kv_cache_gib is None else int(config.rollout.kv_cache_gib * 2**30)
    room = replica.room() if cache_bytes is None else None
    dtype, remote = getattr(torch, replica.dtype), config.model.trust_remote_code
    load = partial(load_model, replica.model_path, dtype=dtype, trust_remote_code=remote)
    # In a thread: heartbeats are answered while the model is read.
    model = (await asyncio.to_thread(load)).to(replica.device)
    if room is not None:
        kind = kind_of(replica.device)
        # Sized by the memory free now: by the whole card, it left nothing to other processes or to a trainer in this
        # one.
        cache_bytes = room.cache_in(kind.free_memory(replica.device) or 0, kind.allocated_memory(replica.device) or 0)
    return NativeEngine(
        model,
        decode=replica.decode,
        dual_buffer=config.rollout.enable_dual_buffer and config.cluster.placement == "split",
        kv_cache_bytes=cache_bytes,
        consume_bucket_bytes=bucket_bytes(config.rollout.param_update_consume_bucket_size_mb),
        **replica.common,
    )


async def start_vllm(replica: ReplicaSpec) -> Any:
    from headway.engines.rollout.vllm.engine import VllmEngine

    config = replica.config
    options = config.rollout.engine_kwargs
    beside = config.cluster.placement == "shared" or replica.in_one_process
    if beside and (room := replica.room()) is not None and room.share > 0:
        # By default vLLM uses nearly all of the device, which is taken after the first training step.
        options = {"gpu_memory_utilization": room.share, **options}  # the user's own value comes last, and counts
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
    except BaseException:  # nothing else would close the engine
        await engine.close()
        raise
    return engine


ENGINES = {"native": start_native, "vllm": start_vllm}


async def start_engine(replica: ReplicaSpec) -> Any:
    """Start the engine of ``rollout.name`` and return it."""
    return await ENGINES[replica.config.rollout.name](replica)


WITHIN = "within"
"""Key of the link between actor and replica in one process."""


class RolloutRole(Role):
    """Role of one replica. ``engine`` runs in a separate thread, and is called by name (``engine.pause``)."""

    def __init__(self, *, shares_device: bool = False, **common: Any) -> None:
        """Create the role. ``shares_device``: True if a training rank in this process uses the device in turns."""
        super().__init__(**common)
        self._shares_device = shares_device
        self._offset = 0.0
        self.inbox = WeightInbox(self.name, self._here)

    @register(Dispatch.RANK_ZERO)
    def build(self, store: Address | None) -> None:
        """Load the tokenizer. A replica is one rank, and does not connect to ``store``."""
        import torch

        from headway.models.tokenizer import load_tokenizer

        torch.set_num_threads(self._threads)
        self._tokenizer = load_tokenizer(self._model_path, trust_remote_code=self._config.model.trust_remote_code)

    @register(Dispatch.RANK_ZERO)
    async def serve(self, manifest: Manifest, clock_offset: float) -> Capabilities:
        """Load the model and start the engine, which receives weights in the layout ``manifest``.

        ``clock_offset`` brings this machine's monotonic clock to the driver's.
        """
        self._offset = clock_offset
        replica = ReplicaSpec(
            config=self._config,
            model_path=self._model_path,
            name=self.name,
            device=self._device,
            decode=text_of(self._tokenizer),
            dtype=served_dtype(self._config, self._device),
            receive=self.inbox.receive,
            manifest=manifest,
            clock=self.clock,
        )
        self.engine: RolloutEngine = await start_engine(replica)
        capabilities: Capabilities = self.engine.capabilities
        return capabilities

    async def stage_weights(self, version: int, left: Left) -> ReceiveReport:
        """Stage ``version`` in the engine. ``left``: senders' stored versions, or the copy of another process."""
        with self.inbox.holding(version, left):
            return await self.engine.stage_weights(version)

    async def sleep(self, keep_weights: bool) -> None:
        """Free the engine's memory on the device, as `RolloutEngine.sleep` does."""
        await self.engine.sleep(keep_weights=keep_weights)

    async def activate(self, version: int) -> float:
        """Serve a staged version, as `PolicyReceiver.activate` does."""
        self._make_room()
        return await self.engine.activate(version)

    async def wake(self) -> None:
        """Wake the engine, as `RolloutEngine.wake` does."""
        self._make_room()
        await self.engine.wake()

    def _make_room(self) -> None:
        """Free device memory cached by a training rank in this process, since the engine may be another process.

        Called before the engine takes memory, when the rank has done its part.
        """
        if self._shares_device:
            kind_of(self._device).release_cached()

    async def monotonic(self) -> float:
        """Return this machine's monotonic time in seconds, for comparison with the driver's."""
        return time.monotonic()

    def clock(self) -> float:
        """Return the time in seconds on the driver's clock."""
        return time.monotonic() + self._offset

    async def close(self) -> None:  # type: ignore[override]
        """Stop the engine's thread and leave the receivers' group."""
        self.inbox.close()  # first: the engine may be waiting for a bucket
        if hasattr(self, "engine"):
            await self.engine.close()


class FusedRole:
    """Role of an actor and a replica: ``actor`` and ``rollout`` hold their arguments; ``common`` is for both."""

    def __init__(self, *, actor: dict[str, Any], rollout: dict[str, Any], name: str, **common: Any) -> None:
        self.actor = ActorRole(**actor, name=name, **common)
        _, plus, again = name.partition("+")  # names are never reused, also after a loss
        replica = rollout["name"] + plus + again
        self.rollout = RolloutRole(**rollout | {"name": replica}, **common, shares_device=True)
        # Calls to the process, not to one of its roles.
        self.lookout, self.profile, self.hardware = self.actor.lookout, self.actor.profile, self.actor.hardware

    def connect_within(self, dtype: str, timeout_s: float) -> None:
        """Connect the replica to this process's training rank, so that it gets the weights that the rank gathers."""
        receiver = self.rollout.name
        link = Link(WITHIN_PROCESS, self.actor.layout(dtype), (receiver,), timeout_s)
        self.actor.outbox.open_link(WITHIN, link)
        self.rollout.inbox.open([link])

    async def close(self) -> None:
        """Close both roles, the engine first, since it computes with memory of the rank."""
        try:
            await self.rollout.close()
        finally:
            self.actor.close()
