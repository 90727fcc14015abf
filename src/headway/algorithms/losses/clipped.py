"""PPO's clipped loss and its variants, SAPO's smooth gate, and the critic's loss. Shape suffixes as in `base`.

`gspo` and `gmpo` have one ratio per answer (an episode with all its rows). Their losses are returned per token: each
token has its answer's loss as its value, and its own share of the gradient. With ``seq-mean-token-mean``, which both
papers use, value and gradient equal the paper's; other aggregations weigh long answers more. The per-token form also
allows advantages that differ within an answer, and corrections that weigh tokens.

`clip_cov` and `kl_cov` restrain the few tokens that cost the most entropy (Cui et al. 2025, arXiv:2505.22617, section
4). A step lowers the policy's entropy where log π_θ and the advantage are correlated, so the tokens with a large
(log π_θ − mean)·(A − mean) are selected, with means over the micro-batch's valid tokens. Another split into
micro-batches selects other tokens, and gives another gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses.base import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLossParams,
    approx_kl,
    clean,
    cleaned_advantages,
    dense_labels,
    log_ratio,
    sequence_mean,
)
from headway.config.sections.losses import ClipCov, DualClip, Gmpo, Gspo, KlCov, PolicyLossConfig, Sapo, TPpo
from headway.errors import ConfigError


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    inputs: LossInputs, params: PolicyLossParams[PolicyLossConfig]
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −min(u·A, clip(u, 1 − clip_low, 1 + clip_high)·A) with u = π_θ/π_old.

    ``old_logprobs`` are the denominator, whichever policy they come from. ``clip_high`` > ``clip_low`` is clip-higher.
    Decoupled PPO is this loss with π_prox for π_old, times the weight that a correction supplies.

    Metrics: ``clip_fraction`` is 1 where the clipped term was the smaller one (no gradient there), ``approx_kl`` is the
    k3 estimate of KL(π_old‖π_θ).

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; clip-higher: DAPO, Yu et al. 2025,
    arXiv:2503.14476, equation 10; decoupled: Hilton et al. 2021, arXiv:2110.00641.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses_NT, clipped_NT = clipped_surrogate(log_ratio_NT.exp(), cleaned_advantages(inputs, log_ratio_NT), params)
    return losses_NT, {"clip_fraction": clipped_NT, "approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("dual_clip")
def dual_clip(inputs: LossInputs, params: PolicyLossParams[DualClip]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip`, bounded by −c·A where A < 0: −max(min(u·A, clip(u)·A), c·A), with c = ``clip_ratio_c``.

    Without the bound, a token of a bad answer that has become much more likely (u ≫ 1) has an unbounded loss.

    Metrics: those of `ppo_clip`, and ``clip_fraction_lower``, 1 where c bounded the loss (no gradient there).

    Source: Ye et al. 2020, arXiv:1912.09729, section "Dual-clip PPO". verl's ``vanilla`` loss is this one.

    Raises:
        ConfigError: c ≤ 1 + clip_high: c would cut inside the clip range.
    """
    c = params.own.clip_ratio_c
    if c <= 1.0 + params.clip_high:
        raise ConfigError(f"clip_ratio_c={c:g} must be above 1 + clip_high = {1.0 + params.clip_high:g} (usual: 3)")
    losses_NT, metrics = ppo_clip(inputs, params)
    advantages_NT = cleaned_advantages(inputs, losses_NT)
    ceiling_NT = torch.where(advantages_NT < 0, -c * advantages_NT, torch.inf)
    lower_NT = (losses_NT > ceiling_NT).to(losses_NT.dtype)
    return torch.minimum(losses_NT, ceiling_NT), metrics | {"clip_fraction_lower": lower_NT.detach()}


