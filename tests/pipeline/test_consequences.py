"""One decision on what follows a failure, for all that a run can lose."""

from __future__ import annotations

import pytest

from headway.config.sizing.timeouts import Timeouts
from headway.pipeline.consequences import Consequence, Restarts, what_follows
from headway.planner.simulation.virtual_clock import run_virtual


@pytest.mark.parametrize(
    ("tries", "starts", "others", "follows"),
    [
        (1, 1, True, Consequence.AGAIN),
        (0, 1, True, Consequence.REPLACED),
        (0, 1, False, Consequence.REPLACED),
        (0, 0, True, Consequence.WITHOUT),
        (0, 0, False, Consequence.END),
        (-1, 0, False, Consequence.END),
    ],
)
def test_what_costs_least_comes_first_and_the_end_last(tries: int, starts: int, others: bool, follows: Consequence):
    assert what_follows(tries=tries, starts=starts, others=others) is follows


def test_a_start_is_counted_and_the_stall_detector_waits_for_it():
    async def begin() -> None:
        restarts = Restarts(2, Timeouts(60.0, 20.0, 100.0))
        restarts.begin()
        assert (restarts.left, restarts.starts_until) == (1, 60.0)

    run_virtual(begin())
