"""The log-probs of given tokens through vLLM's own model runner and sampler, while the scheduler stands still.

A paused engine runs no request, and its interrupted ones must not run on for a probe. So each context is run as a step
of its own, in the worker, with keys and values in the cache's block 0, which no request ever owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput  # type: ignore[import-not-found]

NULL_BLOCK = 0
"""The block that stands for none: it belongs to nobody, and nothing reads from it."""
_serial = count()


def score(worker: Any, context: Sequence[int], token: int, temperature: float) -> float | None:
    """The log-prob (nats) of ``token`` behind ``context``, as it would be sampled at ``temperature`` (above 0).

    None on a worker that does not sample. Raises `ValueError` for a context that is longer than a block.
    """
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    room = min(group.kv_cache_spec.block_size for group in groups)
    if len(context) > room:
        raise ValueError(f"a context of {len(context)} tokens; the one block that is free for it takes {room}")
    request = f"headway-probe-{next(_serial)}"
    params = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        logprobs=0,
        logprob_token_ids=[token],
        ignore_eos=True,
        detokenize=False,
    )
    new = NewRequestData(
        req_id=request,
        prompt_token_ids=list(context),
        mm_features=[],
        sampling_params=params,
        pooling_params=None,
        block_ids=tuple([NULL_BLOCK] for _ in groups),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=list(context),
    )
    try:
        output = worker.execute_model(_step(new=new, tokens={request: len(context)}))
        if output is None:
            output = worker.sample_tokens(None)
        if hasattr(output, "get_output"):
            output = output.get_output()
    finally:
        worker.execute_model(_step(finished={request}))
    if output is None or output.logprobs is None:
        return None
    row = output.req_id_to_index[request]
    of_token = output.logprobs.logprob_token_ids[row] == token
    return float(output.logprobs.logprobs[row][of_token][0])


def _step(
    *, new: NewRequestData | None = None, tokens: dict[str, int] | None = None, finished: set[str] | None = None
) -> SchedulerOutput:
    tokens = tokens or {}
    return SchedulerOutput(
        scheduled_new_reqs=[new] if new is not None else [],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=finished or set(),
        free_encoder_mm_hashes=[],
    )
