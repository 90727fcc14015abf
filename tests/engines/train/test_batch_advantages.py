"""Advantages and returns of a batch against scalar loops: ragged groups, holes, a KL penalty, the user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sections.learning import AlgorithmConfig
from headway.data.packing import CollatedRow
from headway.data.types import Outcomes, TrajectoryId
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.errors import ConfigError, RunError, UserCodeError
from tests.engines.train.rows import without_column

GROUPS = (7, 3, 3, 7, 12, 7, 3, 7, 7)
"""Of five, of three and of one answer, mixed up; numbers are those of admissions."""
Floats = list[float]


def fetch(seed: int = 0, *, holes: bool = True, groups: Sequence[int] = GROUPS) -> tuple[list[CollatedRow], Outcomes]:
    """Answers of 1 to 9 tokens; some were cut off; tokens in holes are garbage."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(len(groups)):
        length = int(rng.integers(1, 10)) + 3 * (i == 0)
        mask = rng.random(length) < 0.6 if holes else np.ones(length, dtype=np.bool_)
        mask[rng.integers(length)] = True
        columns = {
            name: np.where(mask, rng.standard_normal(length), np.nan).astype(np.float32)
            for name in ("values", "ref_logprobs", "prox_logprobs")
        }
        rows.append(
            CollatedRow(
                input_ids=rng.integers(0, 18, 3 + length).astype(np.int32),
                prompt_length=3,
                logprobs=np.where(mask, rng.standard_normal(length), np.nan).astype(np.float32),
                versions=np.zeros(length, dtype=np.int32),
                loss_mask=mask,
                columns=columns,
            )
        )
    outcomes = Outcomes(
        ids=tuple(TrajectoryId(1, 40 + number, 0, k) for k, number in enumerate(groups)),
        rewards=(2 * rng.standard_normal(len(groups))).astype(np.float32),
        groups=np.array(groups, dtype=np.int64),
        episode_of=np.arange(len(groups)),
    )
    return rows, outcomes


def compute(rows: Sequence[CollatedRow], outcomes: Outcomes, **algorithm: Any) -> dict[str, list[np.ndarray]]:
    return BatchAdvantages(AlgorithmConfig.model_validate(algorithm))(rows, outcomes)


# ---------------------------------------------------------------------------------------------- scalar loops


def token_rewards(row: CollatedRow, reward: float, coef: float = 0.0, anchor: str | None = None) -> dict[int, float]:
    """Token that counts → its reward: k1 off each, the answer's own at the last one."""
    counts = [t for t, valid in enumerate(row.loss_mask) if valid]
    policy = row.logprobs if anchor is None else row.columns[anchor]
    rewards = {t: -coef * (float(policy[t]) - float(row.columns["ref_logprobs"][t])) for t in counts}
    rewards[counts[-1]] += reward
    return rewards


def scores(rows: Sequence[CollatedRow], outcomes: Outcomes, coef: float = 0.0, anchor: str | None = None) -> Floats:
    return [
        math.fsum(token_rewards(row, float(reward), coef, anchor).values())
        for row, reward in zip(rows, outcomes.rewards, strict=True)
    ]


def grpo_loop(score: Floats, groups: Sequence[int], by_std: bool) -> Floats:
    result = []
    for mine, number in zip(score, groups, strict=True):
        group = [s for s, other in zip(score, groups, strict=True) if other == number]
        mean = math.fsum(group) / len(group)
        if len(group) == 1:
            result.append(0.0)
            continue
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in group) / (len(group) - 1))
        result.append((mine - mean) / (std + 1e-6) if by_std else mine - mean)
    return result


def rloo_loop(score: Floats, groups: Sequence[int]) -> Floats:
    result = []
    for i, number in enumerate(groups):
        others = [score[j] for j, other in enumerate(groups) if other == number and j != i]
        result.append(score[i] - math.fsum(others) / len(others) if others else 0.0)
    return result


def gae_loop(
    rewards: dict[int, float], values: Sequence[float], gamma: float, lam: float
) -> dict[int, tuple[float, float]]:
    """Token that counts → advantage (not whitened) and return, by the backward recursion."""
    tokens = sorted(rewards)
    result: dict[int, tuple[float, float]] = {}
    after, advantage = 0.0, 0.0
    for t in reversed(tokens):
        value = float(values[t])
        advantage = rewards[t] + gamma * after - value + gamma * lam * advantage
        result[t] = (advantage, advantage + value)
        after = value
    return result


