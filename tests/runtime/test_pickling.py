"""Records of an answer: what of a dataclass they keep."""

from __future__ import annotations

import copy
import pickle
from dataclasses import field, fields, replace

import numpy as np
import pytest

from headway.data.types import Outcomes, SampledTokens, TrajectoryId
from headway.records import record


@record
class Answer:
    text: str
    length: int = 0
    notes: list[str] = field(default_factory=list)


def test_a_record_is_a_dataclass_with_slots_that_survives_pickling() -> None:
    answer = Answer("yes", 3, ["kept"])
    assert [one.name for one in fields(Answer)] == ["text", "length", "notes"]
    assert pickle.loads(pickle.dumps(answer)) == copy.copy(answer) == answer != replace(answer, length=4)
    with pytest.raises(AttributeError):
        answer.other = 1  # type: ignore[attr-defined]


def test_a_record_that_says_itself_how_it_is_pickled_keeps_that() -> None:
    tokens = SampledTokens(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.int32))
    assert tokens.__reduce__()[1] == (tokens.ids.tobytes() + tokens.logprobs.tobytes() + tokens.versions.tobytes(),)
    assert pickle.loads(pickle.dumps(tokens)).ids.tolist() == [0, 1, 2]


def test_the_outcomes_of_a_batch_arrive_as_they_were_sent() -> None:
    ids = tuple(TrajectoryId(0, 3, 1, k) for k in range(2))
    sent = Outcomes(ids, np.ones(2, np.float32), np.zeros(2, np.int64), np.arange(2), lengths=np.array([4, 5]))
    arrived = pickle.loads(pickle.dumps(sent))
    assert (arrived.ids, arrived.baselines, arrived.turn_rewards) == (ids, None, ())
    for name in ("rewards", "groups", "episode_of", "lengths"):
        np.testing.assert_array_equal(getattr(arrived, name), getattr(sent, name))
