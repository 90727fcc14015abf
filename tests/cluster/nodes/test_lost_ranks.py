"""Training ranks that are lost with their machine, where no other machine has room for them."""

from __future__ import annotations

import pytest

from benchmarks.nodes.machines import Machines, wait_until
from tests.cluster.nodes.runs import RECIPE, RUN_S, check_ledgers, events, hosts

pytestmark = pytest.mark.nodes
GROUPS = 96


def test_the_rank_whose_machine_stays_goes_on_alone(three: Machines) -> None:
    """Takes long: lost ranks wait for half of the start's time, a minute, for a machine with room."""
    three.fill(left=0.01)
    run = three.shared / "alone"
    settings = ["mode=async_stale", "trainer.nnodes=2", "trainer.save_freq=2", "cluster.start_timeout_s=90"]
    settings += [f"rollout.total_rollout_steps={GROUPS}", "run.dir=/tmp/shared/alone"]
    output = three.scratch / "alone.txt"
    driver = three["A"].start("headway", "train", RECIPE, *settings, output=output)

    def reached(version: int) -> bool:
        assert driver.poll() is None, output.read_text()
        return any(event["version"] == version for event in events(run, "version.reached"))

    wait_until(lambda: reached(5), RUN_S)
    on = {worker: host for worker, host in hosts(run).items() if worker.startswith("actor") and host != "nodeA"}
    host = on[min(on)]
    lost = host.removeprefix("node")
    three[lost].kill()
    try:
        assert driver.wait(RUN_S) == 0, output.read_text()
        told = check_ledgers(run, GROUPS)
        assert told["groups"]["admitted"] == GROUPS, "no group was given up"
        (back,) = events(run, "ranks.restarted")
        assert back["role"] == "actor" and back["batches"] > 0
        assert (back["ranks"], back["of"]) == (1, 2) and ", with 1 of 2 ranks, " in output.read_text()
        sent = [event for event in events(run, "update.phase") if event["phase"] == "load"]
        assert {event["version"] for event in sent} == set(range(1, told["version"] + 1))
    finally:
        three.boot(lost, 1)
        three.wait_for_ray(3)
        three.empty()
