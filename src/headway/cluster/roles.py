"""The roles: what one rank of the cluster does, the same on every backend. Nothing here knows Ray.

    ActorRole      a training rank: engine, reference (where it shares the ranks), sender of weights
    RolloutRole    one replica: engine, receiver of weights
    RefRole        a rank of the reference policy, where it has ranks of its own

A role is made cheaply and then built, because torch must be imported after its process was set up: imports of torch and
of what imports it stand inside the methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.hardware import Hardware, hardware_here
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.config.schema import Config
from headway.data.collate import Row, resolve
from headway.data.types import GroupTokens, Handle, Sample
from headway.errors import RunError, UpdateFailed
from headway.interfaces import (
    Capabilities,
    FinishedGroup,
    GenerateRequest,
    Manifest,
    SendReport,
    StepReport,
    WeightReceiver,
    WeightSender,
)
from headway.weights.transports.links import Address, Link

if TYPE_CHECKING:
    import torch

    from headway.engines.rollout.native.engine import NativeEngine
    from headway.engines.train.fsdp.engine import FsdpEngine
    from headway.engines.train.fsdp.reference import ReferenceEngine


class Role:
    """What all roles have. ``fetch`` brings what is behind handles; ``host`` is this machine's address for others."""

    def __init__(
        self,
        *,
        config: Config,
        model_path: str,
        name: str,
        device: str,
        threads: int,
        fetch: Callable[[Sequence[Handle[Any]]], list[Any]],
        host: str = "127.0.0.1",
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._name = name
        self._device = device
        self._threads = threads
        self._fetch = fetch
        self._host = host

    def hardware(self) -> Hardware:
        """What this rank computes on; ask once it is built."""
        return hardware_here(self._device)

    def _rows(self, samples: Sequence[Sample]) -> list[Row]:
        """The samples with their arrays; everything that they point to is fetched at once, and only once."""
        handles = {id(s.tokens): s.tokens for s in samples}
        handles.update((id(c.handle), c.handle) for s in samples for c in s.columns.values())
        behind = dict(zip(handles, self._fetch(list(handles.values())), strict=True))
        return resolve(samples, lambda handle: behind[id(handle)])

    def _set_threads(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def _join_ranks(self, store: Address | None, role: str, rank: int, world_size: int) -> None:
        """torch.distributed's default group, of this role's ranks. Without a store the process has a group already."""
        if store is None:
            return
        import torch.distributed as dist

        from headway.weights.transports.group import join_store

        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.startswith("cuda") else "gloo",
            store=join_store(store, f"ranks/{role}", self._config.cluster.start_timeout_s),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self._config.cluster.stall_timeout_s),
        )

    def close(self) -> None:
        """Release what outlives the process or the role."""


class ActorRole(Role):
    """One training rank. Every method that is registered for all ranks is collective."""

    def __init__(
        self, *, rank: int, world_size: int, total_optimizer_steps: int, with_reference: bool, **common: Any
    ) -> None:
        super().__init__(**common)
        self._rank = rank
        self._world_size = world_size
        self._total_optimizer_steps = total_optimizer_steps
        self._with_reference = with_reference
        self._store: Any = None
        self._sender: WeightSender | None = None

    @register(Dispatch.RANK_ZERO)
    def open_store(self) -> Address:
        """Host the store at which ranks and receivers meet. Returns its address."""
        from headway.weights.transports.group import open_store

        # Held: the store lives as long as this object.
        self._store, port = open_store(self._host, self._config.cluster.start_timeout_s)
        return self._host, port

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> Manifest:
        """Join the ranks that meet at ``store``, and load the model. Returns the layout of what will be sent."""
        import torch

        from headway.engines.train.fsdp.engine import FsdpEngine
        from headway.engines.train.fsdp.reference import ReferenceEngine

        self._set_threads()
        self._join_ranks(store, "actor", self._rank, self._world_size)
        self._engine: FsdpEngine = FsdpEngine(
            model_path=self._model_path,
            config=self._config,
            total_optimizer_steps=self._total_optimizer_steps,
            device=torch.device(self._device),
        )
        self._reference: ReferenceEngine | None = None
        if self._with_reference:
            self._reference = ReferenceEngine(
                model_path=self._model_path, config=self._config, device=torch.device(self._device)
            )
        self._manifest = self._engine.manifest(int(self._config.rollout.param_update_preduce_bucket_size_mb * 2**20))
        return self._manifest

    @register(Dispatch.RANK_ZERO)
    def connect(self, link: Link) -> None:
        """Open the sender's end. Blocks until every receiver has joined."""
        from headway.weights.transports.factory import make_sender

        self._sender = make_sender(link, self._host)

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward_logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self._rows(samples))

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        if self._reference is None:
            raise RunError("this run has no reference policy: nothing in its algorithm asks for one")
        return self._reference.forward_logprobs(self._rows(samples))

    @register(Dispatch.SPLIT)
    def train_step(self, samples: Sequence[Sample]) -> StepReport:
        return self._engine.train_step(self._rows(samples))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> SendReport | None:
        """Gather on every rank; rank zero sends each bucket while it is there. None on the others."""
        from headway.weights.buckets import GatheredBuckets

        started = time.perf_counter()
        buckets = self._engine.gather_buckets(self._manifest)
        if self._rank > 0:
            deque(buckets, maxlen=0)  # takes part in every gather
            return None
        if self._sender is None:
            raise UpdateFailed("weights were sent before the trainer was connected to the receivers")
        gathered = GatheredBuckets(buckets)
        self._sender.send(version, gathered)
        return SendReport(
            gather_s=gathered.gather_s,
            send_s=time.perf_counter() - started - gathered.gather_s,
            nbytes=gathered.nbytes,
            checksum=gathered.checksum,
        )

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        self._engine.save(path, dict(driver_state))

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: Path) -> dict[str, Any]:
        return self._engine.load(path)

    @register(Dispatch.ONE_TO_ALL)
    def export(self, path: Path) -> None:
        self._engine.export(path)

    def close(self) -> None:
        """Leave the group that carries weights."""
        if self._sender is not None:
            self._sender.close()


