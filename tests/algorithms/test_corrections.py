"""Corrections against a scalar loop in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headway.algorithms.corrections import CORRECTIONS, CorrectionParams, build_correction, truncate
from headway.algorithms.losses import LossInputs
from headway.errors import ConfigError

SHAPE = (5, 7)


def inputs(seed: int = 0, scale: float = 1.0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale

    return LossInputs(
        logprobs=normal(),
        old_logprobs=normal(),
        behaviour_logprobs=normal(),
        advantages=normal(),
        mask=torch.rand(SHAPE, generator=generator) < 0.7,
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_truncate_is_the_smaller_of_ratio_and_bound(scale: float) -> None:
    given = inputs(scale=scale)
    weights, metrics = truncate(given, CorrectionParams(bound=2.0))
    for n in range(SHAPE[0]):
        for t in range(SHAPE[1]):
            if given.mask[n, t]:
                ratio = math.exp(float(given.old_logprobs[n, t]) - float(given.behaviour_logprobs[n, t]))
                assert float(weights[n, t]) == pytest.approx(min(ratio, 2.0), rel=1e-12)
                assert bool(metrics["correction/truncated"][n, t]) == (ratio > 2.0)


def test_with_the_behaviour_policy_as_anchor_every_weight_is_one() -> None:
    given = inputs()
    given.old_logprobs = given.behaviour_logprobs
    weights, _ = truncate(given, CorrectionParams(bound=1.5))
    assert torch.equal(weights, torch.ones(SHAPE, dtype=torch.float64))


def test_weights_carry_no_gradient_and_padding_may_hold_anything() -> None:
    given = inputs()
    given.old_logprobs = given.old_logprobs.masked_fill(~given.mask, -torch.inf).requires_grad_()
    given.behaviour_logprobs = given.behaviour_logprobs.masked_fill(~given.mask, torch.nan)
    weights, _ = truncate(given, CorrectionParams(bound=2.0))
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()


def test_an_unknown_correction_lists_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'truncate'.*known: .*mask.*truncate"):
        CORRECTIONS.get("truncat")


def test_a_correction_is_built_by_name_and_checked_before_it_runs() -> None:
    weights, _ = build_correction("truncate", CorrectionParams(bound=2.0))(inputs(), CorrectionParams(bound=2.0))
    assert torch.equal(weights, truncate(inputs(), CorrectionParams(bound=2.0))[0])
    for name, params, message in [
        ("mask", CorrectionParams(bound=0.5, lower=0.2), "exactly on policy"),
        ("mask", CorrectionParams(bound=2.0, delta=0.1), "delta has no effect"),
        ("off_policy_sequence_mask", CorrectionParams(), "needs a positive delta"),
        ("off_policy_sequence_mask", CorrectionParams(delta=0.1, bound=2.0), "bound has no effect"),
        ("off_policy_sequence_mask", CorrectionParams(delta=0.1, level="geometric"), "level has no effect"),
        ("trunctate", CorrectionParams(bound=2.0), "did you mean 'truncate'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_correction(name, params)


def test_a_correction_of_the_users_own_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(inputs, params):\n    return inputs.advantages * 0 + params.bound, {}\n"
    )
    weights, _ = build_correction(f"{tmp_path}/mine.py:half", CorrectionParams(bound=0.5))(
        inputs(), CorrectionParams(bound=0.5)
    )
    assert (weights == 0.5).all()
