"""Faults of every kind on three machines, and a run that goes on."""

from __future__ import annotations

import pytest

from benchmarks import chaos
from benchmarks.nodes.faults import FAULTS

pytestmark = pytest.mark.slow
EIGHT = (
    "kill:actor:write",
    "kill:driver:send",
    "kill:rollout:load",
    "partition:machine",
    "memory:episode-worker",
    "slow:machine",
    "stop:machine",
    "kill:machine:removal",
)


def test_eight_faults_lose_nothing_and_leave_nothing(possible: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Takes long, nine minutes on two cores on which others compute: Ray on three machines, a run, and each time a few
    steps before a fault, the fault itself, and what is started anew until the next step.
    """
    with pytest.raises(SystemExit) as ended:
        chaos.main(["--faults", "8", "--life", "2", "--only", ",".join(EIGHT)])
    assert ended.value.code == 0, capsys.readouterr().out


def test_each_round_has_all_faults_in_an_order_that_seed_and_number_decide() -> None:
    rounds = [chaos.shuffled(FAULTS, 0, number)[number % len(FAULTS)] for number in range(2 * len(FAULTS))]
    assert sorted(rounds[: len(FAULTS)]) == sorted(rounds[len(FAULTS) :]) == sorted(FAULTS)
    assert rounds[: len(FAULTS)] != rounds[len(FAULTS) :]
