"""Every policy loss against a scalar version written from its paper, its gradient against finite differences of that,
and the properties that all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from headway.algorithms.aggregation import token_weights
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
from headway.config.sections.losses import LOSSES, ClipCov, DualClip, Gspo, KlCov, TPpo, TruncatedIs
from headway.errors import ConfigError

LOW, HIGH, RHO = 0.2, 0.28, 1.3
OWN = {name: section() for name, section in LOSSES.items()} | {
    "truncated_is": TruncatedIs(rollout_is_threshold=RHO),
    "clip_cov": ClipCov(clip_cov_lb=0.05, clip_cov_ratio=0.1),
    "kl_cov": KlCov(kl_cov_ratio=0.2),
    "t_ppo": TPpo(ignore_last=2),
}
PARAMS = {name: PolicyLossParams(own, LOW, HIGH) for name, own in OWN.items()}
EVERY_LOSS = POLICY_LOSSES.names()
BY_BATCH = {"clip_cov", "kl_cov"}
H = 1e-6


def batch(seed: int, rows: int = 5, length: int = 8, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Rows with holes in their masks, one of them empty; log-ratios well inside and outside the clip range."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=g, dtype=dtype)

    logprobs = -0.1 - 3 * torch.rand(rows, length, generator=g, dtype=dtype)
    old = (logprobs + normal(0.4)).clamp(max=-0.01)
    mask = torch.rand(rows, length, generator=g) < 0.75
    mask[-1] = False
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=(old + normal(0.2)).clamp(max=-0.01),
        advantages=torch.randn(rows, 1, generator=g, dtype=dtype).expand(rows, length).clone(),
        mask=mask,
        finished=torch.arange(rows) % 2 == 0,
    )


def detached(inputs: LossInputs, **changed: Tensor) -> LossInputs:
    fields = {
        name: getattr(inputs, name)
        for name in ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages", "mask", "finished")
    }
    return LossInputs(**(fields | {"logprobs": inputs.logprobs.detach().clone().requires_grad_()} | changed))


# Scalar versions: the loss of one token as a function of its new log-prob x; weights are frozen at x0.
Scalar = Callable[[float, float, float, float, float], float]


def _clip(ratio: float) -> float:
    return min(max(ratio, 1 - LOW), 1 + HIGH)


def _ppo(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    ratio = math.exp(x - old)
    return -min(ratio * a, _clip(ratio) * a)


def _dual(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    surrogate = -_ppo(x, x0, old, behaviour, a)
    return -(max(surrogate, 3.0 * a) if a < 0 else surrogate)


def _cispo(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    return -_clip(math.exp(x0 - old)) * a * x


def _truncated_is(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    return -min(math.exp(x0 - behaviour), RHO) * a * x


def _gpg(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    return -a * x


def _sapo(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x - old) - 1))) * a


def _dppo_tv(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    moved = math.exp(x0) - math.exp(old)
    keep = moved <= HIGH if a > 0 else moved >= -LOW
    return -keep * min(math.exp(x0 - old), 20.0) * a * x


def _dppo_kl(x: float, x0: float, old: float, behaviour: float, a: float) -> float:
    p, q = math.exp(old), math.exp(x0)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    keep = (kl <= HIGH or q <= p) if a > 0 else (kl <= LOW or q >= p)
    return -keep * min(q / p, 20.0) * a * x


PER_TOKEN: dict[str, Scalar] = {
    "ppo_clip": _ppo,
    "dual_clip": _dual,
    "cispo": _cispo,
    "truncated_is": _truncated_is,
    "gpg": _gpg,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
}


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("seed", range(4))
def test_a_tokens_loss_and_gradient_are_those_of_the_scalar_version(name: str, seed: int) -> None:
    inputs, scalar = batch(seed), PER_TOKEN[name]
    losses, _ = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    for n, t in inputs.mask.nonzero().tolist():
        x, *rest = (
            v[n, t].item() for v in (inputs.logprobs, inputs.old_logprobs, inputs.behaviour_logprobs, inputs.advantages)
        )
        slope = (scalar(x + H, x, *rest) - scalar(x - H, x, *rest)) / (2 * H)
        assert losses[n, t].item() == pytest.approx(scalar(x, x, *rest), rel=1e-6, abs=1e-9)
        assert gradient[n, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert (losses[~inputs.mask] == 0).all() and (gradient[~inputs.mask] == 0).all()


def test_dual_clip_bounds_the_loss_of_a_bad_answer_only() -> None:
    ratios = torch.tensor([[5.0, 5.0, 2.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0, 1.0, -1.0]], dtype=torch.float64)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    inputs = LossInputs(ratios.log().requires_grad_(), zero, zero, advantages, torch.ones(1, 3, dtype=torch.bool))
    losses, metrics = POLICY_LOSSES.get("dual_clip")(inputs, PARAMS["dual_clip"])
    torch.testing.assert_close(losses.detach(), torch.tensor([[3.0, -1.28, 2.0]], dtype=torch.float64))
    assert metrics["clip_fraction_lower"].tolist() == [[1, 0, 0]]
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    assert (gradient == 0).tolist() == [[True, True, False]]


def test_dual_clip_refuses_a_bound_inside_the_clip_range() -> None:
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1.2 must be above 1 \+ clip_high"):
        POLICY_LOSSES.get("dual_clip")(batch(0), PolicyLossParams(DualClip(clip_ratio_c=1.2), clip_high=0.28))


def test_dppo_truncates_the_weight_of_a_rare_token() -> None:
    """Its probability has hardly moved, however large the ratio."""
    inputs = detached(
        batch(0, rows=1, length=1),
        logprobs=torch.full((1, 1), -5.0, dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.full((1, 1), -12.0, dtype=torch.float64),
        advantages=torch.ones(1, 1, dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    for name in ("dppo_tv", "dppo_kl"):
        losses, metrics = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        assert gradient.item() == pytest.approx(-20.0)
        assert (metrics["clip_fraction"].item(), metrics["clip_fraction_lower"].item()) == (0.0, 1.0)


def test_dppo_kl_of_a_certain_token_is_finite() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float32)
    old = torch.tensor([[-1e-9, -3.0]])
    inputs = LossInputs(zero.clone().requires_grad_(), old, old, zero + 1, torch.ones(1, 2, dtype=torch.bool))
    losses, metrics = POLICY_LOSSES.get("dppo_kl")(inputs, PARAMS["dppo_kl"])
    assert torch.isfinite(losses).all()
    assert metrics["clip_fraction"].tolist() == [[0, 1]]


# Answers: the objective of one row as its paper has it.
def _gspo_row(new: list[float], old: list[float], a: float) -> float:
    s = math.prod(math.exp(x - o) for x, o in zip(new, old, strict=True)) ** (1 / len(new))
    return -min(s * a, _clip(s) * a)


def _gmpo_row(new: list[float], old: list[float], a: float) -> float:
    ratios = [math.exp(x - o) for x, o in zip(new, old, strict=True)]
    low, high = math.exp(-LOW), math.exp(HIGH)
    sign = 1 if a > 0 else -1
    # min over ratio^sign and clip(ratio)^sign, raised to sign again
    kept = [min(r**sign, min(max(r, low), high) ** sign) ** sign for r in ratios]
    return -(math.prod(kept) ** (1 / len(kept))) * a


@pytest.mark.parametrize(("name", "row"), [("gspo", _gspo_row), ("gmpo", _gmpo_row)])
@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_loss_averaged_over_answers_is_the_papers_objective(name: str, row, seed: int) -> None:
    """Value and gradient, the loss's own tokens apart from the holes."""
    inputs = batch(seed)
    answers = [(n, mask.nonzero().flatten().tolist()) for n, mask in enumerate(inputs.mask) if mask.any()]

    def objective(new: Tensor) -> float:
        return sum(
            row(new[n, places].tolist(), inputs.old_logprobs[n, places].tolist(), inputs.advantages[n, 0].item())
            for n, places in answers
        ) / len(answers)

    losses, _ = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
    weights = token_weights(
        inputs.mask, "seq-mean-token-mean", total_tokens=float(inputs.mask.sum()), total_sequences=float(len(answers))
    )
    loss = (weights * losses).sum()
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    x = inputs.logprobs.detach()
    assert loss.item() == pytest.approx(objective(x), rel=1e-6)
    for n, places in answers:
        for t in places:
            bump = torch.zeros_like(x)
            bump[n, t] = H
            slope = (objective(x + bump) - objective(x - bump)) / (2 * H)
            assert gradient[n, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def _covariances(inputs: LossInputs) -> dict[tuple[int, int], float]:
    places = [(n, t) for n, t in inputs.mask.nonzero().tolist()]
    x = {p: inputs.logprobs[p].item() for p in places}
    a = {p: inputs.advantages[p].item() for p in places}
    mean_x, mean_a = sum(x.values()) / len(x), sum(a.values()) / len(a)
    return {p: (x[p] - mean_x) * (a[p] - mean_a) for p in places}


@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_penalises_the_tokens_of_the_largest_covariance(seed: int) -> None:
    inputs = batch(seed)
    losses, metrics = POLICY_LOSSES.get("kl_cov")(inputs, PARAMS["kl_cov"])
    covariances = _covariances(inputs)
    count = max(1, int(0.2 * len(covariances)))
    chosen = sorted(covariances, key=covariances.__getitem__)[-count:]
    for place in covariances:
        d = (inputs.logprobs[place] - inputs.old_logprobs[place]).item()
        expected = -math.exp(d) * inputs.advantages[place].item() + (abs(d) if place in chosen else 0.0)
        assert losses[place].item() == pytest.approx(expected, rel=1e-9)
        assert bool(metrics["cov_fraction"][place]) == (place in chosen)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_clip_cov_silences_tokens_drawn_from_those_of_a_high_covariance(seed: int, share: float) -> None:
    inputs = batch(seed, rows=8)
    params = PolicyLossParams(ClipCov(clip_cov_lb=0.05, clip_cov_ub=1.0, clip_cov_ratio=share), LOW, HIGH)
    ppo, ppo_metrics = POLICY_LOSSES.get("ppo_clip")(inputs, PARAMS["ppo_clip"])
    losses, metrics = POLICY_LOSSES.get("clip_cov")(inputs, params)
    covariances = _covariances(inputs)
    candidates = {p for p, c in covariances.items() if 0.05 < c < 1.0 and not ppo_metrics["clip_fraction"][p]}
    drawn = {tuple(p) for p in metrics["cov_fraction"].nonzero().tolist()}
    assert drawn <= candidates
    assert len(drawn) == min(len(candidates), max(1, int(share * len(covariances))))
    for place in covariances:
        assert losses[place].item() == (0.0 if place in drawn else ppo[place].item())
    again, _ = POLICY_LOSSES.get("clip_cov")(inputs, params)
    assert torch.equal(losses, again)


def test_clip_cov_draws_all_candidates_alike() -> None:
    """Over many batches, each of 12 equal places is drawn about equally often."""
    length, counts = 12, torch.zeros(12)
    mask = torch.ones(2, length, dtype=torch.bool)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, length)
    params = PolicyLossParams(ClipCov(clip_cov_lb=0.1, clip_cov_ub=5.0, clip_cov_ratio=1e-9))
    for seed in range(600):
        noise = 1e-3 * torch.randn(2, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64) + noise
        _, metrics = POLICY_LOSSES.get("clip_cov")(LossInputs(x, x, x, advantages, mask), params)
        assert metrics["cov_fraction"].sum() == 1
        counts += metrics["cov_fraction"].sum(0)
    assert counts.min() > 20 and counts.max() < 90  # 50 expected, a deviation of 7


