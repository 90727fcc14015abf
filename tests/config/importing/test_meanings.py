"""Settings whose names are alike and whose meanings are not: the recipe has what the other project does with them."""

from __future__ import annotations

from typing import Any

import pytest

from headway.agents.rewards.built_in import make_rule
from headway.agents.rewards.score_request import ScoreRequest
from headway.config.migration.settings_files import SettingsFile
from headway.config.migration.shell_scripts import unresolved
from headway.config.migration.translation import Translation, body, recipe, translate
from headway.config.migration_tables.projects import PROJECTS
from headway.config.migration_tables.table_rows import ReportPart
from tests.tiers import crossed

BATCHES = {"per_device_train_batch_size": 16, "num_processes": 8, "num_generations": 8}
"""TRL's 16 prompts of an optimizer step."""
VERL = {"actor_rollout_ref.actor.ppo_mini_batch_size": 16, "data.train_batch_size": 64}
"""Four optimizer steps of one of verl's."""


def imported(project: str, settings: dict[str, Any]) -> Translation:
    return translate(PROJECTS[project], [SettingsFile("file", settings)])


@pytest.mark.parametrize(
    ("project", "settings", "expected"),
    [
        (  # an engine that is not known from the file: by the size of a replica
            "verl",
            VERL
            | {
                "actor_rollout_ref.rollout.name": "$ENGINE",
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 8,
            },
            {"rollout.name": "vllm"},
        ),
        (  # 200 steps see 100 batches of 16 prompts, each of them twice
            "trl",
            BATCHES | {"num_iterations": 2, "max_steps": 200, "save_steps": 50, "warmup_ratio": 0.1},
            {
                "rollout.total_rollout_steps": 1600,
                "actor.ppo_epochs": 2,
                "trainer.save_freq": 25,
                "actor.optim.lr_warmup_steps": 20,
            },
        ),
        (  # one batch of generation is two steps of 16 prompts: it is as many prompts with and without
            "trl",
            BATCHES | {"steps_per_generation": 2, "max_steps": 200, "save_steps": 50},
            {"rollout.total_rollout_steps": 3200, "async_training.require_batches": 2, "trainer.save_freq": 25},
        ),
        (  # all checkpoints are kept, and validation is like training
            "trl",
            BATCHES | {"eval_strategy": "steps", "eval_steps": 10, "temperature": 0.7},
            {"trainer.max_actor_ckpt_to_keep": None, "rollout.val_n": 8, "rollout.val_temperature": 0.7},
        ),
        (  # verl's steps and its learning rate's are of 64 prompts, which are trained on in 4 · 2 optimizer steps
            "verl",
            VERL
            | {
                "trainer.total_training_steps": 10,
                "actor_rollout_ref.actor.ppo_epochs": 2,
                "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
            },
            {"rollout.total_rollout_steps": 640, "actor.optim.lr_warmup_steps": 24},
        ),
        (  # 64 answers of a micro-batch are those of all ranks: 2 · 4 of them, each half of a pair
            "verl",
            VERL
            | {
                "actor_rollout_ref.actor.ppo_micro_batch_size": 64,
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
                "trainer.nnodes": 2,
                "trainer.n_gpus_per_node": 4,
            },
            {"actor.ppo_max_token_len_per_gpu": 16 * (512 + 512)},
        ),
        (  # a whole configuration of main_ppo says that generation has no nodes of its own
            "verl",
            VERL | {"actor_rollout_ref.rollout.nnodes": 0, "trainer.v1.trainer_mode": "sync"},
            {"mode": "colocate_sync", "rollout.nnodes": "absent", "async_training.require_batches": 4},
        ),
        (  # main_ppo's trainers are modes here: 64 prompts of a version are four fetches of 16
            "verl",
            VERL | {"the program": "main_ppo", "trainer.v1.trainer_mode": "separate_async"},
            {
                "mode": "async_partial",
                "async_training.trigger_parameter_sync_step": 4,
                "async_training.staleness_threshold": 1,
                "rollout.n_gpus_per_node": 8,
            },
        ),
        (
            "verl",
            VERL | {"the program": "main_ppo", "trainer.v1.trainer_mode": "colocate_async"},
            {"mode": "colocate_async", "async_training.require_batches": 4, "async_training.staleness_threshold": 1},
        ),
        (  # a whole configuration has the reward in both spellings
            "verl",
            VERL | {"reward.custom_reward_function.path": "a.py", "custom_reward_function.path": None},
            {"reward.function": "a.py:compute_score"},
        ),
        (  # how far ahead, and how old: two settings in both
            "prime-rl",
            {"max_async_level": 2, "orchestrator.max_off_policy_steps": 8},
            {"mode": "async_partial", "async_training.staleness_threshold": 2, "async_training.max_lag": 8},
        ),
        (
            "prime-rl",
            {"orchestrator.max_off_policy_steps": 8, "max_async_level": 0},
            {"mode": "on_policy", "async_training.max_lag": "absent"},
        ),
        (  # OpenRLHF's own defaults: PPO with a critic, KL in the reward
            "openrlhf",
            {"pretrain": "m", "n_samples_per_prompt": 2, "kl_estimator": "k2"},
            {
                "algorithm.adv_estimator": "gae",
                "algorithm.kl_ctrl.kl_coef": 0.01,
                "algorithm.kl_penalty": "k2",
                "critic.optim.lr": 9e-6,
                "actor.ppo_mini_batch_size": 64,
                "async_training.require_batches": 16,
                "data.max_prompt_length": 1024,
                "data.max_response_length": 1024,
                "trainer.save_freq": -1,
            },
        ),
        (
            "openrlhf",
            {"train_batch_size": unresolved("$TB"), "use_kl_loss": True},
            {
                "actor.ppo_mini_batch_size": "absent",
                "async_training.require_batches": "absent",
                "actor.use_kl_loss": True,
                "actor.kl_loss_coef": 0.01,
                "actor.kl_loss_type": "k1",
            },
        ),
        (  # an environment's own groups
            "prime-rl",
            {"orchestrator.batch_size": 128, "orchestrator.train.env[0].group_size": 8},
            {"rollout.n": 8, "actor.ppo_mini_batch_size": 16},
        ),
        (  # engines are counted there, and devices here
            "prime-rl",
            {"inference.parallel.dp": 3, "inference.parallel.tp": 2},
            {"rollout.n_gpus_per_node": 6, "rollout.tensor_model_parallel_size": 2, "rollout.name": "vllm"},
        ),
        (
            "areal",
            {"allocation_mode": "sglang:d2t4+fsdp:d8"},
            {"rollout.n_gpus_per_node": 8, "rollout.tensor_model_parallel_size": 4, "rollout.name": "vllm"},
        ),
        (
            "openrlhf",
            {"vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "async_train": True},
            {"rollout.n_gpus_per_node": 8, "rollout.tensor_model_parallel_size": 2, "rollout.name": "vllm"},
        ),
        (  # forks of verl's: copies of a prompt, of which mini-batches count the answers
            "verl",
            {
                "actor_rollout_ref.rollout.n_agent": 5,
                "actor_rollout_ref.rollout.n_val": 8,
                "actor_rollout_ref.rollout.val_temperature": 0.6,
                "trainer.rejection_sample": True,
                "data.train_batch_size": 40,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 100,
            },
            {
                "rollout.n": 5,
                "rollout.val_n": 8,
                "rollout.val_temperature": 0.6,
                "algorithm.filter_groups.enable": True,
                "actor.ppo_mini_batch_size": 20,
                "async_training.require_batches": 2,
                "rollout.name": "vllm",
            },
        ),
        (  # scores of 1 and -1 become 1 and 0, so half the penalty weighs as much
            "verl",
            {
                "reward_model.reward_manager": "dapo",
                "reward_model.overlong_buffer.enable": True,
                "reward_model.overlong_buffer.len": 64,
                "reward_model.overlong_buffer.penalty_factor": 1.0,
            },
            {"reward.function": "math_verify", "reward.overlong_buffer.penalty_factor": 0.5},
        ),
        (  # an episode is as long as the orchestrator and the engine have it; the trainer's length is a micro-batch's
            "prime-rl",
            {
                "seq_len": 8192,
                "trainer.model.seq_len": 32768,
                "orchestrator.seq_len": 4096,
                "inference.vllm.max_model_len": 3072,
                "orchestrator.sampling.max_tokens": 2048,
            },
            {
                "data.max_prompt_length": 1024,
                "data.max_response_length": 2048,
                "actor.ppo_max_token_len_per_gpu": 32768,
                "rollout.name": "vllm",
            },
        ),
        (
            "areal",
            {"rollout.backend": "sglang:d4", "actor.path": "m"},
            {"rollout.n_gpus_per_node": 4, "rollout.name": "vllm"},
        ),
        (  # where both take turns a replica has one device
            "openrlhf",
            {"vllm_num_engines": 4, "vllm_tensor_parallel_size": 2},
            {"rollout.n_gpus_per_node": 8, "rollout.tensor_model_parallel_size": "absent"},
        ),
    ],
)
def test_a_setting_becomes_what_it_does_there(project: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(project, settings)
    assert {key: found.values.get(key, "absent") for key in expected} == expected


def test_several_greedy_answers_of_validation_are_one() -> None:
    name = "actor_rollout_ref.rollout.val_kwargs"
    greedy, sampled = (imported("verl", VERL | {f"{name}.n": 4} | more) for more in ({}, {f"{name}.temperature": 0.7}))
    assert (greedy.values["rollout.val_n"], sampled.values["rollout.val_n"]) == (1, 4)


def test_a_value_that_several_settings_give_is_said_to_be_of_the_first() -> None:
    engine = {"actor_rollout_ref.rollout.name": "sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size": 2}
    found = imported("verl", VERL | engine)
    assert found.values["rollout.name"] == "vllm"
    assert found.origins()["rollout.name"].key == "actor_rollout_ref.rollout.name"


def test_trls_reward_of_the_form_gives_what_it_gives_there() -> None:
    found = imported("trl", {"reward_funcs": ["think_format_reward"], "num_generations": 8})
    rule = make_rule(found.values["reward.function"], found.values["reward.params"])
    answers = ("<think>x</think> 42", "<think>a\nb</think>\n4\n2", "<think>x</think>", "<think>x", "x</think>")
    twice = "<think>x<think>y</think>"
    request = ScoreRequest("?", [*answers, twice], None, "", {})
    assert [rule(request, request.response(k)) for k in range(6)] == [1, 1, 1, 0, 0, 0]
    both = imported("trl", {"reward_funcs": ["accuracy_reward", "think_format_reward"], "reward_weights": [1, 0.2]})
    weighted = both.values["reward.functions"]
    assert weighted[1] == {"function": "format", "weight": 0.2, "params": found.values["reward.params"]}


@crossed(
    ("setting", "value"),
    [
        ("verl", "actor_rollout_ref.model.use_remove_padding"),
        ("trl", "use_vllm"),
        ("trl", "bf16"),
        ("trl", "scale_rewards"),
    ],
    [True, False],
)
def test_1_and_0_are_true_and_false(setting: tuple[str, str], value: bool) -> None:
    project, key = setting

    def answer(given: bool | int) -> Any:
        (found,) = (one.answer for one in imported(project, {key: given}).outcomes if one.key == key)
        return found

    assert answer(int(value)) == answer(value)


def test_rows_that_share_their_prompt_are_not_what_others_call_packed() -> None:
    (packed,) = (
        one
        for one in imported("verl", {"actor_rollout_ref.model.use_remove_padding": True}).of(ReportPart.DIFFERS)
        if one.key.endswith("use_remove_padding")
    )
    assert packed.answer.values == {"model.packing": "shared"} and "packed" in packed.answer.note


def test_what_the_file_does_not_say_has_no_default_and_is_named_at_the_recipes_top() -> None:
    batch, sequences = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
    found = imported("verl", {batch: unresolved("$TB"), "trainer.n_gpus_per_node": unresolved("$N"), sequences: 16})
    assert not {"async_training.require_batches", "trainer.n_gpus_per_node"} & set(found.values)
    assert "#   - async_training.require_batches: data.train_batch_size=$TB\n" in recipe(found, None)
    found = imported("verl", {batch: 64, sequences: unresolved("$MINI")})
    (asked,) = (one for one in found.outcomes if one.key == batch)
    assert "async_training.require_batches" not in found.values
    assert asked.answer.note.startswith("needs actor.ppo_mini_batch_size, which is not known from the file; set async")


def test_prime_rls_environment_is_something_to_do_and_an_unlisted_key_is_unknown() -> None:
    found = imported("prime-rl", {"orchestrator.train.env[0].id": "wordle", "orchestrator.new_thing": 1})
    notes = {one.key: one.answer.note for one in found.of(ReportPart.WITHOUT)}
    assert notes["orchestrator.train.env[0].id"].startswith("an environment of verifiers plays and scores unmodified")
    assert notes["orchestrator.new_thing"].startswith("unknown to Headway")


@pytest.mark.parametrize(
    ("project", "settings"),
    [
        ("verl", [f"{one}.frobnicate" for one in ("data", "trainer", "critic", "actor_rollout_ref", "async_training")]),
        ("verl", [f"actor_rollout_ref.{one}.x" for one in ("actor", "rollout", "ref", "model", "actor.policy_loss")]),
        ("verl", ["critic.optim.x", "actor_rollout_ref.actor.optim.x", "actor_rollout_ref.actor.adaptive_entropy.on"]),
        ("areal", [f"{one}.x" for one in ("actor", "gconfig", "train_dataset", "rollout", "ref", "actor.optimizer")]),
        ("prime-rl", [f"{one}.x" for one in ("trainer", "trainer.model", "trainer.optim", "inference", "data")]),
        ("trl", ["frobnicate"]),
        ("openrlhf", ["actor.frobnicate", "frobnicate"]),
    ],
)
def test_a_key_that_the_project_does_not_have_is_unknown_and_never_nothing_to_do(
    project: str, settings: list[str]
) -> None:
    found = imported(project, dict.fromkeys(settings, 7))
    notes = {one.key: one.answer.note for one in found.of(ReportPart.WITHOUT)}
    assert {key: notes[key].startswith("unknown to Headway") for key in settings} == dict.fromkeys(settings, True)


def test_an_unknown_key_names_the_nearest_one_of_its_project() -> None:
    found = imported("verl", {"actor_rollout_ref.actor.entropy_coef": 0.1, "data.max_respons_length": 9})
    notes = [one.answer.note for one in found.outcomes if not one.known]
    assert notes[0].endswith("; the nearest is actor.entropy_coeff")
    assert notes[1].endswith("; the nearest is data.max_response_length")


def test_what_is_lost_is_not_said_to_be_taken_over() -> None:
    keys = {
        f"actor_rollout_ref.model.override_config.{key}": 0 for key in ("attention_dropout", "max_position_embeddings")
    }
    found = imported("verl", keys)
    assert {one.key for one in found.of(ReportPart.WITHOUT)} >= set(keys)
    (loss,) = (one for one in imported("prime-rl", {}).of(ReportPart.DIFFERS) if one.key == "trainer.loss.type")
    assert "kl_tau=0.001, is not there" in loss.answer.note


def test_a_setting_that_is_left_out_is_not_said_to_be_taken_over() -> None:
    found = imported("verl", {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2})
    (left_out,) = (one for one in found.outcomes if one.key.endswith("tensor_model_parallel_size"))
    assert left_out.answer.part is ReportPart.WITHOUT
    assert "left out, as it has no effect: with cluster.placement=shared" in left_out.answer.note


def test_a_dataset_whose_columns_the_file_does_not_say_asks_for_them() -> None:
    found = imported("areal", {"train_dataset.path": "some/rows", "actor.path": "m"})
    assert any(line.startswith("data.prompt_key, data.answer_key") for line in found.unknown)
    assert not imported("areal", {"train_dataset.path": "openai/gsm8k"}).unknown


@pytest.mark.parametrize(("project", "key"), [("trl", "run_name"), ("openrlhf", "wandb_run_name")])
def test_a_run_without_a_name_is_not_called_none(project: str, key: str) -> None:
    assert "run.name" not in imported(project, {key: None}).values


def test_a_settings_origin_stands_behind_it_and_its_remark_above_it() -> None:
    text = body({"run.seed": 3, "mode": "on_policy"}, {"run.seed": ("data.seed", "one seed for all"), "mode": ("", "")})
    assert text == "mode: on_policy\n\nrun:\n  # one seed for all\n  seed: 3  # data.seed\n"