def spread(per_answer: Floats, rows: Sequence[CollatedRow]) -> list[np.ndarray]:
    return [np.where(row.loss_mask, value, 0.0) for value, row in zip(per_answer, rows, strict=True)]


def assert_equal(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_is_that_of_a_scalar_loop(seed: int, holes: bool, by_std: bool) -> None:
    rows, outcomes = fetch(seed, holes=holes)
    columns = compute(rows, outcomes, norm_adv_by_std_in_grpo=by_std)
    assert columns.keys() == {"advantages"}
    assert_equal(columns["advantages"], spread(grpo_loop(scores(rows, outcomes), GROUPS, by_std), rows))


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_that_of_a_scalar_loop(seed: int) -> None:
    rows, outcomes = fetch(seed)
    columns = compute(rows, outcomes, adv_estimator="rloo")
    assert columns.keys() == {"advantages"}
    assert_equal(columns["advantages"], spread(rloo_loop(scores(rows, outcomes), GROUPS), rows))


def expected_gae(
    rows: Sequence[CollatedRow],
    outcomes: Outcomes,
    gamma: float,
    lam: float,
    coef: float = 0.0,
    anchor: str | None = None,
) -> dict[str, list[np.ndarray]]:
    of_tokens = [
        gae_loop(token_rewards(row, float(r), coef, anchor), row.columns["values"], gamma, lam)
        for row, r in zip(rows, outcomes.rewards, strict=True)
    ]
    every = [advantage for row in of_tokens for advantage, _ in row.values()]
    mean = math.fsum(every) / len(every)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in every) / (len(every) - 1) + 1e-8)
    advantages, returns = [], []
    for row, tokens in zip(rows, of_tokens, strict=True):
        advantages.append(
            np.array([(tokens[t][0] - mean) / std if t in tokens else 0.0 for t in range(len(row.logprobs))])
        )
        returns.append(np.array([tokens[t][1] if t in tokens else 0.0 for t in range(len(row.logprobs))]))
    return {"advantages": advantages, "returns": returns}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_gae_and_its_returns_are_those_of_the_backward_recursion(seed: int, gamma: float, lam: float) -> None:
    rows, outcomes = fetch(seed)
    columns = compute(rows, outcomes, adv_estimator="gae", gamma=gamma, lam=lam)
    expected = expected_gae(rows, outcomes, gamma, lam)
    assert columns.keys() == expected.keys()
    for name, arrays in expected.items():
        assert_equal(columns[name], arrays)


def test_remax_takes_the_greedy_answers_reward_off_and_with_a_penalty_off_what_is_still_to_come() -> None:
    rows, outcomes = fetch(3)
    baselines = np.arange(len(GROUPS), dtype=np.float32) / 4
    outcomes = replace(outcomes, baselines=baselines)
    plain = compute(rows, outcomes, adv_estimator="remax")["advantages"]
    pairs = zip(outcomes.rewards, baselines, strict=True)
    assert_equal(plain, spread([float(r) - float(b) for r, b in pairs], rows))
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.2}}
    got = compute(rows, outcomes, adv_estimator="remax", **kl)["advantages"]
    for row, reward, baseline, advantages in zip(rows, outcomes.rewards, baselines, got, strict=True):
        rewards = token_rewards(row, float(reward), 0.2, "prox_logprobs")
        for t in range(len(row.logprobs)):
            ahead = math.fsum(r for u, r in rewards.items() if u >= t) - float(baseline)
            assert advantages[t] == pytest.approx(ahead if row.loss_mask[t] else 0.0, rel=1e-4, abs=1e-5)


def test_without_a_critics_values_gae_says_what_is_missing() -> None:
    rows, outcomes = fetch()
    with pytest.raises(ConfigError, match="gae needs a critic's value"):
        compute([without_column(row, "values") for row in rows], outcomes, adv_estimator="gae")


# ---------------------------------------------------------------------------------------------- KL in the reward


