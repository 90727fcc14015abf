from fractions import Fraction
from pathlib import Path

import pytest

from headway.config.aliases import FIXED as FIXED_KEYS
from headway.config.aliases import GONE, MOVED
from headway.config.loading import load
from headway.config.schema_keys import keys
from headway.errors import ConfigError
from tests.tiers import crossed

from .conftest import Load, Write

FIXED = [
    ("rollout.mode", ["async"], ["sync"]),
    ("rollout.calculate_log_probs", ["True"], ["False", "1"]),
    ("actor.strategy", ["fsdp2", "fsdp"], ["megatron"]),
    ("actor.use_dynamic_bsz", ["True"], ["False"]),
    ("hybrid_engine", ["False"], ["True"]),
    ("data.return_raw_chat", ["True"], ["False"]),
    ("data.train_batch_size", ["0"], ["64", "False"]),
    ("data.gen_batch_size", ["1"], ["8", "True"]),
    ("train_batch_size", ["0"], ["64"]),
]


def test_no_setting_counts_as_moved_or_gone() -> None:
    assert not {key.plain for key in keys()} & {*FIXED_KEYS, *GONE, *MOVED}
    assert load(None, ["trainer.snapshot_freq=2"]).config.trainer.snapshot_freq == 2


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(None, overrides)
    return str(refused.value)


@crossed(("accepted", "prefix"), FIXED, ["", "+", "actor_rollout_ref.", "+actor_rollout_ref."])
def test_a_key_of_the_recipes_is_accepted_at_the_value_that_headway_always_has(
    accepted: tuple[str, list[str], list[str]], prefix: str
) -> None:
    key, values, _ = accepted
    for value in values:
        loaded = load(None, [f"{prefix}{key}={value}"])
        assert (loaded.config, loaded.user_keys) == (load(None).config, frozenset())


@pytest.mark.parametrize(("key", "values"), [(key, values) for key, _, values in FIXED])
def test_a_key_of_the_recipes_is_refused_at_any_other_value_with_the_reason(key: str, values: list[str]) -> None:
    for value in values:
        message = refusal(f"{key}={value}")
        assert message.startswith(f"{key}: got ")
        assert "Headway accepts only" in message
        assert message.rpartition(": ")[2]


def test_generate_ahead_steps_is_eta_plus_one() -> None:
    loaded = load(None, ["trainer.generate_ahead_steps=2"])
    assert loaded.config.async_training.staleness_threshold == Fraction(1)
    assert loaded.config.trainer.generate_ahead_steps is None
    assert loaded.user_keys == {"async_training.staleness_threshold"}


ETA_1, STEPS_2 = "async_training: {staleness_threshold: 1}\n", "trainer: {generate_ahead_steps: 2}\n"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ["trainer.generate_ahead_steps=2", "async_training.staleness_threshold=1"]),
        (ETA_1 + STEPS_2, []),
        (ETA_1, ["trainer.generate_ahead_steps=2"]),
        (STEPS_2, ["async_training.staleness_threshold=1"]),
    ],
)
def test_generate_ahead_steps_and_eta_together_are_refused(text: str, overrides: list[str], write: Write) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.generate_ahead_steps=2 and async_training\.staleness_threshold=1"):
        load(write(text), overrides)


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "true", "two"])
def test_generate_ahead_steps_is_a_whole_number_from_1_on(steps: str) -> None:
    assert "expected a whole number of at least 1" in refusal(f"trainer.generate_ahead_steps={steps}")


def test_the_asynchronous_pipeline_is_the_mode_overlapped() -> None:
    assert load(None, ["+async_pipeline=True"]).config == load(None, ["mode=overlapped"]).config
    assert load(None, ["async_pipeline=False"]).config == load(None).config
    assert "expected true (mode=overlapped) or false" in refusal("async_pipeline=maybe")


