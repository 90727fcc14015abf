"""Parts that all policy losses share: inputs, parameters, registry, and the safe log-ratio.

A *sequence* is an episode: one row, or all rows with the same label in `LossInputs.episodes`. Losses and corrections
that work on sequences use `sequence_sum`, `sequence_mean` and `anywhere_in_sequence`.

Shape suffixes: N rows of a micro-batch, T response tokens (padded), 1 a broadcast column. Training calls the built-in
functions without padding: each token is a row, T is 1, and ``episodes`` groups the rows into sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.registry import Registry
from headway.config.sections.losses import PolicyLossConfig

Own = TypeVar("Own", bound=PolicyLossConfig, covariant=True)

MAX_LOG_RATIO = 20.0
"""Bound on the size of log-ratios, clamped before ``exp``: e^20 squared still fits float32. No gradient beyond it."""


@dataclass(slots=True)
class LossInputs:
    """The inputs of a policy loss. Values at masked positions are never used and may be anything."""

    logprobs: Float[Tensor, "N T"]
    """Log-probs log π_θ of the sampled tokens, in nats. Only they, and ``entropy``, have a gradient."""
    old_logprobs: Float[Tensor, "N T"]
    """Log-probs log π_prox, the anchor of the trust region; log π_behav if the engine's log-probs are used instead."""
    behaviour_logprobs: Float[Tensor, "N T"]
    """Log-probs log π_behav of the policy that the engine sampled from, in nats."""
    advantages: Float[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    """Mask [N, T], True at tokens that the policy wrote. May have holes."""
    ref_logprobs: Float[Tensor, "N T"] | None = None
    """Log-probs log π_ref of the reference policy, in nats; None without ``actor.use_kl_loss`` or
    ``algorithm.use_kl_in_reward``."""
    entropy: Float[Tensor, "N T"] | None = None
    finished: Bool[Tensor, " N"] | None = None
    """Flag of each answer, True if it has ended; None: all have. Only ``t_ppo`` uses them."""
    episodes: Int[Tensor, " N"] | None = None
    """Label of each row's episode: rows with the same label are one sequence. None: each row is a sequence."""


@dataclass(frozen=True, slots=True)
class PolicyLossParams(Generic[Own]):
    """Parameters of a policy loss: its own section of the configuration, and the clip range that losses share."""

    own: Own
    """The loss's own parameters, all set: a section from `headway.config.sections.losses`."""
    clip_low: float = 0.2
    """Lower ε: the ratio is clipped to [1 − clip_low, 1 + clip_high]. ``gmpo`` clips the log-ratio to
    [−clip_low, clip_high]; for ``dppo_tv`` and ``dppo_kl`` they are the largest divergence down and up. The off-policy
    guard may have tightened both."""
    clip_high: float = 0.2
    """Upper ε: the ratio is clipped to [1 − clip_low, 1 + clip_high]. For the losses that differ see ``clip_low``."""


PolicyLoss = Callable[[LossInputs, PolicyLossParams[Any]], tuple[Tensor, dict[str, Tensor]]]
"""Function that returns per-token losses [N, T], 0 where masked, and per-token metrics [N, T] without gradient."""


def per_token_results(result: Any, inputs: LossInputs, *_: Any) -> bool:
    """Tell whether ``result`` has the format of a loss or correction: numbers per token [N, T], and metrics by name."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        return False
    numbers, metrics = result
    fits = isinstance(numbers, Tensor) and numbers.shape == inputs.logprobs.shape
    return fits and all(isinstance(metric, Tensor) for metric in metrics.values())


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    "algorithm.policy_loss.loss_mode",
    expected="the loss of each token, shaped [N, T] as inputs.logprobs, and a dictionary of metrics like that",
    fits=per_token_results,
)


def log_ratio(
    logprobs: Float[Tensor, "N T"], old_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """Compute log(π/π_old) in at least float32, clamped to ±`MAX_LOG_RATIO`, 0 where masked.

    Padding is filled before the subtraction: −inf − (−inf) is NaN, and ``where`` after it would still multiply a NaN
    into the gradient of what comes before.
    """
    return (clean(logprobs, mask) - clean(old_logprobs.detach(), mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clean(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Return ``values`` in at least float32, 0 (also for NaN) where ``mask`` is False."""
    # Filled, not multiplied: 0 · NaN is NaN, in the gradient, too.
    return values.masked_fill(~mask, 0.0).to(torch.promote_types(values.dtype, torch.float32))


def cleaned_advantages(inputs: LossInputs, like: Tensor) -> Float[Tensor, "N T"]:
    """Return the advantages without gradient, 0 where masked, in the dtype of ``like``."""
    return clean(inputs.advantages.detach(), inputs.mask).to(like.dtype)


def sequence_sum(values: Tensor, episodes: Int[Tensor, " N"] | None) -> Float[Tensor, "N 1"]:
    """Sum of ``values`` [N, T], which are 0 where masked, over each row's sequence: all rows with its label.

    In float64: the signs of log-ratios cancel, and what is left is compared with clip ranges of 1e-4.
    """
    total_N = values.sum(dim=1, dtype=torch.float64)
    if episodes is None:
        return total_N[:, None]
    # index_put adds in the same order every time; a scatter on a GPU does not.
    place_N = dense_labels(episodes)
    return torch.zeros_like(total_N).index_put((place_N,), total_N, accumulate=True)[place_N][:, None]


def dense_labels(labels: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Renumber ``labels`` from 0, ascending, without `torch.unique`, which would wait for a GPU to count them."""
    ordered, order = labels.sort(stable=True)
    number_N = torch.cat([torch.zeros_like(labels[:1]), (ordered[1:] != ordered[:-1]).cumsum(0)])
    return torch.empty_like(labels).scatter(0, order, number_N)


def sequence_mean(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], episodes: Int[Tensor, " N"] | None = None
) -> Float[Tensor, "N 1"]:
    """Mean over the valid tokens of each row's sequence, 0 where it has none. ``values`` are 0 where masked."""
    length_N1 = mask.sum(dim=1, keepdim=True) if episodes is None else sequence_sum(mask, episodes)
    return (sequence_sum(values, episodes) / length_N1.clamp(min=1)).to(values.dtype)


def anywhere_in_sequence(flags: Bool[Tensor, "N T"], episodes: Int[Tensor, " N"] | None) -> Bool[Tensor, "N T"]:
    """Set the flags True in all rows of each sequence that has a True flag."""
    if episodes is None:
        return flags.any(dim=1, keepdim=True).expand_as(flags)
    return (sequence_sum(flags, episodes) > 0).expand_as(flags)


@torch.no_grad()
def approx_kl(log_ratio_NT: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """k3 estimate of KL(π_old‖π_θ) per token: e^x − 1 − x, x = log(π_θ/π_old)."""
    return torch.expm1(log_ratio_NT) - log_ratio_NT
