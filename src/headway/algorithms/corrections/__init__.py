"""Corrections by π_prox/π_behav: the trust region's anchor over the policy that sampled.

    LossInputs ─▶ correction ─▶ weights w [N, T] ─▶ w · policy loss (decoupled PPO); 0 rejects a token

A correction uses the ratio itself (a level, an action, two bounds), or whole sequences, or multiplies several others:

    π_prox/π_behav ─▶ ratio at a level ─▶ action within [lower, upper] ─▶ · veto ─▶ weight

| action | weight |
|---|---|
| truncate | the ratio, clamped to the bounds |
| mask | the ratio within the bounds, 0 outside (IcePop) |
| reject | 1 within the bounds, 0 outside |
| veto | 0 on the whole answer if any of its tokens is outside the bounds, else 1 |

The loss is normalised by the number of tokens before any rejection. There are three ways to get log π_prox: a forward
pass; log π_behav itself, at no cost; and `log_linear_prox`, which interpolates between versions. Shape suffixes as in
`losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.losses import MAX_LOG_RATIO, LossInputs, anywhere_in_sequence, log_ratio, sequence_sum
from headway.algorithms.losses.base import clean, cleaned_advantages, per_token_results, sequence_mean
from headway.algorithms.registry import Registry
from headway.errors import ConfigError

__all__ = [
    "CORRECTIONS",
    "Action",
    "Correction",
    "CorrectionParams",
    "Level",
    "RatioCorrection",
    "build_correction",
    "from_params",
    "log_linear_prox",
    "off_policy_sequence_mask",
    "product",
    "ratio_at",
    "truncate",
]


Level = Literal["token", "sequence", "geometric"]
"""Ratio that a bound applies to: each token's ratio, the product over the answer, or the geometric mean."""


@dataclass(frozen=True, slots=True)
class CorrectionParams:
    """The parameters of a correction. All bounds are on π_prox/π_behav, never on its inverse."""

    bound: float | None = None
    """Upper bound: ``truncate`` cuts larger ratios to it; ``mask``, ``reject`` and ``veto`` reject them."""
    lower: float | None = None
    """Lower bound of the ratio; None: no lower bound."""
    level: Level = "token"
    veto: float | None = None
    """Bound of an additional veto: an answer with a token whose ratio is below it is rejected as a whole."""
    delta: float | None = None
    """Largest mean of log(π_behav/π_θ) of an answer, in nats per token, for ``off_policy_sequence_mask``."""


Correction = Callable[[LossInputs, CorrectionParams], tuple[Tensor, dict[str, Tensor]]]
"""Function that returns weights [N, T] ≥ 0 and metrics [N, T] by name, without gradient. Masked values do not count."""

CORRECTIONS: Registry[Correction] = Registry(
    "correction",
    "algorithm.rollout_correction.name",
    expected="the weight of each token, shaped [N, T] as inputs.logprobs, and a dictionary of metrics like that",
    fits=per_token_results,
)


Action = Literal["truncate", "mask", "reject", "veto"]


