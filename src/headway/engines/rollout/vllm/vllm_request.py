"""One call as a request of vLLM's, and what vLLM gives back as its tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from headway.data.types import FinishReason, SampledTokens
from headway.engines.rollout.call_run import CallRun, not_finite
from headway.errors import RunError

_FIRST_AND_LAST = 2**31
"""An interval between outputs that no answer reaches: vLLM then sends the first token, and everything at the end."""
_SEED_BITS = 63
"""Bits of a seed: vLLM's seeds are signed."""


def prompt_of(run: CallRun, version: int) -> Any:
    """The context as token ids. Only those that came under the same version of the weights share keys and values."""
    from vllm.inputs import tokens_input  # type: ignore[import-not-found]

    return tokens_input(run.call.input_ids.tolist(), cache_salt=f"headway-{version}")


def sampling_of(run: CallRun) -> Any:
    """vLLM's sampling parameters: one seed per call, log-probs of the sampled tokens, no text.

    Before ``min_tokens`` vLLM withholds the tokenizer's end-of-sequence, too, whatever the request's stop tokens are;
    and it takes temperatures between 0 and 0.01 for 0.01.
    """
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    from vllm import SamplingParams  # type: ignore[import-not-found]

    sampling = run.call.sampling
    bias: defaultdict[int, float] = defaultdict(float)
    for token, added in sampling.logit_bias:
        bias[token] += added
    return SamplingParams(
        max_tokens=run.limit,
        min_tokens=min(sampling.min_tokens, run.limit),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(bias) or None,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=True,  # the model folder's: what ends an answer is in the request
        seed=run.key & ((1 << _SEED_BITS) - 1),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be one
        output_kind=RequestOutputKind.CUMULATIVE,
        stream_interval=_FIRST_AND_LAST,
    )


def has_tokens(output: Any) -> bool:
    return bool(output.outputs[0].token_ids)


def written_of(output: Any, replica: str) -> SampledTokens:
    """The tokens of a last output, their log-probs, and the version that vLLM says sampled each of them.

    Raises `NonFinite` for weights that give no distribution, and `RunError` when the three do not agree in length.
    """
    completion = output.outputs[0]
    ids = np.array(completion.token_ids, np.int32)
    logprobs = np.array(completion.logprobs.logprobs if completion.logprobs is not None else [], np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if len(logprobs) != len(ids) or (versions < 0).any():
        raise RunError(
            f"rollout engine {replica}: vLLM gave {len(ids)} tokens, {len(logprobs)} log-probs and the versions "
            f"{completion.weight_versions}; this release of vLLM is not one that Headway knows"
        )
    if not all(map(math.isfinite, logprobs.tolist())):
        raise not_finite(replica, int(versions[-1]))
    return SampledTokens(ids, logprobs, versions)


def reason_of(output: Any) -> FinishReason | None:
    """The reason for which an answer ended; None for what vLLM calls anything else than stop, length or abort."""
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
    return reasons.get(output.outputs[0].finish_reason)
