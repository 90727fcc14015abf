"""Advantages of episodes: whichever rows their tokens are in, and with turns, against loops written out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.scores import episode_scores
from headway.config.sections.learning import AlgorithmConfig
from headway.data.packing import CollatedRow
from headway.data.types import Outcomes
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.errors import RunError
from tests.engines.train.episodes import GROUPS, cut_anywhere, dealt, in_rows, whole
from tests.tiers import searched

ESTIMATORS = sorted(set(ADVANTAGES.names()) - {"maxrl"})
"""All but one that refuses negative rewards."""
KL = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.1}}


def compute(rows: Sequence[CollatedRow], outcomes: Outcomes, **algorithm: Any) -> dict[str, dict[int, float]]:
    """Each column's values by token, at the tokens that count; holes are checked to be 0."""
    columns = BatchAdvantages(AlgorithmConfig.model_validate(algorithm))(rows, outcomes)
    found: dict[str, dict[int, float]] = {}
    for name, arrays in columns.items():
        assert len(arrays) == len(rows)
        found[name] = {}
        for row, array in zip(rows, arrays, strict=True):
            assert array.dtype == np.float32 and array.shape == row.loss_mask.shape
            assert (array[~row.loss_mask] == 0).all()
            values = zip(row.columns["place"][row.loss_mask], array[row.loss_mask], strict=True)
            found[name] |= {int(place): float(value) for place, value in values}
    return found


def check_equal(found: dict[str, dict[int, float]], expected: dict[str, dict[int, float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


ways = st.one_of(
    st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=len(GROUPS), max_size=len(GROUPS)),
    st.lists(st.integers(1, 3), min_size=len(GROUPS), max_size=len(GROUPS)),
)
"""For each episode where its row is cut, or how many rows its turns are dealt to."""


def apart(rows: Sequence[CollatedRow], way: Sequence[Any]) -> list[list[CollatedRow]]:
    return [
        cut_anywhere(row, how) if isinstance(how, list) else dealt(row, how) for row, how in zip(rows, way, strict=True)
    ]


@searched(
    60,
    st.integers(0, 50),
    ways,
    st.sampled_from(ESTIMATORS),
    st.sampled_from([{}, KL]),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.booleans(),
)
def test_cutting_an_episodes_row_into_several_changes_no_advantage(
    seed: int, way: list[Any], estimator: str, kl: dict[str, Any], discount: float, of_turns: bool
) -> None:
    rows, outcomes = whole(seed)
    if not of_turns:
        outcomes = replace(outcomes, turn_rewards=())
    params = {"gamma": 0.9, "lam": 0.8, "pass_k": 2, "step_weight": 0.7}
    algorithm = {"adv_estimator": estimator, "turn_discount": discount, **params, **kl}
    expected = compute(rows, outcomes, **algorithm)
    check_equal(compute(*in_rows(apart(rows, way), outcomes), **algorithm), expected)


# ---------------------------------------------------------------------------------------------- against loops


Episode = list[tuple[int, int, CollatedRow, int]]
"""The tokens of an episode in order: (turn, place in the batch, row, index in the row)."""


def tokens_of(rows: Sequence[CollatedRow]) -> Episode:
    tokens = [
        (turn.number, int(row.columns["place"][t]), row, t)
        for row in rows
        for turn in row.turns
        for t in range(turn.start, turn.stop)
        if row.loss_mask[t]
    ]
    return sorted(tokens, key=lambda token: token[0])  # stable: within a turn as they stand


def rewards_of(tokens: Episode, reward: float, of_turns: Sequence[float], coef: float) -> list[float]:
    rewards = [
        -coef * (float(row.columns["prox_logprobs"][t]) - float(row.columns["ref_logprobs"][t]))
        for _, _, row, t in tokens
    ]
    rewards[-1] += reward
    for number, value in enumerate(of_turns):
        last = max(i for i, token in enumerate(tokens) if token[0] == number)
        rewards[last] += value
    return rewards


def recursion(tokens: Episode, rewards: list[float], gamma: float, lam: float, discount: float) -> list[list[float]]:
    """(A, A + V) of each token, by the backward recursion; γ is γ·δ^n at a step over n turns."""
    result: list[list[float]] = []
    ahead, value_ahead, turn_ahead = 0.0, 0.0, None
    for (turn, _, row, t), reward in reversed(list(zip(tokens, rewards, strict=True))):
        step = gamma if turn_ahead is None else gamma * discount ** (turn_ahead - turn)
        value = float(row.columns["values"][t])
        ahead = reward + step * value_ahead - value + step * lam * ahead
        value_ahead, turn_ahead = value, turn
        result.insert(0, [ahead, ahead + value])
    return result


def whitened(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) + 1e-8)
    return [(v - mean) / std for v in values]


def forked(seed: int) -> tuple[list[list[CollatedRow]], Outcomes]:
    rows, outcomes = whole(seed)
    return [dealt(row, 1 + k % 3) for k, row in enumerate(rows)], outcomes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_gae_of_forked_episodes_is_the_backward_recursion_over_turns_in_their_order(
    seed: int, discount: float, coef: float
) -> None:
    parts, outcomes = forked(seed)
    assert max(map(len, parts)) > 1
    advantages: dict[int, float] = {}
    returns: dict[int, float] = {}
    for rows, reward, of_turns in zip(parts, outcomes.rewards, outcomes.turn_rewards, strict=True):
        tokens = tokens_of(rows)
        values = recursion(tokens, rewards_of(tokens, float(reward), of_turns, coef), 0.95, 0.9, discount)
        for (_, place, _, _), (advantage, target) in zip(tokens, values, strict=True):
            advantages[place], returns[place] = advantage, target
    white = dict(zip(advantages, whitened(list(advantages.values())), strict=True))
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coef}} if coef else {}
    found = compute(
        *in_rows(parts, outcomes), adv_estimator="gae", gamma=0.95, lam=0.9, turn_discount=discount, **kl
    )  # fmt: skip
    check_equal(found, {"advantages": white, "returns": returns})


