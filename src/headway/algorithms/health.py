"""Health: distance of the trained policy from the policy that sampled, from the importance ratios w = π_θ/π_behav.

Sums add up over micro-batches and ranks; those in `MAX_REDUCED` are reduced by maximum instead. `ratio_sums` and
`health` cover all tokens; `lag_sums` and `lag_health` cover the tokens of each lag separately.

Shape suffixes: N rows, T response tokens, M valid tokens, B lags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.losses import MAX_LOG_RATIO, log_ratio

MAX_REDUCED = frozenset({"ratio_max", "lag/ratio_max"})

LAG_BUCKETS = 5
"""Number of lag classes: 0, 1, 2, 3, and 4 or more versions."""
LAG_NAMES = ("lag_0", "lag_1", "lag_2", "lag_3", "lag_4_up")
QUANTILES = (0.01, 0.5, 0.99)

HISTOGRAM_BINS = 513
HISTOGRAM_SCALE = 0.01
"""Scale of the bins: equal steps of asinh(log w / scale), fine around w = 1, where most tokens are, up to ±20."""
_HALF = HISTOGRAM_BINS // 2
_BIN_WIDTH = math.asinh(MAX_LOG_RATIO / HISTOGRAM_SCALE) / _HALF


@torch.no_grad()
def ratio_sums(
    logprobs: Float[Tensor, "N T"], behaviour_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> dict[str, Float[Tensor, ""]]:
    """Return Σw, Σw², number of valid tokens, Σ of k3 estimates of KL(π_behav‖π_θ), and largest w: float64 scalars.

    Float64, because w² spans 17 orders of magnitude within the clamp of ±20.
    """
    log_ratio_NT = log_ratio(logprobs, behaviour_logprobs, mask).double()
    valid_NT = mask.double()
    ratio_NT = log_ratio_NT.exp() * valid_NT
    return {
        "count": valid_NT.sum(),
        "ratio": ratio_NT.sum(),
        "ratio_squared": ratio_NT.square().sum(),
        # expm1: e^x − 1 would lose its digits near 0, where most tokens are.
        "kl": (torch.expm1(log_ratio_NT) - log_ratio_NT).sum(),
        "ratio_max": ratio_NT.max() if ratio_NT.numel() else ratio_NT.new_zeros(()),
    }


def health(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the metrics from reduced `ratio_sums`; empty if there was no valid token.

    - ``offpolicy/ess``: effective sample size as a share of the tokens, (Σw)²/(N·Σw²), in (0, 1]; 1 is on policy
      (Kong 1992).
    - ``offpolicy/kl``: mean per-token KL(π_behav‖π_θ), nats, k3 estimate.
    - ``offpolicy/ratio_max``: the largest w.
    """
    count = float(sums["count"])
    if count == 0:
        return {}
    return {
        "offpolicy/ess": float(sums["ratio"]) ** 2 / (count * float(sums["ratio_squared"])),
        "offpolicy/kl": float(sums["kl"]) / count,
        "offpolicy/ratio_max": float(sums["ratio_max"]),
    }


