"""A rollout engine over vLLM: its asynchronous engine, its pauses and its weight transfer, behind `RolloutEngine`.

    this process                                             vLLM's processes
    ────────────────────────────────────────────────         ──────────────────────────────────────────────────
    engine.py      settings, start, VllmEngine
    vllm_core.py   VllmCore: calls, on vLLM's loop      ═▶   engine core (scheduler, KV cache) ─▶ workers
    vllm_state.py  pause, sleep, weights; vLLM's end         extension.py: weight transfer, the probe's scores

`extension.py` is imported by vLLM's processes and by `engine.start_vllm`. vLLM itself is imported there and inside
functions only: the rest of Headway runs without it.
"""
