"""Role of the reference policy on separate ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.data.types import Sample
from headway.engines.weights.transports.links import Address

if TYPE_CHECKING:
    from headway.engines.train.fsdp.policy_copies import ReferenceEngine


class RefRole(Role):
    """Role of one rank of the frozen reference policy. Every registered method is collective over these ranks."""

    def __init__(self, *, rank: int, world_size: int, **common: Any) -> None:
        super().__init__(**common)
        self._rank = rank
        self._world_size = world_size

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the reference's model."""
        from headway.engines.train.fsdp.policy_copies import ReferenceEngine

        self._set_threads()
        self._join_ranks(store, "ref", self._rank, self._world_size)
        self._engine: ReferenceEngine = ReferenceEngine(
            model_path=self._model_path, config=self._config, mesh=self._mesh
        )

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return self._engine.forward_logprobs(self._rows(samples))