@torch.no_grad()
def lag_sums(
    logprobs: Float[Tensor, " M"],
    behaviour_logprobs: Float[Tensor, " M"],
    lags: Int[Tensor, " M"],
    per_token: Mapping[str, Float[Tensor, " M"] | Bool[Tensor, " M"]] | None = None,
) -> dict[str, Tensor]:
    """Return the sums of `ratio_sums` by lag, a histogram of log w, and the sum of each of ``per_token``; all float64.

    The arguments are for valid tokens only.

    ``lag/count``, ``lag/ratio``, ``lag/ratio_squared``, ``lag/kl``, ``lag/ratio_max`` and ``lag/sum/<name>`` are
    [`LAG_BUCKETS`], ``lag/histogram`` is [`LAG_BUCKETS`, `HISTOGRAM_BINS`]. They add up over micro-batches and ranks
    like `ratio_sums`, except the maximum (`MAX_REDUCED`).

    Args:
        logprobs: log π_θ.
        behaviour_logprobs: log π_behav.
        lags: the trainer's version minus the version that sampled the token, ≥ 0.
        per_token: further values that are averaged by lag, by name: clip and mask indicators, entropy.
    """
    every_M = torch.ones_like(lags, dtype=torch.bool)
    # In float64: squares of ratios are summed over all tokens, and one large ratio would swallow the rest in float32.
    log_ratio_M = log_ratio(logprobs, behaviour_logprobs, every_M).double()
    bucket_M = lags.long().clamp(max=LAG_BUCKETS - 1)
    ratio_M = log_ratio_M.exp()
    columns = {
        "lag/count": torch.ones_like(ratio_M),
        "lag/ratio": ratio_M,
        "lag/ratio_squared": ratio_M.square(),
        "lag/kl": torch.expm1(log_ratio_M) - log_ratio_M,
        **{f"lag/sum/{name}": values.detach().double() for name, values in (per_token or {}).items()},
    }
    # A product with the indicators of the lags is deterministic; a scatter on a GPU is not.
    indicator_MB = (bucket_M[:, None] == torch.arange(LAG_BUCKETS, device=bucket_M.device)).double()
    sums = dict(zip(columns, torch.stack(list(columns.values())) @ indicator_MB, strict=True))
    no_ratio_B = ratio_M.new_zeros(LAG_BUCKETS)
    sums["lag/ratio_max"] = no_ratio_B.scatter_reduce(0, bucket_M, ratio_M, "amax")
    place_M = torch.asinh(log_ratio_M / HISTOGRAM_SCALE) / _BIN_WIDTH
    bin_M = place_M.round().long().clamp(-_HALF, _HALF) + _HALF
    cells_M = bucket_M * HISTOGRAM_BINS + bin_M
    # Not by `bincount`, which waits for a GPU to learn how many bins there are. Sums of ones are exact in any order.
    counts = no_ratio_B.new_zeros(LAG_BUCKETS * HISTOGRAM_BINS).index_add_(0, cells_M, torch.ones_like(ratio_M))
    return sums | {"lag/histogram": counts.view(LAG_BUCKETS, HISTOGRAM_BINS)}


def lag_health(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics from reduced `lag_sums`; lags without a token have none. ``<lag>`` is a name in `LAG_NAMES`.

    - ``offpolicy/tokens/<lag>``: number of tokens.
    - ``offpolicy/ess/<lag>``, ``offpolicy/kl/<lag>``, ``offpolicy/ratio_max/<lag>``: as in `health`, over these tokens.
    - ``offpolicy/ratio_p01/<lag>``, ``…p50…``, ``…p99…``: quantiles of w, from the histogram: see `ratio_quantiles`.
    - ``offpolicy/<name>/<lag>``: the mean of each of ``per_token``.
    """
    metrics: dict[str, float] = {}
    for bucket, lag in enumerate(LAG_NAMES):
        own = {name.removeprefix("lag/"): value[bucket] for name, value in sums.items()}
        count = float(own["count"])
        if count == 0:
            continue
        metrics[f"offpolicy/tokens/{lag}"] = count
        metrics |= {f"{name}/{lag}": value for name, value in health(own).items()}
        quantiles = ratio_quantiles(own["histogram"], QUANTILES)
        metrics |= {f"offpolicy/ratio_p{100 * q:02.0f}/{lag}": w for q, w in zip(QUANTILES, quantiles, strict=True)}
        for name, value in own.items():
            if name.startswith("sum/"):
                metrics[f"offpolicy/{name.removeprefix('sum/')}/{lag}"] = float(value) / count
    return metrics


def ratio_quantiles(histogram: Float[Tensor, " bins"], quantiles: Sequence[float]) -> list[float]:
    """Return quantiles of w from a histogram of log w. A quantile between two neighbours is the lower one.

    The result is a bin's centre. A bin spans 0.00032 of log w around w = 1, so w is known to ±0.02 % there; far from it
    a bin spans 3.3 % of log w. The middle bin's centre is exactly w = 1.
    """
    cumulative = histogram.double().cumsum(0)
    wanted = torch.tensor(quantiles, dtype=torch.float64, device=histogram.device) * cumulative[-1]
    # At least half a token: a quantile of 0 would find the first bin, which may be empty.
    bins = torch.searchsorted(cumulative, wanted.clamp(min=0.5)).clamp(max=HISTOGRAM_BINS - 1)
    centres = torch.sinh((bins - _HALF).double() * _BIN_WIDTH) * HISTOGRAM_SCALE
    return [float(w) for w in centres.exp()]
