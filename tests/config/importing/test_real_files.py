"""Files of the keys and values of real ones: each setting is in the report once, and the recipe loads, in our units."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config.layers import flatten
from headway.config.loading import load
from headway.config.migration.settings_files import read
from headway.config.migration.translation import WIDTH, Translation, recipe, recognise, report, translate
from headway.config.migration_tables.projects import PROJECTS
from headway.config.migration_tables.table_rows import ReportPart
from tests.tiers import mostly_slow

FILES = Path(__file__).parent / "files"
WHOLE: Mapping[str, tuple[str, ...]] = {
    **{file.name: (file.name,) for file in sorted(FILES.iterdir()) if file.is_file() and "wordle" not in file.name},
    "prime_wordle": ("prime_wordle_orch.toml", "prime_wordle_train.toml", "prime_wordle_infer.toml"),
}
"""Name of a test → the files that it imports together."""
EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "verl_grpo.sh": {
        "mode": "colocate_sync",
        "actor.ppo_mini_batch_size": 256,  # prompts, as there
        "async_training.require_batches": 4,  # 1024 prompts of a step
        "actor.ppo_max_token_len_per_gpu": 32 * (512 + 1024),
        "rollout.n_gpus_per_node": 8,
        "rollout.n": 5,
        "actor.kl_loss_type": "k3",
        "algorithm.policy_loss.loss_mode": "dual_clip",
        "async_training.use_rollout_log_probs": False,
        "data.epochs": 15,
    },
    "verl_ppo.sh": {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-5, "async_training.require_batches": 4},
    "verl_gspo.sh": {"algorithm.policy_loss.loss_mode": "gspo", "actor.clip_ratio_high": 0.0004},
    "verl_megatron.sh": {"actor.parallel.tp": 2},
    "verl_reward.sh": {
        "reward.function": "examples/fapo_trainer/reward_fn_reasoning.py:compute_score_baseline",
        "reward.overlong_buffer.len": 4096,
        "reward.workers": 4,
    },
    "verl_one_step_off.sh": {
        "mode": "one_step_off",
        "async_training.require_batches": 6,  # 1152 prompts, 192 of them in a step of the optimizer
        "trainer.n_gpus_per_node": 6,
        "rollout.n_gpus_per_node": 2,
        "rollout.tensor_model_parallel_size": 2,
    },
    "verl_fully_async.sh": {
        "mode": "async_stale",
        "async_training.on_update": "interrupt",
        "async_training.use_rollout_log_probs": False,  # compute_prox_log_prob: the trainer recomputes them
        "async_training.staleness_threshold": 0.5,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 4,
        "rollout.total_rollout_steps": 204800,  # 400 versions of 4 · 4 · 32 prompts
    },
    "verl_fork.sh": {
        "rollout.n": 4,
        "actor.ppo_mini_batch_size": 64,  # 256 answers, 4 of a prompt
        "async_training.require_batches": 8,
        "rollout.val_n": 8,
        "algorithm.filter_groups.enable": True,
    },
    "verl_fully_async.yaml": {"mode": "async_stale", "async_training.staleness_threshold": 0.1, "rollout.n": 4},
    "verl_search.yaml": {"async_training.require_batches": 1, "rollout.name": "vllm"},
    "trl_async.py": {
        "mode": "async_stale",
        "actor.ppo_mini_batch_size": 4,  # 16 · 2 completions, 8 of a prompt
        "rollout.total_rollout_steps": 800,
        "data.max_response_length": 1024,
        "data.train": {"dataset": "openai/gsm8k", "subset": "main", "split": "train"},
        "async_training.staleness_threshold": 4,
        "reward.function": "math_verify",
    },
    "trl_game.py": {
        "mode": "colocate_sync",
        "actor.ppo_mini_batch_size": 128,  # 8 · 64 completions, 4 of a prompt
        "rollout.n": 4,
        "model.path": "Qwen/Qwen3-1.7B",
        "actor.optim.lr_scheduler_type": "linear",  # the default of transformers
    },
    "trl_cli.yaml": {
        "mode": "on_policy",
        "actor.ppo_mini_batch_size": 2,  # 4 · 4 completions, 8 of a prompt
        "async_training.require_batches": 2,  # 32 completions of a generation
        "rollout.total_rollout_steps": 200,
        "actor.optim.lr_warmup_steps": 10,
        "trainer.save_freq": 10,
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "reward.overlong_buffer.len": 256,
    },
    "areal_grpo.yaml": {
        "mode": "async_partial",
        "async_training.staleness_threshold": 2,
        "async_training.trigger_parameter_sync_step": 1,
        "actor.ppo_mini_batch_size": 256,
        "trainer.n_gpus_per_node": 4,
        "algorithm.rollout_correction.name": "mask",
        "actor.optim.lr": 1.7e-5,
    },
    "areal_dapo.yaml": {"algorithm.filter_groups.enable": True, "actor.clip_ratio_high": 0.28},
    "areal_ppo.yaml": {"algorithm.adv_estimator": "gae"},
    "areal_sapo.yaml": {"algorithm.policy_loss.loss_mode": "sapo"},
    "prime_reverse_text.toml": {
        "actor.ppo_mini_batch_size": 8,  # 128 rollouts, 16 of a problem
        "rollout.total_rollout_steps": 160,
        "async_training.max_lag": 8,
        "data.max_prompt_length": 2048 - 128,
        "algorithm.adv_estimator": "dr_grpo",
    },
    "prime_math.toml": {
        "trainer.nnodes": 2,
        "rollout.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        "actor.parallel.ep": 8,
        "rollout.name": "vllm",
        "rollout.tensor_model_parallel_size": 8,
    },
    "openrlhf_reinforce.sh": {
        "mode": "colocate_sync",
        "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
        "actor.ppo_mini_batch_size": 64,  # 1024 samples, 16 of a prompt
        "async_training.require_batches": 8,  # 512 prompts
        "actor.kl_loss_coef": 1e-4,
        "actor.kl_loss_type": "k2",
        "actor.grad_clip": 0.5,
        "actor.optim.betas": [0.9, 0.95],
        "actor.optim.lr_scheduler_type": "cosine",
        "actor.optim.min_lr_ratio": 0.1,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 8192,
        "trainer.save_freq": 5,
        "rollout.test_freq": 5,
        "rollout.val_n": 2,
        "rollout.val_temperature": 0.8,
        "run.seed": 42,
    },
    "prime_wordle": {"actor.ppo_mini_batch_size": 64, "rollout.n": 16, "data.max_response_length": 1024},
}
"""Values of the recipes, worked out by hand."""


@cache
def imported(name: str) -> Translation:
    sources = [read(str(FILES / file)) for file in WHOLE[name]]
    return translate(recognise(sources), sources)


def settings_in(file: Path) -> Iterator[str]:
    """Keys that a file sets, found without the package's readers."""
    text = file.read_text()
    match file.suffix:
        case ".sh":
            yield from re.findall(r"""^ +["']?(\+*[\w.]+)=""", text, re.MULTILINE)
            yield from re.findall(r"^ +--(\w+)(?: |$)", text if file.name.startswith("openrlhf") else "", re.MULTILINE)
        case ".yaml":
            yield from (key for key, _ in flatten(yaml.safe_load(text)))
        case ".toml":
            yield from (key for key, _ in flatten(tomllib.loads(text)))
        case ".py":
            yield from re.findall(r"^ +(\w+)=(?!GRPOConfig|AsyncGRPOConfig|config)", text, re.MULTILINE)


