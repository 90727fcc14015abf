"""Health by lag against scalar loops; quantiles against sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headway.algorithms.health import (
    HISTOGRAM_BINS,
    LAG_BUCKETS,
    LAG_NAMES,
    health,
    lag_health,
    lag_sums,
    ratio_quantiles,
    ratio_sums,
)
from tests.algorithms.test_kl_and_health import merge_sums
from tests.tiers import searched


def batch(seed: int, rows: int = 6, length: int = 50) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    new, noise = (torch.randn(rows, length, generator=g) for _ in range(2))
    lags = torch.randint(0, 8, (rows, length), generator=g)
    return new, new - 0.1 * (1 + lags) * noise, torch.rand(rows, length, generator=g) < 0.7, lags


def valid_sums(
    new: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    lags: torch.Tensor,
    per_token: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    per_token = {name: values[mask] for name, values in (per_token or {}).items()}
    return lag_sums(new[mask], old[mask], lags[mask], per_token)


def test_each_lag_has_the_metrics_of_its_own_tokens() -> None:
    new, old, mask, lags = batch(0)
    clipped, entropy = new > 0.5, new.abs()
    got = lag_health(valid_sums(new, old, mask, lags, {"clip_fraction": clipped, "entropy": entropy}))
    for bucket, lag in enumerate(LAG_NAMES):
        own = mask & ((lags == bucket) if bucket < LAG_BUCKETS - 1 else (lags >= bucket))
        for name, value in health(ratio_sums(new, old, own)).items():
            assert got[f"{name}/{lag}"] == pytest.approx(value, rel=1e-9)
        assert got[f"offpolicy/tokens/{lag}"] == int(own.sum())
        assert got[f"offpolicy/clip_fraction/{lag}"] == pytest.approx(float(clipped[own].double().mean()))
        assert got[f"offpolicy/entropy/{lag}"] == pytest.approx(float(entropy[own].double().mean()))
        ordered = np.sort((new - old)[own].double().numpy())
        for q in (1, 50, 99):
            exact = ordered[max(math.ceil(q / 100 * len(ordered)), 1) - 1]
            assert math.log(got[f"offpolicy/ratio_p{q:02d}/{lag}"]) == pytest.approx(exact, rel=0.0167, abs=0.00017)


@searched(50, st.lists(st.floats(-20, 20), min_size=1, max_size=40), st.floats(0, 1))
def test_a_quantile_is_within_half_a_bin_of_the_exact_one(log_ratios: list[float], q: float) -> None:
    x = torch.tensor(log_ratios, dtype=torch.float64)
    sums = lag_sums(x, torch.zeros_like(x), torch.zeros_like(x).long())
    (got,) = ratio_quantiles(sums["lag/histogram"][0], [q])
    exact = sorted(log_ratios)[max(math.ceil(q * len(log_ratios) - 1e-9), 1) - 1]
    assert math.log(got) == pytest.approx(exact, rel=0.0167, abs=0.00017)


def test_on_policy_every_quantile_is_exactly_one() -> None:
    x = torch.randn(12)
    got = lag_health(lag_sums(x, x, torch.ones_like(x).long()))
    assert got == {
        "offpolicy/tokens/lag_1": 12.0,
        "offpolicy/ess/lag_1": 1.0,
        "offpolicy/kl/lag_1": 0.0,
        "offpolicy/ratio_max/lag_1": 1.0,
        "offpolicy/ratio_p01/lag_1": 1.0,
        "offpolicy/ratio_p50/lag_1": 1.0,
        "offpolicy/ratio_p99/lag_1": 1.0,
    }


def test_sums_of_any_split_merge_to_those_of_the_batch() -> None:
    new, old, mask, lags = batch(1)
    parts = (valid_sums(new[rows], old[rows], mask[rows], lags[rows]) for rows in ([3], [0, 5, 1], [2, 4]))
    merged, whole = merge_sums(parts), valid_sums(new, old, mask, lags)
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value)
        assert value.dtype == torch.float64
        assert value.shape == ((LAG_BUCKETS, HISTOGRAM_BINS) if name == "lag/histogram" else (LAG_BUCKETS,))


def test_lags_add_up_to_the_whole() -> None:
    new, old, mask, lags = batch(2)
    by_lag, whole = valid_sums(new, old, mask, lags), ratio_sums(new, old, mask)
    for name, value in whole.items():
        part = by_lag[f"lag/{name}"]
        torch.testing.assert_close(part.max() if name == "ratio_max" else part.sum(), value)


def test_extremes_are_finite() -> None:
    new, old, lags = torch.tensor([0.0, -100.0]), torch.tensor([-100.0, 0.0]), torch.tensor([0, 0])
    got = lag_health(lag_sums(new, old, lags, {"entropy": torch.tensor([1.0, 2.0])}))
    assert all(math.isfinite(value) for value in got.values())
    assert got["offpolicy/ratio_p99/lag_0"] == pytest.approx(math.exp(20))
    assert got["offpolicy/ratio_p01/lag_0"] == pytest.approx(math.exp(-20))
    assert got["offpolicy/entropy/lag_0"] == 1.5


def test_without_a_valid_token_there_is_no_metric() -> None:
    nothing = torch.zeros(0)
    assert lag_health(lag_sums(nothing, nothing, nothing.long(), {"entropy": nothing})) == {}