class RolloutRole(Role):
    """One replica. ``engine`` has a thread of its own; its coroutines are called by name (``engine.pause``)."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._offset = 0.0
        self._receiver: WeightReceiver | None = None

    @register(Dispatch.RANK_ZERO)
    def build(self, store: Address | None) -> None:
        """Load the model and the tokenizer. A replica is one rank, and meets nobody at ``store``."""
        import torch

        from headway.models.loading import compute_dtype, load_model, load_tokenizer

        self._set_threads()
        remote = self._config.model.trust_remote_code
        dtype = compute_dtype(self._config, torch.device(self._device))
        self._model = load_model(self._model_path, dtype=dtype, trust_remote_code=remote).to(self._device)
        self._tokenizer = load_tokenizer(self._model_path, trust_remote_code=remote)

    @register(Dispatch.RANK_ZERO)
    def connect(self, link: Link) -> None:
        """Open the receiver's end. Blocks until sender and receivers have joined."""
        from headway.weights.transports.factory import make_receiver

        self._receiver = make_receiver(link, self._name, self._host)

    @register(Dispatch.RANK_ZERO)
    async def serve(self, manifest: Manifest, clock_offset: float) -> Capabilities:
        """Start the engine; ``clock_offset`` brings this machine's monotonic clock to the driver's."""
        from headway.engines.rollout.native.engine import NativeEngine

        self._offset = clock_offset
        data, rollout = self._config.data, self._config.rollout
        self.engine: NativeEngine = NativeEngine(
            self._model,
            name=self._name,
            seed=self._config.run.seed,
            slots=rollout.max_concurrent,
            max_context=data.max_prompt_length + data.max_response_length,
            max_batched_tokens=rollout.max_batched_tokens,
            pad_token_id=int(self._tokenizer.pad_token_id),
            decode=partial(self._tokenizer.decode, skip_special_tokens=True),
            receive=self._receive,
            manifest=manifest,
            clock=self.clock,
        )
        return self.engine.capabilities

    async def monotonic(self) -> float:
        """This machine's clock, for the handshake."""
        return time.monotonic()

    def clock(self) -> float:
        """The driver's clock."""
        return time.monotonic() + self._offset

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[FinishedGroup, GroupTokens], None]:
        """Metadata and tokens apart, so that the driver can take the one and pass the other on."""
        async for group in self.engine.generate(requests):
            yield replace(group, tokens=None), group.tokens

    async def close(self) -> None:  # type: ignore[override]
        """Stop the engine's thread and leave the receivers' group."""
        if hasattr(self, "engine"):
            await self.engine.close()
        if self._receiver is not None:
            self._receiver.close()

    def _receive(self, version: int) -> Iterator[torch.Tensor]:
        if self._receiver is None:
            raise UpdateFailed(f"{self._name} was asked for version {version} before it was connected to the trainer")
        return self._receiver.receive(version)


class RefRole(Role):
    """One rank of the frozen reference policy. Every method that is registered is collective over these ranks."""

    def __init__(self, *, rank: int, world_size: int, **common: Any) -> None:
        super().__init__(**common)
        self._rank = rank
        self._world_size = world_size

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the model."""
        import torch

        from headway.engines.train.fsdp.reference import ReferenceEngine

        self._set_threads()
        self._join_ranks(store, "ref", self._rank, self._world_size)
        self._engine: ReferenceEngine = ReferenceEngine(
            model_path=self._model_path, config=self._config, device=torch.device(self._device)
        )

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self._rows(samples))
