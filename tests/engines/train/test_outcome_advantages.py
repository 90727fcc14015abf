"""Advantages from outcomes alone: bit for bit those that rows give, one number for each episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.algorithms.advantages import ADVANTAGES, looks_at_tokens
from headway.cluster.machine.batch_cache import spread
from headway.config.sections.learning import AlgorithmConfig
from headway.data.packing import CollatedRow
from headway.data.types import Outcomes
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.errors import ConfigError, RunError
from tests.engines.train.episodes import GROUPS, cut_anywhere, dealt, in_rows, whole
from tests.tiers import searched

FROM_OUTCOMES = sorted(name for name in ADVANTAGES.names() if not looks_at_tokens(ADVANTAGES.get(name)))


def estimator(**algorithm: Any) -> BatchAdvantages:
    return BatchAdvantages(AlgorithmConfig.model_validate(algorithm))


def fetch(
    seed: int, *, holes: bool, cuts: Sequence[Sequence[int]], hands: Sequence[int]
) -> tuple[list[CollatedRow], Outcomes]:
    """Random episodes, some of them in several rows; rewards are those of a verifier."""
    rows, outcomes = whole(seed, turns=4 if holes else 1)
    parts = [
        dealt(row, hand) if hand > 1 else cut_anywhere(row, at) for row, at, hand in zip(rows, cuts, hands, strict=True)
    ]
    rng = np.random.default_rng(seed)
    outcomes = replace(
        outcomes,
        turn_rewards=(),
        rewards=rng.choice(np.array([0, 0.3, 1], np.float32), len(GROUPS)),
        lengths=np.array([row.loss_mask.sum() for row in rows]),
    )
    return in_rows(parts, outcomes)


def per_episode(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=len(GROUPS), max_size=len(GROUPS))


def test_what_looks_at_tokens_is_known() -> None:
    assert set(ADVANTAGES.names()) - set(FROM_OUTCOMES) == {"gae", "gigpo", "reinforce_plus_plus"}


@pytest.mark.parametrize("name", FROM_OUTCOMES)
@searched(
    25,
    seed=st.integers(0, 10**6),
    holes=st.booleans(),
    cuts=per_episode(st.lists(st.integers(0, 20), max_size=3)),
    hands=per_episode(st.integers(1, 3)),
)
def test_every_row_gets_bit_for_bit_what_its_tokens_give(
    name: str, seed: int, holes: bool, cuts: list[list[int]], hands: list[int]
) -> None:
    rows, outcomes = fetch(seed, holes=holes, cuts=cuts, hands=hands)
    compute = estimator(adv_estimator=name)
    expected = compute(rows, outcomes)["advantages"]
    numbers = compute.of_outcomes(outcomes)
    assert numbers is not None and numbers.shape == (len(GROUPS),) and numbers.dtype == np.float32
    sent = numbers[outcomes.episode_of].tolist()
    for row, number, wanted in zip(rows, sent, expected, strict=True):
        column = spread(number, row.loss_mask)
        assert column.dtype == np.float32 and column.shape == row.loss_mask.shape
        assert column.tobytes() == wanted.tobytes()


def test_a_number_without_holes_is_a_view_that_takes_no_memory() -> None:
    assert spread(0.1, np.ones(10**6, np.bool_)).strides == (0,)
    with_holes = spread(-0.1, np.array([True, False]))
    assert with_holes.tobytes() == np.array([-0.1, 0.0], np.float32).tobytes()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"adv_estimator": "gae"},
        {"adv_estimator": "reinforce_plus_plus"},
        {"use_kl_in_reward": True},
        {"turn_discount": 0.9},
    ],
)
def test_tokens_are_looked_at_where_the_algorithm_needs_them(algorithm: dict[str, Any]) -> None:
    _, outcomes = fetch(0, holes=False, cuts=[[]] * len(GROUPS), hands=[1] * len(GROUPS))
    assert estimator(**algorithm).of_outcomes(outcomes) is None
    assert estimator().of_outcomes(outcomes) is not None
    assert estimator().of_outcomes(replace(outcomes, turn_rewards=((1.0,),) * len(GROUPS))) is None


OWN = """
import torch
from headway.algorithms.advantages import from_outcomes_alone
def unknown(inputs): return inputs.rewards
@from_outcomes_alone
def declared(inputs):
    assert inputs.mask is None
    return inputs.rewards / inputs.written()
@from_outcomes_alone
def writes(inputs): return inputs.rewards.add_(1)
@from_outcomes_alone
def per_token(inputs): return torch.zeros(len(inputs.rewards), int(inputs.lengths.max()))
"""


def test_an_estimator_of_ones_own_looks_at_tokens_unless_it_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    _, outcomes = fetch(3, holes=True, cuts=[[4]] * len(GROUPS), hands=[1] * len(GROUPS))
    assert estimator(adv_estimator=f"{tmp_path}/own.py:unknown").of_outcomes(outcomes) is None
    numbers = estimator(adv_estimator=f"{tmp_path}/own.py:declared").of_outcomes(outcomes)
    assert outcomes.lengths is not None
    np.testing.assert_allclose(numbers, outcomes.rewards / outcomes.lengths, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"own\.py:per_token .*outcomes.* not \[6, \d+\]"):
        estimator(adv_estimator=f"{tmp_path}/own.py:per_token").of_outcomes(outcomes)


def test_an_estimator_that_writes_into_its_inputs_changes_no_rewards_of_the_batch(tmp_path: Path) -> None:
    """What tensors and arrays share, torch warns of where the arrays are read-only, as an object store's are."""
    (tmp_path / "own.py").write_text(OWN)
    _, outcomes = fetch(3, holes=True, cuts=[[4]] * len(GROUPS), hands=[1] * len(GROUPS))
    before = outcomes.rewards.copy()
    numbers = estimator(adv_estimator=f"{tmp_path}/own.py:writes").of_outcomes(outcomes)
    np.testing.assert_array_equal(outcomes.rewards, before)
    np.testing.assert_array_equal(numbers, before + 1)


def test_a_reward_that_is_not_finite_names_its_trajectory() -> None:
    _, outcomes = fetch(0, holes=False, cuts=[[]] * len(GROUPS), hands=[1] * len(GROUPS))
    outcomes.rewards[2] = np.nan
    with pytest.raises(RunError, match=r"rewards of trajectory \(0, 9, 0, 2\) \(group 9\) .*not finite"):
        estimator().of_outcomes(outcomes)
