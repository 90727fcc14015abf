"""Meshes of training ranks over several machines, and a run that goes on with other numbers of workers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from benchmarks.nodes.machines import Machines, wait_until
from tests.cluster.nodes.runs import RECIPE, RUN_S, check, check_ledgers, check_no_tokens, events, hosts, train
from tests.integration.support import batches_in

pytestmark = pytest.mark.nodes
FOUR = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"]


@pytest.mark.parametrize(
    ("mode", "parallel"),
    [("async_stale", ["tp=2", "replicate=2"]), ("stream_off_policy", ["cp=2"])],
)
def test_a_mesh_of_four_ranks_on_two_machines(two_each: Machines, mode: str, parallel: list[str]) -> None:
    """Takes long: a whole run of six workers on three machines, each importing torch on two shared cores."""
    run = train(two_each, f"mesh-{mode}", f"mode={mode}", *FOUR, *(f"actor.parallel.{part}" for part in parallel))
    check(run)
    on = hosts(run)
    assert on["actor-0"] == on["actor-1"] != on["actor-2"] == on["actor-3"], "an inner mesh is on one machine"
    assert on["rollout-0"] not in {on["actor-0"], on["actor-2"]}


def test_a_run_that_was_killed_goes_on_with_half_the_replicas_and_twice_the_ranks(two_each: Machines) -> None:
    """Takes long: two starts of a run on three machines."""
    run = two_each.shared / "resumed"
    settings = ["mode=async_partial", "rollout.total_rollout_steps=160", "trainer.save_freq=3"]
    wide = ["trainer.nnodes=2", "rollout.nnodes=2", "run.dir=/tmp/shared/resumed"]
    output = two_each.scratch / "resumed.txt"
    driver = two_each["A"].start("headway", "train", RECIPE, *settings, *wide, output=output)

    def reached(version: int) -> bool:
        assert driver.poll() is None, output.read_text()
        return any(event["version"] == version for event in events(run, "version.reached"))

    wait_until(lambda: reached(5), RUN_S)
    workers = [
        pid
        for machine in two_each.by_name.values()
        for role in ("actor-", "rollout-", "episode-worker-")
        for pid in machine.processes(role)
    ]
    assert len(workers) >= 6, "two ranks, two replicas and their episode workers"
    for pid in (*two_each["A"].processes("headway"), *workers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()
    before = hosts(run)
    assert len({host for worker, host in before.items() if worker.startswith("actor")}) == 2
    assert len({worker for worker in before if worker.startswith("rollout")}) == 2

    narrow = ["trainer.n_gpus_per_node=2", "rollout.nnodes=1"]
    ran = two_each["A"].run("headway", "train", "--resume", "/tmp/shared/resumed", *narrow, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = check_ledgers(run, 160)
    assert (told["resumed"], told["groups"]["admitted"]) == (1, 160), "no group was given up"
    check_no_tokens(two_each)
    batches = batches_in(events(run, "fetch.taken"))
    assert sum(len(lives) > 1 for lives in batches.values()) >= 4
    assert all(numbers == lives[0] for lives in batches.values() for numbers in lives)
