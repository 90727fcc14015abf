"""Estimators with one advantage per trajectory: scalar loops from the papers, brute force over subsets and outcomes."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import strategies as st

from headway.algorithms.advantages import ADVANTAGES, AdvantageInputs, grpo, per_token
from headway.errors import ConfigError, RunError
from tests.tiers import searched

EPS = 1e-6
RELATIVE = ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk", "pass_at_k"]

Answers = list[tuple[float, int]]
"""Reward and length of each answer of a group."""

rewards = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 10).map(lambda x: round(x, 3)))
ragged = st.lists(st.lists(st.tuples(rewards, st.integers(1, 20)), min_size=1, max_size=7), min_size=1, max_size=5)


def inputs_of(groups: list[Answers], numbers: list[int] | None = None) -> AdvantageInputs:
    numbers = numbers or list(range(len(groups)))
    answers = [answer for group in groups for answer in group]
    return AdvantageInputs(
        rewards=torch.tensor([r for r, _ in answers], dtype=torch.float64),
        groups=torch.tensor([n for n, group in zip(numbers, groups, strict=True) for _ in group]),
        lengths=torch.tensor([length for _, length in answers]),
    )


def pass_at_k_by_enumeration(r: list[float], k: int) -> list[float]:
    """Every subset's best reward, standardised, averaged over the subsets that an answer is in."""
    subsets = list(itertools.combinations(range(len(r)), min(k, len(r))))
    best = {subset: max(r[i] for i in subset) for subset in subsets}
    mean = statistics.fmean(best.values())
    std = statistics.pstdev(best.values())
    mine = [[best[s] for s in subsets if i in s] for i in range(len(r))]
    return [(statistics.fmean(b) - mean) / (std + EPS) for b in mine]


def reference(name: str, group: Answers) -> list[float]:
    r, lengths = [a[0] for a in group], [a[1] for a in group]
    n, mean = len(r), statistics.fmean(r)
    if len(set(r)) == 1:
        return [0.0] * n
    std = statistics.stdev(r)
    match name:
        case "grpo":
            return [(x - mean) / (std + EPS) for x in r]
        case "dr_grpo":
            return [x - mean for x in r]
        case "rloo":
            return [x - sum(r[:i] + r[i + 1 :]) / (n - 1) for i, x in enumerate(r)]
        case "opo":
            baseline = sum(x * w for x, w in group) / sum(lengths)
            return [x - baseline for x in r]
        case "maxrl":
            return [(x - mean) / (mean + EPS) for x in r]
        case "grpo_passk":
            second, first = sorted(r)[-2:]
            return [(first - second) / (std + EPS) if x == first and first > second else 0.0 for x in r]
        case "pass_at_k":
            return pass_at_k_by_enumeration(r, k=4)
    raise AssertionError(name)


@pytest.mark.parametrize("name", RELATIVE)
@searched(30, groups=ragged)
def test_each_estimator_is_its_scalar_loop_in_each_group(name: str, groups: list[Answers]) -> None:
    got = ADVANTAGES.get(name)(inputs_of(groups)).tolist()
    expected = [a for group in groups for a in reference(name, group)]
    assert got == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("name", [*RELATIVE, "reinforce_plus_plus_baseline"])
def test_the_order_of_trajectories_and_the_names_of_groups_do_not_matter(name: str) -> None:
    rng = random.Random(name)
    groups = [[(rng.choice([0.0, 1.0, 0.3]), rng.randint(1, 9)) for _ in range(n)] for n in (4, 1, 7, 2)]
    one = inputs_of(groups)
    order = torch.tensor(rng.sample(range(14), 14))
    other = inputs_of(groups, numbers=[7, -3, 500, 2])
    shuffled = AdvantageInputs(other.rewards[order], other.groups[order], other.lengths[order])
    torch.testing.assert_close(ADVANTAGES.get(name)(shuffled), ADVANTAGES.get(name)(one)[order])


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e8 + 0.1])
def test_equal_rewards_and_single_answers_give_exactly_zero(name: str, value: float) -> None:
    groups = [[(value, n) for n in range(1, 8)], [(0.0, 1), (1.0, 2)], [(value, 5)]]
    got = ADVANTAGES.get(name)(inputs_of(groups)).tolist()
    assert got[:7] + got[9:] == [0.0] * 8
    assert name == "pass_at_k" or got[8] > 0  # the best of two of two is always the same


