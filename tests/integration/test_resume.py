"""Whole runs of a tiny job that end early and are resumed, as a user does it."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks import evidence
from headway.cluster.on_ray.ray_worker import RayWorker
from headway.data.journal import records, segments
from headway.runtime.process_tree import descendants
from tests.integration.support import (
    alive,
    batches_in,
    events,
    finish,
    run_here,
    start,
    summary,
    train,
    wait_for,
)
from tests.integration.test_on_policy import weights

REACHED = '"kind": "version.reached", '


def resume(run_dir: Path, *overrides: str, own_process: bool = False) -> tuple[int, str]:
    """Exit code and output. ``own_process``: for runs that start Ray."""
    arguments = ("train", "--resume", str(run_dir), *overrides)
    if own_process:
        return finish(start("-m", "headway", *arguments))
    done = run_here(*arguments)
    return done.exit_code, done.output


def kill(recipe: Path, run_dir: Path, versions: int, *overrides: str, save_freq: int = 1) -> None:
    """SIGKILL the driver once it has reached so many versions, the first included. Its workers end by themselves."""
    settings = (*overrides, f"trainer.save_freq={save_freq}", f"run.dir={run_dir}")
    process = start("-m", "headway", "train", str(recipe), *settings)
    wait_for(REACHED, process, run_dir, times=versions)
    workers = [pid for pid in descendants(process.pid) if not is_rays_own(pid)]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while left := alive(workers):
        assert time.monotonic() < deadline, f"processes {left} outlive their driver"
        time.sleep(0.1)


def calls_of(journal: Iterable[Path]) -> set[tuple[object, ...]]:
    found = [record.values for path in journal for record in records(path)]
    return {(*values["trajectory"], values["key"]) for values in found if values.get("kind") == "completion"}


def is_rays_own(pid: int) -> bool:
    """Two agents of Ray's notice only after a minute that their node is gone. They have nothing of the run's."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return title.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_on_policy_ends_with_the_weights_of_a_run_that_nobody_killed_bit_for_bit(
    recipe: Path, undisturbed: Path, tmp_path: Path, backend: str
) -> None:
    """The run that is killed is a process of its own, whose imports take seconds."""
    run_dir = tmp_path / "run"
    kill(recipe, run_dir, 4, f"cluster.backend={backend}")
    code, output = resume(run_dir, own_process=backend == "ray")
    assert code == 0, output
    assert "resuming from the checkpoint of version" in output
    check_as_if_nobody_had_killed_it(run_dir, undisturbed)


