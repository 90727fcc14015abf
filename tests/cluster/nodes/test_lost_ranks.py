"""Training ranks that are lost with their machine: they go on without it, or come back from snapshots elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.nodes.machines import Machines, wait_until
from tests.cluster.nodes.runs import RECIPE, RUN_S, check_ledgers, events, hosts

pytestmark = pytest.mark.nodes
GROUPS = 96


def two_ranks(three: Machines, name: str, *settings: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run with two ranks on machines of their own, and a replica on the third one."""
    given = ["mode=async_stale", "trainer.nnodes=2", f"rollout.total_rollout_steps={GROUPS}", *settings]
    output = three.scratch / f"{name}.txt"
    return three["A"].start("headway", "train", RECIPE, f"run.dir=/tmp/shared/{name}", *given, output=output), output


def lose_a_rank(three: Machines, run: Path) -> str:
    """Kill the machine of a rank, but not the driver's. Returns its name."""
    on = {worker: host for worker, host in hosts(run).items() if worker.startswith("actor") and host != "nodeA"}
    lost = on[min(on)].removeprefix("node")
    three[lost].kill()
    return lost


def test_the_rank_whose_machine_stays_goes_on_alone(three: Machines) -> None:
    """Takes long: lost ranks wait for a quarter of the start's time for a machine with room."""
    three.fill(left=0.01)
    run = three.shared / "alone"
    driver, output = two_ranks(three, "alone", "trainer.save_freq=2", "cluster.start_timeout_s=90")

    def reached(version: int) -> bool:
        assert driver.poll() is None, output.read_text()
        return any(event["version"] == version for event in events(run, "version.reached"))

    wait_until(lambda: reached(5), RUN_S)
    lost = lose_a_rank(three, run)
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


def test_where_snapshots_are_on_another_machine_the_loss_of_one_costs_no_version(three: Machines) -> None:
    """There is no checkpoint. The machine starts again, and its rank with it."""
    three.fill(left=0.01)
    run = three.shared / "snapshots"
    driver, output = two_ranks(three, "snapshots", "trainer.save_freq=1000", "trainer.snapshot=memory")

    def kept() -> int:
        assert driver.poll() is None, output.read_text()
        return len(events(run, "snapshot.kept"))

    wait_until(lambda: kept() > 2, RUN_S)
    lost = lose_a_rank(three, run)
    three.boot(lost, 1)
    try:
        assert driver.wait(RUN_S) == 0, output.read_text()
        check_ledgers(run, GROUPS)
        (back,) = events(run, "ranks.restarted")
        assert (back["role"], back["ranks"], back["of"]) == ("actor", 2, 2)
        assert back["batches"] <= 8 < 4 * back["version"], "not from the initial model: a version has four batches"
        assert not [note for note in events(run, "note") if "snapshot" in note["text"]]
    finally:
        three.wait_for_ray(3)
        three.empty()
