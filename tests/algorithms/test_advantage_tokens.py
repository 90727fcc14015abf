"""Estimators with one advantage per token: REINFORCE++, ReMax and GAE against scalar recursions, with holes."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    per_token,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from headway.algorithms.advantages.groups import sums_ahead, whiten
from headway.errors import ConfigError, RunError

PER_TOKEN = ["reinforce_plus_plus", "remax", "gae"]


def fetch(seed: int, *, holes: bool = True, of_tokens: bool = True, size: int = 9, width: int = 13) -> AdvantageInputs:
    """Ragged rows, some empty, some of holes only; what does not count is NaN or infinite."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (size,), generator=g)
    lengths[0] = width
    mask = torch.rand(size, width, generator=g) < (0.6 if holes else 2.0)
    mask[1] = False
    valid = mask & (torch.arange(width) < lengths[:, None])
    junk = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(0, 3, (size, width), generator=g)].double()

    def column() -> Tensor:
        return torch.where(valid, torch.randn(size, width, generator=g, dtype=torch.float64), junk)

    return AdvantageInputs(
        rewards=torch.randn(size, generator=g, dtype=torch.float64),
        groups=torch.randint(0, 3, (size,), generator=g),
        lengths=lengths,
        token_rewards=column() if of_tokens else None,
        mask=mask,
        values=column(),
        baselines=torch.randn(size, generator=g, dtype=torch.float64),
        finished=torch.rand(size, generator=g) < 0.5,
    )


def written(inputs: AdvantageInputs, row: int) -> list[int]:
    """Positions of the tokens that count."""
    mask = inputs.mask if inputs.mask is not None else torch.ones(len(inputs.lengths), inputs.width, dtype=torch.bool)
    return [t for t in range(int(inputs.lengths[row])) if mask[row, t]]


def rewards_at(inputs: AdvantageInputs, row: int) -> list[float]:
    at = written(inputs, row)
    if inputs.token_rewards is not None:
        return [float(inputs.token_rewards[row, t]) for t in at]
    return [0.0] * (len(at) - 1) + [float(inputs.rewards[row])] * bool(at)


def scattered(inputs: AdvantageInputs, rows: list[list[float]]) -> Tensor:
    result = torch.zeros(len(rows), inputs.width, dtype=torch.float64)
    for s, row in enumerate(rows):
        for t, value in zip(written(inputs, s), row, strict=True):
            result[s, t] = value
    return result


def whitened(rows: list[list[float]]) -> list[list[float]]:
    values = [x for row in rows for x in row]
    mean, scale = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    return [[(x - mean) / scale for x in row] for row in rows]


def scalar_gae(
    r: list[float], v: list[float], finished: bool, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    advantages = [0.0] * len(r)
    ahead, following = 0.0, (0.0 if finished or not v else v[-1])
    for t in reversed(range(len(r))):
        ahead = r[t] + gamma * following - v[t] + gamma * lam * ahead
        advantages[t], following = ahead, v[t]
    return advantages, [a + b for a, b in zip(advantages, v, strict=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.0, 1.0)])
def test_gae_is_the_backward_recursion_over_what_the_policy_wrote(
    seed: int, of_tokens: bool, gamma: float, lam: float
) -> None:
    inputs = fetch(seed, of_tokens=of_tokens)
    assert inputs.values is not None and inputs.finished is not None
    pairs = [
        scalar_gae(
            rewards_at(inputs, s),
            [float(inputs.values[s, t]) for t in written(inputs, s)],
            bool(inputs.finished[s]),
            gamma,
            lam,
        )
        for s in range(len(inputs.rewards))
    ]
    got = gae(inputs, gamma=gamma, lam=lam)
    raw = gae(inputs, gamma=gamma, lam=lam, whitened=False)
    torch.testing.assert_close(got.advantages, scattered(inputs, whitened([a for a, _ in pairs])))
    torch.testing.assert_close(got.returns, scattered(inputs, [r for _, r in pairs]))
    torch.testing.assert_close(raw.advantages, scattered(inputs, [a for a, _ in pairs]))
    assert torch.equal(raw.returns, got.returns)


