"""The stage Reward over episodes: their own rewards, those of their turns, and the baseline of a smaller group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import Conversation, FinishReason, Prompt, Trajectory
from headway.events import GroupRewarded
from headway.pipeline.stage import Channel
from headway.pipeline.stages.reward import Reward, Scoring, scores_of
from tests.pipeline.fakes import Recorder
from tests.pipeline.test_ledger import run_state

PROMPT = Prompt(0, 0, 0, "test", "", np.zeros(1, np.int32))


def episode(k: int, reward: float | None = None, of_turns: tuple[float, ...] = (), **others: Any) -> Trajectory:
    return Trajectory(
        id=PROMPT.trajectory_id(k),
        replica="a",
        text="",
        prompt_length=1,
        length=2,
        finish_reason=FinishReason.STOP,
        version_spans=[[0, 0]],
        started=0.0,
        finished=1.0,
        rows=(),
        turns=max(1, len(of_turns)),
        reward=reward,
        turn_rewards=of_turns,
        **others,
    )


async def passed(
    *episodes: Trajectory, n: int = 2, turn_discount: float = 1.0, filters: bool = False, buffer: int | None = None
) -> list[Group]:
    """The group, or nothing where it was filtered. ``buffer``: tokens before the limit of four that cost reward."""
    recorder = Recorder()
    state = run_state(recorder)
    number = state.admit(PROMPT)
    channel: Channel[Group] = Channel("groups")

    algorithm = {"turn_discount": turn_discount, "filter_groups": {"enable": filters}}
    values = {"mode": "on_policy", "algorithm": algorithm, "data": {"max_response_length": 4}}
    if buffer is not None:
        values["reward"] = {"overlong_buffer": {"enable": True, "len": buffer}}
    config = Config.model_validate(values)
    stage = Reward(recorder.on_event, channel, Channel("rewarded"), config, state, Scoring(None))
    made = Group(number, PROMPT, n, SamplingParams(1), trajectories=episodes)
    groups = [group async for group in stage.process_data(made)]
    (told,) = [event.rewards for event in recorder.events if isinstance(event, GroupRewarded)]
    assert told == [(t.reward or 0.0) + sum(t.turn_rewards) for t in episodes if t.id.k < n]
    return groups


async def rewarded(*episodes: Trajectory, n: int = 2) -> Group:
    (group,) = await passed(*episodes, n=n)
    assert group.rewards is not None and len(group.rewards) == len(group.trajectories)
    return group


async def test_rewards_of_turns_are_told_with_the_episodes_and_trained_apart_from_it():
    group = await rewarded(episode(0, 1.0, (0.5, 0.25)), episode(1, 2.0))
    assert group.rewards.tolist() == [1.0, 2.0]


async def test_groups_are_compared_by_discounted_scores():
    def episodes() -> list[Trajectory]:
        return [episode(0, None, (1.0, 1.0)), episode(1, None, (2.0,))]

    assert not await passed(*episodes(), filters=True)
    assert await passed(*episodes(), filters=True, turn_discount=0.5)


async def test_an_answer_near_the_limit_loses_reward_that_is_trained_on_and_not_the_one_that_is_reported():
    (group,) = await passed(episode(0, 1.0), replace(episode(1, 1.0), length=4), filters=False, buffer=4)
    assert group.rewards is not None and group.rewards.tolist() == [0.5, 0.0]
    assert not await passed(episode(0, 1.0), replace(episode(1, 1.0), length=4), filters=True, buffer=4), "as scored"


async def test_the_baseline_is_found_where_other_episodes_failed():
    group = await rewarded(episode(1, 1.0), episode(3, 0.0), episode(4, 5.0), n=4)
    assert (group.baseline, group.rewards.tolist()) == (5.0, [1.0, 0.0])
    assert [t.id.k for t in group.trajectories] == [1, 3]


async def test_a_group_goes_on_without_text():
    told = Conversation([{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "4"}])
    group = await rewarded(*(replace(episode(k, 1.0, conversation=told), text="4") for k in range(3)))
    assert [(t.id.k, t.conversation, t.text) for t in group.trajectories] == [(0, None, ""), (1, None, "")]
    assert group.baseline == 1.0


async def test_an_episode_that_a_limit_ended_before_any_reward_has_none():
    assert (await scores_of(None, PROMPT, [episode(0, limit="turns")])).rewards.tolist() == [0.0]