@pytest.mark.parametrize(
    ("overrides", "on_update"),
    [
        (("mode=async_stale", "async_training.partial_rollout=true"), "interrupt"),
        (("mode=async_partial", "async_training.partial_rollout=false"), "drain"),
        (("async_training.partial_rollout=true", "async_training.on_update=keep"), "keep"),
        (("async_training.partial_rollout=true", "async_training.on_update=interrupt"), "interrupt"),
        (("async_training.partial_rollout=false", "async_training.on_update=drain"), "drain"),
    ],
)
def test_partial_rollout_says_what_happens_on_an_update(
    minimal: Load, overrides: tuple[str, ...], on_update: str
) -> None:
    assert minimal(*overrides).config.async_training.on_update == on_update


@pytest.mark.parametrize(("partial", "on_update"), [("false", "interrupt"), ("false", "keep"), ("true", "drain")])
def test_partial_rollout_against_a_contrary_on_update_is_refused(partial: str, on_update: str) -> None:
    message = refusal(f"async_training.partial_rollout={partial}", f"async_training.on_update={on_update}")
    assert f"async_training.partial_rollout={partial} means" in message


def test_a_partial_rollout_that_is_no_truth_value_is_refused() -> None:
    assert "async_training.partial_rollout: got 'some'" in refusal("async_training.partial_rollout=some")


def test_a_value_of_verls_is_told_as_what_it_is_here() -> None:
    assert refusal("actor.kl_loss_type=low_var_kl").endswith("or 'abs+'; verl's low_var_kl is k3 here")


def test_verls_parameters_of_a_reward_are_found_by_whatever_lies_in_them(minimal: Load) -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.reward_kwargs\.scale is reward\.params\.scale"):
        minimal("custom_reward_function.reward_kwargs.scale=2")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("actor.lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("batch_size", "actor.ppo_mini_batch_size"),
        ("model.batch_size", "model.warmup.batch_size"),
        ("eta", "async_training.staleness_threshold"),
        ("lag", "async_training.max_lag"),
        ("kl_coef", "actor.kl_loss_coef or algorithm.kl_ctrl.kl_coef"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_the_name_that_other_systems_have_is_answered_with_the_one_here(written: str, meant: str) -> None:
    assert refusal(f"{written}=1").endswith(f"{written}: unknown key (on the command line); did you mean {meant}?")


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("learning_rate", "TRL's learning_rate is actor.optim.lr here"),
        ("actor.learning_rate", "TRL's learning_rate is actor.optim.lr here"),
        ("critic.learning_rate", "TRL's learning_rate is critic.optim.lr here"),
        ("num_generations", "TRL's num_generations is rollout.n here"),
        ("beta", "TRL's beta is actor.kl_loss_coef here"),
        ("rollout.expert_parallel_size", "verl's rollout.expert_parallel_size has no counterpart: "),
        ("vllm_tensor_parallel_size", "TRL's vllm_tensor_parallel_size is rollout.tensor_model_parallel_size here"),
        (
            "actor.ppo_micro_batch_size_per_gpu",
            "verl's actor.ppo_micro_batch_size_per_gpu is actor.ppo_max_token_len_per_gpu here",
        ),
        ("lora_rank", "TRL's lora_rank has no counterpart: Headway trains all weights; full training takes a lower "),
        ("rollout.max_num_seqs", "verl's rollout.max_num_seqs is rollout.max_concurrent here"),
        ("data.train_files", "verl's data.train_files is data.train here"),
        ("trainer.critic_warmup", "verl's trainer.critic_warmup has no counterpart: the critic trains from the first "),
        ("gconfig.n_samples", "AReaL's gconfig.n_samples is rollout.n here"),
        ("max_head_offpolicyness", "AReaL's rollout.max_head_offpolicyness is async_training.staleness_threshold here"),
        ("max_async_level", "prime-rl's max_async_level is async_training.staleness_threshold here"),
        ("rollout.max_new_tokens", "OpenRLHF's rollout.max_new_tokens is data.max_response_length here"),
        ("n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is rollout.n here"),
    ],
)
def test_another_projects_key_is_answered_with_the_project_and_the_key_here(written: str, answer: str) -> None:
    assert f"{written}: unknown key (on the command line)" + (f"; {answer}" if answer else "") in refusal(
        f"{written}=1"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout.max_turns=3", "agent.max_turns=3"),
        ("actor_rollout_ref.rollout.tools=[a.py:f]", "agent.tools=[a.py:f]"),
        ("rollout.agent=a.py:run", "agent.client=a.py:run"),
        ("rollout.agent={command: [x]}", "agent.client=[x]"),
        ("rollout.runners=3", "agent.workers=3"),
        ("rollout.params={a.b: 1}", "agent.params={a.b: 1}"),
        ("rollout.mcp.table.env.PORT=80", "agent.mcp.table.env.PORT=80"),
        (
            "rollout.vllm.engine_args={seed: 1, compilation_config: {level: 3}}",
            "rollout.engine_kwargs={seed: 1, compilation_config: {level: 3}}",
        ),
        ("rollout.vllm.engine_args.seed=1", "rollout.engine_kwargs.seed=1"),
    ],
)
def test_a_key_of_an_earlier_release_works_and_a_note_says_what_it_is_called_now(old: str, new: str) -> None:
    loaded, now = load(None, [old]), load(None, [new])
    assert (loaded.config, loaded.user_keys) == (now.config, now.user_keys)
    (note,) = loaded.notes
    spelled = old.partition("=")[0].removeprefix("actor_rollout_ref.")
    name = new.partition("=")[0].split(".")[0]
    assert note.startswith(f"on the command line: {spelled}") and f" is {name}." in note and "this release only" in note
    assert now.notes == []