@POLICY_LOSSES.register("t_ppo")
def t_ppo(inputs: LossInputs, params: PolicyLossParams[TPpo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip` without the last ``ignore_last`` tokens of unfinished answers.

    Other parts implement the rest of truncated PPO: extended GAE assumes V(s_l+1) = V(s_l) where an answer was cut;
    ``mask`` holds only the tokens of the current window, so that none is trained on twice; the value model learns from
    finished answers only. The assumption dominates the advantage of a cut answer's last tokens, hence ``ignore_last``.
    Dropped tokens still count in the normaliser, like rejected ones.

    Metrics: those of `ppo_clip`, and ``window_dropped``, 1 at the tokens left out.

    Source: truncated PPO, Fan et al. 2025, arXiv:2506.15050, section 3.
    """
    losses_NT, metrics = ppo_clip(inputs, params)
    dropped_NT = _last_of_unfinished(inputs, params.own.ignore_last)
    losses_NT = losses_NT.masked_fill(dropped_NT, 0.0)
    metrics["clip_fraction"] = metrics["clip_fraction"].masked_fill(dropped_NT, 0.0)
    return losses_NT, metrics | {"window_dropped": dropped_NT.to(losses_NT.dtype)}


def clipped_surrogate(
    ratio_NT: Float[Tensor, "N T"], advantages_NT: Float[Tensor, "N T"], params: PolicyLossParams[PolicyLossConfig]
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Compute −min(u·A, clip(u)·A), and a flag, 1 where the clipped term was the smaller one."""
    unclipped_NT = -ratio_NT * advantages_NT
    clipped_NT = -ratio_NT.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * advantages_NT
    return torch.maximum(unclipped_NT, clipped_NT), (clipped_NT > unclipped_NT).to(ratio_NT.dtype).detach()


def _last_of_unfinished(inputs: LossInputs, count: int) -> Bool[Tensor, "N T"]:
    if inputs.finished is None or count <= 0:
        return torch.zeros_like(inputs.mask)
    row_N = torch.arange(len(inputs.mask), device=inputs.mask.device)
    label_N = row_N if inputs.episodes is None else dense_labels(inputs.episodes)
    number_NT = inputs.mask.flatten().cumsum(0).view_as(inputs.mask)  # of valid tokens: holes take no place
    # The last number of an episode, over all its rows: here each row may be a single token.
    last_N = torch.zeros_like(label_N).scatter_reduce(0, label_N, number_NT[:, -1], "amax")[label_N]
    return inputs.mask & (last_N[:, None] - number_NT < count) & ~inputs.finished[:, None]


@POLICY_LOSSES.register("sapo")
def sapo(inputs: LossInputs, params: PolicyLossParams[Sapo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −(4/τ)·σ(τ·(u − 1))·A with u = π_θ/π_old, τ = ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere.

    The gate's slope is 1 at u = 1 and decays smoothly on both sides: near the old policy the gradient is PPO's, and it
    never jumps. At u = 1 the loss is −2A/τ.

    Aggregation: ``seq-mean-token-mean``.

    Metrics: ``gate`` is the slope 4·σ·(1 − σ), the share of the unclipped gradient that is left; ``approx_kl`` as for
    `ppo_clip`.

    Source: SAPO, Gao et al. 2025, arXiv:2511.20347, section 3.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    tau_NT = torch.full_like(advantages_NT, params.own.tau_neg).masked_fill(advantages_NT > 0, params.own.tau_pos)
    gate_NT = torch.sigmoid(tau_NT * (log_ratio_NT.exp() - 1.0))
    slope_NT = (4.0 * gate_NT * (1.0 - gate_NT)).detach().masked_fill(~inputs.mask, 0.0)
    return -(4.0 / tau_NT) * gate_NT * advantages_NT, {"gate": slope_NT, "approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("gspo")
def gspo(inputs: LossInputs, params: PolicyLossParams[Gspo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A), s the geometric mean of the answer's ratios π_θ/π_old.

    s_i = exp(1/|y_i| · Σ_t log u_t), and per token s_t = sg[s_i] · π_θ/sg[π_θ], where sg stops the gradient. |y_i|
    counts valid tokens. A geometric mean moves little: clip ranges are of the order of 3e-4.

    Aggregation: ``seq-mean-token-mean``, then the loss is −1/G Σ_i min(s_i·A_i, clip(s_i)·A_i).

    Metrics: ``clip_fraction`` is 1 at all tokens of a clipped answer, ``approx_kl`` is per token as for `ppo_clip`.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5, 7 and, per token, 13 and 14. verl also clamps
    log s_t to at most 10; here each token's log-ratio is clamped to ±20.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    ratio_NT = _shared(log_ratio_NT, sequence_mean(log_ratio_NT, inputs.mask, inputs.episodes)).exp()
    losses_NT, clipped_NT = clipped_surrogate(ratio_NT, advantages_NT, params)
    return losses_NT, {"clip_fraction": clipped_NT, "approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("gmpo")
def gmpo(inputs: LossInputs, params: PolicyLossParams[Gmpo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −R·A, with R the geometric mean of the answer's clipped ratios: R_i = exp(1/|y_i| · Σ_t c_t).

    c_t is log(π_θ/π_old), at most ``clip_high`` where A > 0 and at least −``clip_low`` where A < 0: the clip range
    bounds the *log*-ratio (the paper has 0.4 on both sides). A clipped token has no gradient; the answer's other tokens
    keep theirs.

    Aggregation: ``seq-mean-token-mean``, then the loss is −1/G Σ_i R_i·A_i.

    Metrics: ``clip_fraction`` is 1 where c_t was bounded, ``approx_kl`` as for `ppo_clip`.

    Source: GMPO, Zhao et al. 2025, arXiv:2507.20673, section 3. verl's ``geo_mean`` also means the advantages of a row
    and divides by all rows, those without a valid token too.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    bounded_NT = torch.where(
        advantages_NT > 0, log_ratio_NT.clamp(max=params.clip_high), log_ratio_NT.clamp(min=-params.clip_low)
    )
    ratio_NT = _shared(bounded_NT, sequence_mean(bounded_NT, inputs.mask, inputs.episodes)).exp()
    clipped_NT = (bounded_NT != log_ratio_NT) & (advantages_NT != 0)  # an advantage of 0 has no gradient to bound
    metrics = {"clip_fraction": clipped_NT.to(ratio_NT.dtype), "approx_kl": approx_kl(log_ratio_NT)}
    return -ratio_NT * advantages_NT, metrics


def _shared(token_NT: Float[Tensor, "N T"], mean_N1: Float[Tensor, "N 1"]) -> Float[Tensor, "N T"]:
    """Return tokens whose value is their answer's mean and whose gradient is their own."""
    return mean_N1.detach() + (token_NT - token_NT.detach())


@POLICY_LOSSES.register("clip_cov")
def clip_cov(inputs: LossInputs, params: PolicyLossParams[ClipCov]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip`, but 0 at max(1, ⌊``clip_cov_ratio``·tokens⌋) random tokens with a high covariance.

    They are drawn uniformly from the tokens that PPO did not clip and whose covariance is between ``clip_cov_lb`` and
    ``clip_cov_ub``; if there are fewer, all are taken. The values themselves seed the draw, so that the loss is a
    function of its inputs. (verl draws from torch's global generator.)

    Aggregation: ``token-mean``.

    Metrics: ``clip_fraction`` is that of `ppo_clip`, ``cov_fraction`` is 1 at the tokens drawn, ``approx_kl`` as there.
    """
    losses_NT, metrics = ppo_clip(inputs, params)
    covariance_NT = _covariance(inputs)
    candidates_NT = inputs.mask & (metrics["clip_fraction"] == 0)
    candidates_NT &= (covariance_NT > params.own.clip_cov_lb) & (covariance_NT < params.own.clip_cov_ub)
    drawn_NT = _draw(
        candidates_NT, _share_of(inputs.mask, params.own.clip_cov_ratio), seed_from=covariance_NT[inputs.mask]
    )
    return losses_NT.masked_fill(drawn_NT, 0.0), metrics | {"cov_fraction": drawn_NT.to(losses_NT.dtype)}


@POLICY_LOSSES.register("kl_cov")
def kl_cov(inputs: LossInputs, params: PolicyLossParams[KlCov]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −u·A, plus ``ppo_kl_coef``·|log u| at the max(1, ⌊``kl_cov_ratio``·tokens⌋) tokens of largest covariance.

    u = π_θ/π_old is not clipped: the penalty alone keeps the policy near the old one.

    Aggregation: ``token-mean``.

    Metrics: ``cov_fraction`` is 1 at the tokens with the penalty, ``approx_kl`` as for `ppo_clip`.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses_NT = -log_ratio_NT.exp() * cleaned_advantages(inputs, log_ratio_NT)
    # `_share_of` is at least 1, even without a valid token: a masked one would be chosen.
    count = min(_share_of(inputs.mask, params.own.kl_cov_ratio), int(inputs.mask.sum()))
    ranked_NT = _covariance(inputs).masked_fill(~inputs.mask, -torch.inf)
    chosen_NT = torch.zeros_like(inputs.mask)
    chosen_NT.view(-1)[ranked_NT.flatten().topk(count).indices] = True
    losses_NT = torch.where(chosen_NT, losses_NT + params.own.ppo_kl_coef * log_ratio_NT.abs(), losses_NT)
    return losses_NT, {"cov_fraction": chosen_NT.to(losses_NT.dtype), "approx_kl": approx_kl(log_ratio_NT)}


@torch.no_grad()
def _covariance(inputs: LossInputs) -> Float[Tensor, "N T"]:
    """Compute (log π_θ − mean)·(A − mean) per token, means over valid tokens, float64, 0 where masked."""
    count = inputs.mask.sum().clamp(min=1)
    centred = []
    for values in (inputs.logprobs, inputs.advantages):
        clean_NT = clean(values, inputs.mask).double()
        centred.append((clean_NT - clean_NT[inputs.mask].sum() / count).masked_fill(~inputs.mask, 0.0))
    return centred[0] * centred[1]


def _share_of(mask: Bool[Tensor, "N T"], share: float) -> int:
    return max(1, int(share * int(mask.sum())))


def _draw(candidates_NT: Bool[Tensor, "N T"], count: int, *, seed_from: Float[Tensor, " M"]) -> Bool[Tensor, "N T"]:
    """Draw ``count`` candidates uniformly, or all if there are fewer. Returns a mask, True at the drawn ones."""
    places_K = candidates_NT.flatten().nonzero().squeeze(1)
    if places_K.numel() > count:
        bits = int(seed_from.sum().view(torch.int64))  # of float64: equal data draw equal tokens, whatever ran before
        # On the CPU, so that every device draws the same tokens.
        generator = torch.Generator().manual_seed(bits % 2**63)
        places_K = places_K[torch.randperm(places_K.numel(), generator=generator)[:count].to(places_K.device)]
    drawn_NT = torch.zeros_like(candidates_NT)
    drawn_NT.view(-1)[places_K] = True
    return drawn_NT


def value_loss(
    values: Float[Tensor, "N T"],
    old_values: Float[Tensor, "N T"],
    returns: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    cliprange: float | None,
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) per token, exactly 0 where masked.

    Taking the larger term makes the update pessimistic, as in PPO's policy loss: a value that is already more than ε
    from V_old gets no gradient to move further away. ``cliprange=None``: ½·(V − R)².

    Args:
        values: V, the critic's, with gradient.
        old_values: V_old, the critic's before the batch's first step.
        returns: R, what `advantages.gae` returns; without gradient, like ``old_values``.
        mask: True at valid tokens.
        cliprange: ε, in the rewards' unit.

    Returns:
        Losses [N, T] in at least float32, and the metric ``vf_clipfrac``: 1 where the clipped term was the larger one.

    Source: Schulman et al., OpenAI baselines' PPO2 (value clipping); Huang et al. 2022, "The 37 Implementation Details
    of Proximal Policy Optimization", detail 9. verl has the same ½.
    """
    values_NT = clean(values, mask)
    old_NT, returns_NT = clean(old_values.detach(), mask), clean(returns.detach(), mask)
    plain_NT = (values_NT - returns_NT).square()
    if cliprange is None:
        return 0.5 * plain_NT, {"vf_clipfrac": torch.zeros_like(plain_NT)}
    clipped_NT = (old_NT + (values_NT - old_NT).clamp(-cliprange, cliprange) - returns_NT).square()
    is_clipped_NT = (clipped_NT > plain_NT).to(plain_NT.dtype).detach()
    return 0.5 * torch.maximum(plain_NT, clipped_NT), {"vf_clipfrac": is_clipped_NT}