def test_truncated_ppo_drops_the_last_tokens_of_unfinished_answers_only() -> None:
    inputs = batch(3)
    ppo, _ = POLICY_LOSSES.get("ppo_clip")(inputs, PARAMS["ppo_clip"])
    losses, metrics = POLICY_LOSSES.get("t_ppo")(inputs, PARAMS["t_ppo"])
    for n, mask in enumerate(inputs.mask):
        places = mask.nonzero().flatten().tolist()
        dropped = [] if inputs.finished[n] else places[-2:]
        assert metrics["window_dropped"][n].nonzero().flatten().tolist() == dropped
        for t in places:
            assert losses[n, t].item() == (0.0 if t in dropped else ppo[n, t].item())
    assert torch.equal(POLICY_LOSSES.get("t_ppo")(detached(inputs, finished=None), PARAMS["t_ppo"])[0], ppo)


# What all of them share.
@pytest.mark.parametrize("name", EVERY_LOSS)
@pytest.mark.parametrize("padding", [-math.inf, math.inf, math.nan])
def test_padding_leaves_no_trace(name: str, padding: float) -> None:
    inputs, loss = batch(5), POLICY_LOSSES.get(name)
    clean, _ = loss(inputs, PARAMS[name])
    (expected,) = torch.autograd.grad(clean.sum(), inputs.logprobs)
    dirty = detached(
        inputs,
        **{
            field: getattr(inputs, field).detach().masked_fill(~inputs.mask, padding)
            for field in ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages")
        },
    )
    dirty.logprobs.requires_grad_()
    losses, metrics = loss(dirty, PARAMS[name])
    (gradient,) = torch.autograd.grad(losses.sum(), dirty.logprobs)
    assert (losses[~inputs.mask] == 0).all()
    assert all((values[~inputs.mask] == 0).all() for values in metrics.values())
    torch.testing.assert_close(losses, clean)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", EVERY_LOSS)
