"""Runs on three machines that share nothing but the network and one folder.

Slow: three Ray nodes and a run of several processes in each test, some 3 minutes in all where the machine is idle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml

from benchmarks.nodes.machines import ADDRESSES, RAY, Machines, machines, wait_until, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"machines of namespaces: {WHY_NOT}"),
]
RUN_S = 300.0
"""For one run, on a machine on which others compute, too."""
QUICK: dict[str, Any] = {
    "model": {"path": "/tmp/shared/model"},
    "data": {
        "task": {"name": "sort", "params": {"mean_length": 4, "max_length": 8}, "val_size": 8},
        "max_prompt_length": 16,
        "max_response_length": 16,
    },
    "reward": {"function": "task"},
    "rollout": {"n": 2, "total_rollout_steps": 32, "test_freq": -1, "max_concurrent": 4},
    "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 1024},
    "cluster": {"device": "cpu", "address": RAY, "start_timeout_s": RUN_S},
    "reports": {"live": "off", "trackers": []},
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Machines]:
    """Each has room for one worker."""
    scratch = tmp_path_factory.mktemp("machines")
    copytree(tiny_model, scratch / "shared" / "model")
    (scratch / "shared" / "quick.yaml").write_text(yaml.safe_dump(QUICK))
    with machines(scratch, dict.fromkeys(ADDRESSES, 1)) as made:
        made.fill(left=0.01)
        yield made


def train(three: Machines, *settings: str) -> subprocess.CompletedProcess[str]:
    return three["A"].run("headway", "train", "/tmp/shared/quick.yaml", *settings, timeout_s=RUN_S)


def test_ranks_on_two_machines_train_and_save_in_a_directory_that_both_see(three: Machines) -> None:
    """Takes long: a whole run, with workers started on two machines, each importing torch on two shared cores."""
    ran = train(three, "trainer.nnodes=2", "run.dir=/tmp/shared/both", "trainer.save_freq=1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = three.shared / "both"
    hosts = {event["worker"]: event["host"] for event in events(run) if event["kind"] == "worker.described"}
    assert sorted(hosts.values()) == ["nodeA", "nodeB", "nodeC"]
    newest = max(run.glob("checkpoints/version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    assert len(list(newest.glob("*.distcp"))) == 2
    assert (run / "model" / "config.json").is_file()


def test_a_directory_that_the_ranks_do_not_share_is_refused_before_anything_is_trained(three: Machines) -> None:
    """Takes long: the workers of two machines must start before they can look at the directory."""
    ran = train(three, "trainer.nnodes=2", "run.dir=/tmp/alone")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "run.dir=/tmp/alone is not one directory for all that write to it" in ran.stderr
    assert "the driver, on nodeA (10.77.0.1), sees it" in ran.stderr
    assert any(f"but not {rank} on node" in ran.stderr for rank in ("actor-0", "actor-1"))
    assert "training starts" not in ran.stdout


def test_a_model_that_only_the_driver_has_is_refused_with_who_lacks_it(three: Machines) -> None:
    """Takes long: the workers of two machines must start before they can look for the model."""
    three["A"].run("cp", "-r", "/tmp/shared/model", "/tmp/mine")
    ran = train(three, "trainer.nnodes=2", "model.path=/tmp/mine", "run.dir=/tmp/shared/mine")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "/tmp/mine: no such folder for " in ran.stderr
    lacking, found, _ = ran.stderr.partition("; the driver, on nodeA")
    assert found and "on nodeB (10.77.0.2)" in lacking and "on nodeC (10.77.0.3)" in lacking


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("shared_memory", "param_update.transport=shared_memory works within one machine, and this run is on several"),
        ("disk", "Set param_update.directory to a path on a file system that these machines share"),
    ],
)
def test_a_transport_that_does_not_reach_is_refused_at_the_start(three: Machines, transport: str, said: str) -> None:
    """Takes long: the workers of two machines must start before they can try to meet."""
    ran = train(
        three,
        "rollout.nnodes=2",
        f"run.dir=/tmp/shared/{transport}",
        f"param_update.transport={transport}",
        *(["param_update.directory=/tmp/weights"] if transport == "disk" else []),
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert said in ran.stderr
    assert "training starts" not in ran.stdout


def test_a_machine_that_falls_silent_is_missed_soon_and_its_replica_replaced_on_another(three: Machines) -> None:
    """The last test: the machine stays silent. Half of the update's time-out would be longer than the whole test."""
    run = three.shared / "silent"
    settings = [
        "rollout.nnodes=2",
        "run.dir=/tmp/shared/silent",
        "rollout.total_rollout_steps=100000",
        "param_update.timeout_s=1200",
        "cluster.stall_timeout_s=1300",
    ]
    output = three.scratch / "silent.txt"
    driver = three["A"].start("headway", "train", "/tmp/shared/quick.yaml", *settings, output=output)

    def seen(*kinds: str) -> list[dict[str, Any]]:
        assert driver.poll() is None, output.read_text()
        return [event for event in events(run) if event["kind"] in kinds]

    wait_until(lambda: len(seen("update.finished")) > 2, RUN_S)
    three.empty()  # room for the replica that will be started
    hosts = {event["worker"]: event["host"] for event in seen("worker.described")}
    lost = next(name for name, host in hosts.items() if name.startswith("rollout") and host != "nodeA")
    three.silence(hosts[lost].removeprefix("node"))
    began = time.monotonic()
    updates = len(seen("update.finished"))
    wait_until(lambda: bool(seen("replica.lost")), RUN_S)
    wait_until(lambda: len(seen("update.finished")) > updates + 2, RUN_S)
    assert time.monotonic() - began < 120.0
    assert f"worker {lost} is lost: its machine, {hosts[lost]}" in seen("replica.lost")[0]["reason"]
    wait_until(lambda: bool(seen("replica.joined")), RUN_S)
    assert seen("replica.joined")[0]["replica"] == f"{lost}+1"
    for pid in three["A"].processes("headway"):
        os.kill(pid, signal.SIGINT)
    assert driver.wait(RUN_S) == 130, output.read_text()
    assert (run / "model" / "config.json").is_file()


def events(run: Path) -> list[dict[str, Any]]:
    """What a run has written by now."""
    file = run / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
