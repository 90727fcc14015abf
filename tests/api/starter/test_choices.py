"""The choices of a first recipe follow from the model, the data and the devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.memory_choices import MODELS
from headway.api.init.data_summary import TextLengths
from headway.api.init.device_layout import config_of, taken
from headway.api.init.model_summary import Machine, look_here
from headway.api.init.recipe_builder import render
from headway.config.doctor import diagnose
from headway.config.loading import LoadedConfig
from headway.config.sizing.process_memory import room
from headway.errors import ConfigError
from tests.api.starter.facts import GB, choices, data, gpus, model, values

CPU = Machine(gpus=0, device_bytes=16 * GB, cores=4)


@pytest.mark.parametrize(
    ("name", "on", "answers"),
    [
        (name, machine, answers)
        for (name, machine), answers in product(
            [
                ("1 B", gpus(1)),
                ("1 B", gpus(1, 24)),
                ("1 B", gpus(8)),
                ("1 B", gpus(64)),
                ("8 B", gpus(1)),
                ("8 B", gpus(2)),
                ("8 B", gpus(8)),
                ("8 B", gpus(8, 48)),
                ("8 B", gpus(16)),
                ("32 B", gpus(8, 180)),
                ("30 B-A3B", gpus(8, 140)),
                ("30 B-A3B", gpus(64)),
            ],
            (1024, 8192),
        )
    ],
)
def test_what_is_chosen_fits_by_the_arithmetic_of_the_whole_run(name: str, on: Machine, answers: int) -> None:
    made = choices(model(name), on, data__max_response_length=answers)
    assert all(one.memory.device <= room(on.device_bytes) for one in taken(made, model(name), on))
    config = config_of(made)
    assert diagnose(LoadedConfig(config, frozenset(values(made)))) is not None, "raises where something has no effect"
    lines = render(made, ["a line of the header"] * 6).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 110
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.cluster.placement == "split":
        devices += config.rollout.nnodes * config.rollout.n_gpus_per_node
    assert devices == on.gpus


def test_episodes_of_several_turns_have_room_for_all_of_them() -> None:
    single = values(choices(model("1 B"), gpus(8)))["data.max_response_length"]
    episodes = values(choices(model("1 B"), gpus(8), agent__environment="f.py:make", agent__max_turns=5))
    assert (single, episodes["data.max_response_length"]) == (1024, 2560)  # 1024 + 4 · (256 + 128)


def test_recomputation_is_on_where_activations_would_not_fit_and_only_there() -> None:
    def recomputes(name: str, answers: int) -> bool:
        made = values(choices(model(name), gpus(8), data__max_response_length=answers))
        return bool(made.get("model.enable_gradient_checkpointing", False))

    assert not recomputes("1 B", 1024)
    assert recomputes("8 B", 8192)


def test_a_mixture_divides_its_experts_and_large_meshes_keep_copies_within_machines() -> None:
    made = values(choices(model("30 B-A3B"), gpus(64)))
    assert made["actor.parallel.ep"] == 8
    assert values(choices(model("1 B"), gpus(64)))["actor.parallel.replicate"] == 2


def test_a_model_that_one_gpu_has_no_room_for_is_served_by_several_with_vllm() -> None:
    made = values(choices(model("70 B"), gpus(64)))
    assert made["rollout.name"] == "vllm"
    assert made["rollout.tensor_model_parallel_size"] == 4
    assert made["rollout.n_gpus_per_node"] % 4 == 0
    small = values(choices(model("8 B"), gpus(64)))
    assert "rollout.tensor_model_parallel_size" not in small


def test_replicas_are_as_large_as_is_asked_for_and_divide_what_generates() -> None:
    made = values(choices(model("8 B"), gpus(8), rollout__tensor_model_parallel_size=4))
    assert (made["rollout.name"], made["rollout.n_gpus_per_node"] % 4) == ("vllm", 0)
    odd = values(choices(model("70 B"), gpus(6)))
    assert (odd["trainer.n_gpus_per_node"], odd["rollout.n_gpus_per_node"]) == (2, 4)
    assert odd["rollout.tensor_model_parallel_size"] == 4
    with pytest.raises(ConfigError, match=r"\b3 train\. 16 GPUs of 80 GB"):
        choices(model("70 B"), gpus(8), trainer__n_gpus_per_node=3)


def test_replicas_divide_the_heads_of_keys_or_are_a_multiple_of_them() -> None:
    heads = {**MODELS["32 B"], "num_attention_heads": 40, "num_key_value_heads": 10}
    sizes = {
        values(choices(model(config=heads), gpus(8, gb))).get("rollout.tensor_model_parallel_size", 1)
        for gb in (48, 80, 140)
    }
    assert sizes <= {1, 2} and 2 in sizes


def test_a_model_that_no_replica_holds_and_too_few_devices_are_refused_with_what_would_do() -> None:
    without = r"1 × 80 GB, .*have no room .*rollout\.name=vllm"
    with pytest.raises(ConfigError, match=without):
        choices(model("70 B"), gpus(64, here=True))
    with pytest.raises(ConfigError, match=r"1 × 80 GB, .*have no room"):
        choices(model("70 B"), gpus(64), rollout__name="native")
    with pytest.raises(ConfigError, match=r"8 × 12 GB, .*have no room .* Give GPUs"):
        choices(model("70 B"), gpus(64, device_bytes=12 * GB))
    host = gpus(2, host_bytes=64 * GB, here=True)
    with pytest.raises(ConfigError, match=r"on 2 GPUs of 80 GB\. 4 GPUs of 80 GB .*\(--gpus 4\)"):
        choices(model("8 B"), host)
    with pytest.raises(ConfigError, match=r"CPU takes [\d.]+ GB .*\b16\.0\b"):
        choices(model("8 B"), CPU)


def test_optimizer_state_goes_to_the_host_where_it_has_room_for_it() -> None:
    made = values(choices(model("8 B"), gpus(2, host_bytes=500 * GB, here=True)))
    assert made["actor.fsdp_config.param_offload"] is True


@pytest.mark.parametrize(
    ("thinks", "kind", "answers", "expected"),
    [
        (False, "math", [4], 1024),
        (True, "math", [4], 8192),
        (False, "math", [700], 1408),
        (False, "choice", [1], 512),
        (False, "text", [40], 96),
        (False, "code", [], 2048),
    ],
)
def test_answers_get_the_room_that_their_kind_needs(thinks: bool, kind: Any, answers: Any, expected: int) -> None:
    read = data(kind=kind, answers=TextLengths.of(answers) if answers else None)
    assert values(choices(model("1 B", thinks=thinks), gpus(8), read))["data.max_response_length"] == expected


def test_answers_get_less_room_before_a_model_is_refused() -> None:
    thinker, small = model("8 B", thinks=True), gpus(2, 19.5, host_bytes=500 * GB)
    made = {choice.key: choice for choice in choices(thinker, small)}
    assert made["data.max_response_length"].value in (4096, 2048, 1024)
    assert "do not fit on these devices" in made["data.max_response_length"].reason


def test_few_long_prompts_are_left_out_and_positions_bound_both_lengths() -> None:
    made = choices(model("1 B"), gpus(8), data([100] * 990 + [9000] * 5 + [400] * 5))
    (prompt,) = [choice for choice in made if choice.key == "data.max_prompt_length"]
    assert prompt.value == 416
    assert prompt.reason == "median 100, 99% 400, longest 9000 tokens; 0.5% are left out"
    short = model("1 B", config={"max_position_embeddings": 512})
    bounded = values(choices(short, gpus(8)))
    assert (bounded["data.max_prompt_length"], bounded["data.max_response_length"]) == (320, 192)
    with pytest.raises(ConfigError, match="MODEL has 512 positions"):
        choices(short, gpus(8), data([600]))


def test_the_learning_rate_falls_with_size_and_the_batch_with_rows() -> None:
    tiny = model("1 B", config={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 99})
    assert values(choices(tiny, CPU))["actor.optim.lr"] == 2e-4
    assert values(choices(model("1 B"), gpus(8)))["actor.optim.lr"] == 1e-6
    few = values(choices(tiny, CPU, data(rows=20)))
    assert (few["actor.ppo_mini_batch_size"], few["data.val_size"]) == (4, 2)
    one = values(choices(tiny, CPU, data(rows=1)))
    assert (one["actor.ppo_mini_batch_size"], one["data.val_size"]) == (1, 0)
    assert "rollout.test_freq" not in one


def test_a_given_mode_and_given_sizes_are_what_the_others_follow_from() -> None:
    made = values(choices(model("1 B"), gpus(4), mode="colocate_sync", actor__ppo_mini_batch_size=10))
    assert (made["trainer.n_gpus_per_node"], made["rollout.n_gpus_per_node"]) == (4, 4)
    assert made["rollout.total_rollout_steps"] % 10 == 0


def test_devices_that_are_given_leave_the_others_to_the_other_role() -> None:
    for given in ({"trainer__n_gpus_per_node": 4}, {"rollout__n_gpus_per_node": 4}):
        made = values(choices(model("1 B"), gpus(8), **given))
        assert (made["trainer.n_gpus_per_node"], made["rollout.n_gpus_per_node"]) == (4, 4)
    with pytest.raises(ConfigError, match=r"is 8 of 8 GPUs, .*leaves 0 for rollout"):
        choices(model("1 B"), gpus(8), trainer__n_gpus_per_node=8)


def test_gpus_that_are_no_whole_machines_are_not_left_idle() -> None:
    with pytest.raises(ConfigError, match=r"leaves 12 for rollout; .*machines of 8"):
        choices(model("1 B"), gpus(16), trainer__n_gpus_per_node=4)


def test_a_given_placement_needs_no_mode() -> None:
    tiny = model("1 B", config={"num_hidden_layers": 1})
    for on in (CPU, gpus(8)):
        made = values(choices(tiny, on, cluster__placement="shared"))
        assert (made["mode"], made["cluster.placement"]) == ("colocate_async", "shared")
        assert made["trainer.n_gpus_per_node"] == made["rollout.n_gpus_per_node"] == max(1, on.gpus)


def test_a_given_answer_takes_positions_from_prompts_and_a_given_prompt_from_answers() -> None:
    short = model("1 B", config={"max_position_embeddings": 256})
    made = values(choices(short, gpus(8), data([90] * 10), data__max_response_length=166))
    assert (made["data.max_prompt_length"], made["data.max_response_length"]) == (90, 166)
    with pytest.raises(ConfigError, match=r"data.max_prompt_length=256 leaves no room .*256 positions"):
        choices(short, gpus(8), data([90]), data__max_prompt_length=256)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=4 leaves out 100%.*\(median 90\b"):
        choices(short, gpus(8), data([90]), data__max_prompt_length=4)


def test_held_out_data_leaves_all_rows_to_training_and_epochs_tell_the_steps() -> None:
    few = data(rows=60, settings={"data.train": "train.jsonl", "data.val": "val.jsonl"})
    made = {choice.key: choice for choice in choices(model("1 B"), gpus(8), few, data__val="val.jsonl")}
    assert "all that 60 rows allow" in made["actor.ppo_mini_batch_size"].reason
    assert "data.val_size" not in made
    assert made["rollout.test_freq"].value == 5
    short = values(choices(model("1 B"), gpus(8), few, data__val="val.jsonl", data__epochs=2))
    assert "actor.optim.lr_warmup_steps" not in short, "8 steps"
    assert "rollout.total_rollout_steps" not in short


def test_with_vllm_the_trainer_is_checked_against_memory() -> None:
    def with_vllm(**given: Any) -> Any:
        return choices(model("8 B"), gpus(8, vllm=True), rollout__name="vllm", **given)

    with pytest.raises(ConfigError, match=r"trainer rank.* takes [\d.]+ GB .*\b80\.0\b"):
        with_vllm(actor__ppo_max_token_len_per_gpu=131_072)
    names = [one.name for one in taken(with_vllm(), model("8 B"), gpus(8))]
    assert not any(name == "replica" for name in names), "it takes what it finds"


def test_gpus_that_nobody_knows_of_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.api.init.model_summary.listed_here", lambda: None)
    with pytest.raises(ConfigError, match=r"GPUs .*not known; give --gpus N"):
        look_here(None, None)
    assert not look_here(2, None).here


def test_vllm_generates_where_it_is_installed_and_has_gpus_of_its_own() -> None:
    engines = [values(choices(model("1 B"), gpus(n, vllm=True)))["rollout.name"] for n in (1, 8)]
    assert engines == ["native", "vllm"]
    machine = replace(CPU, device_bytes=24 * GB)
    assert values(choices(model("1 B", config={"num_hidden_layers": 1}), machine))["rollout.name"] == "native"


def test_on_a_cpu_the_cache_is_bounded_before_anything_else_is_given_up() -> None:
    half_a_billion = model("1 B", config={"num_hidden_layers": 3, "num_key_value_heads": 32})

    def given_up(gb: int) -> list[str]:
        machine = replace(CPU, device_bytes=gb * GB)
        made = choices(half_a_billion, machine)
        assert sum(one.count * one.memory.device for one in taken(made, half_a_billion, machine)) <= room(gb * GB)
        savers = ("rollout.kv_cache_gib", "model.enable_gradient_checkpointing", "rollout.enable_dual_buffer")
        return [key for key in savers if key in values(made)]

    assert given_up(64) == []
    assert given_up(34) == ["rollout.kv_cache_gib"]
    assert given_up(26)[:2] == ["rollout.kv_cache_gib", "model.enable_gradient_checkpointing"]