def test_an_error_about_a_key_that_moved_says_which_one_was_written() -> None:
    with pytest.raises(ConfigError, match=r"agent\.max_turns: .*\n.*rollout\.max_turns is agent\.max_turns"):
        load(None, ["rollout.max_turns=-3"])


def test_a_key_that_moved_and_then_went_is_gone_under_both_names() -> None:
    for key in ("rollout.val_max_concurrent", "agent.val_max_concurrent"):
        with pytest.raises(ConfigError, match=f"{key} is no setting"):
            load(None, [f"{key}=3"])


def test_an_old_and_a_new_name_of_one_setting_that_disagree_are_refused(write: Write) -> None:
    path = write("rollout: {max_turns: 3}\nagent: {max_turns: 4}\n")
    with pytest.raises(ConfigError, match=r"agent\.max_turns is given twice.* 3 .* 4"):
        load(path)


def test_a_reference_to_the_earlier_name_of_a_key_is_one_to_the_key(write: Write) -> None:
    path = write(
        "rollout: {n: '${rollout.params.x}', stall_s: '${rollout.step_timeout_s}', step_timeout_s: 7,\n"
        "  params: {x: 5, text: 'a \\${rollout.n}'}}\n"
    )
    config = load(path).config
    assert (config.rollout.n, config.agent.stall_s, config.agent.params["text"]) == (5, 7, "a ${rollout.n}")


def test_null_beside_the_earlier_name_of_data_is_no_second_value(write: Write) -> None:
    data = load(write("data: {train: null, sources: [{path: a.jsonl}], val: null, val_sources: []}\n")).config.data
    assert [source.path for source in data.train_sources] == ["a.jsonl"] and data.val is None