@pytest.mark.parametrize("log_ratio", [20.0, -20.0, 80.0, -80.0])
def test_extreme_ratios_stay_finite_in_float32(name: str, log_ratio: float) -> None:
    old = torch.zeros(2, 3) if log_ratio < 0 else torch.full((2, 3), -log_ratio)
    logprobs = (old + log_ratio).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 0.0]]).expand(2, 3)
    losses, metrics = POLICY_LOSSES.get(name)(
        LossInputs(logprobs, old, old, advantages, torch.ones(2, 3, dtype=torch.bool)), PARAMS[name]
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(values).all() for values in metrics.values())


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_without_valid_tokens_there_is_neither_loss_nor_gradient(name: str) -> None:
    inputs = batch(1)
    for empty in (torch.zeros_like(inputs.mask), None):
        given = (
            detached(inputs, mask=empty)
            if empty is not None
            else LossInputs(
                torch.zeros(0, 4, requires_grad=True), *(torch.zeros(0, 4),) * 3, torch.zeros(0, 4, dtype=torch.bool)
            )
        )
        losses, _ = POLICY_LOSSES.get(name)(given, PARAMS[name])
        (gradient,) = torch.autograd.grad(losses.sum(), given.logprobs)
        assert (losses == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_only_the_new_log_probs_get_a_gradient(name: str) -> None:
    inputs = batch(4)
    for field in ("old_logprobs", "behaviour_logprobs", "advantages"):
        setattr(inputs, field, getattr(inputs, field).clone().requires_grad_())
    losses, metrics = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
    losses.sum().backward()
    assert inputs.logprobs.grad is not None
    assert inputs.old_logprobs.grad is None
    assert inputs.behaviour_logprobs.grad is None
    assert inputs.advantages.grad is None
    assert not any(values.requires_grad for values in metrics.values())
    assert all(values.shape == losses.shape for values in metrics.values())


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_bfloat16_is_computed_in_float32(name: str) -> None:
    assert POLICY_LOSSES.get(name)(batch(6, dtype=torch.bfloat16), PARAMS[name])[0].dtype == torch.float32


@pytest.mark.parametrize("name", sorted(set(EVERY_LOSS) - BY_BATCH))
@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_know_of_each_other(name: str, seed: int) -> None:
    """So that any order of rows, and any split into micro-batches, gives the same losses and gradients."""
    inputs, loss = batch(seed), POLICY_LOSSES.get(name)
    whole, _ = loss(inputs, PARAMS[name])
    (expected,) = torch.autograd.grad(whole.sum(), inputs.logprobs)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for rows in (order[:2], order[2:]):
        part = detached(
            inputs,
            **{
                field: getattr(inputs, field)[rows].detach()
                for field in ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages", "mask", "finished")
            },
        )
        part.logprobs.requires_grad_()
        losses, _ = loss(part, PARAMS[name])
        (gradient,) = torch.autograd.grad(losses.sum(), part.logprobs)
        torch.testing.assert_close(losses, whole[rows])
        torch.testing.assert_close(gradient, expected[rows])


@pytest.mark.parametrize("name", sorted(set(EVERY_LOSS) - {"clip_cov"}))
def test_on_policy_every_gradient_is_that_of_reinforce(name: str) -> None:
    inputs = batch(9)
    x = inputs.logprobs.detach()
    given = detached(inputs, old_logprobs=x, behaviour_logprobs=x, finished=None)
    losses, metrics = POLICY_LOSSES.get(name)(given, PARAMS[name])
    (gradient,) = torch.autograd.grad(losses.sum(), given.logprobs)
    torch.testing.assert_close(gradient, torch.where(inputs.mask, -inputs.advantages, 0.0))
    assert not metrics["approx_kl"].any()
    assert not metrics.get("clip_fraction", torch.zeros(1)).any()


def test_truncated_is_looks_at_what_sampled_not_at_the_anchor() -> None:
    inputs = batch(2)
    moved = detached(inputs, old_logprobs=inputs.old_logprobs - 1.0)
    truncated_is = POLICY_LOSSES.get("truncated_is")
    assert torch.equal(truncated_is(moved, PARAMS["truncated_is"])[0], truncated_is(inputs, PARAMS["truncated_is"])[0])


def test_geometric_means_of_long_answers_keep_their_precision() -> None:
    """50,000 float32 log-ratios that cancel to a mean of about 1e-3; their partial sums reach 3e5."""
    d = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)).mul(15).clamp(-20, 20).sort().values
    d = d - d.mean() + 1e-3
    d = d.clamp(-20, 20)
    zero = torch.zeros_like(d)
    losses, _ = POLICY_LOSSES.get("gspo")(
        LossInputs(d, zero, zero, zero + 1, torch.ones_like(d, dtype=torch.bool)),
        PolicyLossParams(Gspo(), 0.5, 0.5),
    )
    assert -losses[0, 0].item() == pytest.approx(math.exp(math.fsum(d[0].tolist()) / d.numel()), abs=1.2e-7)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_in_a_sequence_loss_each_token_has_the_value_of_its_answer_and_its_own_gradient(name: str) -> None:
    """Each in its own place, so that a correction that weighs tokens weighs their gradients."""
    inputs = batch(0)
    inputs.old_logprobs = inputs.logprobs.detach() + 0.01 * torch.randn(5, 8, dtype=torch.float64)
    losses, _ = POLICY_LOSSES.get(name)(inputs, PARAMS[name])
    for n, mask in enumerate(inputs.mask):
        places = mask.nonzero().flatten().tolist()
        for t in places:
            assert losses[n, t].item() == losses[n, places[0]].item()
            (gradient,) = torch.autograd.grad(losses[n, t], inputs.logprobs, retain_graph=True)
            assert gradient.nonzero().tolist() == [[n, t]]
            assert gradient[n, t].item() == pytest.approx(losses[n, t].item())


