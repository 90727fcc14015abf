"""Group-in-group advantages against loops over turns in plain Python."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from headway.algorithms.advantages import AdvantageInputs, gigpo, grpo
from headway.errors import ConfigError, RunError
from tests.tiers import searched

EPS = 1e-6

Turn = tuple[float, int, int, int]
"""Reward, state, number of its tokens, and of those of the hole behind it."""
Fetch = list[tuple[int, list[Turn]]]
"""Each episode's group and turns."""

turns = st.tuples(
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3).map(lambda x: round(x, 3))),
    st.sampled_from([-(2**63), 0, 5, 2**63 - 1]),
    st.integers(1, 3),
    st.integers(0, 2),
)
fetches = st.lists(st.tuples(st.integers(0, 2), st.lists(turns, min_size=1, max_size=5)), min_size=1, max_size=8)


def inputs_of(fetch: Fetch, discount: float = 1.0) -> AdvantageInputs:
    """What does not count is NaN, and of other turns and states."""
    width = max(sum(t + h for _, _, t, h in episode) for _, episode in fetch)
    rewards = torch.full((len(fetch), width), math.nan, dtype=torch.float64)
    mask, states = torch.zeros(len(fetch), width, dtype=torch.bool), torch.full((len(fetch), width), 5)
    numbers = torch.full((len(fetch), width), 99)
    lengths = []
    for k, (_, episode) in enumerate(fetch):
        at = 0
        for number, (reward, state, tokens, hole) in enumerate(episode):
            here = slice(at, at + tokens)
            mask[k, here], numbers[k, here], states[k, here], rewards[k, here] = True, number, state, 0.0
            rewards[k, at + tokens - 1] = reward
            at += tokens + hole
        lengths.append(at)
    return AdvantageInputs(
        rewards=torch.full((len(fetch),), math.nan, dtype=torch.float64),
        groups=torch.tensor([group for group, _ in fetch]),
        lengths=torch.tensor(lengths),
        token_rewards=rewards,
        mask=mask,
        turns=numbers,
        states=states,
        turn_discount=discount,
    )


def above_mean(mine: float, all_of_them: list[float], by_std: bool) -> float:
    if len(set(all_of_them)) == 1:
        return 0.0
    above = mine - statistics.fmean(all_of_them)
    return above / (statistics.stdev(all_of_them) + EPS) if by_std else above


def reference(fetch: Fetch, discount: float, weight: float, by_std: bool) -> list[list[float]]:
    """The advantage of each episode's turns."""
    totals = [(group, sum(reward for reward, *_ in episode)) for group, episode in fetch]
    ahead: list[list[float]] = []
    for _, episode in fetch:
        later, returns = 0.0, []
        for reward, *_ in reversed(episode):
            later = reward + discount * later
            returns.insert(0, later)
        ahead.append(returns)
    result = []
    for k, (group, episode) in enumerate(fetch):
        of_episode = above_mean(totals[k][1], [total for other, total in totals if other == group], by_std)
        result.append([])
        for turn, (_, state, *_) in enumerate(episode):
            peers = [
                ahead[j][i]
                for j, (other, theirs) in enumerate(fetch)
                for i, (_, at, *_) in enumerate(theirs)
                if (other, at) == (group, state)
            ]
            result[-1].append(of_episode + weight * above_mean(ahead[k][turn], peers, by_std))
    return result


def of_turns(advantages: torch.Tensor, fetch: Fetch) -> list[list[float]]:
    """The advantage of each episode's turns; checked to be one number for a turn's tokens, and 0 elsewhere."""
    found = []
    for k, (_, episode) in enumerate(fetch):
        row, at = advantages[k].tolist(), 0
        found.append([])
        for _, _, tokens, hole in episode:
            assert len(set(row[at : at + tokens])) == 1
            found[-1].append(row[at])
            assert row[at + tokens : at + tokens + hole] == [0.0] * hole
            at += tokens + hole
        assert row[at:] == [0.0] * (len(row) - at)
    return found