@mostly_slow("name", WHOLE, quick=[*WHOLE][::6])
def test_every_setting_of_a_file_is_in_one_part_of_the_report(name: str) -> None:
    found = imported(name)
    parts = [{one.key for one in found.of(part) if one.given} for part in ReportPart]
    mentioned = set().union(*parts)
    for file in WHOLE[name]:
        for key in settings_in(FILES / file):
            assert any(one == key or one.startswith((f"{key}[", f"{key}.")) for one in mentioned), key
    assert sum(map(len, parts)) == len(mentioned)
    text = report(found)
    assert all(f"  {key}=" in text for key in mentioned)


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_is_recognised_and_nine_in_ten_of_its_settings_have_a_row(name: str) -> None:
    found = imported(name)
    assert found.project is PROJECTS[{"prime": "prime-rl"}.get(name.partition("_")[0], name.partition("_")[0])]
    given = [one for one in found.outcomes if one.given]
    assert sum(one.known for one in given) >= 0.9 * len(given)


@mostly_slow("name", WHOLE, quick=[*WHOLE][1::3])
def test_the_recipe_loads_with_the_values_in_our_units(name: str, tmp_path: Path) -> None:
    found = imported(name)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(found, "recipe.yaml"))
    loaded = load(file)
    expected = EXPECTED.get(name, {})
    assert {key: found.values.get(key) for key in expected} == expected
    assert {key.partition(".")[0] for key in found.values} == {key.partition(".")[0] for key in loaded.user_keys}
    assert all("  # " in line for line in file.read_text().splitlines() if re.match(r" *\w+: \S", line))


@pytest.mark.parametrize("name", ["verl_grpo.sh", "areal_grpo.yaml", "prime_math.toml"])
def test_a_report_fits_eighty_columns_where_words_allow_it(name: str) -> None:
    assert all(
        len(line) <= WIDTH or line.lstrip().startswith(("→", "actor", "rollout"))
        for line in report(imported(name)).splitlines()
    )


def test_every_file_has_expected_values_or_is_one_more_of_its_kind() -> None:
    assert set(EXPECTED) <= set(WHOLE)
    assert set(WHOLE) - set(EXPECTED) == {"verl_lora.sh", "verl_tools.sh", "prime_grpo.toml"}
