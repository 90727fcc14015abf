"""A rollout engine over vLLM: its asynchronous engine, its pauses and its weight transfer, behind `RolloutEngine`.

    this process                                          vLLM's processes
    ─────────────────────────────────────────────         ─────────────────────────────────────────────
    engine.py         VllmEngine: the protocol
    vllm_core.py      VllmCore: who runs, on vLLM's loop ═▶ engine core (scheduler, KV cache) ─▶ workers
    (`headway.engines.weights.incoming_version`) ─────────────────────────────────────────────▶ vllm_transfer.py
    launch.py         settings, start                                                           vllm_scoring.py
    vllm_request.py   ours to vLLM's, and back
    vllm_activity.py  busy time, counts

`vllm_transfer.py` and `vllm_scoring.py` run in vLLM's workers, by way of `extension.py`. vLLM itself is
imported there and inside functions only: the rest of Headway runs without it.
"""

from headway.engines.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