@pytest.mark.parametrize("anchor", ["prox_logprobs", None])
@pytest.mark.parametrize("coef", [0.05, 1.0])
def test_a_penalty_in_the_reward_is_taken_off_every_token_and_the_estimators_see_what_is_left(
    anchor: str | None, coef: float
) -> None:
    """KL(π_prox‖π_ref) where π_prox was recomputed or taken for it; of groups the sum over each answer."""
    rows, outcomes = fetch(4)
    if anchor is None:
        rows = [without_column(row, "prox_logprobs") for row in rows]
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coef}}
    left = scores(rows, outcomes, coef, anchor)
    assert max(abs(a - b) for a, b in zip(left, scores(rows, outcomes), strict=True)) > 0.1 * coef
    assert_equal(compute(rows, outcomes, **kl)["advantages"], spread(grpo_loop(left, GROUPS, True), rows))
    rloo = compute(rows, outcomes, adv_estimator="rloo", **kl)["advantages"]
    assert_equal(rloo, spread(rloo_loop(left, GROUPS), rows))
    gae = compute(rows, outcomes, adv_estimator="gae", gamma=0.95, lam=0.9, **kl)
    for name, arrays in expected_gae(rows, outcomes, 0.95, 0.9, coef, anchor).items():
        assert_equal(gae[name], arrays)


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
        ("abs", abs),
    ],
)
def test_each_kind_of_penalty_is_its_own_formula(kind: str, of: Any) -> None:
    """With returns of γ = λ = 1 and a critic that says 0, the returns are what is left of the rewards, summed ahead."""
    rows, outcomes = fetch(5)
    rows = [replace(row, columns={**row.columns, "values": np.zeros_like(row.logprobs)}) for row in rows]
    got = compute(
        rows, outcomes, adv_estimator="gae", use_kl_in_reward=True, kl_penalty=kind, kl_ctrl={"kl_coef": 0.1}
    )["returns"]
    for row, reward, returns in zip(rows, outcomes.rewards, got, strict=True):
        ahead = float(reward)
        for t in reversed(np.flatnonzero(row.loss_mask)):
            ahead -= 0.1 * of(float(row.columns["prox_logprobs"][t]) - float(row.columns["ref_logprobs"][t]))
            assert returns[t] == pytest.approx(ahead, rel=1e-4, abs=1e-5)


def test_without_a_penalty_log_probs_are_not_looked_at() -> None:
    rows, outcomes = fetch(6)
    bare = [replace(row, logprobs=np.full_like(row.logprobs, np.nan), columns={}) for row in rows]
    assert_equal(compute(bare, outcomes)["advantages"], compute(rows, outcomes)["advantages"])


