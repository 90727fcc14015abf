"""π_prox by interpolation, and what the three policies come to where they are one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms.corrections import CORRECTIONS, CorrectionParams, log_linear_prox
from headway.algorithms.losses import LossInputs, PolicyLossParams, ppo_clip
from headway.config.sections.losses import PpoClip

SHAPE = (4, 6)
EVERY_TOKEN = torch.ones(SHAPE, dtype=torch.bool)


def random(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 20), st.floats(0, 3))
def test_it_is_exact_where_log_probs_move_linearly_with_the_version(seed: int, prox: int, ahead: float) -> None:
    at_zero, slope = random(seed), random(seed + 1)
    versions = torch.randint(0, prox + 1, SHAPE, generator=torch.Generator().manual_seed(seed))

    def policy(version: Tensor | float) -> Tensor:
        return at_zero + slope * version

    got = log_linear_prox(
        policy(versions), policy(prox + ahead), versions, EVERY_TOKEN, prox_version=prox, version=prox + ahead
    )
    torch.testing.assert_close(got, policy(float(prox)), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 6), st.floats(0, 3))
def test_it_lies_between_the_two_policies(seed: int, prox: int, ahead: float) -> None:
    behaviour, current = random(seed), random(seed + 1)
    versions = torch.randint(0, prox + 3, SHAPE, generator=torch.Generator().manual_seed(seed))
    got = log_linear_prox(behaviour, current, versions, EVERY_TOKEN, prox_version=prox, version=prox + ahead)
    assert (got >= torch.minimum(behaviour, current) - 1e-12).all()
    assert (got <= torch.maximum(behaviour, current) + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ahead", [0.0, 0.25, 1.0])
def test_a_token_of_the_anchors_version_has_exactly_the_behaviour_policy(dtype: torch.dtype, ahead: float) -> None:
    behaviour, current = random(0, dtype), random(1, dtype)
    versions = torch.full(SHAPE, 5)
    got = log_linear_prox(behaviour, current, versions, EVERY_TOKEN, prox_version=5, version=5 + ahead)
    assert torch.equal(got, behaviour)


def test_before_the_first_step_an_older_token_has_exactly_the_current_policy() -> None:
    behaviour, current = random(0, torch.float32), random(1, torch.float32).requires_grad_()
    got = log_linear_prox(behaviour, current, torch.full(SHAPE, 3), EVERY_TOKEN, prox_version=5, version=5)
    assert torch.equal(got, current)
    assert not got.requires_grad


def test_each_token_has_its_own_share() -> None:
    """One answer over versions 0, 2 and 3; the anchor is 3, the current policy 4."""
    behaviour, current = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.4, -2.4, -3.4]])
    got = log_linear_prox(
        behaviour, current, torch.tensor([[0, 2, 3]]), torch.ones(1, 3, dtype=torch.bool), prox_version=3, version=4
    )
    torch.testing.assert_close(got, torch.tensor([[-1.3, -2.2, -3.0]]))


@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
def test_padding_leaves_no_trace(padding: float) -> None:
    mask = random(7) > 0
    versions = torch.where(mask, 2, -(10**9))
    behaviour, current = (random(s).masked_fill(~mask, padding) for s in (0, 1))
    got = log_linear_prox(behaviour, current, versions, mask, prox_version=3, version=4)
    assert (got[~mask] == 0).all()
    torch.testing.assert_close(got[mask], (0.5 * (behaviour + current))[mask])


def test_an_anchor_in_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match=r"before .*π_prox"):
        log_linear_prox(random(0), random(1), torch.zeros(SHAPE), EVERY_TOKEN, prox_version=3, version=2)


CORRECTED = [
    ("truncate", CorrectionParams(2.0)),
    ("mask", CorrectionParams(2.0, 0.5)),
    ("reject", CorrectionParams(1.01, 0.99, "geometric", veto=1e-4)),
    ("mask", CorrectionParams(2.0, 0.5, "sequence")),
    ("veto", CorrectionParams(lower=1e-4)),
]


@pytest.mark.parametrize(("name", "params"), CORRECTED)
@pytest.mark.parametrize("steps", [0, 1])
def test_without_staleness_decoupled_ppo_is_ppo_to_the_last_bit(
    name: str, params: CorrectionParams, steps: int
) -> None:
    """π_behav = π_prox, and π_θ the same or some steps on: the weights are 1, losses and gradients equal."""
    behaviour = -random(0, torch.float32).abs()
    current = (behaviour + 0.3 * steps * random(1, torch.float32)).requires_grad_()
    inputs = LossInputs(current, behaviour, behaviour, random(2, torch.float32), random(3) > -0.5)
    weights, _ = CORRECTIONS.get(name)(inputs, params)
    plain, _ = ppo_clip(inputs, PolicyLossParams(PpoClip()))
    (expected,) = torch.autograd.grad(plain.sum(), current, retain_graph=True)
    (gradient,) = torch.autograd.grad((weights * plain).sum(), current)
    assert torch.equal(weights * plain, plain)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("name", "params"), CORRECTED)
def test_with_one_version_all_ways_to_the_anchor_agree(name: str, params: CorrectionParams) -> None:
    """Taken as π_behav, recomputed (the same policy) or interpolated: at every step of the version."""
    behaviour = -random(0, torch.float32).abs()
    versions = torch.full(SHAPE, 7)
    for step in range(4):
        current = behaviour + 0.1 * step * random(1, torch.float32)
        interpolated = log_linear_prox(behaviour, current, versions, EVERY_TOKEN, prox_version=7, version=7 + step / 4)
        results = []
        for anchor in (behaviour, behaviour.clone(), interpolated):
            inputs = LossInputs(current, anchor, behaviour, random(2, torch.float32), EVERY_TOKEN)
            weights, _ = CORRECTIONS.get(name)(inputs, params)
            results.append(weights * ppo_clip(inputs, PolicyLossParams(PpoClip()))[0])
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
