"""KL estimators in expectation over a whole categorical distribution, and the off-policy health metrics."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headway.algorithms.health import MAX_REDUCED, health, ratio_sums
from headway.algorithms.kl import KINDS, kl_in_reward, kl_penalty
from headway.algorithms.scores import has_variance
from headway.errors import ConfigError
from tests.tiers import searched

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REF = torch.tensor([0.1, 0.4, -0.5, 0.2], dtype=torch.float64).log_softmax(-1)


def expected_penalty(logits: torch.Tensor, kind: str, sampler: torch.Tensor) -> torch.Tensor:
    """E over tokens sampled with probabilities ``sampler`` (held constant) of the penalty."""
    logprobs = logits.log_softmax(-1)
    return (sampler * kl_penalty(logprobs[None], REF[None], kind)[0]).sum()


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    logprobs = LOGITS.log_softmax(-1)
    torch.testing.assert_close(expected_penalty(LOGITS, kind, logprobs.exp()), exact_kl(logprobs, REF))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("k1", lambda logprobs: 0.0 * logprobs.sum()),
        ("k2", lambda logprobs: exact_kl(logprobs, REF)),
        ("k3", lambda logprobs: exact_kl(REF, logprobs)),
    ],
)
def test_each_estimators_gradient_is_the_one_its_documentation_names(kind: str, target) -> None:
    logits = LOGITS.clone().requires_grad_()
    sampler = logits.log_softmax(-1).exp().detach()
    (got,) = torch.autograd.grad(expected_penalty(logits, kind, sampler), logits)
    (expected,) = torch.autograd.grad(target(logits.log_softmax(-1)), logits)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)


def test_abs_has_the_gradient_of_no_divergence_but_pulls_back() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (got,) = torch.autograd.grad(expected_penalty(logits, "abs", logprobs.exp().detach()), logits, retain_graph=True)
    sign = (logprobs - REF).sign()
    (expected,) = torch.autograd.grad((logprobs.exp().detach() * sign * logprobs).sum(), logits)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)
    assert exact_kl((LOGITS - 1e-3 * got).log_softmax(-1), REF) < exact_kl(LOGITS.log_softmax(-1), REF)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_the_divergence(kind: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    sampler = logprobs.exp().detach()
    penalty = expected_penalty(logits, kind if kind == "k2" else f"{kind}+", sampler)
    torch.testing.assert_close(penalty, expected_penalty(LOGITS, kind, sampler))
    (got,) = torch.autograd.grad(penalty, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact_kl(logprobs, REF), logits)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_importance_weights_make_value_and_gradient_unbiased_on_stale_data(kind: str) -> None:
    behaviour = torch.tensor([-0.4, 0.9, 0.2, 0.3], dtype=torch.float64).log_softmax(-1)
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    penalty = (behaviour.exp() * kl_penalty(logprobs[None], REF[None], kind, None, behaviour[None])[0]).sum()
    kl = exact_kl(logprobs, REF)
    torch.testing.assert_close(penalty, kl)
    (got,) = torch.autograd.grad(penalty, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)


def test_importance_weights_and_a_plus_are_not_combined() -> None:
    with pytest.raises(ConfigError, match="both mend"):
        kl_penalty(REF[None], REF[None], "k3+", None, REF[None])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_in_the_reward_is_taken_off_each_token(kind: str) -> None:
    rewards = torch.tensor([[0.0, math.nan, 1.0]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, math.nan, -2.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5, -math.inf, -1.0]], dtype=torch.float64)
    shaped, kl = kl_in_reward(rewards, logprobs, ref, torch.tensor([[True, False, True]]), coef=0.1, kind=kind)
    value = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d, "abs": abs}[kind]
    assert kl[0].tolist() == pytest.approx([value(0.5), 0.0, value(-1.0)])
    assert shaped[0].tolist() == pytest.approx([-0.1 * value(0.5), 0.0, 1 - 0.1 * value(-1.0)])
    assert not shaped.requires_grad


def test_a_plus_in_the_reward_has_no_effect_and_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="use 'k3'"):
        kl_in_reward(one, one, one, one > 0, coef=0.1, kind="k3+")


@searched(100, st.floats(-25, 25), st.sampled_from(KINDS))
def test_the_penalty_of_one_token_is_the_formula(d: float, kind: str) -> None:
    x = max(-20.0, min(20.0, d))
    expected = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x, "abs": abs(x)}[kind.removesuffix("+")]
    got = kl_penalty(torch.tensor([[d]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64), kind).item()
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_k3_keeps_its_precision_near_zero() -> None:
    """exp(−d) − 1 + d is d²/2 there; taken literally in float32 it would be rounding noise."""
    d = 1e-3
    got = kl_penalty(torch.tensor([[d]]), torch.zeros(1, 1), "k3").item()
    assert got == pytest.approx(d * d / 2, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_positions_are_zero_whatever_they_hold(kind: str) -> None:
    logprobs = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    penalty = kl_penalty(logprobs, torch.tensor([[-2.0, -math.inf]]), kind, mask)
    penalty.sum().backward()
    assert penalty[0, 1].item() == 0.0
    assert logprobs.grad[0, 1].item() == 0.0
    assert torch.isfinite(logprobs.grad).all()


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_health_is_that_of_a_scalar_loop() -> None:
    new, old = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -9.0]])
    mask = torch.tensor([[True, True, False]])
    weights = [math.exp(0.5), math.exp(-1.0)]
    got = health(ratio_sums(new, old, mask))
    assert got["offpolicy/ess"] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    assert got["offpolicy/kl"] == pytest.approx(sum(w - 1 - math.log(w) for w in weights) / 2)
    assert got["offpolicy/ratio_max"] == pytest.approx(weights[0])


def test_on_policy_the_effective_sample_size_is_all_tokens() -> None:
    logprobs = torch.randn(3, 4)
    got = health(ratio_sums(logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool)))
    assert got == {"offpolicy/ess": 1.0, "offpolicy/kl": 0.0, "offpolicy/ratio_max": 1.0}


def merge_sums(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sums of several micro-batches as one."""
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name in MAX_REDUCED else merged[name] + value
    return merged


def test_sums_of_micro_batches_merge_to_those_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.4
    merged = merge_sums(ratio_sums(new[i : i + 2], old[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4))
    assert health(merged) == pytest.approx(health(ratio_sums(new, old, mask)))
    assert merged["ratio_max"] == ratio_sums(new, old, mask)["ratio_max"]


def test_extreme_ratios_stay_finite() -> None:
    new = torch.tensor([[0.0, -100.0, -math.inf]])
    old = torch.tensor([[-100.0, 0.0, -math.inf]])
    got = health(ratio_sums(new, old, torch.tensor([[True, True, False]])))
    assert all(math.isfinite(value) for value in got.values())
    assert got["offpolicy/ess"] == pytest.approx(0.5)


def test_without_a_valid_token_there_is_no_metric() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert health(ratio_sums(torch.zeros(2, 3), torch.zeros(2, 3), nothing)) == {}
    assert health(ratio_sums(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))) == {}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0, 1, 1], True), ([1, 1, 1], False), ([0.1] * 5, False), ([2.0], False), ([], False)],
)
def test_a_group_has_variance_when_two_rewards_differ(rewards: list[float], expected: bool) -> None:
    assert has_variance(np.asarray(rewards, dtype=np.float32)) is expected


def test_filters_and_registries_load_without_torch() -> None:
    code = "import sys, headway.algorithms.scores, headway.algorithms.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env={"PYTHONPATH": ":".join(sys.path)})
