"""Tokens that are rows of their own give what padded rows give: every loss, correction and aggregation."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from headway.algorithms.aggregation import AGGREGATIONS, token_weights
from headway.algorithms.corrections import CORRECTIONS, CorrectionParams
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, anywhere_in_sequence, sequence_mean, sequence_sum
from headway.algorithms.losses.clipped import value_loss
from tests.algorithms.test_policy_loss_family import PARAMS
from tests.tiers import searched

uneven = st.lists(st.one_of(st.integers(1, 4), st.sampled_from([9, 70])), min_size=1, max_size=7)
"""Numbers of response tokens of each row."""
BOUNDED = [
    CorrectionParams(bound=1.1, lower=0.9),
    CorrectionParams(bound=1.1, level="sequence"),
    CorrectionParams(bound=1.02, lower=0.98, level="geometric", veto=0.7),
]
CASES = [(name, params) for name in ("truncate", "mask", "reject") for params in BOUNDED]
CASES += [("veto", CorrectionParams(lower=0.8)), ("off_policy_sequence_mask", CorrectionParams(delta=0.02))]


def padded(lengths: list[int], seed: int) -> tuple[LossInputs, Tensor]:
    """Rows with holes, NaN where they are padded, and the mask [N, T] of what is no padding."""
    g = torch.Generator().manual_seed(seed)
    present = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def near(centre: Tensor | float, scale: float) -> Tensor:
        return (centre + scale * torch.randn(present.shape, generator=g)).masked_fill(~present, torch.nan)

    old = near(-2.0, 0.5)
    return LossInputs(
        logprobs=near(old, 0.3).requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=near(old, 0.1),
        advantages=near(0.0, 1.0),
        mask=present & (torch.rand(present.shape, generator=g) < 0.8),
        finished=torch.rand(len(lengths), generator=g) < 0.5,
    ), present


def flat(inputs: LossInputs, present: Tensor) -> LossInputs:
    row = present.nonzero()[:, 0]
    tokens = {
        field.name: value[present][:, None]
        for field in fields(inputs)
        if (value := getattr(inputs, field.name)) is not None and value.ndim == 2
    }
    assert inputs.finished is not None
    return LossInputs(**tokens, finished=inputs.finished[row], episodes=row)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@searched(25, lengths=uneven, seed=st.integers(0, 99))
def test_every_loss_has_the_values_metrics_and_gradient_of_padded_rows(
    name: str, lengths: list[int], seed: int
) -> None:
    inputs, present = padded(lengths, seed)
    values, metrics = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
    (gradient,) = torch.autograd.grad(values.masked_fill(~inputs.mask, 0.0).sum(), inputs.logprobs)
    leaf = replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())
    flat_values, flat_metrics = POLICY_LOSSES.get(name)(flat(leaf, present), PARAMS[name])
    flat_values.masked_fill(~inputs.mask[present][:, None], 0.0).sum().backward()
    # To float32 rounding: sequences are added up in another order, and vectorised functions round otherwise at an end.
    torch.testing.assert_close(flat_values[:, 0], values[present], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(leaf.logprobs.grad, gradient, rtol=1e-5, atol=1e-7)
    assert flat_metrics.keys() == metrics.keys()
    for key, metric in metrics.items():
        torch.testing.assert_close(flat_metrics[key][:, 0], metric[present], rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize(("name", "params"), CASES)
@searched(25, lengths=uneven, seed=st.integers(0, 99))
def test_every_correction_has_the_weights_and_metrics_of_padded_rows(
    name: str, params: CorrectionParams, lengths: list[int], seed: int
) -> None:
    assert {case for case, _ in CASES} == set(CORRECTIONS.names())
    inputs, present = padded(lengths, seed)
    weights, metrics = CORRECTIONS.get(name)(inputs, params)
    flat_weights, flat_metrics = CORRECTIONS.get(name)(flat(inputs, present), params)
    torch.testing.assert_close(flat_weights[:, 0], weights[present], rtol=1e-5, atol=1e-7)
    assert flat_metrics.keys() == metrics.keys()
    for key, metric in metrics.items():
        torch.testing.assert_close(flat_metrics[key][:, 0], metric[present], rtol=1e-5, atol=1e-7, msg=key)


@searched(50, uneven, st.integers(0, 99), st.sampled_from(AGGREGATIONS.names()))
def test_every_aggregation_has_the_weights_of_padded_rows(lengths: list[int], seed: int, mode: str) -> None:
    inputs, present = padded(lengths, seed)
    totals = {"total_tokens": 17.0, "total_sequences": 3.0, "loss_scale_factor": 7.0}
    own = inputs.mask.sum(dim=1)
    weights = token_weights(inputs.mask, mode, **totals)
    flat_weights = token_weights(inputs.mask[present][:, None], mode, **totals, lengths=own[present.nonzero()[:, 0]])
    assert torch.equal(flat_weights[:, 0], weights[present])


@searched(
    50, st.lists(st.sampled_from([-7, 0, 3, 2**40]), min_size=1, max_size=9), st.integers(1, 3), st.integers(0, 99)
)
def test_a_sequence_is_all_rows_of_its_label_whatever_the_labels_are_and_wherever_the_rows_stand(
    labels: list[int], width: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(len(labels), width, generator=g) < 0.7
    values = torch.randn(len(labels), width, generator=g).masked_fill(~mask, 0.0).requires_grad_()
    episodes = torch.tensor(labels)
    same = (episodes[:, None] == episodes[None, :]).double()
    expected, count = same @ values.double().sum(1, keepdim=True), same @ mask.double().sum(1, keepdim=True)
    torch.testing.assert_close(sequence_sum(values, episodes), expected)
    torch.testing.assert_close(sequence_mean(values, mask, episodes), (expected / count.clamp(min=1)).float())
    assert torch.equal(
        anywhere_in_sequence(~mask, episodes), ((same @ (~mask).double()).sum(1) > 0)[:, None].expand_as(mask)
    )
    (gradient,) = torch.autograd.grad(sequence_sum(values, episodes).sum(), values)
    assert torch.equal(gradient, same.sum(1, keepdim=True).float().expand_as(values))


@searched(100, uneven, st.integers(0, 99), st.sampled_from([None, 0.2]))
def test_the_critics_loss_is_that_of_padded_rows(lengths: list[int], seed: int, cliprange: float | None) -> None:
    inputs, present = padded(lengths, seed)
    given_NT = (inputs.logprobs.detach(), inputs.old_logprobs, inputs.advantages, inputs.mask)
    losses, _ = value_loss(*given_NT, cliprange=cliprange)
    flat_losses, _ = value_loss(*(values[present][:, None] for values in given_NT), cliprange=cliprange)
    torch.testing.assert_close(flat_losses[:, 0], losses[present])
