"""A machine that falls silent, and stays so: the last test on the three machines."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from benchmarks.nodes.machines import Machines, wait_until
from tests.cluster.nodes.runs import RECIPE, RUN_S, events, hosts

pytestmark = pytest.mark.nodes


def test_a_machine_that_falls_silent_is_missed_soon_and_its_replica_replaced_on_another(three: Machines) -> None:
    """The last test: the machine stays silent. Half of the update's time-out would be longer than the whole test."""
    run = three.shared / "silent"
    three.fill(left=0.01)
    settings = [
        "rollout.nnodes=2",
        "run.dir=/tmp/shared/silent",
        "rollout.total_rollout_steps=100000",
        "param_update.timeout_s=1200",
        "cluster.stall_timeout_s=1300",
    ]
    output = three.scratch / "silent.txt"
    driver = three["A"].start("headway", "train", RECIPE, *settings, output=output)

    def seen(*kinds: str) -> list[dict[str, Any]]:
        assert driver.poll() is None, output.read_text()
        return events(run, *kinds)

    wait_until(lambda: len(seen("update.finished")) > 2, RUN_S)
    three.empty()  # room for the replica that will be started
    on = hosts(run)
    lost = next(name for name, host in on.items() if name.startswith("rollout") and host != "nodeA")
    three.silence(on[lost].removeprefix("node"))
    began = time.monotonic()
    updates = len(seen("update.finished"))
    wait_until(lambda: bool(seen("replica.lost")), RUN_S)
    wait_until(lambda: len(seen("update.finished")) > updates + 2, RUN_S)
    assert time.monotonic() - began < 120.0
    assert f"worker {lost} is lost: its machine, {on[lost]}" in seen("replica.lost")[0]["reason"]
    wait_until(lambda: bool(seen("replica.joined")), RUN_S)
    assert seen("replica.joined")[0]["replica"] == f"{lost}+1"
    for pid in three["A"].processes("headway"):
        os.kill(pid, signal.SIGINT)
    assert driver.wait(RUN_S) == 130, output.read_text()
    assert (run / "model" / "config.json").is_file()