def test_with_lambda_1_returns_are_the_discounted_rewards_whatever_the_critic_says() -> None:
    inputs = replace(fetch(3), finished=None)
    other = replace(inputs, values=inputs.values * 3 + 1)
    torch.testing.assert_close(gae(inputs, gamma=0.9).returns, gae(other, gamma=0.9).returns)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    inputs = replace(fetch(5), finished=None)
    right = gae(inputs, gamma=0.9).returns
    perfect = gae(replace(inputs, values=right), gamma=0.9, lam=0.8, whitened=False)
    torch.testing.assert_close(perfect.advantages, torch.zeros_like(right))
    torch.testing.assert_close(perfect.returns, right)


def test_an_answer_that_was_cut_off_goes_on_with_its_last_value_by_hand() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.0, 0.0]),
        groups=torch.tensor([0, 1]),
        lengths=torch.tensor([2, 2]),
        values=torch.tensor([[0.5, 0.75], [0.5, 0.75]]),
        finished=torch.tensor([False, True]),
    )
    got = gae(inputs, gamma=1.0, lam=0.5, whitened=False)
    assert got.advantages.tolist() == [[0.25, 0.0], [0.25 - 0.5 * 0.75, -0.75]]
    assert got.returns.tolist() == [[0.75, 0.75], [0.375, 0.0]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_reinforce_plus_plus_whitens_returns_over_the_whole_batch(seed: int, of_tokens: bool, gamma: float) -> None:
    inputs = fetch(seed, of_tokens=of_tokens)
    rows = []
    for s in range(len(inputs.rewards)):
        r = rewards_at(inputs, s)
        rows.append([sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))])
    torch.testing.assert_close(reinforce_plus_plus(inputs, gamma=gamma), scattered(inputs, whitened(rows)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("of_tokens", [True, False])
def test_its_baseline_form_whitens_over_tokens_what_is_centred_in_groups(seed: int, of_tokens: bool) -> None:
    inputs = fetch(seed, of_tokens=of_tokens)
    scores = [sum(rewards_at(inputs, s)) if of_tokens else float(inputs.rewards[s]) for s in range(len(inputs.rewards))]
    groups = inputs.groups.tolist()
    rows = []
    for s, score in enumerate(scores):
        mean = statistics.fmean(x for x, g in zip(scores, groups, strict=True) if g == groups[s])
        rows.append([score - mean] * len(written(inputs, s)))
    torch.testing.assert_close(reinforce_plus_plus_baseline(inputs), scattered(inputs, whitened(rows)))


@pytest.mark.parametrize("of_tokens", [True, False])
def test_remax_is_the_reward_still_to_come_less_the_greedy_answers(of_tokens: bool) -> None:
    inputs = fetch(2, of_tokens=of_tokens)
    assert inputs.baselines is not None
    rows = []
    for s in range(len(inputs.rewards)):
        r = rewards_at(inputs, s)
        rows.append([sum(r[t:]) - float(inputs.baselines[s]) for t in range(len(r))])
    torch.testing.assert_close(remax(inputs), scattered(inputs, rows))


def test_without_a_mask_or_rewards_of_tokens_remax_has_one_advantage_per_trajectory() -> None:
    zeros = torch.zeros(2, dtype=torch.long)
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), zeros, zeros + 3, baselines=torch.tensor([0.25, 1.0]))
    assert remax(inputs).tolist() == [0.75, -1.0]


# ----------------------------------------------------------------------------- in common


def advantages_of(name: str, inputs: AdvantageInputs) -> Tensor:
    result = ADVANTAGES.get(name)(inputs)
    return result if isinstance(result, Tensor) else torch.stack([result.advantages, result.returns], dim=-1)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_padding_and_holes_leave_no_trace(name: str) -> None:
    inputs = fetch(7)
    assert inputs.token_rewards is not None and inputs.values is not None
    valid = inputs.counts()
    clean = replace(
        inputs,
        token_rewards=inputs.token_rewards.masked_fill(~valid, 0.0),
        values=inputs.values.masked_fill(~valid, 5.0),
    )
    got = advantages_of(name, inputs)
    assert torch.equal(got, advantages_of(name, clean))
    assert got.isfinite().all()
    assert not got[~valid].any()