@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
def test_the_returns_of_reinforce_plus_plus_are_sums_over_what_comes_later(discount: float) -> None:
    parts, outcomes = forked(5)
    expected: dict[int, float] = {}
    for rows, reward, of_turns in zip(parts, outcomes.rewards, outcomes.turn_rewards, strict=True):
        tokens = tokens_of(rows)
        rewards = rewards_of(tokens, float(reward), of_turns, 0.0)
        for i, (turn, place, _, _) in enumerate(tokens):
            later = range(i, len(tokens))
            expected[place] = math.fsum(0.9 ** (u - i) * discount ** (tokens[u][0] - turn) * rewards[u] for u in later)
    expected = dict(zip(expected, whitened(list(expected.values())), strict=True))
    found = compute(
        *in_rows(parts, outcomes), adv_estimator="reinforce_plus_plus", gamma=0.9, turn_discount=discount
    )  # fmt: skip
    check_equal(found, {"advantages": expected})


@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_an_episodes_score_is_the_discounted_sum_over_its_turns_with_its_own_reward_at_the_last(
    estimator: str, discount: float
) -> None:
    parts, outcomes = forked(7)
    scores = []
    for reward, of_turns in zip(outcomes.rewards, outcomes.turn_rewards, strict=True):
        at_turns = [*of_turns[:-1], of_turns[-1] + float(reward)]
        scores.append(math.fsum(discount**t * r for t, r in enumerate(at_turns)))
    expected: dict[int, float] = {}
    for k, (rows, group) in enumerate(zip(parts, GROUPS, strict=True)):
        mine = [s for s, other in zip(scores, GROUPS, strict=True) if other == group]
        mean = math.fsum(mine) / len(mine)
        above = scores[k] - mean
        if estimator == "grpo":
            std = math.sqrt(math.fsum((s - mean) ** 2 for s in mine) / max(1, len(mine) - 1))
            advantage = above / (std + 1e-6)
        else:
            advantage = above * len(mine) / max(1, len(mine) - 1)
        expected |= {place: advantage for _, place, _, _ in tokens_of(rows)}
    found = compute(*in_rows(parts, outcomes), adv_estimator=estimator, turn_discount=discount)
    check_equal(found, {"advantages": expected})


@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
def test_the_scores_that_groups_are_filtered_by_are_those_of_the_estimators(tmp_path: Path, discount: float) -> None:
    (tmp_path / "own.py").write_text("def estimate(inputs):\n    return inputs.scores()\n", encoding="utf-8")
    parts, outcomes = forked(8)
    turns = [len(of_turns) for of_turns in outcomes.turn_rewards]
    scores = episode_scores(outcomes.rewards, outcomes.turn_rewards, turns, turn_discount=discount)
    own = f"{tmp_path / 'own.py'}:estimate"
    found = compute(*in_rows(parts, outcomes), adv_estimator=own, turn_discount=discount)["advantages"]
    for rows, score in zip(parts, scores, strict=True):
        assert [found[place] for _, place, _, _ in tokens_of(rows)] == pytest.approx(
            [score] * sum(int(row.loss_mask.sum()) for row in rows), rel=1e-5, abs=1e-6
        )


