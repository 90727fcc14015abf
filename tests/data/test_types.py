"""Versions of trajectories and groups; the samples of episodes of several rows."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import (
    Column,
    FinishReason,
    Prompt,
    RowAt,
    RowTokens,
    SampledTokens,
    TrainSample,
    Trajectory,
    TrajectoryId,
)
from headway.errors import RunError
from headway.pipeline.actor_critic import add_column, outcomes

PROMPT = Prompt(epoch=0, row=0, attempt=0, source="test", text="", token_ids=np.array([1], np.int32))


def group(*version_spans: list[list[int]]) -> Group:
    trajectories = tuple(
        Trajectory(
            id=PROMPT.trajectory_id(k),
            replica="rollout-0",
            text="",
            prompt_length=1,
            length=8 if spans else 0,
            finish_reason=FinishReason.STOP if spans else FinishReason.ABORTED,
            version_spans=spans,
            started=0.0,
            finished=1.0,
            rows=(RowAt(k, 1, 8 if spans else 0),),
        )
        for k, spans in enumerate(version_spans)
    )
    return Group(7, PROMPT, len(trajectories), SamplingParams(8), trajectories=trajectories)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    assert group([[0, 3], [4, 5]], [[0, 4]]).oldest_version == 3


def test_a_trajectory_without_tokens_has_no_version_and_does_not_count() -> None:
    mixed = group([], [[0, 4]])
    assert mixed.oldest_version == 4


def test_a_group_without_any_token_says_so() -> None:
    with pytest.raises(RunError, match=r"group 7 .*\(aborted, aborted\)"):
        _ = group([], []).oldest_version


# ---------------------------------------------------------------------------------------------- samples


def episode(k: int, *rows: RowAt, **changed: Any) -> Trajectory:
    trajectory = Trajectory(
        id=PROMPT.trajectory_id(k),
        replica="rollout-0",
        text="",
        prompt_length=2,
        length=sum(row.length for row in rows),
        finish_reason=FinishReason.STOP,
        version_spans=[[0, 0]],
        started=0.0,
        finished=1.0,
        rows=rows,
    )
    return replace(trajectory, **changed)


def forked() -> Group:
    """Three episodes, the first of two rows and the second failed."""
    return Group(
        3,
        PROMPT,
        3,
        SamplingParams(8),
        trajectories=(
            episode(0, RowAt(0, 2, 5), RowAt(1, 4, 3), turn_rewards=(0.5, 0.25), limit="turns"),
            episode(1, failure="the sandbox is away"),
            episode(2, RowAt(2, 2, 4)),
        ),
        tokens="handle",
        rewards=np.array([1.0, np.nan, 2.0], np.float32),
        baseline=0.75,
    )


def test_a_group_has_a_sample_for_each_row_in_the_order_of_its_episodes() -> None:
    group = forked()
    columns = [Column("values", index) for index in range(3)]
    add_column([group], "values", columns)
    samples = group.samples(("values", "absent"))
    assert [(s.index, s.prompt_length, s.length, s.total_length) for s in samples] == [
        (0, 2, 5, 7),
        (1, 4, 3, 7),
        (2, 2, 4, 6),
    ]
    assert [s.episode.k for s in samples] == [0, 0, 2]
    assert [s.columns for s in samples] == [{"values": column} for column in columns]


def test_columns_of_several_groups_are_those_of_their_rows_in_order() -> None:
    groups = [forked(), forked()]
    columns = [Column("values", index) for index in range(6)]
    add_column(groups, "values", columns)
    assert [group.columns["values"] for group in groups] == [tuple(columns[:3]), tuple(columns[3:])]


def test_an_episode_that_a_limit_ended_is_not_complete_and_is_masked_whole_where_that_is_asked_for() -> None:
    group = forked()
    assert [s.finished for s in group.samples()] == [False, False, True]
    assert [s.masked for s in group.samples()] == [False] * 3
    assert [s.masked for s in group.samples(mask_cut_off=True)] == [True, True, False]
    group.trajectories = (replace(group.trajectories[2], finish_reason=FinishReason.LENGTH),)
    assert [s.finished for s in group.samples()] == [False]


def test_outcomes_are_of_episodes_and_leave_those_that_failed_out() -> None:
    first, second = forked(), forked()
    second.number = 8
    found = outcomes([first, second])
    assert [id.k for id in found.ids] == [0, 2, 0, 2]
    assert found.rewards.tolist() == [1.0, 2.0, 1.0, 2.0]
    assert found.groups.tolist() == [3, 3, 8, 8]
    assert found.episode_of.tolist() == [0, 0, 1, 2, 2, 3]
    assert found.baselines is not None and found.baselines.tolist() == [0.75] * 4
    assert found.turn_rewards == ((0.5, 0.25), (), (0.5, 0.25), ())
    assert len(found.episode_of) == len([*first.samples(), *second.samples()])


def test_rows_keep_the_array_of_a_prompt_that_they_share_when_they_travel() -> None:
    prompt, sampled = np.arange(3, dtype=np.int32), SampledTokens.nothing()
    tokens = (RowTokens.answer(prompt, sampled), RowTokens.answer(prompt, sampled))
    one, other = pickle.loads(pickle.dumps(tokens))
    assert one.prompt_ids is other.prompt_ids


def sampled(length: int, version: int = 3) -> SampledTokens:
    ids = np.arange(length, dtype=np.int32)
    return SampledTokens(ids, -ids.astype(np.float32) / 7, np.full(length, version, np.int32))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_sampled_tokens_are_pickled_as_they_were(length: int) -> None:
    tokens = sampled(length)
    back = pickle.loads(pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL))
    for name in ("ids", "logprobs", "versions"):
        there, here = getattr(tokens, name), getattr(back, name)
        assert np.array_equal(there, here)
        assert (here.dtype, here.flags.writeable) == (there.dtype, True)


def test_a_sample_is_pickled_as_it_was() -> None:
    columns = {"advantages": 0.5, "ref_logprobs": Column("a handle", 4), "values": Column("another", 0)}
    sample = TrainSample("tokens", 2, 5, 7, TrajectoryId(0, 1, 2, 3), columns, finished=False, masked=True)
    back = pickle.loads(pickle.dumps(sample))
    assert back == sample
    assert type(back.episode) is TrajectoryId