@pytest.mark.parametrize("name", RELATIVE)
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    assert ADVANTAGES.get(name)(AdvantageInputs(torch.zeros(0), nothing, nothing)).shape == (0,)


@pytest.mark.parametrize("name", [*RELATIVE, "remax", "reinforce_plus_plus_baseline"])
def test_the_result_has_the_rewards_dtype_and_with_a_mask_zeros_in_its_holes(name: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    plain = {
        "rewards": torch.tensor([0.25, 1.0, 0.0]),
        "groups": torch.tensor([3, 3, 3]),
        "lengths": torch.tensor([4, 3, 4]),
        "baselines": torch.tensor([0.5, 0.5, 0.5]),
    }
    got = ADVANTAGES.get(name)(AdvantageInputs(**plain, mask=mask))
    valid = mask & (torch.arange(4) < plain["lengths"][:, None])
    assert got.dtype == torch.float32
    assert got.shape == (3, 4)
    assert torch.equal(got, torch.where(valid, got[:, :1], 0.0))
    assert ADVANTAGES.get(name)(AdvantageInputs(**plain)).shape == (3,)


@pytest.mark.parametrize("name", RELATIVE)
def test_rewards_of_tokens_count_with_their_sum_over_what_the_policy_wrote(name: str) -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    nan, inf = math.nan, math.inf
    token_rewards = torch.tensor([[0.5, nan, 0.25], [1.0, 0.0, 0.5], [0.0, 0.125, inf]])
    common = {"groups": torch.tensor([0, 0, 0]), "lengths": torch.tensor([3, 3, 2]), "mask": mask}
    got = ADVANTAGES.get(name)(AdvantageInputs(rewards=torch.full((3,), nan), token_rewards=token_rewards, **common))
    expected = ADVANTAGES.get(name)(AdvantageInputs(rewards=torch.tensor([0.75, 1.5, 0.125]), **common))
    torch.testing.assert_close(got, expected)


def test_opo_weighs_by_the_tokens_that_the_policy_wrote_not_by_the_length() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        lengths=torch.tensor([4, 2]),
        mask=torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
    )
    got = ADVANTAGES.get("opo")(inputs)
    torch.testing.assert_close(got[:, 0], torch.tensor([1 - 1 / 3, -1 / 3]))


def test_dr_grpo_is_grpo_without_std() -> None:
    inputs = inputs_of([[(0.3, 1), (2.0, 4), (1.0, 2)], [(5.0, 1)]])
    assert torch.equal(ADVANTAGES.get("dr_grpo")(inputs), grpo(inputs, normalize_by_std=False))


# ------------------------------------------------------------------------------ pass@k


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("binary", [True, False])
def test_pass_at_k_is_the_mean_over_all_subsets_by_enumeration(k: int, binary: bool) -> None:
    rng = random.Random(10 * k + binary)
    groups = [
        [(float(rng.random() < 0.3) if binary else rng.gauss(-1, 3), 1) for _ in range(n)]
        for n in (1, 2, 3, 5, 6, 8, 9)
    ]
    got = ADVANTAGES.get("pass_at_k")(inputs_of(groups), k=k).tolist()
    expected = [a for group in groups for a in pass_at_k_by_enumeration([r for r, _ in group], k)]
    assert got == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("n", [8, 64, 1000])
def test_pass_at_k_of_binary_rewards_is_the_papers_formula(n: int) -> None:
    for failures in {0, 1, n // 2, n - 2, n}:
        k = 4
        mean = 1 - math.comb(failures, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean))
        got = ADVANTAGES.get("pass_at_k")(inputs_of([[(0.0, 1)] * failures + [(1.0, 1)] * (n - failures)]), k=k)
        if failures < k or failures == n:
            assert got.tolist() == [0.0] * n
            continue
        given_failure = 1 - math.comb(failures - 1, k - 1) / math.comb(n - 1, k - 1)
        assert got[0].item() == pytest.approx((given_failure - mean) / (std + EPS), rel=1e-9)
        assert got[-1].item() == pytest.approx((1 - mean) / (std + EPS), rel=1e-9)


def test_pass_at_k_wants_at_least_one_answer() -> None:
    with pytest.raises(ConfigError, match=r"\bk .*at least 1, not 0"):
        ADVANTAGES.get("pass_at_k")(inputs_of([[(1.0, 1)]]), k=0)


