"""Role that recomputes log π_prox on ranks of its own: each holds a copy of the policy and gets every update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.inbox import WeightInbox
from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.data.types import Sample
from headway.interfaces import ReceiveReport
from headway.weights.layout import Manifest, bucket_bytes
from headway.weights.protocols import Parcel
from headway.weights.transports.links import Address, Link

if TYPE_CHECKING:
    from headway.engines.train.logprobs import LogProbCopy


class LogpRole(Role):
    """Role of one rank that recomputes log-probs. Ranks know nothing of each other: samples are divided over them."""

    def __init__(self, *, rank: int, world_size: int, **common: Any) -> None:
        super().__init__(**common)
        self._inbox = WeightInbox(self.name)

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Load the model, in the dtype that the trainer computes in. Does not connect to ``store``."""
        import torch

        from headway.models.pretrained import compute_dtype, load_model

        self._set_threads()
        dtype = compute_dtype(self._config, torch.device(self._device))
        remote = self._config.model.trust_remote_code
        self._model = load_model(self._model_path, dtype=dtype, trust_remote_code=remote).to(self._device)

    @register(Dispatch.RANK_ZERO)
    def served_dtype(self) -> str:
        """Dtype in which the rank receives weights, as torch spells it without the prefix."""
        return str(self._model.dtype).removeprefix("torch.")

    async def connect(self, link: Link) -> None:
        """Open the receiver's end of ``link``. May wait for sender and receivers."""
        await self._inbox.connect(link, self._here())

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, manifest: Manifest) -> None:
        """Create the engine that recomputes log-probs, with weights in the layout ``manifest``."""
        from headway.data.packing import Packing
        from headway.engines.train.logprobs import LogProbCopy

        self._copy: LogProbCopy = LogProbCopy(
            self._model,
            name=self.name,
            manifest=manifest,
            receive=self._inbox.receive,
            window=bucket_bytes(self._config.rollout.param_update_consume_bucket_size_mb),
            temperature=self._config.rollout.temperature,
            packing=Packing.of(self._config),
            takes_deltas=self._config.param_update.encoding == "delta",
        )

    @register(Dispatch.RANK_ZERO)
    def padded(self) -> str | None:
        """Return why the model's rows are padded and not packed; None where they are packed."""
        return self._copy.padded

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def proximal_logprobs(self, samples: Sequence[Sample], version: int) -> list[NDArray[np.float32]]:
        return self._copy.proximal_logprobs(self._rows(samples), version)

    async def stage_weights(self, version: int, parcel: Parcel | None) -> ReceiveReport:
        """Stage ``version``. ``parcel``: what the sender left, with a stored transport."""
        with self._inbox.holding(version, parcel):
            return await self._copy.stage_weights(version)

    def activate(self, version: int) -> float:
        """Serve the staged ``version``. Returns the seconds it took."""
        started = time.perf_counter()
        self._copy.activate(version)
        return time.perf_counter() - started

    def probe(self) -> NDArray[np.float32]:
        return self._copy.probe()

    def close(self) -> None:
        """Close the receiver's end of the link to the trainer."""
        self._inbox.close()  # first: a thread may be waiting for a bucket
        if hasattr(self, "_copy"):
            self._copy.close()
