"""Group-relative advantages against a scalar loop in plain Python."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import strategies as st

from headway.algorithms.advantages import ADVANTAGES, AdvantageInputs, grpo, per_token
from tests.tiers import searched

ragged_groups = st.lists(
    st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=6), min_size=1, max_size=5
)


def inputs_of(groups: list[list[float]], numbers: list[int] | None = None) -> AdvantageInputs:
    numbers = numbers or list(range(len(groups)))
    return AdvantageInputs(
        rewards=torch.tensor([r for group in groups for r in group], dtype=torch.float64),
        groups=torch.tensor([n for n, group in zip(numbers, groups, strict=True) for _ in group]),
        lengths=torch.ones(sum(map(len, groups)), dtype=torch.long),
    )


def reference(group: list[float], normalize: bool) -> list[float]:
    if len(group) == 1 or len(set(group)) == 1:
        return [0.0] * len(group)
    mean = statistics.fmean(group)
    scale = statistics.stdev(group) + 1e-6 if normalize else 1.0
    return [(r - mean) / scale for r in group]


@searched(100, ragged_groups, st.booleans())
def test_grpo_is_reward_minus_mean_over_deviation_in_each_group(groups: list[list[float]], normalize: bool) -> None:
    got = grpo(inputs_of(groups), normalize_by_std=normalize).tolist()
    expected = [a for group in groups for a in reference(group, normalize)]
    assert got == pytest.approx(expected, abs=1e-9, rel=1e-9)


@searched(100, ragged_groups, st.randoms(use_true_random=False))
def test_the_order_of_trajectories_does_not_matter(groups: list[list[float]], rng) -> None:
    inputs = inputs_of(groups, numbers=rng.sample(range(1000), len(groups)))
    order = torch.tensor(rng.sample(range(len(inputs.rewards)), len(inputs.rewards)))
    shuffled = AdvantageInputs(inputs.rewards[order], inputs.groups[order], inputs.lengths[order])
    torch.testing.assert_close(grpo(shuffled), grpo(inputs)[order])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1])
def test_equal_rewards_give_advantages_of_exactly_zero(value: float) -> None:
    assert grpo(inputs_of([[value] * 7, [0.0, 1.0]])).tolist()[:7] == [0.0] * 7


def test_a_group_with_one_answer_has_no_baseline_and_so_no_advantage() -> None:
    assert grpo(inputs_of([[5.0], [0.0, 1.0]])).tolist()[0] == 0.0


def test_one_right_answer_in_four_by_hand() -> None:
    got = grpo(inputs_of([[1.0, 0.0, 0.0, 0.0]])).tolist()
    assert got == pytest.approx([0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3)


def test_an_empty_batch_has_no_advantages() -> None:
    empty = AdvantageInputs(torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert grpo(empty).shape == (0,)


def test_advantages_keep_the_dtype_of_the_rewards() -> None:
    inputs = AdvantageInputs(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), torch.tensor([1, 1]))
    assert grpo(inputs).dtype == torch.float32


def test_one_advantage_per_trajectory_is_shared_by_its_tokens() -> None:
    rows = per_token(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([2, 0, 1]))
    assert [row.tolist() for row in rows] == [[1.0, 1.0], [], [3.0]]


def test_one_advantage_per_token_is_cut_to_each_length() -> None:
    rows = per_token(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 1]))
    assert [row.tolist() for row in rows] == [[1.0, 2.0], [3.0]]


def test_an_estimator_that_returns_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[S\] or \[S, T\] for S = 2"):
        per_token(torch.zeros(3), torch.tensor([1, 1]))


def test_an_estimator_may_come_from_a_file(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def centred(inputs, **params):\n    return inputs.rewards - inputs.rewards.mean()\n")
    estimator = ADVANTAGES.get(f"{file}:centred")
    assert estimator(inputs_of([[1.0, 3.0]])).tolist() == [-1.0, 1.0]