@dataclass(frozen=True, slots=True)
class RatioCorrection:
    """A `Correction` by the ratio: one choice of level, action and bounds. The module describes the actions.

    Raises:
        ConfigError: on construction, for a combination that makes no sense or has no effect.
    """

    action: Action
    level: Level = "token"
    upper: float | None = None
    lower: float | None = None
    veto: float | None = None
    """Ratio below which a single token rejects its whole answer; None: no veto."""

    def __post_init__(self) -> None:
        for name in ("upper", "lower", "veto"):
            _check_bound(name, getattr(self, name), self.action)
        if self.upper is None and self.lower is None:
            raise ConfigError(f"correction {self.action}: without an upper or a lower bound it has no effect; set one")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ConfigError(f"correction {self.action}: lower={self.lower:g} must be below upper={self.upper:g}")
        if self.action == "veto" and self.level != "token":
            raise ConfigError(f"correction veto: looks at single tokens; level={self.level!r} makes no sense")
        if self.action == "veto" and self.veto is not None:
            raise ConfigError("correction veto: its bound is 'lower'; a second one as 'veto' makes no sense")

    @torch.no_grad()
    def __call__(
        self, inputs: LossInputs, params: CorrectionParams | None = None
    ) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
        """Compute weights and metrics of ``inputs``; ``params`` is ignored."""
        log_ratio_NT = log_ratio(inputs.old_logprobs, inputs.behaviour_logprobs, inputs.mask)
        ratio_NT = ratio_at(self.level, log_ratio_NT, inputs.mask, inputs.episodes)
        weights_NT, metrics = self._act(ratio_NT, inputs.episodes)
        if self.veto is not None:
            vetoed_NT = anywhere_in_sequence(log_ratio_NT.exp() < self.veto, inputs.episodes)
            weights_NT = weights_NT.masked_fill(vetoed_NT, 0.0)
            metrics["correction/vetoed"] = vetoed_NT.to(weights_NT.dtype)
        return weights_NT, {"correction/weight": weights_NT, **metrics}

    def _act(
        self, ratio_NT: Float[Tensor, "N T"], episodes: Int[Tensor, " N"] | None
    ) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
        outside_NT = (ratio_NT > (self.upper or math.inf)) | (ratio_NT < (self.lower or 0.0))  # a bound is above 0
        if self.action == "truncate":
            weights_NT = ratio_NT.clamp(self.lower, self.upper)
            return weights_NT, {"correction/truncated": outside_NT.to(ratio_NT.dtype)}
        if self.action == "veto":
            # A masked position has ratio 1, and so is always within the bounds.
            outside_NT = anywhere_in_sequence(outside_NT, episodes)
        within_NT = ratio_NT if self.action == "mask" else torch.ones_like(ratio_NT)
        return within_NT.masked_fill(outside_NT, 0.0), {"correction/rejected": outside_NT.to(ratio_NT.dtype)}


def ratio_at(
    level: Level,
    log_ratio_NT: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    episodes: Int[Tensor, " N"] | None = None,
) -> Float[Tensor, "N T"]:
    """Return the ratio at a level, for every token. ``log_ratio_NT`` is 0 where masked.

    ``token`` has low variance, but is biased. ``sequence``, the product over the answer, is the unbiased weight of an
    answer, but has enormous variance. ``geometric`` is the product's |y|-th root: a measure of drift, not a weight. An
    answer is a row, or all rows with the same label in ``episodes``. Its log-ratio is clamped to ±20, like a token's.
    """
    if level == "token":
        return log_ratio_NT.exp()
    total_N1 = sequence_sum(log_ratio_NT, episodes)
    if level == "geometric":
        total_N1 = total_N1 / sequence_sum(mask, episodes).clamp(min=1)
    # Clamped once more: `exp` of a sum of clamped log-ratios may overflow.
    ratio_N1 = total_N1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(log_ratio_NT.dtype)
    return ratio_N1.expand_as(log_ratio_NT)


def _check_bound(name: str, value: float | None, action: Action) -> None:
    if value is None:
        return
    what = f"correction {action}: {name}={value:g}"
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{what}: a bound on π_prox/π_behav is a positive finite number")
    if abs(math.log(value)) >= MAX_LOG_RATIO:
        raise ConfigError(f"{what} has no effect: ratios are clamped to e^±{MAX_LOG_RATIO:g}; bring it nearer to 1")
    if name == "upper" and value < 1 and action != "truncate":
        raise ConfigError(f"{what}: it must be at least 1, or tokens that are exactly on policy would be rejected")
    if name != "upper" and value > 1:
        raise ConfigError(f"{what}: it must be at most 1, or it would act on tokens that are exactly on policy")


