"""The five modes, each a handful of values, from the first event to the last."""

from __future__ import annotations

import pytest
from tests.pipeline.scenario import MODES, Scenario

from headway.events import RunStarted


@pytest.mark.parametrize("mode", MODES)
def test_every_group_has_exactly_one_fate_and_the_exact_number_is_trained(mode):
    run = Scenario(mode, problems=3).run().assert_completed()
    total = run.of(RunStarted)[0].total_groups
    assert run.groups == {
        "admitted": total, "trained": total, "filtered": 0, "dropped": 0, "failed": 0, "in_flight": 0
    }  # fmt: skip
    assert run.version == 6
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]