@pytest.mark.parametrize("name", PER_TOKEN)
def test_closing_a_hole_changes_nothing_for_the_tokens_beside_it(name: str) -> None:
    inputs = fetch(8)
    rows = [written(inputs, s) for s in range(len(inputs.rewards))]
    front = {key: torch.zeros(len(rows), inputs.width, dtype=torch.float64) for key in ("token_rewards", "values")}
    for key, column in front.items():
        for s, row in enumerate(rows):
            column[s, : len(row)] = getattr(inputs, key)[s, row]
    lengths = torch.tensor([len(row) for row in rows])
    without = advantages_of(name, replace(inputs, mask=None, lengths=lengths, **front))
    with_holes = advantages_of(name, inputs)
    for s, row in enumerate(rows):
        torch.testing.assert_close(with_holes[s, row], without[s, : len(row)])


@pytest.mark.parametrize("name", PER_TOKEN)
def test_the_order_of_trajectories_does_not_matter(name: str) -> None:
    inputs = fetch(9)
    order = torch.tensor(random.Random(1).sample(range(9), 9))
    fields = {key: getattr(inputs, key) for key in AdvantageInputs.__dataclass_fields__}
    shuffled = replace(inputs, **{key: of[order] for key, of in fields.items() if isinstance(of, torch.Tensor)})
    torch.testing.assert_close(advantages_of(name, shuffled), advantages_of(name, inputs)[order])


@pytest.mark.parametrize("name", sorted(ADVANTAGES.names()))
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_batch_in_which_the_policy_wrote_nothing_has_no_advantage(name: str, size: int) -> None:
    inputs = AdvantageInputs(
        rewards=torch.arange(size).float(),
        groups=torch.zeros(size, dtype=torch.long),
        lengths=torch.full((size,), 4),
        mask=torch.zeros(size, 4, dtype=torch.bool),
        values=torch.full((size, 4), math.nan),
        baselines=torch.zeros(size),
        finished=torch.zeros(size, dtype=torch.bool),
        states=torch.zeros(size, 4, dtype=torch.long),
    )
    got = advantages_of(name, inputs)
    assert got.shape[:2] == (size, 4)
    assert not got.any()


def test_one_token_or_equal_returns_whiten_to_exactly_zero() -> None:
    one = AdvantageInputs(torch.tensor([0.3]), torch.tensor([0]), torch.tensor([1]))
    assert reinforce_plus_plus(one).tolist() == [[0.0]]
    same = AdvantageInputs(torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0, 1, 2]), torch.tensor([3, 1, 2]))
    assert not reinforce_plus_plus(same).any()


def test_the_result_of_gae_goes_on_as_one_row_per_trajectory() -> None:
    inputs = fetch(4)
    result = gae(inputs)
    rows = per_token(result, inputs.lengths)
    assert [len(row) for row in rows] == inputs.lengths.tolist()
    assert all(torch.equal(row, result.advantages[s, : len(row)]) for s, row in enumerate(rows))


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("remax", "baselines")])
def test_what_an_estimator_needs_and_does_not_get_is_named(name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator: {name} needs"):
        ADVANTAGES.get(name)(replace(fetch(0), **{missing: None}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", ["token_rewards", "values"])
def test_a_token_that_counts_with_a_number_that_is_not_finite_is_named(column: str, bad: float) -> None:
    inputs = fetch(0)
    spoilt = getattr(inputs, column).clone()
    t = written(inputs, 0)[2]
    spoilt[0, t] = bad
    with pytest.raises(RunError, match=f"of token {t} of trajectory 0 "):
        gae(replace(inputs, **{column: spoilt}))


@pytest.mark.parametrize("params", [{"gamma": 1.1}, {"lam": -0.1}, {"gamma": math.nan}])
def test_discounts_outside_0_to_1_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"is not in \[0, 1\]"):
        gae(fetch(0), **params)


@pytest.mark.parametrize("width", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_sums_ahead_are_those_of_the_backward_recursion(width: int, decay: float) -> None:
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    expected = torch.zeros_like(values)
    ahead = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(width)):
        ahead = values[:, t] + decay * ahead
        expected[:, t] = ahead
    torch.testing.assert_close(sums_ahead(values, decay), expected)


def test_whitening_with_weights_is_whitening_of_repeated_values() -> None:
    values = torch.tensor([3.0, -1.0, math.nan, 0.5], dtype=torch.float64)
    weights = torch.tensor([2.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    repeated = whiten(torch.tensor([3.0, 3.0, -1.0, -1.0, -1.0, 0.5]).double(), torch.ones(6).double())
    torch.testing.assert_close(
        whiten(values, weights), torch.stack([repeated[0], repeated[2], values[0] * 0, repeated[5]])
    )