@CORRECTIONS.register("truncate")
@torch.no_grad()
def truncate(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Truncated importance sampling: w = min(π_prox/π_behav, bound), and at least ``lower`` if it is set.

    Metrics: ``correction/weight`` is w, ``correction/truncated`` is 1 where a bound was used instead of the ratio. If
    ``veto`` is set, also ``correction/vetoed``.

    Source: truncation, Ionides 2008 (Journal of Computational and Graphical Statistics 17.2), equation 3; as the weight
    of decoupled PPO, Hilton et al. 2021, arXiv:2110.00641, and AReaL, Fu et al. 2025, arXiv:2505.24298, equation 5.

    Raises:
        ConfigError: bounds that make no sense or have no effect.
    """
    return from_params("truncate", params)(inputs)


@CORRECTIONS.register("mask")
def mask(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Weigh tokens by their ratio within bounds: w = π_prox/π_behav within [lower, bound], 0 outside.

    Metrics: ``correction/weight`` is w, ``correction/rejected`` is 1 where the ratio was outside.

    Source: IcePop, in Ring-1T, Ling Team 2025, arXiv:2510.18855 (there per token).
    """
    return from_params("mask", params)(inputs)


@CORRECTIONS.register("reject")
def reject(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Reject tokens by their ratio: w = 1 where π_prox/π_behav is within [lower, bound], 0 outside.

    Metrics: those of `mask`.
    """
    return from_params("reject", params)(inputs)


@CORRECTIONS.register("veto")
def veto(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Reject whole answers: w = 0 on every token of an answer that has one token outside [lower, bound], else 1.

    Metrics: those of `mask`.
    """
    return from_params("veto", params)(inputs)


def from_params(action: Action, params: CorrectionParams) -> RatioCorrection:
    """Return the correction for an action and parameters. Raises `ConfigError` as `RatioCorrection` does."""
    return RatioCorrection(action=action, level=params.level, upper=params.bound, lower=params.lower, veto=params.veto)


@CORRECTIONS.register("off_policy_sequence_mask")
@torch.no_grad()
def off_policy_sequence_mask(
    inputs: LossInputs, params: CorrectionParams
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Mask answers: w = 0 where A < 0 and the mean over the answer of log(π_behav/π_θ) is above ``delta``, else 1.

    The mean is the k1 estimate of KL(π_behav‖π_θ), over the answer's valid tokens, in nats per token, and uses the
    *current* policy: it is computed anew at every step. A good answer is kept however old it is. An answer is an
    episode, with all its rows.

    Metrics: ``correction/weight`` is w, ``correction/rejected`` is 1 where it is 0.

    Source: DeepSeek-V3.2, DeepSeek-AI 2025, arXiv:2512.02556, section 3.1, "Off-Policy Sequence Masking". The paper
    gives no value of δ; TRL suggests to begin with 0.5.

    Raises:
        ConfigError: no ``delta``, or one that is not a positive number.
    """
    delta = check_delta(params.delta)
    drift_NT = -log_ratio(inputs.logprobs.detach(), inputs.behaviour_logprobs, inputs.mask)
    negative_NT = cleaned_advantages(inputs, drift_NT) < 0
    rejected_NT = negative_NT & (sequence_mean(drift_NT, inputs.mask, inputs.episodes) > delta)
    weights_NT = torch.ones_like(drift_NT).masked_fill(rejected_NT, 0.0)
    return weights_NT, {"correction/weight": weights_NT, "correction/rejected": rejected_NT.to(weights_NT.dtype)}


def check_delta(delta: float | None) -> float:
    """Return ``delta``. Raises `ConfigError` unless it is a positive finite number."""
    if delta is None or not (math.isfinite(delta) and delta > 0):
        raise ConfigError(f"correction off_policy_sequence_mask needs a positive delta, not {delta} (try 0.5)")
    return delta


def product(corrections: Sequence[tuple[Correction, CorrectionParams]]) -> Correction:
    """Combine corrections by the product of their weights: a token that one of them rejects is rejected.

    Other metrics of the same name are 1 where any of them is 1; ``correction/weight`` is the product.

    Raises:
        ConfigError: fewer than two corrections, or more than one with the ratio in its weight (truncate, mask).
    """
    if len(corrections) < 2:
        raise ConfigError(f"a product of corrections takes at least two, not {len(corrections)}")
    if sum(correction in (truncate, mask) for correction, _ in corrections) > 1:
        raise ConfigError("two corrections that weigh by the ratio (truncate, mask) would square it; keep one of them")

    def combined(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
        weights, metrics = corrections[0][0](inputs, corrections[0][1])
        for correction, own in corrections[1:]:
            more_weights, more = correction(inputs, own)
            weights = weights * more_weights
            # The larger one: a token that two corrections reject counts once.
            metrics = metrics | {n: torch.maximum(metrics[n], v) if n in metrics else v for n, v in more.items()}
        return weights, metrics | {"correction/weight": weights}

    return combined


SEQUENCE_MASK = "off_policy_sequence_mask"


def build_correction(name: str, params: CorrectionParams) -> Correction:
    """Build the correction ``name``, a registered name or ``file.py:function``, and check its parameters.

    A user's function gets all parameters, unchecked.

    Raises:
        ConfigError: unknown name; parameters that make no sense, or that the correction does not use.
        UserCodeError: the user's file does not import or lacks the function.
    """
    correction = CORRECTIONS.get(name)
    if name in get_args(Action):
        if params.delta is not None:
            raise ConfigError(f"correction {name}: delta has no effect, it belongs to {SEQUENCE_MASK}")
        from_params(name, params)  # type: ignore[arg-type]  # one of Action's names
    elif name == SEQUENCE_MASK:
        check_delta(params.delta)
        unused = [field for field in ("bound", "lower", "veto") if getattr(params, field) is not None]
        unused += ["level"] if params.level != "token" else []
        if unused:
            raise ConfigError(f"correction {name}: {', '.join(unused)} has no effect, it is bounded by delta alone")
    return correction


@torch.no_grad()
def log_linear_prox(
    behaviour_logprobs: Float[Tensor, "N T"],
    logprobs: Float[Tensor, "N T"],
    versions: Int[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    prox_version: float,
    version: float,
) -> Float[Tensor, "N T"]:
    """Estimate log π_prox per token: log π_behav + α·(log π_θ − log π_behav), α = (v_prox − v_behav)/(v_θ − v_behav).

    Exact if log π is linear in the version. A token with v_behav ≥ v_prox gets exactly log π_behav; if v_θ = v_prox,
    every older token gets exactly log π_θ. α is clamped to [0, 1].

    Args:
        behaviour_logprobs: log π_behav at each token's own version.
        logprobs: log π_θ of the current policy; no gradient flows back.
        versions: v_behav, the version that sampled each token.
        mask: True at valid tokens; elsewhere the result is 0, even for NaN.
        prox_version: v_prox, the version whose policy anchors the trust region.
        version: v_θ ≥ v_prox; may be a fraction: V + k/K after k of the K optimizer steps of version V.

    Returns:
        log π_prox [N, T] in at least float32, without gradient.

    Source: AReaL's ``loglinear`` approximation of decoupled PPO, which has v_prox = v_θ − 1.

    Raises:
        ValueError: ``version`` < ``prox_version``: the anchor would lie in the future.
    """
    if version < prox_version:
        raise ValueError(f"the current version {version:g} is before that of π_prox, {prox_version:g}")
    versions_NT = versions.double().masked_fill(~mask, prox_version)  # a masked token may have any version
    distance_NT = version - versions_NT
    share_NT = (prox_version - versions_NT) / torch.where(distance_NT > 0, distance_NT, 1.0)
    alpha_NT = torch.where(distance_NT > 0, share_NT, 0.0).clamp(0.0, 1.0)
    start_NT, end_NT = clean(behaviour_logprobs, mask), clean(logprobs, mask)
    dtype = torch.promote_types(start_NT.dtype, end_NT.dtype)
    # lerp is exact at both ends, which start + α·(end − start) is not at α = 1.
    return torch.lerp(start_NT.to(dtype), end_NT.to(dtype), alpha_NT.to(dtype))
