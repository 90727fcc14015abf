"""Versions of trajectories and groups."""

from __future__ import annotations

import numpy as np
import pytest

from headway.data.types import FinishReason, Group, Prompt, RowAt, Trajectory
from headway.errors import RunError

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
    return Group(number=7, prompt=PROMPT, trajectories=trajectories, tokens=None)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    assert group([[0, 3], [4, 5]], [[0, 4]]).oldest_version == 3


def test_a_trajectory_without_tokens_has_no_version_and_does_not_count() -> None:
    mixed = group([], [[0, 4]])
    assert [t.oldest_version for t in mixed.trajectories] == [None, 4]
    assert mixed.oldest_version == 4


def test_a_group_without_any_token_says_so() -> None:
    with pytest.raises(RunError, match=r"group 7: none of its 2 trajectories has a token \(aborted, aborted\)"):
        _ = group([], []).oldest_version
