"""Every level, action and bound against a scalar loop in float64; and what cannot be built."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headway.algorithms.aggregation import token_weights
from headway.algorithms.corrections import (
    CORRECTIONS,
    CorrectionParams,
    RatioCorrection,
    off_policy_sequence_mask,
    product,
    truncate,
)
from headway.algorithms.losses import LossInputs, PolicyLossParams, ppo_clip
from headway.config.sections.losses import PpoClip
from headway.errors import ConfigError

LEVELS = ("token", "sequence", "geometric")
ACTIONS = ("truncate", "mask", "reject", "veto")
BOUNDS = ((1.5, None), (None, 0.7), (1.5, 0.7))
BUILT = [
    (action, level, upper, lower, veto)
    for action, level, (upper, lower), veto in itertools.product(ACTIONS, LEVELS, BOUNDS, (None, 0.6))
    if action != "veto" or (level == "token" and veto is None)
]


def batch(seed: int = 0, rows: int = 6, length: int = 7, scale: float = 0.3) -> LossInputs:
    g = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, length, generator=g, dtype=torch.float64) * scale

    mask = torch.rand(rows, length, generator=g) < 0.7
    mask[-1] = False
    return LossInputs(normal(), normal(), normal(), normal(), mask)


def expected_weights(given: LossInputs, action: str, level: str, upper, lower, veto) -> list[dict[int, float]]:
    """For each row, the weight of each of its valid tokens."""
    rows = []
    for n, mask in enumerate(given.mask):
        places = mask.nonzero().flatten().tolist()
        token = {t: math.exp(float(given.old_logprobs[n, t] - given.behaviour_logprobs[n, t])) for t in places}
        whole = math.prod(token.values())
        ratio = {
            "token": token,
            "sequence": dict.fromkeys(places, whole),
            "geometric": dict.fromkeys(places, whole ** (1 / max(len(places), 1))),
        }[level]
        low, high = lower or 0.0, upper or math.inf
        outside = {t: not low <= r <= high for t, r in ratio.items()}
        match action:
            case "truncate":
                weights = {t: min(max(r, low), high) for t, r in ratio.items()}
            case "mask":
                weights = {t: 0.0 if outside[t] else r for t, r in ratio.items()}
            case "reject":
                weights = {t: 0.0 if outside[t] else 1.0 for t in places}
            case _:
                weights = dict.fromkeys(places, 0.0 if any(outside.values()) else 1.0)
        if veto is not None and any(r < veto for r in token.values()):
            weights = dict.fromkeys(places, 0.0)
        rows.append(weights)
    return rows


@pytest.mark.parametrize(("action", "level", "upper", "lower", "veto"), BUILT)
def test_weights_are_those_of_a_scalar_loop(action, level, upper, lower, veto) -> None:
    for seed in range(3):
        given = batch(seed)
        weights, metrics = RatioCorrection(action, level, upper, lower, veto)(given)
        for n, row in enumerate(expected_weights(given, action, level, upper, lower, veto)):
            for t, weight in row.items():
                assert float(weights[n, t]) == pytest.approx(weight, rel=1e-9)
                if "correction/rejected" in metrics and veto is None:
                    assert bool(metrics["correction/rejected"][n, t]) == (weight == 0)
        assert torch.equal(metrics["correction/weight"], weights)
        by_name, _ = CORRECTIONS.get(action)(given, CorrectionParams(upper, lower, level, veto))
        assert torch.equal(by_name, weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "truncate"}, "has no effect"),
        ({"action": "mask", "upper": 0.9, "lower": 0.5}, "at least 1"),
        ({"action": "reject", "upper": 2.0, "lower": 1.5}, "at most 1"),
        ({"action": "truncate", "upper": 0.5, "lower": 0.5}, "must be below"),
        ({"action": "truncate", "upper": 0.0}, "positive finite"),
        ({"action": "mask", "upper": 2.0, "lower": -0.1}, "positive finite"),
        ({"action": "mask", "upper": math.inf}, "positive finite"),
        ({"action": "mask", "upper": math.nan}, "positive finite"),
        ({"action": "truncate", "upper": 1e9}, "has no effect"),
        ({"action": "reject", "upper": 2.0, "lower": 1e-9}, "has no effect"),
        ({"action": "reject", "upper": 2.0, "veto": 1.1}, "at most 1"),
        ({"action": "veto", "level": "geometric", "lower": 0.1}, "makes no sense"),
        ({"action": "veto", "level": "sequence", "lower": 0.1}, "makes no sense"),
        ({"action": "veto", "lower": 0.1, "veto": 0.1}, "makes no sense"),
    ],
)
def test_what_makes_no_sense_or_has_no_effect_is_refused_where_it_is_built(arguments, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RatioCorrection(**arguments)


def test_bounds_are_on_prox_over_behaviour_not_on_its_inverse() -> None:
    zero = torch.zeros(1, 2)
    given = LossInputs(zero, torch.tensor([[1.0, -1.0]]), zero, zero, zero == 0)
    assert RatioCorrection("mask", upper=2.0)(given)[0].tolist() == [[0.0, pytest.approx(math.exp(-1))]]
    assert RatioCorrection("mask", lower=0.5)(given)[0].tolist() == [[pytest.approx(math.e), 0.0]]


@pytest.mark.parametrize(("action", "level", "upper", "lower", "veto"), BUILT)
def test_on_policy_every_weight_is_one(action, level, upper, lower, veto) -> None:
    given = batch()
    given.old_logprobs = given.behaviour_logprobs
    assert (RatioCorrection(action, level, upper, lower, veto)(given)[0] == 1).all()


@pytest.mark.parametrize(("action", "level", "upper", "lower", "veto"), BUILT)
def test_padding_extremes_and_empty_rows_leave_no_trace(action, level, upper, lower, veto) -> None:
    given, correction = batch(4, scale=30.0), RatioCorrection(action, level, upper, lower, veto)
    clean, metrics = correction(given)
    assert torch.isfinite(clean).all() and all(torch.isfinite(values).all() for values in metrics.values())
    for field, padding in (("old_logprobs", -math.inf), ("behaviour_logprobs", math.nan), ("advantages", math.inf)):
        setattr(given, field, getattr(given, field).masked_fill(~given.mask, padding).requires_grad_())
    dirty, _ = correction(given)
    assert not dirty.requires_grad
    assert torch.equal(clean[given.mask], dirty[given.mask])
    nothing = LossInputs(*(torch.zeros(0, 3),) * 4, torch.zeros(0, 3, dtype=torch.bool))
    assert correction(nothing)[0].shape == (0, 3)


def test_after_rejection_the_loss_is_still_divided_by_all_tokens() -> None:
    given = batch(2)
    weights, _ = RatioCorrection("reject", "token", 1.2, 0.8)(given)
    losses, _ = ppo_clip(given, PolicyLossParams(PpoClip()))
    kept = given.mask & (weights > 0)
    assert 0 < int(kept.sum()) < int(given.mask.sum())
    loss = token_weights(given.mask, "token-mean", total_tokens=float(given.mask.sum()), total_sequences=5)
    total = float((loss * weights * losses).sum())
    assert total == pytest.approx(float(losses[kept].sum()) / int(given.mask.sum()), rel=1e-6)


@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_bad_answers_that_the_policy_has_left_are_masked(delta: float) -> None:
    given = batch(1, rows=40)
    weights, metrics = off_policy_sequence_mask(given, CorrectionParams(delta=delta))
    dropped = 0
    for n, mask in enumerate(given.mask):
        places = mask.nonzero().flatten().tolist()
        drift = [float(given.behaviour_logprobs[n, t] - given.logprobs[n, t]) for t in places]
        for t in places:
            drop = float(given.advantages[n, t]) < 0 and sum(drift) / len(drift) > delta
            assert (float(weights[n, t]), bool(metrics["correction/rejected"][n, t])) == (0.0 if drop else 1.0, drop)
            dropped += drop
    assert dropped


@pytest.mark.parametrize("delta", [None, 0.0, -1.0, math.nan])
def test_the_sequence_mask_needs_a_positive_delta(delta: float | None) -> None:
    with pytest.raises(ConfigError, match="positive delta"):
        off_policy_sequence_mask(batch(), CorrectionParams(delta=delta))


def test_a_product_rejects_what_any_of_its_corrections_rejects() -> None:
    given = batch(3)
    reject = RatioCorrection("reject", "geometric", 1.1, 0.9)
    masked = CorrectionParams(delta=0.05)
    parts = [
        truncate(given, CorrectionParams(1.2)),
        reject(given),
        off_policy_sequence_mask(given, masked),
    ]
    both = product(
        [(truncate, CorrectionParams(1.2)), (reject, CorrectionParams()), (off_policy_sequence_mask, masked)]
    )
    weights, metrics = both(given, CorrectionParams())
    torch.testing.assert_close(weights, parts[0][0] * parts[1][0] * parts[2][0])
    assert torch.equal(metrics["correction/weight"], weights)
    assert torch.equal(metrics["correction/truncated"], parts[0][1]["correction/truncated"])
    rejected = parts[1][1]["correction/rejected"].bool() | parts[2][1]["correction/rejected"].bool()
    assert torch.equal(metrics["correction/rejected"].bool(), rejected)
    with pytest.raises(ConfigError, match="at least two"):
        product([(truncate, CorrectionParams(1.2))])


def test_a_product_does_not_weigh_by_the_ratio_twice() -> None:
    with pytest.raises(ConfigError, match="would square it"):
        product([(truncate, CorrectionParams(1.2)), (CORRECTIONS.get("mask"), CorrectionParams(2.0))])
