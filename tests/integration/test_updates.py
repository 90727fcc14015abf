"""Parameter updates in whole runs: every way that weights can take, and replicas that die or fall silent on it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.runtime.process_tree import descendants
from tests.integration.support import (
    alive,
    events,
    finish,
    pid_of_worker,
    start_long_run,
    summary,
    train,
    wait_for,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("mode=overlapped", "rollout.n_gpus_per_node=2"),
        ("mode=overlapped", "param_update.transport=shared_memory", "param_update.encoding=delta"),
        ("mode=async_partial", "param_update.transport=object_store", "rollout.enable_dual_buffer=false"),
        ("mode=async_partial", "param_update.encoding=delta", "rollout.dtype=bfloat16"),
        ("mode=colocate_async", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2"),
        ("mode=colocate_sync", "async_training.trigger_parameter_sync_step=2"),
    ],
    ids=" ".join,
)
def test_a_run_balances_whichever_way_its_weights_take(
    ray_here: None, recipe: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Two to four workers are started on Ray, and import torch."""
    result = train(recipe, tmp_path / "run", *overrides, "rollout.total_rollout_steps=32")
    assert result["groups"]["trained"] == 32
    assert result["balanced"]
    assert result["lag"]["max"] <= result["lag"]["bound"]
    versions = [event["version"] for event in events(tmp_path / "run", "update.finished")]
    assert versions == list(range(1, result["version"] + 1))
    loads = [event for event in events(tmp_path / "run", "update.phase") if event["phase"] == "load"]
    verified = {load["version"] for load in loads if load["probe_difference"] is not None}
    assert verified == {load["version"] for load in loads}, "what is served was verified each time"


def test_versions_on_disk_are_safetensors_files_that_hold_the_trained_model(recipe: Path, tmp_path: Path) -> None:
    """Makes a whole run."""
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    train(recipe, run_dir, "param_update.transport=disk", f"param_update.directory={weights}", "cluster.backend=inline")
    newest = max((weights / "float32").iterdir(), key=lambda path: int(path.stem.removeprefix("version_")))
    served = load_file(newest)
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "model").state_dict()
    assert all((exported[name] == tensor).all() for name, tensor in served.items())
    assert len(list((weights / "float32").iterdir())) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "does not answer"])
@pytest.mark.slow
def test_an_episode_worker_that_is_lost_is_replaced_and_the_run_goes_on(
    recipe: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Driver, Ray and three workers are started, and a further episode worker; a silent one is given 10 s."""
    run_dir = tmp_path / "run"
    process = start_long_run(recipe, run_dir, "param_update.timeout_s=10")
    started = descendants(process.pid)
    os.kill(pid_of_worker(process.pid, "episode-worker-0"), how)
    wait_for("episode_worker.lost", process, run_dir)
    before = len(events(run_dir, "update.finished"))
    wait_for("update.finished", process, run_dir, times=before + 2)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert [event["worker"] for event in events(run_dir, "episode_worker.lost")] == ["episode-worker-0"]
    assert "episode-worker-0 is gone; episode-worker-0+1 takes its place" in " ".join(output.split())
    result = summary(run_dir)
    assert result["balanced"]
    assert (result["groups"]["dropped"], result["groups"]["failed"]) == (0, 0)
    assert alive(started) == []


@pytest.mark.slow
def test_the_only_replica_is_killed_and_another_one_takes_its_place(recipe: Path, tmp_path: Path) -> None:
    """Driver, Ray and three workers are started, and a further replica."""
    run_dir = tmp_path / "run"
    process = start_long_run(recipe, run_dir)
    started = descendants(process.pid)
    os.kill(pid_of_worker(process.pid, "rollout-0"), signal.SIGKILL)
    wait_for("replica.joined", process, run_dir)
    before = len(events(run_dir, "update.finished"))
    wait_for("update.finished", process, run_dir, times=before + 2)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "rollout-0 is gone; it was the last replica, and the run waits for another one" in " ".join(output.split())
    assert [event["replica"] for event in events(run_dir, "replica.joined")] == ["rollout-0+1"]
    result = summary(run_dir)
    assert result["balanced"]
    assert (result["groups"]["dropped"], result["groups"]["failed"]) == (0, 0)
    assert alive(started) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "does not answer"])
@pytest.mark.slow
def test_a_replica_that_is_lost_is_left_out_and_the_run_goes_on(
    recipe: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Driver, Ray and three workers are started; one that falls silent is given the time-out's 10 s."""
    run_dir = tmp_path / "run"
    process = start_long_run(
        recipe,
        run_dir,
        "rollout.n_gpus_per_node=2",
        "param_update.timeout_s=10",
        "async_training.staleness_threshold=0.5",
    )
    started = descendants(process.pid)
    os.kill(pid_of_worker(process.pid, "rollout-1"), how)
    wait_for("replica.lost", process, run_dir)
    (lost,) = events(run_dir, "replica.lost")
    before = len(events(run_dir, "update.finished"))
    wait_for("update.finished", process, run_dir, times=before + 2)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert lost["replica"] == "rollout-1"
    result = summary(run_dir)
    assert result["balanced"]
    settled = events(run_dir, "group.settled")
    admitted = events(run_dir, "group.admitted")
    dropped = {event["number"] for event in settled if (event["reason"] or "").startswith("rollout-1 ")}
    came_back = {(event["epoch"], event["row"]) for event in admitted if event["attempt"] == 1}
    assert {(event["epoch"], event["row"]) for event in admitted if event["number"] in dropped} == came_back
    assert alive(started) == []
