"""What ``headway eval`` asks, and how: of a run, a recipe, a file, a task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headway.api.eval.evaluation_settings import settle
from headway.config.sizing.placement import resolve_placement
from headway.errors import ConfigError
from tests.cli.evaluations import RUN, said, write
from tests.cli.test_commands import run


def test_a_run_is_asked_what_it_held_out_as_its_validation_asks(run_dir: Path) -> None:
    """Takes seconds: the first of these tests imports torch and transformers."""
    job = settle(str(run_dir), None, [])
    config = job.config
    assert (config.model.path, config.run.seed) == (str(run_dir / "model"), 7)
    assert job.held_out
    assert config.data.task is not None
    assert config.data.task.val_size == 5
    assert (config.rollout.val_n, config.rollout.val_temperature, config.rollout.top_p) == (2, 0.7, 1.0)
    assert (
        said(run("eval", str(run_dir)))["data"]
        == "held-out problems of sort: 5 problems, 2 answers each, temperature 0.7"
    )


def test_the_version_of_the_model_is_told_and_that_a_newer_checkpoint_is_complete(run_dir: Path) -> None:
    """Takes seconds: `headway eval` runs in a process of its own, which imports torch."""
    (run_dir / "model" / "headway.json").write_text('{"version": 9}')
    for folder in ("version_8", "version_9", ".version_12.partial"):
        (run_dir / "checkpoints" / folder).mkdir(parents=True)
    job = settle(str(run_dir), None, [])
    assert (job.version, job.newer) == (9, None)
    (run_dir / "checkpoints" / "version_11").mkdir()
    done = run("eval", str(run_dir))
    assert said(done)["version"] == "9"
    assert "warning: the checkpoint of version 11 is newer than the model, which is version 9" in done.stderr
    job = settle(str(run_dir / "model"), "sort", [])
    assert (job.version, job.newer) == (9, None)


def test_filters_that_are_given_count(run_dir: Path) -> None:
    config = settle(str(run_dir), None, ["rollout.top_p=0.9", "rollout.logit_bias={3: 1.0}"]).config
    assert (config.rollout.top_p, config.rollout.logit_bias) == (0.9, {3: 1.0})


def test_a_file_takes_the_place_of_the_runs_task(run_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "odd: name, [1].jsonl", [{"prompt": "1+1=", "answer": "2"}])
    job = settle(str(run_dir), data, [])
    assert (job.held_out, job.config.data.task, job.config.data.train) == (False, None, data)
    assert job.config.reward.function == "exact_match"
    assert "exact_match" in job.notes[0]
    assert said(run("eval", str(run_dir), data))["data"].startswith(f"{data}"[:40])


def test_a_saved_folder_is_asked_for_its_test_split(run_dir: Path, tmp_path: Path) -> None:
    for splits in (["train", "test"], ["validation", "train"], ["train"]):
        folder = tmp_path / splits[-1]
        folder.mkdir()
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        (source,) = settle(str(run_dir), str(folder), []).config.data.train_sources
        wanted = {"train, test": "test", "validation, train": "validation", "train": "train"}[", ".join(splits)]
        assert (source.dataset, source.split) == (str(folder), wanted)
        shutil.rmtree(folder)


def test_a_task_is_scored_by_its_own_verifier_unless_the_reward_is_given(tiny: Path, run_dir: Path) -> None:
    def reward(model: Path, data: str, *overrides: str) -> str:
        return settle(str(model), data, overrides).config.reward.function

    assert reward(tiny, "sort") == "task"
    assert reward(tiny, "reasoning_gym/leg_counting") == "task"
    assert reward(tiny, "reverse", "reward.function=exact_match") == "exact_match"
    other = run_dir.with_name("other")
    shutil.copytree(run_dir, other)
    (other / "config.yaml").write_text(RUN.replace("function: task", "function: exact_match"))
    assert reward(other, "sort") == "exact_match"
    assert reward(other, "reverse") == "task"


def test_a_recipe_gives_data_and_reward_to_any_model(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RUN)
    job = settle(str(tiny), None, [], config_file=tmp_path / "recipe.yaml", n=1, temperature=0.0)
    assert (job.config.model.path, job.config.reward.function, job.held_out) == (str(tiny), "task", True)


def test_one_replica_answers_whatever_devices_it_has(run_dir: Path) -> None:
    config = settle(str(run_dir), None, ["rollout.name=vllm", "rollout.tensor_model_parallel_size=4"]).config
    assert [len(group) for group in resolve_placement(config).replicas] == [4]


def test_what_the_engine_does_not_look_at_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: has no effect: .*\bnative\b"):
        settle(str(run_dir), None, ["rollout.name=native", "rollout.tensor_model_parallel_size=2"])