def test_the_file_of_a_run_is_upgraded_without_a_word(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("rollout: {n: 4, agent: 'a.py:run', params: {x.y: 1}, env: {A.B: C}, runners: 3}\n")
    assert "agent.client now, rollout.params.x" in load(file).notes[0]
    (tmp_path / "events.jsonl").touch()
    loaded = load(file)
    assert loaded.notes == []
    agent = loaded.config.agent
    assert (agent.client, agent.params, agent.env, agent.workers) == ("a.py:run", {"x.y": 1}, {"A.B": "C"}, 3)


def test_verls_keys_of_its_agent_loops_are_still_verls() -> None:
    assert "verl's rollout.agent.num_workers has no counterpart" in refusal("rollout.agent.num_workers=8")


def test_a_setting_that_is_no_more_is_refused_with_what_holds_and_told_where_the_file_is_of_a_run(
    tmp_path: Path,
) -> None:
    assert refusal("data.prefetch=8", "sandbox.processes=8").startswith("data.prefetch is no setting any more: 64 ")
    file = tmp_path / "config.yaml"
    file.write_text("data: {train: a.jsonl, sources: [], prefetch: 8}\nsandbox: {cpu_s: 3}\nplacement: {kind: split}\n")
    with pytest.raises(ConfigError, match=r"data\.prefetch is no setting.*\n.*sandbox\.cpu_s is no setting"):
        load(file)
    (tmp_path / "metrics.jsonl").touch()
    loaded = load(file)
    assert (loaded.config.data.train, loaded.config.cluster.placement) == ("a.jsonl", "split")
    told = [note.split(": ")[1] for note in loaded.notes]
    assert told == ["data.prefetch=8 does not hold any more", "sandbox.cpu_s=3 does not hold any more"]
    file.write_text("data: {train: a.jsonl, prefetch: 64}\nplacement: {kind: split}\n")
    assert load(file).notes == []


GONE_AT_THEIR_DEFAULTS = """
data: {train: a.jsonl, prefetch: 64}
sandbox: {cpu_s: 10.0, processes: 32, output_kib: 64, scratch_mib: 64}
rollout: {val_max_concurrent: null, vllm: {}}
placement: {}
offpolicy: null
reports: {run_name: null}
param_update: {backend: auto}
trainer: {max_nonfinite_steps: 10}
algorithm: {rollout_correction: {name: truncate, also: []}}
"""


def test_settings_and_sections_that_are_no_more_are_accepted_at_their_defaults_with_a_note(write: Write) -> None:
    loaded = load(write(GONE_AT_THEIR_DEFAULTS))
    assert loaded.user_keys == {"data.train", "algorithm.rollout_correction.name"}
    for key in (
        "data.prefetch",
        "sandbox.cpu_s",
        "placement",
        "offpolicy",
        "rollout.vllm",
        "trainer.max_nonfinite_steps",
    ):
        (note,) = [note for note in loaded.notes if f" {key} is no " in note]
        assert note.endswith("; drop it")


def test_further_corrections_of_an_earlier_release_are_a_list_with_the_first(write: Write) -> None:
    also = "also: [{name: reject, bound: 1.5}]"
    path = write(f"algorithm: {{rollout_correction: {{name: truncate, bound: 2, {also}}}}}\n")
    old = load(path, ["algorithm.rollout_correction.bound=3"])
    new = load(None, ["algorithm.rollout_correction=[{name: truncate, bound: 3}, {name: reject, bound: 1.5}]"])
    assert old.config == new.config and [one.name for one in new.config.algorithm.corrections] == ["truncate", "reject"]
    assert "algorithm.rollout_correction.also is the rest of a list" in old.notes[0] and not new.notes


def test_a_part_of_one_correction_is_not_laid_over_a_list_of_them(write: Write) -> None:
    path = write("algorithm: {rollout_correction: [{name: truncate, bound: 2}, {name: reject, bound: 1.5}]}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.bound=3 .* list"):
        load(path, ["algorithm.rollout_correction.bound=3"])
    whole = load(path, ["algorithm.rollout_correction.name=truncate", "algorithm.rollout_correction.bound=3"])
    assert [(one.name, one.bound) for one in whole.config.algorithm.corrections] == [("truncate", 3)]


def test_sources_of_an_earlier_release_are_lists_of_the_new_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "data: {sources: [a.jsonl, {path: b.jsonl}], val_sources: []}\noffpolicy: {guard: {min_ess: 0.5}}\n"
    )
    (tmp_path / "events.jsonl").touch()
    config = load(file).config
    assert [source.path for source in config.data.train_sources] == ["a.jsonl", "b.jsonl"]
    assert config.data.val is None and config.algorithm.guard.min_ess == 0.5
