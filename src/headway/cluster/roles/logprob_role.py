"""Roles of separate ranks that compute log-probs: under a copy of the policy (log π_prox), or the reference policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.role import Role
from headway.cluster.roles.weight_roles import Left, WeightInbox
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import TrainSample
from headway.engines.weights.protocols import Address, Link
from headway.engines.weights.weight_layout import Manifest

if TYPE_CHECKING:
    from headway.engines.train.fsdp.column_engines import LogProbCopy, ReferenceEngine


class LogpRole(Role):
    """Role of one rank that recomputes log-probs. Methods that compute are collective over these ranks; each takes its
    part of new weights from its machine's copy.
    """

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._inbox = WeightInbox(self.name)

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``."""
        self._join_ranks(store, "logp")

    @register(Dispatch.RANK_ZERO)
    def served_dtype(self) -> str:
        """Dtype in which the rank receives weights, as torch spells it without the prefix."""
        return self._computed_dtype()

    async def connect(self, links: Sequence[Link]) -> None:
        """Open the receiver's end of ``links``. May wait for senders and receivers."""
        await self._inbox.connect(links, self._here())

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, manifest: Manifest) -> None:
        """Open the model, for updates in the layout ``manifest``."""
        from headway.engines.train.fsdp.column_engines import LogProbCopy

        self._copy: LogProbCopy = LogProbCopy(
            model_path=self._model_path,
            config=self._config,
            mesh=self._mesh,
            name=self.name,
            manifest=manifest,
            receive=self._inbox.receive,
        )

    @register(Dispatch.RANK_ZERO)
    def padded(self) -> str | None:
        """Return why the model's rows are padded and not packed; None where they are packed."""
        return self._copy.padded

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[NDArray[np.float32]]:
        return self._copy.proximal_logprobs(self.batch.rows(samples), version)

    async def stage_weights(self, version: int, left: Left) -> ReceiveReport:
        """Stage ``version``. ``left``: what senders left, or where another process has the version."""
        with self._inbox.holding(version, left):
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


class RefRole(Role):
    """Role of one rank of the frozen reference policy. Every registered method is collective over these ranks."""

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the reference's model."""
        from headway.engines.train.fsdp.column_engines import ReferenceEngine

        self._join_ranks(store, "ref")
        self._engine: ReferenceEngine = ReferenceEngine(
            model_path=self._model_path, config=self._config, mesh=self._mesh
        )

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self.batch.rows(samples))
