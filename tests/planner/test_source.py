import asyncio

import numpy as np
import pytest

from headway.algorithms.scores import has_variance
from headway.data.types import Prompt, TrajectoryId
from headway.planner.profiles.job_profile import RewardProfile
from headway.planner.simulation.simulated_prompts import SimulatedReward, SimulatedSource, held_out_prompts
from headway.planner.simulation.virtual_clock import run_virtual


def by_row(id: TrajectoryId) -> int:
    return 10 + id.row


def given(source: SimulatedSource, count: int) -> list[Prompt]:
    return [source.next() for _ in range(count)]


def test_prompts_have_the_length_of_their_row_and_one_epoch_never_ends() -> None:
    prompts = given(SimulatedSource(by_row), 1000)
    assert [(p.epoch, p.row, len(p.token_ids)) for p in prompts] == [(0, row, 10 + row) for row in range(1000)]


def test_token_ids_take_no_memory_and_cannot_be_written() -> None:
    ids = given(SimulatedSource(lambda *_: 1_000_000), 1)[0].token_ids
    assert (ids.shape, ids.dtype, ids.strides) == ((1_000_000,), np.int32, (0,))
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_a_row_runs_again_as_a_further_attempt_of_the_same_length() -> None:
    source = SimulatedSource(by_row)
    prompt = given(source, 3)[2]
    again = source.again(source.again(prompt))
    assert (again.epoch, again.row, again.attempt, len(again.token_ids)) == (0, 2, 2, 12)


def test_a_prompt_carries_what_is_known_of_its_group() -> None:
    source = SimulatedSource(by_row, filtered=lambda id: id.row == 2 or id.attempt == 1)
    first, second = given(source, 2)
    assert (first.answer, second.answer) == (False, False)
    assert given(source, 1)[0].answer is True
    assert source.again(first).answer is True
    assert given(SimulatedSource(by_row), 1)[0].answer is None


def test_a_restored_source_goes_on_where_the_other_stood() -> None:
    source, other = SimulatedSource(by_row), SimulatedSource(by_row)
    source.again(given(source, 4)[0])
    other.restore(source.state())
    assert [(p.epoch, p.row, len(p.token_ids)) for p in given(other, 2)] == [(0, 4, 14), (0, 5, 15)]


def test_held_out_prompts_are_rows_of_an_epoch_of_their_own() -> None:
    assert [(p.epoch, p.row, len(p.token_ids)) for p in held_out_prompts(2, by_row)] == [(-1, 0, 10), (-1, 1, 11)]


# ---------------------------------------------------------------------------------------------- the reward


def test_groups_are_scored_in_order_by_so_many_workers() -> None:
    async def main() -> list[float]:
        reward = SimulatedReward(RewardProfile(seconds=2.0, workers=2), seed=0)

        async def scored(prompt: Prompt) -> float:
            await reward.score(prompt, ["", ""])
            return asyncio.get_running_loop().time()

        return await asyncio.gather(*(scored(prompt) for prompt in given(SimulatedSource(by_row), 5)))

    assert run_virtual(main()) == [2, 2, 4, 4, 6]


def filtered(seed: int, share: float, groups: int) -> list[bool]:
    async def main() -> list[bool]:
        reward = SimulatedReward(RewardProfile(filtered=share), seed)
        scores = [(await reward.score(prompt, [""] * 4)).rewards for prompt in given(SimulatedSource(by_row), groups)]
        assert all(score.shape == (4,) and score.dtype == np.float32 for score in scores)
        return [not has_variance(score) for score in scores]

    return run_virtual(main())


def test_the_share_of_groups_without_variance_is_the_one_asked_for() -> None:
    assert not any(filtered(0, 0.0, 500))
    # 5000 draws: four standard deviations are 0.026.
    assert np.mean(filtered(0, 0.3, 5000)) == pytest.approx(0.3, abs=0.026)


def test_what_is_known_of_a_group_decides_instead_of_the_share() -> None:
    async def main() -> list[bool]:
        reward = SimulatedReward(RewardProfile(filtered=0.5), seed=0)
        source = SimulatedSource(by_row, filtered=lambda id: id.row % 3 == 0)
        return [has_variance((await reward.score(prompt, [""] * 4)).rewards) for prompt in given(source, 9)]

    assert run_virtual(main()) == [False, True, True] * 3


def test_which_groups_are_filtered_depends_on_the_seed_and_a_further_attempt_is_another_draw() -> None:
    assert filtered(1, 0.5, 50) == filtered(1, 0.5, 50)
    assert filtered(1, 0.5, 50) != filtered(2, 0.5, 50)

    async def main() -> set[bool]:
        reward, source = SimulatedReward(RewardProfile(filtered=0.5), seed=0), SimulatedSource(by_row)
        prompt = given(source, 1)[0]
        outcomes = set()
        for _ in range(20):
            outcomes.add(has_variance((await reward.score(prompt, ["", ""])).rewards))
            prompt = source.again(prompt)
        return outcomes

    assert run_virtual(main()) == {True, False}
