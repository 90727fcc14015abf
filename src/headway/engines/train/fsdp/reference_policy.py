"""The frozen reference policy: the trainer's model without its optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import Config
from headway.data.collate import CollatedRow
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.forward_passes import forward_sharded
from headway.engines.train.fsdp.sharded.sharding import sharded_policy
from headway.models.pretrained import compute_dtype


class ReferenceEngine:
    """One rank of the reference policy. Collective like `engine.FsdpEngine`, beside which it may live."""

    def __init__(self, *, model_path: str, config: Config, mesh: TrainMesh) -> None:
        """Load and shard the model at ``model_path``, in the dtype that the policy computes in.

        Raises `ModelError` on every rank when it cannot be used.
        """
        self._policy = sharded_policy(model_path, config, mesh, compute_dtype(config, mesh.device))
        self._policy.requires_grad_(False)
        self._packing = self._policy.packing(config)
        self._device = mesh.device

    def forward_logprobs(self, rows: Sequence[CollatedRow]) -> list[NDArray[np.float32]]:
        """The [T] float32 log-probs of each of this rank's ``rows`` (nats, ``rollout.temperature`` applied)."""
        return forward_sharded(self._policy, rows, self._packing, self._device)