def test_dppo_has_a_bound_of_its_own_on_each_side() -> None:
    """π_old = 0.5; π_θ 0.2 and 0.4 above and below it, bounds of 0.1 down and 0.3 up."""
    new = torch.tensor([[0.7, 0.9, 0.45, 0.3, 0.7, 0.3]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    old = torch.full_like(new, math.log(0.5))
    inputs = LossInputs(new, old, old, advantages, torch.ones_like(new, dtype=torch.bool))
    for name, low, high in (("dppo_tv", 0.1, 0.3), ("dppo_kl", 0.02, 0.2)):
        _, metrics = POLICY_LOSSES.get(name)(inputs, PolicyLossParams(LOSSES[name](), low, high))
        assert metrics["clip_fraction"].tolist() == [[0, 1, 0, 1, 0, 0]]


def test_every_loss_takes_its_own_section() -> None:
    assert sorted(LOSSES) == EVERY_LOSS
    for name in EVERY_LOSS:
        [section] = get_args(get_type_hints(POLICY_LOSSES.get(name))["params"])
        assert issubclass(LOSSES[name], section)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_a_loss_looks_at_the_clip_range_and_at_the_behaviour_policy_where_its_section_says_so(name: str) -> None:
    inputs, loss = batch(0), POLICY_LOSSES.get(name)
    losses, _ = loss(inputs, PARAMS[name])
    narrow, _ = loss(inputs, PolicyLossParams(OWN[name], 0.01, 0.01))
    assert torch.equal(losses, narrow) != LOSSES[name].clips
    other, _ = loss(detached(inputs, behaviour_logprobs=inputs.behaviour_logprobs - 0.5), PARAMS[name])
    assert torch.equal(losses, other) != LOSSES[name].weighs_behaviour