def test_a_reward_of_an_episode_alone_is_discounted_by_the_turns_before_it() -> None:
    rows, outcomes = whole(3)
    outcomes = replace(outcomes, turn_rewards=())
    ahead = compute(rows, outcomes, adv_estimator="rloo", turn_discount=0.5)["advantages"]
    faded = [float(r) * 0.5 ** (len(row.turns) - 1) for r, row in zip(outcomes.rewards, rows, strict=True)]
    same = compute(rows, replace(outcomes, rewards=np.array(faded, np.float32)), adv_estimator="rloo")["advantages"]
    assert ahead == pytest.approx(same, rel=1e-5, abs=1e-6)
    assert ahead != pytest.approx(compute(rows, outcomes, adv_estimator="rloo")["advantages"], rel=1e-2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("coef", [0.0, 0.1])
@pytest.mark.parametrize("by_std", [True, False])
def test_gigpo_of_forked_episodes_compares_turns_of_a_group_in_the_same_state(
    seed: int, discount: float, coef: float, by_std: bool
) -> None:
    parts, outcomes = forked(seed)
    totals: list[tuple[int, float]] = []
    returns: dict[tuple[int, int], tuple[tuple[int, int], float]] = {}
    """(episode, turn) → ((group, state), return)."""
    for k, (rows, group) in enumerate(zip(parts, GROUPS, strict=True)):
        tokens = tokens_of(rows)
        rewards = rewards_of(tokens, float(outcomes.rewards[k]), outcomes.turn_rewards[k], coef)
        totals.append((group, math.fsum(rewards)))
        for turn in {turn.number: turn for row in rows for turn in row.turns}.values():
            later = [(u, r) for (u, _, _, _), r in zip(tokens, rewards, strict=True) if u >= turn.number]
            ahead = math.fsum(discount ** (u - turn.number) * r for u, r in later)
            returns[k, turn.number] = (group, turn.state), ahead
    of_episodes = [compared(one, totals, by_std) for one in totals]
    expected: dict[int, float] = {}
    for k, rows in enumerate(parts):
        for turn_number, place, _, _ in tokens_of(rows):
            of_turn = compared(returns[k, turn_number], list(returns.values()), by_std)
            expected[place] = of_episodes[k] + 0.7 * of_turn
    assert len({where for where, _ in returns.values()}) < len(returns)
    algorithm = {"adv_estimator": "gigpo", "turn_discount": discount, "step_weight": 0.7}
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coef}} if coef else {}
    found = compute(*in_rows(parts, outcomes), **algorithm, norm_adv_by_std_in_grpo=by_std, **kl)
    check_equal(found, {"advantages": expected})


def test_states_are_given_to_estimators_that_are_declared_to_look_at_them(tmp_path: Path) -> None:
    code = """
from headway.algorithms.advantages import from_states
def plain(inputs):
    assert inputs.states is None and inputs.turns is None and inputs.token_rewards is None
    return inputs.rewards
@from_states
def declared(inputs):
    assert (inputs.token_rewards.sum(dim=1) == inputs.rewards).all()
    return (inputs.states == 7) + 2.0 * inputs.turns
"""
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    parts, outcomes = forked(4)
    outcomes = replace(outcomes, turn_rewards=())
    compute(*in_rows(parts, outcomes), adv_estimator=f"{tmp_path}/own.py:plain")
    found = compute(*in_rows(parts, outcomes), adv_estimator=f"{tmp_path}/own.py:declared")["advantages"]
    for rows in parts:
        states = {turn.number: turn.state for row in rows for turn in row.turns}
        for turn, place, _, _ in tokens_of(rows):
            assert found[place] == (states[turn] == 7) + 2 * turn


def compared(one: tuple[Any, float], all_of_them: Sequence[tuple[Any, float]], by_std: bool) -> float:
    """How far one (group, number) is above its group's mean."""
    mine = [number for group, number in all_of_them if group == one[0]]
    above = one[1] - math.fsum(mine) / len(mine)
    return above / (statistics.stdev(mine) + 1e-6) if by_std and len(mine) > 1 else above


def test_the_reward_of_a_turn_without_a_token_is_at_the_last_token_before_it() -> None:
    rows, outcomes = whole(1)
    at = next(k for k, row in enumerate(rows) if len(row.turns) == 4)
    silent = rows[at].turns
    rows[at] = replace(rows[at], turns=(silent[0], silent[2]._replace(number=3)))
    rows[at].loss_mask[silent[1].start : silent[1].stop] = False
    rows[at].loss_mask[silent[3].start : silent[3].stop] = False
    found = compute(rows, outcomes, adv_estimator="reinforce_plus_plus")
    moved = list(outcomes.turn_rewards)
    moved[at] = (sum(moved[at][:3]), 0.0, 0.0, moved[at][3])
    same = compute(rows, replace(outcomes, turn_rewards=tuple(moved)), adv_estimator="reinforce_plus_plus")
    check_equal(found, same)


def test_a_reward_of_a_turn_that_is_not_finite_is_an_error_that_says_whose_it_is() -> None:
    rows, outcomes = whole(2)
    broken = list(outcomes.turn_rewards)
    broken[3] = (math.nan, *broken[3][1:])
    with pytest.raises(RunError, match=r"rewards of turns of trajectory \(0, 4, 0, 3\)"):
        compute(rows, replace(outcomes, turn_rewards=tuple(broken)))


def test_rows_that_do_not_lie_next_to_each_other_are_refused() -> None:
    rows, outcomes = whole(2)
    with pytest.raises(ValueError, match=r"6 rows .*\[0 1 0 2 3 4\]"):
        compute(rows, replace(outcomes, episode_of=np.array([0, 1, 0, 2, 3, 4])))


def test_a_row_of_one_turn_may_leave_its_span_out() -> None:
    rows, outcomes = whole(4, turns=1)
    bare = [replace(row, turns=()) for row in rows]
    assert all([turn[:3] for turn in row.turns] == [(0, 0, len(row.loss_mask))] for row in rows)
    check_equal(
        compute(bare, outcomes, adv_estimator="gae", turn_discount=0.5),
        compute(rows, outcomes, adv_estimator="gae", turn_discount=0.5),
    )
