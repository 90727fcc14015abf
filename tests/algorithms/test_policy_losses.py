"""PPO's clipped loss and its aggregation against scalar loops, finite differences and arbitrary splits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms.aggregation import AGGREGATIONS, token_weights
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
from headway.config.sections.losses import PpoClip
from headway.errors import ConfigError
from tests.tiers import searched

PARAMS = PolicyLossParams(PpoClip(), 0.2, 0.28)
LONGEST = 16.0
ppo_clip = POLICY_LOSSES.get("ppo_clip")


def batch(seed: int, rows: int = 5, length: int = 7, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Random rows of ragged lengths (some empty), with log-ratios well inside and outside the clip range."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(rows, length, generator=g, dtype=dtype)
    old = logprobs + 0.4 * torch.randn(rows, length, generator=g, dtype=dtype)
    lengths = torch.randint(0, length + 1, (rows, 1), generator=g)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=old,
        advantages=torch.randn(rows, length, generator=g, dtype=dtype),
        mask=torch.arange(length) < lengths,
    )


def scalar_loss(new: float, old: float, advantage: float) -> float:
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - PARAMS.clip_low), 1 + PARAMS.clip_high)
    return -min(ratio * advantage, clipped * advantage)


def reduced(inputs: LossInputs, mode: str, rows: Tensor, totals: LossInputs) -> Tensor:
    """The loss of some rows, normalised by the totals of the whole batch."""
    part = LossInputs(
        *(t[rows] for t in (inputs.logprobs, inputs.old_logprobs, inputs.behaviour_logprobs, inputs.advantages)),
        mask=inputs.mask[rows],
    )
    losses, _ = ppo_clip(part, PARAMS)
    weights = token_weights(
        part.mask,
        mode,
        total_tokens=float(totals.mask.sum()),
        total_sequences=float(totals.mask.any(dim=1).sum()),
        loss_scale_factor=LONGEST,
    )
    return (weights * losses).sum()


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_each_token_is_that_of_a_scalar_loop(seed: int) -> None:
    inputs = batch(seed)
    losses, _ = ppo_clip(inputs, PARAMS)
    for n in range(losses.shape[0]):
        for t in range(losses.shape[1]):
            arguments = (inputs.logprobs[n, t].item(), inputs.old_logprobs[n, t].item(), inputs.advantages[n, t].item())
            expected = scalar_loss(*arguments) if inputs.mask[n, t] else 0.0
            assert losses[n, t].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_the_gradient_is_that_of_finite_differences(mode: str) -> None:
    inputs = batch(seed=11)
    everything = torch.arange(len(inputs.mask))
    (gradient,) = torch.autograd.grad(reduced(inputs, mode, everything, inputs), inputs.logprobs)
    h = 1e-6
    for n in range(gradient.shape[0]):
        for t in range(gradient.shape[1]):
            bump = torch.zeros_like(inputs.logprobs)
            bump[n, t] = h
            values = []
            for sign in (1, -1):
                moved = batch(seed=11)
                moved.logprobs = (moved.logprobs + sign * bump).detach()
                values.append(reduced(moved, mode, everything, moved).item())
            assert gradient[n, t].item() == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-7)


def test_token_mean_is_the_mean_over_valid_tokens() -> None:
    inputs = batch(seed=2)
    losses, _ = ppo_clip(inputs, PARAMS)
    got = reduced(inputs, "token-mean", torch.arange(5), inputs)
    assert got.item() == pytest.approx(losses[inputs.mask].mean().item(), rel=1e-6)


def test_sequence_mean_is_the_mean_of_each_answers_token_mean() -> None:
    inputs = batch(seed=3)
    losses, _ = ppo_clip(inputs, PARAMS)
    means = [row[m].mean().item() for row, m in zip(losses, inputs.mask, strict=True) if m.any()]
    got = reduced(inputs, "seq-mean-token-mean", torch.arange(5), inputs)
    assert got.item() == pytest.approx(sum(means) / len(means), rel=1e-6)


@searched(30, st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(AGGREGATIONS.names()))
def test_any_split_into_micro_batches_gives_the_same_gradient(seed: int, parts: int, mode: str) -> None:
    inputs = batch(seed)
    whole = reduced(inputs, mode, torch.arange(5), inputs)
    (expected,) = torch.autograd.grad(whole, inputs.logprobs, retain_graph=True)
    order = random.Random(seed).sample(range(5), 5)
    losses = [reduced(inputs, mode, torch.tensor(order[i::parts], dtype=torch.long), inputs) for i in range(parts)]
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), inputs.logprobs)
    torch.testing.assert_close(torch.stack(losses).sum(), whole, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("padding", [0.0, -math.inf, math.inf, math.nan])
def test_padding_gives_exactly_zero_and_leaves_no_trace_in_the_gradient(padding: float) -> None:
    inputs = batch(seed=5)
    clean, _ = ppo_clip(inputs, PARAMS)
    (expected,) = torch.autograd.grad(clean.sum(), inputs.logprobs)
    dirty = LossInputs(
        *(
            t.detach().masked_fill(~inputs.mask, padding)
            for t in (inputs.logprobs, inputs.old_logprobs, inputs.behaviour_logprobs, inputs.advantages)
        ),
        mask=inputs.mask,
    )
    dirty.logprobs.requires_grad_()
    losses, metrics = ppo_clip(dirty, PARAMS)
    (gradient,) = torch.autograd.grad(losses.sum(), dirty.logprobs)
    assert (losses[~inputs.mask] == 0).all()
    assert all((values[~inputs.mask] == 0).all() for values in metrics.values())
    torch.testing.assert_close(losses, clean)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("log_ratio", [20.0, -20.0, 80.0, -80.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_stay_finite_in_float32(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    zero = torch.zeros(1, 1)
    losses, metrics = ppo_clip(
        LossInputs(logprobs, zero, zero, torch.full((1, 1), advantage), torch.ones(1, 1, dtype=torch.bool)), PARAMS
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(values).all() for values in metrics.values())
    assert losses.item() == pytest.approx(scalar_loss(max(-20.0, min(20.0, log_ratio)), 0.0, advantage), rel=1e-6)


def test_a_ratio_of_e_to_the_20_against_a_bad_answer_still_has_its_gradient() -> None:
    logprobs = torch.tensor([[20.0]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    ppo_clip(LossInputs(logprobs, zero, zero, zero - 1, torch.ones(1, 1, dtype=torch.bool)), PARAMS)[0].sum().backward()
    assert logprobs.grad.item() == pytest.approx(math.exp(20.0))


def test_clipping_counts_only_where_it_changes_the_loss() -> None:
    """Ratio above the range, below it and inside it, for a good and a bad answer."""
    ratios = torch.tensor([[1.5, 0.5, 1.0, 1.5, 0.5, 1.0]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    zero = torch.zeros(1, 6)
    losses, metrics = ppo_clip(LossInputs(ratios, zero, zero, advantages, torch.ones(1, 6, dtype=torch.bool)), PARAMS)
    losses.sum().backward()
    assert metrics["clip_fraction"].tolist() == [[1, 0, 0, 0, 1, 0]]
    assert (ratios.grad == 0).tolist() == [[True, False, False, False, True, False]]
    assert losses[0, 0].item() == pytest.approx(-1.28)
    assert losses[0, 4].item() == pytest.approx(0.8)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    """At ratio 1 the loss is −A and its gradient −A: both branches of the minimum agree, and none is counted twice."""
    inputs = batch(seed=9)
    inputs.old_logprobs = inputs.logprobs.detach().clone()
    losses, metrics = ppo_clip(inputs, PARAMS)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    expected = torch.where(inputs.mask, -inputs.advantages, 0.0)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(losses.detach(), expected)
    assert not any(values.any() for values in metrics.values())


def test_only_the_new_log_probs_get_a_gradient() -> None:
    inputs = batch(seed=4)
    inputs.old_logprobs = inputs.old_logprobs.clone().requires_grad_()
    inputs.advantages = inputs.advantages.clone().requires_grad_()
    losses, metrics = ppo_clip(inputs, PARAMS)
    losses.sum().backward()
    assert inputs.old_logprobs.grad is None
    assert inputs.advantages.grad is None
    assert not any(values.requires_grad for values in metrics.values())


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_a_micro_batch_without_valid_tokens_weighs_nothing(mode: str) -> None:
    inputs = batch(seed=1)
    inputs.mask = torch.zeros_like(inputs.mask)
    losses, _ = ppo_clip(inputs, PARAMS)
    for totals in ({"total_tokens": 12.0, "total_sequences": 3.0}, {"total_tokens": 0.0, "total_sequences": 0.0}):
        loss = (token_weights(inputs.mask, mode, **totals, loss_scale_factor=LONGEST) * losses).sum()
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs, retain_graph=True)
        assert loss.item() == 0.0
        assert (gradient == 0).all()


@searched(100, st.integers(0, 10_000), st.sampled_from(["token-mean", "seq-mean-token-mean"]))
def test_weights_of_a_mean_over_a_whole_batch_sum_to_one(seed: int, mode: str) -> None:
    mask = batch(seed).mask
    total = float(mask.any(dim=1).sum())
    weights = token_weights(mask, mode, total_tokens=float(mask.sum()), total_sequences=total)
    assert weights.sum().item() == pytest.approx(1.0 if total else 0.0, rel=1e-6)


def test_the_sum_over_an_answer_is_averaged_over_answers() -> None:
    inputs = batch(seed=3)
    losses, _ = ppo_clip(inputs, PARAMS)
    sums = [row[m].sum().item() for row, m in zip(losses, inputs.mask, strict=True) if m.any()]
    everything = torch.arange(5)
    assert reduced(inputs, "seq-mean-token-sum", everything, inputs).item() == pytest.approx(
        sum(sums) / len(sums), rel=1e-6
    )
    assert reduced(inputs, "seq-mean-token-sum-norm", everything, inputs).item() == pytest.approx(
        sum(sums) / len(sums) / LONGEST, rel=1e-6
    )


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_a_constant_length_must_be_given(constant: float | None) -> None:
    with pytest.raises(ConfigError, match=r"actor.loss_scale_factor.*max_response_length"):
        token_weights(
            torch.ones(1, 1, dtype=torch.bool),
            "seq-mean-token-sum-norm",
            total_tokens=1,
            total_sequences=1,
            loss_scale_factor=constant,
        )


def test_bfloat16_log_probs_are_computed_in_float32() -> None:
    inputs = batch(seed=6, dtype=torch.bfloat16)
    assert ppo_clip(inputs, PARAMS)[0].dtype == torch.float32


def test_unknown_losses_and_aggregations_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'ppo_clip'.*known: .*gspo.*ppo_clip"):
        POLICY_LOSSES.get("ppo-clip")
    with pytest.raises(ConfigError, match=r"actor.loss_agg_mode.*'mean'.*token-mean"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), "mean", total_tokens=1, total_sequences=1)
