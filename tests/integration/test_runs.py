"""Whole runs of a tiny job, as a user starts them."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.config.presets import PRESETS
from headway.runtime.process_tree import descendants
from tests.integration.support import (
    alive,
    events,
    finish,
    pid_of_worker,
    run_here,
    start,
    start_long_run,
    summary,
    train,
    wait_for,
)
from tests.tiers import mostly_slow

SMALL = ("data.max_response_length=8", "data.task.val_size=2", "reward.function=task")
"""Short answers, scored without a process."""


@mostly_slow("mode", PRESETS, quick=[mode for mode in PRESETS if mode not in ("on_policy", "one_step_off")])
def test_every_mode_runs_by_switching_its_name_alone(recipe: Path, tmp_path: Path, mode: str) -> None:
    """Makes a whole run. In `make test`, the two others run in `undisturbed` and in the test below."""
    settings = ("cluster.backend=inline", "rollout.total_rollout_steps=32", *SMALL)
    result = train(recipe, tmp_path / "run", f"mode={mode}", *settings)
    groups, lag = result["groups"], result["lag"]
    assert groups["trained"] == 32
    assert groups["admitted"] == sum(groups[fate] for fate in groups if fate != "admitted")
    assert result["balanced"]
    assert lag["max"] <= lag["bound"]
    validated = [entry["version"] for entry in result["eval"]]
    assert (validated[0], validated[-1]) == (0, result["version"])


def test_one_step_off_has_lag_0_then_1_for_ever(recipe: Path, tmp_path: Path) -> None:
    """Makes a whole run."""
    settings = ("mode=one_step_off", "cluster.backend=inline", "rollout.total_rollout_steps=24", *SMALL)
    train(recipe, tmp_path / "run", *settings)
    assert [set(step["lags"]) for step in events(tmp_path / "run", "optimizer.stepped")] == [{0}, *[{1}] * 5]


def test_a_run_of_several_sources_and_rewards_tells_of_each(recipe: Path, tmp_path: Path) -> None:
    """Makes a whole run."""
    for name, long in (("short", []), ("mixed", ["sort:" + "3" * 40 + "="] * 3)):
        prompts = ["sort:31=", "sort:52=", "sort:74=", *long]
        rows = ({"prompt": prompt, "answer": "13", "data_source": name} for prompt in prompts)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = f"[{tmp_path}/short.jsonl, {tmp_path}/mixed.jsonl]"
    functions = f"[{{function: {recipe.parent}/reward.py:score}}, {{function: format, weight: 0.5}}]"
    result = train(
        recipe,
        tmp_path / "run",
        "cluster.backend=inline",
        f"data.train={files}",
        f"data.val={files}",
        f"reward.functions={functions}",
    )
    assert result["left_out"] == {part: {"mixed": {"too_long": 3}} for part in ("held-out", "training")}
    assert all(entry["by_source"].keys() == {"mixed", "short"} for entry in result["eval"])
    rewarded = events(tmp_path / "run", "group.rewarded")
    assert all(event["parts"].keys() == {"score", "format"} for event in rewarded)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get(f"groups/source/{name}", 0) for row in rows for name in ("short", "mixed")) == 16
    for row in rows:
        if "reward/mean" in row:
            parts = row["reward/score/mean"] + 0.5 * row["reward/format/mean"]
            assert row["reward/mean"] == pytest.approx(parts, abs=1e-6)


def test_the_exported_model_opens_as_a_hugging_face_folder(undisturbed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "model")
    assert model(**tokenizer("sort:31=", return_tensors="pt")).logits.shape[-1] >= len(tokenizer)


@pytest.mark.parametrize(
    "placement",
    [
        ["trainer.n_gpus_per_node=4", "trainer.use_nodes_ratios=[0.25,0,0.25,0.5]"],
        ["trainer.n_gpus_per_node=2"],
    ],
    ids=["a reference on ranks of its own and two replicas", "two training ranks that share the reference"],
)
@pytest.mark.slow
def test_roles_run_where_they_are_placed(recipe: Path, tmp_path: Path, placement: list[str]) -> None:
    """Starts a Ray of its own, and up to four workers that import torch."""
    overrides = ["mode=async_partial", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.01", *placement]
    result = train(recipe, tmp_path / "run", *overrides, "rollout.total_rollout_steps=32")
    assert result["groups"]["trained"] == 32
    logs = {path.stem for path in (tmp_path / "run" / "logs").iterdir()} - {"reward", "driver"}
    own_reference = {"actor-0", "ref-0", "rollout-0", "rollout-1", "episode-worker-0"}
    assert logs == (own_reference if len(placement) == 2 else {"actor-0", "actor-1", "rollout-0", "episode-worker-0"})


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_runs_at_once_on_one_machine_both_end_well(recipe: Path, tmp_path: Path) -> None:
    """Each starts a Ray of its own."""
    runs = [tmp_path / "one", tmp_path / "two"]
    processes = [start("-m", "headway", "train", str(recipe), f"run.dir={run}") for run in runs]
    for process, run in zip(processes, runs, strict=True):
        code, output = finish(process)
        assert code == 0, output
        told = summary(run)
        assert (told["status"], told["balanced"], told["groups"]["trained"]) == ("completed", True, 16)


@pytest.mark.slow
def test_the_first_interrupt_finishes_the_version_saves_and_leaves(recipe: Path, tmp_path: Path) -> None:
    """A run as a user starts it: driver, Ray and two workers take longer to start and end than to train."""
    run_dir = tmp_path / "run"
    process = start_long_run(recipe, run_dir, "cluster.backend=ray")
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    result = summary(run_dir)
    assert result["status"] == "interrupted"
    assert result["balanced"]
    assert result["groups"]["trained"] == result["version"] * 16
    assert (run_dir / "checkpoints" / f"version_{result['version']}").is_dir()
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert alive(started) == []


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(recipe: Path, tmp_path: Path) -> None:
    """A run as a user starts it, whose version takes long to finish: driver, Ray and two workers start and end."""
    process = start_long_run(recipe, tmp_path / "run", "cluster.backend=ray", "actor.ppo_epochs=3000")
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    wait_for("press Ctrl-C again", process, tmp_path / "run")  # two at once would arrive as one
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "left at once" in output
    assert alive(started) == []


@pytest.mark.slow
def test_a_killed_trainer_that_may_not_start_again_ends_the_run_with_its_name(recipe: Path, tmp_path: Path) -> None:
    """In other phases, and of replicas: `test_every_phase`. Started again: `test_resume`."""
    process = start_long_run(recipe, tmp_path / "run", "cluster.backend=ray", "trainer.max_restarts=0")
    started = descendants(process.pid)
    os.kill(pid_of_worker(process.pid, "actor-0"), signal.SIGKILL)
    code, output = finish(process)
    assert code == 1, output
    assert "error: worker actor-0 died: " in output
    assert "Traceback" not in output
    assert summary(tmp_path / "run")["status"] == "failed"
    assert alive(started) == []


def test_a_model_without_weights_is_refused_before_the_runs_directory_is_made(recipe: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(recipe.parent / "model", copy)
    (copy / "model.safetensors").write_bytes(b"no weights")
    run_dir = tmp_path / "run"
    done = run_here("train", str(recipe), f"model.path={copy}", "cluster.backend=inline", f"run.dir={run_dir}")
    assert done.exit_code == 2, done.output
    assert str(copy) in done.stderr and "Traceback" not in done.stderr
    assert not run_dir.exists()
