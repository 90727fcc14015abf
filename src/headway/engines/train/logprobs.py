"""A copy of the policy that receives every update, and computes log-probs under the version that it holds.

    proximal_logprobs (v) ─▶ stage (v + 1) ─▶ activate (v + 1) ─▶ proximal_logprobs (v + 1) ─▶ …

New weights may be written over the old ones: nobody asks for a version after the next one was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.collate import Row
from headway.data.packing import Packing
from headway.devices import kind_of
from headway.engines.served.memory import own_storages
from headway.engines.served.update import BufferedIntake, InPlaceIntake, Updates, outcome
from headway.engines.served.weights import ServedWeights
from headway.engines.train.fsdp.forward import forward_rows
from headway.engines.train.fsdp.policy import PolicyModule
from headway.errors import RunError
from headway.interfaces import ReceiveReport
from headway.models.output_layer import check_output_layer
from headway.models.packable import use_packed_attention
from headway.models.probe import probe_rows, probe_vector
from headway.weights.layout import Manifest
from headway.weights.protocols import WeightSink


class LogProbCopy:
    """One whole copy of the policy, on one device. Not thread-safe, but for `stage_weights`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        manifest: Manifest,
        receive: Callable[[int, WeightSink], None],
        window: int,
        temperature: float,
        packing: Packing,
        takes_deltas: bool = False,
    ) -> None:
        """Serve version 0: ``model`` as it is, in the dtype that the trainer computes in.

        Args:
            receive: puts a version into a sink, blocking.
            window: bytes that are copied at a time (``rollout.param_update_consume_bucket_size_mb``).
            takes_deltas: it keeps a second copy in host memory, which deltas are applied to.

        Raises:
            ModelError: ``manifest`` is not of this model, or has logits that are not supported.
        """
        model.eval()
        model.tie_weights()
        own_storages(model)
        check_output_layer(model, name)
        self._name = name
        self._policy = PolicyModule(model, temperature)
        on_gpu = kind_of(model.device).flex_attention
        self.padded = use_packed_attention(model, on_gpu=on_gpu) if packing.packed else "model.packing=padded"
        """Reason why rows are padded and not packed; None where they are packed."""
        self._packing = replace(packing, packed=self.padded is None)
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._weights = ServedWeights(model, name)
        self._weights.check_layout(manifest)
        intake = (BufferedIntake if takes_deltas else InPlaceIntake)(name, self._weights, manifest, window)
        self._updates = Updates(name, intake, receive, self._weights.device)

    def proximal_logprobs(self, rows: Sequence[Row], version: int) -> list[NDArray[np.float32]]:
        """The [T] float32 log-probs of each row (nats) under ``version``. Raises `RunError` when it serves another."""
        self._weights.check("compute log-probs")
        if self._weights.version != version:
            raise RunError(
                f"{self._name} serves version {self._weights.version} and was asked for log-probs under version "
                f"{version}; it has every version for as long as the trainer trains it, and refuses any other"
            )
        return self._logprobs(rows)

    def probe(self) -> NDArray[np.float32]:
        """The log-probs [8] of the probe's sequences under the served version. Raises `RunError` if it is not whole."""
        self._weights.check("probe")
        return probe_vector(self._logprobs(probe_rows(self._vocabulary)))

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive the weights of ``version``, to be served after `activate`. Raises `UpdateFailed`."""
        return await outcome(self._updates.start(version))

    def activate(self, version: int) -> None:
        """Serve the staged ``version``. Raises `UpdateFailed` unless it is the version received last."""
        self._updates.load(version)

    def close(self) -> None:
        """Stop receiving updates; one that is under way ends by itself."""
        self._updates.close()

    def _logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return forward_rows(rows, self._packing(rows), self._policy.per_token, self._weights.device)