def check_as_if_nobody_had_killed_it(run_dir: Path, undisturbed: Path) -> None:
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told, expected = summary(run_dir), summary(undisturbed)
    assert (told["resumed"], told["balanced"], told["groups"]) == (1, True, expected["groups"])
    assert told["eval"] == expected["eval"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for part in ("actor/optimizer_steps", "validation/accuracy"):  # in one row, or in two where a validation ends late
        assert [row["version"] for row in rows if part in row] == [0, 1, 2, 3, 4]


def test_a_run_that_is_killed_before_its_first_checkpoint_loses_nothing(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The run that is killed is a process of its own, whose imports take seconds."""
    run_dir = tmp_path / "run"
    kill(recipe, run_dir, 2, "cluster.backend=inline", save_freq=1000)
    sampled = segments(run_dir / "journal", "episode-worker-0")
    code, output = resume(run_dir)
    assert code == 0, output
    assert "resuming from the checkpoint of version 0" in output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    assert summary(run_dir)["groups"] == summary(undisturbed)["groups"]
    lives = calls_of(sampled), calls_of(set(segments(run_dir / "journal")) - {*sampled})
    assert all(lives) and not lives[0] & lives[1], "no finished answer is sampled again"


@pytest.mark.slow
def test_a_run_whose_directory_is_lost_is_brought_back_from_its_storage_bit_for_bit(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Three runs in all."""
    run_dir, storage = tmp_path / "run", tmp_path / "storage"
    settings = ("cluster.backend=inline", "trainer.save_freq=1", f"run.storage={storage}")
    train(recipe, run_dir, *settings, "rollout.total_rollout_steps=8")
    shutil.rmtree(run_dir)
    code, output = resume(storage, "rollout.total_rollout_steps=16")
    assert code == 0, output
    assert f"bringing version 2 back from {storage} into {run_dir}" in output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told = summary(run_dir)
    assert (told["resumed"], told["balanced"]) == (1, True)
    assert told["storage"] == {"version": 4, "outages": 0, "missing": None}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_what_was_trained_since_the_checkpoint_is_trained_again_on_the_same_tokens_and_nothing_is_lost(
    recipe: Path, tmp_path: Path, backend: str
) -> None:
    """The run that is killed is a process of its own, whose imports take seconds."""
    run_dir = tmp_path / "run"
    settings = ("mode=async_partial", f"cluster.backend={backend}", "rollout.total_rollout_steps=256")
    kill(recipe, run_dir, 9, *settings, "reports.samples=16", save_freq=6)
    evidence.keep(run_dir, tmp_path / "kept")
    code, output = resume(run_dir, own_process=backend == "ray")
    assert code == 0, output
    fetches = batches_in(events(run_dir, "fetch.taken"))
    norms: dict[int, list[float]] = {}
    for event in events(run_dir, "optimizer.stepped"):
        norms.setdefault(event["step"], []).append(event["metrics"]["grad_norm"])
    assert sum(len(lives) > 1 for lives in fetches.values()) >= 3
    assert sum(len(lives) > 1 for lives in norms.values()) >= 3
    assert all(len(set(lives)) == 1 for lives in norms.values()), "the same tokens by the same weights"
    assert all(numbers == lives[0] for lives in fetches.values() for numbers in lives)
    told = summary(run_dir)
    assert (told["resumed"], told["balanced"], told["groups"]["trained"]) == (1, True, 256)
    assert told["groups"]["admitted"] == 256, "no group was given up"
    evidence.keep(run_dir, tmp_path / "kept")
    proved = evidence.examine(run_dir, tmp_path / "kept")
    assert proved.groups > 128
    assert proved.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_on_half_the_replicas_and_twice_the_ranks_no_finished_answer_is_sampled_again(
    recipe: Path, tmp_path: Path, backend: str
) -> None:
    """The run that is killed is a process of its own, whose imports take seconds. In one process there is one rank."""
    run_dir = tmp_path / "run"
    settings = ("mode=async_partial", f"cluster.backend={backend}", "rollout.total_rollout_steps=128")
    kill(recipe, run_dir, 7, *settings, "rollout.n_gpus_per_node=2", "reports.samples=16", save_freq=4)
    evidence.keep(run_dir, tmp_path / "kept")
    twice = ("trainer.n_gpus_per_node=2",) if backend == "ray" else ()
    code, output = resume(run_dir, "rollout.n_gpus_per_node=1", *twice, own_process=backend == "ray")
    assert code == 0, output
    evidence.keep(run_dir, tmp_path / "kept")
    sampled = Counter(
        (*record.values["trajectory"], record.values["key"], record.values["asked"])
        for path in segments(tmp_path / "kept")
        for record in records(path)
        if record.values.get("kind") == "completion"
    )
    assert len(sampled) == 128 * 4
    assert max(sampled.values()) == 1, "each answer was sampled once"
    batches = batches_in(events(run_dir, "fetch.taken"))
    assert sum(len(lives) > 1 for lives in batches.values()) >= 2
    assert all(numbers == lives[0] for lives in batches.values() for numbers in lives)
    told = summary(run_dir)
    assert (told["balanced"], told["groups"]["trained"], told["groups"]["admitted"]) == (True, 128, 128)
    proved = evidence.examine(run_dir, tmp_path / "kept")
    assert (proved.groups, proved.unproved, proved.problems) == (128, 0, [])


@pytest.mark.slow
def test_groups_that_were_open_are_made_anew_where_settings_of_theirs_changed(recipe: Path, tmp_path: Path) -> None:
    """The run that is killed is a process of its own, whose imports take seconds."""
    run_dir = tmp_path / "run"
    settings = ("mode=async_partial", "cluster.backend=inline", "rollout.total_rollout_steps=128")
    kill(recipe, run_dir, 6, *settings, save_freq=4)
    code, output = resume(run_dir, "async_training.staleness_threshold=0.25")
    assert code == 0, output
    assert "sampled again: async_training changed" in output
    told = summary(run_dir)
    assert (told["balanced"], told["groups"]["trained"]) == (True, 128)
    assert told["lag"]["max"] <= told["lag"]["bound"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the driver", "a training rank"])
def test_a_run_with_restarts_ends_as_one_that_nothing_happened_to(
    recipe: Path, undisturbed: Path, tmp_path: Path, dies: str
) -> None:
    """Starts Ray twice, and processes that import torch. With one restart, of which one is needed."""
    run_dir = tmp_path / "run"
    settings = ("trainer.save_freq=1", "trainer.max_restarts=0", "cluster.backend=ray", f"run.dir={run_dir}")
    attending = start("-m", "headway", "train", str(recipe), *settings, "--restarts", "1")
    wait_for(REACHED, attending, run_dir, times=3)
    # Not the process that waits to go on with the run.
    (driver,) = (pid for pid in children_of(attending.pid) if "--resume" not in title(pid))
    victims = [driver] if dies == "the driver" else [pid for pid in descendants(driver) if "actor-0" in title(pid)]
    os.kill(victims[0], signal.SIGKILL)
    code, output = finish(attending)
    assert code == 0, output
    assert "restart 1 of 1" in output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told, expected = summary(run_dir), summary(undisturbed)
    assert (told["resumed"], told["balanced"], told["groups"]) == (1, True, expected["groups"])


SLOW_SECOND_SAVE = """
import itertools, runpy, time
from headway.engines.train.fsdp import checkpoint

save, calls = checkpoint.save, itertools.count()

def slow(*args, **kwargs):
    time.sleep(1000 if next(calls) == 1 else 0)
    save(*args, **kwargs)

checkpoint.save = slow
runpy.run_module("headway", run_name="__main__")
"""


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The run that is killed is a process of its own, whose imports take seconds. Training goes on meanwhile."""
    run_dir = tmp_path / "run"
    settings = ("cluster.backend=inline", "trainer.save_freq=1", f"run.dir={run_dir}")
    process = start("-c", SLOW_SECOND_SAVE, "train", str(recipe), *settings)
    wait_for(REACHED, process, run_dir, times=4)
    process.kill()
    process.communicate()
    half, *whole = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert re.fullmatch(r"\.version_2\..*\.partial", half) and whole == ["version_0", "version_1"]
    code, output = resume(run_dir)
    assert code == 0, output
    assert "resuming from the checkpoint of version 1" in output
    check_as_if_nobody_had_killed_it(run_dir, undisturbed)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["version_3", "version_4"]


def test_a_run_on_ray_whose_training_rank_is_killed_ends_as_one_in_this_process_bit_for_bit(
    recipe: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts and ends a Ray of its own, and four workers that import torch, one of which dies in its third step."""
    others, ours, sessions = set(descendants(os.getpid())), list[int](), list[Path]()
    call, steps = RayWorker.call, count(1)

    async def killed_at_the_third_step(worker: RayWorker, method: str, *args: Any) -> Any:
        if method == "train_step" and next(steps) == 3:
            ours.extend(pid for pid in descendants(os.getpid()) if pid not in others and "ray" in title(pid))
            assert worker.pid in ours
            sessions.append(Path(ray._private.worker._global_node.get_session_dir_path()))  # type: ignore[attr-defined]
            os.kill(worker.pid, signal.SIGKILL)
        return await call(worker, method, *args)

    monkeypatch.setattr(RayWorker, "call", killed_at_the_third_step)
    run_dir = tmp_path / "run"
    done = run_here("train", str(recipe), "cluster.backend=ray", "trainer.save_freq=3", f"run.dir={run_dir}")
    assert done.exit_code == 0, done.output
    assert "the trainer is back at version" in done.output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told, expected = summary(run_dir), summary(undisturbed)
    assert (told["trainer_restarts"], told["resumed"], told["balanced"]) == (1, 0, True)
    assert (told["groups"], told["eval"]) == (expected["groups"], expected["eval"])
    assert not ray.is_initialized()
    assert alive(ours) == []
    assert [session.exists() for session in sessions] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_training_rank_that_is_lost_is_started_again_inside_the_run_bit_for_bit(
    recipe: Path, undisturbed: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Starts Ray, and a training rank twice. The loss comes two batches after the last checkpoint."""
    run_dir = tmp_path / "run"
    settings = ("trainer.save_freq=3", "cluster.backend=ray", "cluster.stall_timeout_s=60", "param_update.timeout_s=30")
    process = start("-m", "headway", "train", str(recipe), *settings, f"run.dir={run_dir}")
    wait_for(REACHED, process, run_dir, times=3)
    os.kill(next(pid for pid in descendants(process.pid) if "actor-0" in title(pid)), how)
    killed = time.time()
    wait_for("ranks.lost", process, run_dir)
    assert time.time() - killed < 10, "a stopped process is a fact, and no matter of a limit"
    code, output = finish(process)
    assert code == 0, output
    assert "the trainer is back at version" in output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told, expected = summary(run_dir), summary(undisturbed)
    assert (told["trainer_restarts"], told["resumed"], told["balanced"]) == (1, 0, True)
    assert (told["groups"], told["eval"]) == (expected["groups"], expected["eval"])
    assert len(events(run_dir, "ranks.lost")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [{1: "ref", 2: "logp", 3: "critic"}, {3: "actor"}], ids=["own", "the trainer's"])
def test_a_reference_log_probs_and_a_critic_are_started_again_inside_the_run_bit_for_bit(
    recipe: Path, tmp_path: Path, killed: dict[int, str]
) -> None:
    """Starts Ray, and each role twice, one after the other. With the trainer all roles on its ranks are lost."""
    own = [role for role in killed.values() if role != "actor"]
    settings = (
        "trainer.save_freq=3",
        "algorithm.adv_estimator=gae",
        "actor.use_kl_loss=true",
        "async_training.use_rollout_log_probs=false",
        *(f"{role}.nnodes=1" for role in own),
    )
    train(recipe, tmp_path / "undisturbed", "cluster.backend=inline", *settings)
    run_dir = tmp_path / "run"
    process = start("-m", "headway", "train", str(recipe), "cluster.backend=ray", *settings, f"run.dir={run_dir}")
    for times, role in killed.items():
        wait_for(REACHED, process, run_dir, times=times)
        os.kill(next(pid for pid in descendants(process.pid) if f"{role}-0" in title(pid)), signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert weights(run_dir / "model") == weights(tmp_path / "undisturbed" / "model")
    told, expected = summary(run_dir), summary(tmp_path / "undisturbed")
    assert (told["trainer_restarts"], told["resumed"], told["balanced"]) == (len(killed), 0, True)
    assert told["groups"] == expected["groups"]
    assert [event["role"] for event in events(run_dir, "ranks.lost")] == list(killed.values())


@pytest.mark.slow
@pytest.mark.parametrize(("holder", "killed"), [("train", "actor-1"), ("generate", "actor-0")])
def test_on_shared_devices_ranks_and_replicas_are_started_again_together_bit_for_bit(
    recipe: Path, tmp_path: Path, holder: str, killed: str
) -> None:
    """Starts Ray twice, and two ranks twice: the first one in a process with the replica."""
    settings = ("mode=colocate_sync", "trainer.save_freq=3", "cluster.backend=ray", "trainer.n_gpus_per_node=2")
    train(recipe, tmp_path / "undisturbed", *settings)
    run_dir = tmp_path / "run"
    process = start("-m", "headway", "train", str(recipe), *settings, f"run.dir={run_dir}")
    wait_for(f'"holder": "{holder}"', process, run_dir, times=2)
    os.kill(next(pid for pid in descendants(process.pid) if killed in title(pid)), signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert weights(run_dir / "model") == weights(tmp_path / "undisturbed" / "model")
    told, expected = summary(run_dir), summary(tmp_path / "undisturbed")
    assert (told["trainer_restarts"], told["resumed"], told["balanced"]) == (1, 0, True)
    assert (told["groups"], told["eval"]) == (expected["groups"], expected["eval"])
    assert [event["role"] for event in events(run_dir, "ranks.lost")] == ["actor"]
    lost, joined = events(run_dir, "replica.lost"), events(run_dir, "replica.joined")
    assert [event["replica"] for event in lost] == ["rollout-0"]
    assert [event["replica"] for event in joined] == ["rollout-0+1"]


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["there", "lost"])
def test_a_training_rank_that_dies_goes_back_to_its_snapshot_bit_for_bit(
    recipe: Path, undisturbed: Path, tmp_path: Path, keeper: str
) -> None:
    """Starts Ray, and a training rank twice. There is no checkpoint; a lost keeper takes the snapshot with it."""
    run_dir = tmp_path / "run"
    settings = ("trainer.save_freq=50", "trainer.snapshot=memory", "cluster.backend=ray")
    process = start("-m", "headway", "train", str(recipe), *settings, f"run.dir={run_dir}")
    wait_for('"kind": "snapshot.kept", ', process, run_dir, times=2)
    for name in ("episode-worker-0", "actor-0") if keeper == "lost" else ("actor-0",):
        os.kill(next(pid for pid in descendants(process.pid) if name in title(pid)), signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    told, (back,) = summary(run_dir), events(run_dir, "ranks.restarted")
    assert (told["trainer_restarts"], told["balanced"]) == (1, True)
    assert (back["batches"] <= 1) == (keeper == "there")
    said = [note["text"] for note in events(run_dir, "note") if "snapshot" in note["text"]]
    assert (
        said[0] == "snapshots of training ranks outlive processes, not a machine: no episode worker is on another one"
    )
    told_lost = [text for text in said if "cannot be loaded, and the initial model is: " in text]
    assert len(told_lost) == (keeper == "lost")  # a snapshot that was on its way as the keeper died is told beside it


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the driver", "a training rank"])
def test_a_kill_on_ray_while_a_checkpoint_is_written_leaves_the_one_before_and_nothing_half(
    recipe: Path, undisturbed: Path, tmp_path: Path, dies: str
) -> None:
    """Starts Ray, and a training rank, twice. The kill comes when the folder of the second checkpoint is there."""
    run_dir = tmp_path / "run"
    process = start("-m", "headway", "train", str(recipe), "trainer.save_freq=1", f"run.dir={run_dir}")
    wait_for("checkpoint.saved", process, run_dir)
    rank = next(pid for pid in descendants(process.pid) if "actor-0" in title(pid))
    deadline = time.monotonic() + 60
    while not any((run_dir / "checkpoints").glob(".version_*.partial")):
        assert time.monotonic() < deadline
    os.kill(rank if dies == "a training rank" else process.pid, signal.SIGKILL)
    code, output = finish(process)
    if dies == "the driver":
        assert [path.name for path in (run_dir / "checkpoints").iterdir() if path.name[0] != "."]
        code, output = resume(run_dir, own_process=True)
    assert code == 0, output
    assert weights(run_dir / "model") == weights(undisturbed / "model")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["version_3", "version_4"]
    assert summary(run_dir)["balanced"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slow
def test_another_transport_and_schedule_go_on_too(recipe: Path, tmp_path: Path) -> None:
    """The trainer's copy of what was sent is gone, and so is what replicas had: the first update is a whole one."""
    run_dir = tmp_path / "run"
    settings = ("mode=overlapped", "param_update.transport=object_store", "param_update.encoding=delta")
    kill(recipe, run_dir, 4, *settings, "cluster.backend=ray", "rollout.total_rollout_steps=32")
    code, output = resume(run_dir, own_process=True)
    assert code == 0, output
    told = summary(run_dir)
    assert (told["status"], told["balanced"], told["groups"]["trained"]) == ("completed", True, 32)
    assert told["lag"]["max"] <= told["lag"]["bound"]


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", [1, 1000])
def test_critic_and_policy_go_on_together(recipe: Path, tmp_path: Path, save_freq: int) -> None:
    """The run that is killed is a process of its own, whose imports take seconds."""
    settings = (
        "mode=async_stale",
        "algorithm.adv_estimator=gae",
        "cluster.backend=inline",
        "rollout.total_rollout_steps=64",
    )
    run_dir = tmp_path / "run"
    kill(recipe, run_dir, 3, *settings, save_freq=save_freq)
    code, output = resume(run_dir)
    assert code == 0, output
    told = summary(run_dir)
    assert (told["balanced"], told["groups"]["trained"]) == (True, 64)
    assert (run_dir / "checkpoints" / "critic" / "version_4").is_dir()


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_finished(recipe: Path, tmp_path: Path) -> None:
    """The run that is interrupted is a process of its own, whose imports take seconds."""
    run_dir = tmp_path / "run"
    arguments = ("mode=async_partial", "cluster.backend=inline", "rollout.total_rollout_steps=256")
    process = start("-m", "headway", "train", str(recipe), *arguments, f"run.dir={run_dir}")
    wait_for(REACHED, process, run_dir, times=2)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert summary(run_dir)["status"] == "interrupted"
    code, output = resume(run_dir, "rollout.total_rollout_steps=128")
    assert code == 0, output
    assert "changed: rollout.total_rollout_steps=128, was 256" in output
    told = summary(run_dir)
    assert (told["status"], told["balanced"], told["groups"]["trained"]) == ("completed", True, 128)
    assert {event["reason"] for event in events(run_dir, "group.settled") if event["fate"] == "dropped"} <= {"resume"}


def test_what_cannot_be_resumed_is_one_message(undisturbed: Path, tmp_path: Path) -> None:
    code, output = resume(undisturbed)
    assert code == 2
    assert "this run is complete, at version 4" in output
    assert "rollout.total_rollout_steps=32" in output

    without = Path(shutil.copytree(undisturbed, tmp_path / "without", ignore=shutil.ignore_patterns("version_*")))
    code, output = resume(without)
    assert code == 2
    assert "there is no complete checkpoint to resume from" in output
    assert f"headway train {without}/config.yaml run.dir=ANOTHER" in output

    code, output = resume(undisturbed, "run.seed=1", "actor.ppo_mini_batch_size=2")
    assert code == 2
    assert "run.seed: 1 instead of 0" in output
    assert "actor.ppo_mini_batch_size: 2 instead of 4" in output


def test_a_complete_run_is_made_longer(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "longer"))
    code, output = resume(run_dir, "rollout.total_rollout_steps=24", "trainer.max_actor_ckpt_to_keep=2")
    assert code == 0, output
    told = summary(run_dir)
    assert (told["version"], told["groups"]["trained"], told["resumed"]) == (6, 24, 1)
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["version_5", "version_6"]
    assert "total_rollout_steps: 24" in (run_dir / "config.yaml").read_text()


SLOW_REWARD = """
import time

def score(response, answer):
    time.sleep(0.1)
    return float(len(response))
"""


@pytest.fixture(scope="module")
def going_on(recipe: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that would take minutes, and its directory. Its reward waits, so that it leaves the cores to others."""
    run_dir = recipe.parent / "going on"
    (recipe.parent / "slow.py").write_text(SLOW_REWARD)
    process = start(
        "-m", "headway", "train", str(recipe), "cluster.backend=inline", "param_update.transport=shared_memory",
        "trainer.save_freq=1", "rollout.total_rollout_steps=65536", f"run.dir={run_dir}",
        f"reward.function={recipe.parent}/slow.py:score",
    )  # fmt: skip
    wait_for("checkpoint.saved", process, run_dir)
    yield process, run_dir
    process.kill()
    process.communicate()
    assert alive([process.pid]) == []


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_resumed(going_on: tuple[subprocess.Popen[str], Path]) -> None:
    process, run_dir = going_on
    code, output = resume(run_dir)
    assert code == 2
    assert f"process {process.pid} on" in output
    assert "trains this run right now" in output


@pytest.mark.slow
def test_a_run_does_not_disturb_another_one_that_goes_on_beside_it(
    going_on: tuple[subprocess.Popen[str], Path], recipe: Path, tmp_path: Path
) -> None:
    """Both have versions in the machine's memory, where each removes what killed runs left, and at its end its own."""
    process, run_dir = going_on
    told = train(recipe, tmp_path / "run", "cluster.backend=inline", "param_update.transport=shared_memory")
    assert (told["status"], told["balanced"], told["version"]) == ("completed", True, 4)
    versions = len(events(run_dir, "update.finished"))
    wait_for('"kind": "update.finished"', process, run_dir, times=versions + 2)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    told = summary(run_dir)
    assert (told["status"], told["balanced"]) == ("interrupted", True)
    assert told["version"] >= versions + 2
