"""The critic's loss against a scalar loop and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms.losses.clipped import value_loss

SHAPE = (5, 7)
CLIP = 0.5


def batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values on both sides of the clip range, and returns on both sides of the values; rows with holes."""
    g = torch.Generator().manual_seed(seed)
    old, change, returns = (torch.randn(SHAPE, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    mask = torch.rand(SHAPE, generator=g) < 0.7
    mask[1] = False
    return (old + change).requires_grad_(), old, old + 2 * returns, mask


def scalar_loss(value: float, old: float, target: float, cliprange: float | None) -> tuple[float, float]:
    """Loss of one token, and whether the clipped term was the larger one."""
    plain = (value - target) ** 2
    if cliprange is None:
        return plain / 2, 0.0
    near = min(max(value, old - cliprange), old + cliprange)
    clipped = (near - target) ** 2
    return max(plain, clipped) / 2, float(clipped > plain)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cliprange", [None, 0.05, CLIP, 100.0])
def test_the_loss_of_each_token_is_that_of_a_scalar_loop(seed: int, cliprange: float | None) -> None:
    values, old, returns, mask = batch(seed)
    losses, metrics = value_loss(values, old, returns, mask, cliprange=cliprange)
    assert losses.dtype == torch.float64
    for n in range(SHAPE[0]):
        for t in range(SHAPE[1]):
            loss, clipped = scalar_loss(values[n, t].item(), old[n, t].item(), returns[n, t].item(), cliprange)
            assert losses[n, t].item() == pytest.approx(loss if mask[n, t] else 0.0, rel=1e-12)
            assert metrics["vf_clipfrac"][n, t].item() == (clipped if mask[n, t] else 0.0)
    share = metrics["vf_clipfrac"][mask].mean()
    assert share == 0 if cliprange in (None, 100.0) else 0 < share < 1
    assert not metrics["vf_clipfrac"].requires_grad


@pytest.mark.parametrize("cliprange", [None, CLIP])
def test_the_gradient_is_that_of_finite_differences(cliprange: float | None) -> None:
    values, old, returns, mask = batch(seed=7)

    def total(at: Tensor) -> Tensor:
        return value_loss(at, old, returns, mask, cliprange=cliprange)[0].sum()

    (gradient,) = torch.autograd.grad(total(values), values)
    h = 1e-6
    for n in range(SHAPE[0]):
        for t in range(SHAPE[1]):
            bump = torch.zeros(SHAPE, dtype=torch.float64)
            bump[n, t] = h
            with torch.no_grad():
                slope = (total(values + bump) - total(values - bump)) / (2 * h)
            assert gradient[n, t].item() == pytest.approx(slope.item(), abs=1e-7)
    assert (gradient[~mask] == 0).all()


def test_beyond_the_range_a_value_that_moves_on_towards_its_return_has_no_gradient_and_one_that_left_it_has() -> None:
    """Old values 0, ε = 0.5. The third token is beyond the range on the wrong side: it must be free to come back."""
    values = torch.tensor([[0.4, 0.9, 0.9]], requires_grad=True)
    returns = torch.tensor([[2.0, 2.0, -2.0]])
    losses, _ = value_loss(values, torch.zeros(1, 3), returns, torch.ones(1, 3, dtype=torch.bool), cliprange=0.5)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor([[1.6**2, 1.5**2, 2.9**2]]) / 2)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[-1.6, 0.0, 2.9]]))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(1e-3, 10))
def test_clipping_only_ever_raises_the_loss(seed: int, cliprange: float) -> None:
    values, old, returns, mask = batch(seed)
    plain, _ = value_loss(values, old, returns, mask, cliprange=None)
    clipped, metrics = value_loss(values, old, returns, mask, cliprange=cliprange)
    assert (clipped >= plain).all()
    assert torch.equal(clipped > plain, metrics["vf_clipfrac"] == 1)


@pytest.mark.parametrize("cliprange", [None, CLIP])
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
def test_padding_leaves_no_trace(padding: float, cliprange: float | None) -> None:
    values, old, returns, mask = batch(seed=3)
    padded = [t.detach().masked_fill(~mask, padding) for t in (values, old, returns)]
    padded[0].requires_grad_()
    got, metrics = value_loss(padded[0], padded[1], padded[2], mask, cliprange=cliprange)
    expected, expected_metrics = value_loss(values, old, returns, mask, cliprange=cliprange)
    assert torch.equal(got, expected)
    assert (got[~mask] == 0).all()
    assert torch.equal(metrics["vf_clipfrac"], expected_metrics["vf_clipfrac"])
    (gradient,) = torch.autograd.grad(got.sum(), padded[0])
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), values)[0])
    assert gradient.isfinite().all() and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("cliprange", [None, CLIP])
def test_with_nothing_to_learn_from_loss_and_gradient_are_zero(cliprange: float | None) -> None:
    values, old, returns, mask = batch(seed=1)
    losses, _ = value_loss(values, old, returns, torch.zeros_like(mask), cliprange=cliprange)
    assert (losses == 0).all()
    assert (torch.autograd.grad(losses.sum(), values)[0] == 0).all()


def test_old_values_and_returns_get_no_gradient() -> None:
    values, old, returns, mask = batch(seed=2)
    old.requires_grad_(), returns.requires_grad_()
    value_loss(values, old, returns, mask, cliprange=CLIP)[0].sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_is_in_float32_at_least(dtype: torch.dtype) -> None:
    """In bfloat16 the difference of a value near 100 and its return would be lost."""
    values, old, returns, mask = batch(seed=4, dtype=dtype)
    losses, _ = value_loss(values, old, returns, mask, cliprange=CLIP)
    wide = [t.detach().double() for t in (values, old, returns)]
    expected, _ = value_loss(wide[0], wide[1], wide[2], mask, cliprange=CLIP)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
