"""An extension of vLLM's workers: vLLM mixes this class into its worker's.

Importing this registers the transfer backend, before vLLM makes one, and has Linux permit the process AMX: vLLM's
kernel for a mixture's experts in bfloat16 uses its tiles without asking, which would end the process (SIGILL).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engines.rollout.vllm import vllm_transfer
from headway.engines.rollout.vllm.vllm_scoring import score

__all__ = ["WorkerExtension", "vllm_transfer"]

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