def test_grpo_passk_gives_the_lead_to_the_best_answer_and_nothing_to_a_tie() -> None:
    groups = [[(3.0, 1), (7.0, 1), (5.0, 1)], [(7.0, 1), (1.0, 1), (7.0, 1)]]
    got = ADVANTAGES.get("grpo_passk")(inputs_of(groups), normalize_by_std=False)
    assert got.tolist() == [0, 2, 0, 0, 0, 0]


# -------------------------------------------------------- expectations over all outcomes


def expected_gradient(name: str, n: int, theta: float) -> float:
    """E[(1/n) Σ A ∇ log π] for a policy that succeeds with probability sigmoid(θ), over all 2^n outcomes."""
    p = 1 / (1 + math.exp(-theta))
    outcomes = list(itertools.product([0.0, 1.0], repeat=n))
    advantages = ADVANTAGES.get(name)(inputs_of([[(r, 1) for r in outcome] for outcome in outcomes]))
    total = 0.0
    for outcome, row in zip(outcomes, advantages.view(-1, n).tolist(), strict=True):
        probability = math.prod(p if r else 1 - p for r in outcome)
        total += probability * sum(a * (r - p) for a, r in zip(row, outcome, strict=True)) / n
    return total


@pytest.mark.parametrize("theta", [-2.0, 0.3, 1.5])
def test_the_gradient_of_rloo_is_unbiased_and_that_of_dr_grpo_short_by_one_nth(theta: float) -> None:
    p = 1 / (1 + math.exp(-theta))
    assert expected_gradient("rloo", 6, theta) == pytest.approx(p * (1 - p))
    assert expected_gradient("dr_grpo", 6, theta) == pytest.approx(5 / 6 * p * (1 - p))


@pytest.mark.parametrize("theta", [-2.0, 0.3, 1.5])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_the_gradient_of_maxrl_is_that_of_log_p_up_to_order_n_minus_1(n: int, theta: float) -> None:
    p = 1 / (1 + math.exp(-theta))
    series = sum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected_gradient("maxrl", n, theta) == pytest.approx(series * p * (1 - p), rel=1e-5)


# ---------------------------------------------------------------- what cannot be right


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names()) - {"gae"}))
def test_a_reward_that_is_not_finite_is_refused_with_its_trajectory(name: str, bad: float) -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.0, 1.0, bad, 0.0]),
        groups=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([1, 2, 1, 1]),
        baselines=torch.zeros(4),
        states=torch.zeros(4, 2, dtype=torch.long),
    )
    with pytest.raises(RunError, match=r"reward of trajectory 2 \(of 4\b.* is (nan|inf|-inf)"):
        ADVANTAGES.get(name)(inputs)


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(RunError, match=r"maxrl: .*trajectory 1 .* -1\.0"):
        ADVANTAGES.get("maxrl")(inputs_of([[(1.0, 1), (-1.0, 1)]]))


@pytest.mark.parametrize(
    ("name", "shape"), [("groups", (3,)), ("finished", (1,)), ("mask", (2, 3)), ("values", (2, 3)), ("mask", (3, 4))]
)
def test_tensors_that_do_not_belong_together_are_refused(name: str, shape: tuple[int, ...]) -> None:
    fields = {
        "rewards": torch.zeros(2),
        "groups": torch.zeros(2, dtype=torch.long),
        "lengths": torch.tensor([4, 1]),
        "token_rewards": torch.zeros(2, 4),
    }
    with pytest.raises(ValueError, match=name):
        AdvantageInputs(**fields | {name: torch.ones(shape, dtype=torch.bool)})


def test_a_trajectory_longer_than_its_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens in tensors for 3"):
        AdvantageInputs(torch.zeros(1), torch.zeros(1), torch.tensor([5]), mask=torch.ones(1, 3, dtype=torch.bool))


def test_holes_of_a_mask_are_zero_in_what_any_estimator_returned() -> None:
    mask = torch.tensor([[True, False, True, False], [True, True, False, False]])
    lengths = torch.tensor([3, 1])
    assert [row.tolist() for row in per_token(torch.tensor([2.0, 3.0]), lengths, mask)] == [[2, 0, 2], [3]]
    narrow = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # padded to the longest trajectory only
    assert [row.tolist() for row in per_token(narrow, lengths, mask)] == [[1, 0, 3], [4]]