@searched(100, fetches, st.sampled_from([1.0, 0.95, 0.5, 0.0]), st.sampled_from([0.0, 1.0, 0.3]), st.booleans())
def test_a_turn_is_compared_with_turns_of_its_group_in_its_state_and_its_episode_with_those_of_its_group(
    fetch: Fetch, discount: float, weight: float, by_std: bool
) -> None:
    found = gigpo(inputs_of(fetch, discount), normalize_by_std=by_std, step_weight=weight)
    for got, expected in zip(of_turns(found, fetch), reference(fetch, discount, weight, by_std), strict=True):
        assert got == pytest.approx(expected, rel=1e-7, abs=1e-7)


@searched(100, fetches, st.sampled_from([1.0, 0.9]), st.booleans())
def test_where_no_state_was_reached_twice_it_is_grpo(fetch: Fetch, discount: float, by_std: bool) -> None:
    count = 0
    apart: Fetch = []
    for group, episode in fetch:
        apart.append((group, [(reward, count + n, t, h) for n, (reward, _, t, h) in enumerate(episode)]))
        count += len(episode)
    inputs = inputs_of(apart, discount)
    expected = grpo(replace(inputs, turn_discount=1.0), normalize_by_std=by_std)
    assert torch.equal(gigpo(inputs, normalize_by_std=by_std), expected)
    assert torch.equal(gigpo(inputs_of(fetch, discount), normalize_by_std=by_std, step_weight=0.0), expected)


@searched(100, fetches, st.randoms(use_true_random=False))
def test_the_order_of_trajectories_and_the_names_of_groups_and_states_do_not_matter(
    fetch: Fetch, rng: random.Random
) -> None:
    order = rng.sample(range(len(fetch)), len(fetch))
    groups, states = rng.sample(range(-9, 9), 3), rng.sample(range(-9, 9), 4)
    names = dict(zip([-(2**63), 0, 5, 2**63 - 1], states, strict=True))
    other = [(groups[fetch[k][0]], [(r, names[s], t, h) for r, s, t, h in fetch[k][1]]) for k in order]
    torch.testing.assert_close(gigpo(inputs_of(other, 0.9)), gigpo(inputs_of(fetch, 0.9))[order])


def test_two_ways_from_one_state_by_hand() -> None:
    """Both episodes pass through state 7; one wins at once from there, the other goes through 8 and loses."""
    fetch: Fetch = [(0, [(0.0, 7, 1, 1), (1.0, 9, 2, 0)]), (0, [(0.0, 6, 1, 0), (0.0, 7, 1, 0), (0.0, 8, 1, 0)])]
    found = of_turns(gigpo(inputs_of(fetch, 0.5), normalize_by_std=False, step_weight=2.0), fetch)
    assert found == [[0.5 + 2 * 0.25, 0.5], [-0.5, -0.5 - 2 * 0.25, -0.5]]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1])
def test_equal_returns_from_a_state_say_nothing_however_they_were_summed(reward: float) -> None:
    fetch: Fetch = [
        (0, [(0.0, 1 + k, 1, 0)] * k + [(0.0, 0, 2, 1), (reward, 9, 1 + k, k), (0.0, 8, k + 1, 0), (reward, 7, 1, 0)])
        for k in range(5)
    ]
    found = of_turns(gigpo(inputs_of(fetch, 0.7)), fetch)
    assert [episode[k] for k, episode in enumerate(found)] == [0.0] * 5


def test_without_tokens_there_is_nothing_to_compare() -> None:
    empty = AdvantageInputs(
        torch.zeros(2), torch.zeros(2).long(), torch.zeros(2).long(), states=torch.zeros(2, 3).long()
    )
    assert gigpo(empty).tolist() == [[0.0] * 3] * 2
    none = AdvantageInputs(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long())
    assert gigpo(replace(none, states=torch.zeros(0, 0).long())).shape == (0, 0)


def test_what_it_cannot_use_is_refused() -> None:
    inputs = inputs_of([(0, [(1.0, 0, 1, 0)])])
    with pytest.raises(ConfigError, match=r"gigpo needs the state .*from_states"):
        gigpo(replace(inputs, states=None))
    with pytest.raises(ConfigError, match=r"algorithm\.step_weight: -1\.0 is negative"):
        gigpo(inputs, step_weight=-1.0)
    with pytest.raises(ValueError, match=r"states .*\[1, 2\].*\[1, 1\]"):
        replace(inputs, states=torch.zeros(1, 2).long())
    with pytest.raises(RunError, match="reward of token 0 of trajectory 0"):
        gigpo(inputs_of([(0, [(math.inf, 0, 1, 0)])]))