# ---------------------------------------------------------------------------------------------- order


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(len(GROUPS))), st.sampled_from(["grpo", "rloo", "gae"]))
def test_trajectories_of_a_batch_may_come_in_any_order(order: list[int], estimator: str) -> None:
    rows, outcomes = fetch(7)
    algorithm = {"adv_estimator": estimator, "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.1}}
    expected = compute(rows, outcomes, **algorithm)
    shuffled = Outcomes(
        ids=tuple(outcomes.ids[i] for i in order),
        rewards=outcomes.rewards[order],
        groups=outcomes.groups[order],
        episode_of=np.arange(len(order)),
    )
    got = compute([rows[i] for i in order], shuffled, **algorithm)
    for name, arrays in expected.items():
        assert_equal(got[name], [arrays[i] for i in order])


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_gets_the_same_advantages_whatever_else_is_in_its_batch(estimator: str) -> None:
    rows, outcomes = fetch(8)
    whole = compute(rows, outcomes, adv_estimator=estimator)["advantages"]
    for number in set(GROUPS):
        at = np.flatnonzero(outcomes.groups == number)
        alone = Outcomes(
            ids=tuple(outcomes.ids[i] for i in at),
            rewards=outcomes.rewards[at],
            groups=outcomes.groups[at],
            episode_of=np.arange(len(at)),
        )
        assert_equal(
            compute([rows[i] for i in at], alone, adv_estimator=estimator)["advantages"], [whole[i] for i in at]
        )


# ---------------------------------------------------------------------------------------------- the user's own


def estimator_file(folder: Path, text: str, name: str = "own") -> str:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return f"{folder / f'{name}.py'}:estimate"


def test_an_estimator_of_the_users_own_gets_the_parameters_that_it_names(tmp_path: Path) -> None:
    own = estimator_file(tmp_path, "def estimate(inputs, gamma, k):\n    return (1000 * k + gamma) + inputs.scores()\n")
    rows, outcomes = fetch(9)
    columns = compute(rows, outcomes, adv_estimator=own, gamma=0.5, pass_k=3)
    assert columns.keys() == {"advantages"}
    assert_equal(columns["advantages"], spread([3000.5 + float(r) for r in outcomes.rewards], rows))


def test_one_that_takes_anything_gets_everything(tmp_path: Path) -> None:
    own = estimator_file(
        tmp_path,
        "import torch\n\n"
        "def estimate(inputs, **params):\n"
        "    expected = {'normalize_by_std': False, 'gamma': 0.5, 'lam': 0.25, 'k': 2, 'step_weight': 3}\n"
        "    assert params == expected, params\n"
        "    return torch.zeros_like(inputs.rewards)\n",
    )
    columns = compute(
        *fetch(9), adv_estimator=own, gamma=0.5, lam=0.25, pass_k=2, norm_adv_by_std_in_grpo=False, step_weight=3.0
    )  # fmt: skip
    assert all((array == 0).all() for array in columns["advantages"])


def test_one_advantage_per_token_and_returns_may_come_from_the_users_own(tmp_path: Path) -> None:
    own = estimator_file(
        tmp_path,
        "import torch\nfrom headway.algorithms.advantages import Advantages\n\n"
        "def estimate(inputs):\n"
        "    place = torch.arange(inputs.width).expand(len(inputs.rewards), -1).float()\n"
        "    return Advantages(place + inputs.groups[:, None], -place)\n",
    )
    rows, outcomes = fetch(10)
    columns = compute(rows, outcomes, adv_estimator=own)
    for name, sign, offset in (("advantages", 1, outcomes.groups), ("returns", -1, 0 * outcomes.groups)):
        expected = [
            np.where(row.loss_mask, sign * np.arange(len(row.logprobs)) + start, 0)
            for row, start in zip(rows, offset, strict=True)
        ]
        assert_equal(columns[name], expected)


def test_an_estimator_that_is_not_there_is_an_error_before_any_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        BatchAdvantages(AlgorithmConfig(adv_estimator="grppo"))
    with pytest.raises(UserCodeError, match="there is no file"):
        BatchAdvantages(AlgorithmConfig(adv_estimator=str(tmp_path / "missing.py:estimate")))


# ---------------------------------------------------------------------------------------------- not finite


def test_an_advantage_that_is_not_finite_is_an_error_that_names_the_trajectory(tmp_path: Path) -> None:
    own = estimator_file(
        tmp_path,
        "import torch\n\n"
        "def estimate(inputs):\n"
        "    return torch.where(torch.arange(len(inputs.rewards)) == 4, float('inf'), inputs.rewards)\n",
    )
    rows, outcomes = fetch(11)
    with pytest.raises(RunError, match=r"advantages of trajectory \(1, 52, 0, 4\) \(group 12\) .*not finite"):
        compute(rows, outcomes, adv_estimator=own)


def test_so_is_a_return(tmp_path: Path) -> None:
    own = estimator_file(
        tmp_path,
        "import torch\nfrom headway.algorithms.advantages import Advantages\n\n"
        "def estimate(inputs):\n"
        "    nothing = torch.zeros(len(inputs.rewards), inputs.width)\n"
        "    returns = nothing.clone()\n    returns[6] = float('nan')\n"
        "    return Advantages(nothing, returns)\n",
    )
    with pytest.raises(RunError, match=r"returns of trajectory \(1, 43, 0, 6\) \(group 3\) .*not finite"):
        compute(*fetch(11), adv_estimator=own)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_says_whose_it_is(estimator: str, value: float) -> None:
    rows, outcomes = fetch(12)
    rewards = outcomes.rewards.copy()
    rewards[5] = value
    with pytest.raises(RunError, match=r"rewards of trajectory \(1, \d+, 0, 5\)"):
        compute(rows, replace(outcomes, rewards=rewards), adv_estimator=estimator)


def test_a_value_that_is_not_finite_is_an_error_that_says_whose_it_is() -> None:
    rows, outcomes = fetch(12)
    broken = {**rows[2].columns, "values": np.full_like(rows[2].logprobs, np.inf)}
    rows[2] = replace(rows[2], columns=broken)
    with pytest.raises(RunError, match=r"values of trajectory \(1, \d+, 0, \d\)"):
        compute(rows, outcomes, adv_estimator="gae")
