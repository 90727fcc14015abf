"""The trace of a way through the files."""

from dataclasses import replace

import numpy as np

from benchmarks.ways import TrainedGroup, traced
from headway.data.types import Prompt, RowAt, RowTokens, SampledTokens


def test_a_way_has_the_functions_that_get_or_give_something_of_it_and_the_data_classes_that_hold_it() -> None:
    prompt = Prompt(0, 3, 0, "", "", np.arange(3, dtype=np.int32))
    with traced(TrainedGroup(held_out=[5])) as way:
        replace(prompt, row=5).trajectory_id(0)
        assert not way.functions, "a validation answers row 5"
        prompt.trajectory_id(0)
        row = RowTokens.answer(prompt.token_ids, SampledTokens.nothing())
        RowAt(0, len(row.prompt_ids), len(row.ids)).index.bit_length()
    called = [name for name in way.functions if not name.endswith("__init__")]
    assert called == [
        "data/types.py:Prompt.trajectory_id",
        "data/types.py:SampledTokens.nothing",
        "data/types.py:RowTokens.answer",
    ]
    assert (way.requests, way.results) == ({"Prompt", "TrajectoryId"}, {"SampledTokens", "RowTokens"})
