import math
import os
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import strategies as st

from headway.config.checks import without_effect
from headway.config.loading import LoadedConfig, dump, load, mode_config, written_values
from headway.config.presets import PRESETS
from headway.config.schema import AsyncTrainingConfig, Config, Order
from headway.errors import ConfigError
from tests.pipeline.cases import for_each
from tests.tiers import a_share_and_all, mostly_slow, searched

from .conftest import Load, Write


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, overrides)
    return str(refused.value)


def test_the_command_line_lies_on_the_file_and_the_file_on_the_mode(write: Write) -> None:
    path = write("mode: async_stale\nasync_training: {staleness_threshold: 0.25, trigger_parameter_sync_step: 2}\n")
    settings = load(path, ["async_training.staleness_threshold=0.75"]).config.async_training
    assert settings.staleness_threshold == Fraction(3, 4)  # the command line's
    assert settings.trigger_parameter_sync_step == 2  # the file's
    assert settings.order is Order.WINDOW  # the mode's


def test_the_mode_comes_from_the_command_line_before_the_file(write: Write) -> None:
    path = write("mode: async_stale\n")
    assert load(path).config.mode == "async_stale"
    assert load(path, ["mode=on_policy"]).config.async_training.staleness_threshold == 0
    assert load(None).config.mode == "async_partial"


@pytest.mark.parametrize("mode", ["asynch_partial", "overlap", "null", "3", "[on_policy]"])
def test_an_unknown_mode_is_refused_with_those_that_there_are(mode: str) -> None:
    message = refusal(f"mode={mode}")
    assert all(known in message for known in PRESETS)


@pytest.mark.parametrize("mode", PRESETS)
def test_every_mode_is_values_of_the_schema(mode: str) -> None:
    loaded = load(None, [f"mode={mode}"])
    assert loaded.config == mode_config(mode)
    assert loaded.user_keys == {"mode"}


def test_user_keys_are_what_the_user_gave_a_value(write: Write) -> None:
    path = write("model: {make: {hidden_size: 64}}\ndata: {val: null}\n")
    assert load(path, ["actor_rollout_ref.rollout.n=4"]).user_keys == {"model.make.hidden_size", "rollout.n"}


def test_a_section_set_to_null_takes_back_everything_below_it(write: Write) -> None:
    loaded = load(write("model: {make: {hidden_size: 64}}\n"), ["model.make=null"])
    assert loaded.config.model.make is None
    assert loaded.user_keys == set()


def test_an_exponent_is_a_number(write: Write) -> None:
    assert load(write("actor: {optim: {lr: 1e-4}}\n")).config.actor.optim.lr == 1e-4
    assert load(None, ["actor.optim.lr=3E-5"]).config.actor.optim.lr == 3e-5


def test_a_reference_stands_for_another_setting(write: Write) -> None:
    path = write("rollout: {n: 4, val_n: '${rollout.n}', val_temperature: 1}\n")
    assert load(path, ["rollout.n=6"]).config.rollout.val_n == 6
    assert "rollout.val_n" in refusal("rollout.val_n=${rollout.m}")


def test_numbers_may_name_things_and_bare_on_and_off_are_words() -> None:
    config = load(None, ["run.name=2024", "reports.live=off"]).config
    assert (config.run.name, config.reports.live) == ("2024", "off")


# ------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=0", "rollout.n: got 0 (on the command line), expected a number greater than 0"),
        (
            "rollout.max_concurrent=0",
            "rollout.max_concurrent: got 0 (on the command line), expected a number greater than 0, or null, as where "
            "it is left out",
        ),
        (
            "rollout.max_concurrent=8.5",
            "rollout.max_concurrent: got 8.5 (on the command line), expected a whole number, or null, as where it is "
            "left out",
        ),
        ("rollout.n=many", "rollout.n: got 'many' (on the command line), expected a whole number"),
        ("rollout.n=2.5", "rollout.n: got 2.5 (on the command line), expected a whole number"),
        ("rollout.n=true", "rollout.n: got True (on the command line), expected a number"),
        ("rollout.n=null", "rollout.n: got null (on the command line), expected a whole number"),
        ("rollout.n=[1]", "rollout.n: got [1] (on the command line), expected a whole number"),
        (
            "rollout.top_p=1.5",
            "rollout.top_p: got 1.5 (on the command line), expected a number less than or equal to 1",
        ),
        ("rollout.test_freq=0", "rollout.test_freq: got 0 (on the command line), expected a number of versions, or -1"),
        ("rollout.name=turbo", "rollout.name: got 'turbo' (on the command line), expected 'native' or 'vllm'"),
        ("actor.use_kl_loss=maybe", "actor.use_kl_loss: got 'maybe' (on the command line), expected true or false"),
        ("actor.grad_clip=.inf", "actor.grad_clip: got inf (on the command line), expected a finite number"),
        (
            "actor.optim.betas=[0.9, 1]",
            "actor.optim.betas[1]: got 1 (on the command line), expected a number less than 1",
        ),
        ("actor.optim.betas=[0.9]", "actor.optim.betas[1]: got nothing (on the command line), expected a value"),
        (
            "actor.optim.betas=[0, 0, 0]",
            "actor.optim.betas: got [0, 0, 0] (on the command line), expected at most 2 values",
        ),
        (
            "actor.optim.betas=0.9",
            "actor.optim.betas: got 0.9 (on the command line), expected a list of values in brackets",
        ),
        (
            "data.task.params=3",
            "data.task.params: got 3 (on the command line), expected a section of names and values",
        ),
        ("actor=3", "actor: got 3 (on the command line), expected a section with keys of its own"),
        (
            "async_training.window=wide",
            "async_training.window: got 'wide' (on the command line), expected a whole number or 'B', or null, "
            "as where it is left out",
        ),
        (
            "async_training.window=0",
            "async_training.window: got 0 (on the command line), expected a number greater than 0 or 'B', or null, "
            "as where it is left out",
        ),
        (
            "async_training.window=true",
            "async_training.window: got True (on the command line), expected a number, or null, "
            "as where it is left out",
        ),
        (
            "async_training.order=lifo",
            "async_training.order: got 'lifo' (on the command line), expected 'fifo', 'window' or 'ready'",
        ),
        (
            "trainer.use_nodes_ratios=[0.5, 0, 0, x]",
            "trainer.use_nodes_ratios[3]: got 'x' (on the command line), expected a number, like 1, 0.3 or 3/10",
        ),
        ("reward.function=null", "reward.function: got null (on the command line), expected text"),
        (
            "model.warmup.target=[0.6, 0.4]",
            "model.warmup.target: got [0.6, 0.4] (on the command line), expected [low, high] with 0 <= low < high <= 1",
        ),
        (
            "model.make.vocabulary=abca",
            "model.make.vocabulary: got 'abca' (on the command line), expected each character once, but 'a' repeats",
        ),
    ],
)
def test_a_bad_value_is_refused_with_the_key_the_place_and_what_was_expected(override: str, message: str) -> None:
    assert refusal(override) == message


def test_attention_heads_that_do_not_share_keys_evenly_are_refused_with_both_numbers() -> None:
    message = refusal("model.make.num_key_value_heads=3")
    assert "expected num_attention_heads (4) to be a multiple of num_key_value_heads (3)" in message


@pytest.mark.parametrize("eta", ["-0.1", "much", "true", "1/0", ".nan", ".inf", "null", "[1]"])
def test_an_eta_that_is_no_fraction_from_0_on_is_refused(eta: str) -> None:
    assert "async_training.staleness_threshold: got" in refusal(f"async_training.staleness_threshold={eta}")


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rolout.n", "rollout.n"),
        ("trainer.total_rollout_steps", "rollout.total_rollout_steps"),
        ("async_training.stalenes_threshold", "async_training.staleness_threshold"),
        ("actor.optim.learning_rate_warmup_steps", "actor.optim.lr_warmup_steps"),
        ("actor_rollout_ref.rollout.temprature", "rollout.temperature"),
        ("val_n", "rollout.val_n"),
        ("trainer.n_gpu", "trainer.n_gpus_per_node"),
        ("ppo_epochs", "actor.ppo_epochs or critic.ppo_epochs"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_probably_meant(key: str, suggestion: str) -> None:
    assert refusal(f"{key}=1").endswith(f"unknown key (on the command line); did you mean {suggestion}?")


def test_an_unknown_key_unlike_any_other_is_refused_without_a_guess(write: Write) -> None:
    path = write("banana: {peel: 3}\n")
    assert refusal(path=path) == f"banana.peel: unknown key (in {path})"


def test_all_problems_come_in_one_message_each_with_its_place(write: Write) -> None:
    path = write("rollout: {n: 0, temprature: 1}\n")
    lines = refusal("actor.clip_ratio=-1", path=path).splitlines()
    assert lines == [
        f"rollout.temprature: unknown key (in {path}); did you mean rollout.temperature?",
        f"rollout.n: got 0 (in {path}), expected a number greater than 0",
        "actor.clip_ratio: got -1 (on the command line), expected a number greater than 0",
    ]


# ------------------------------------------------------------------------------------------- whole choices


def test_a_model_of_the_users_own_replaces_the_made_one(minimal: Load) -> None:
    loaded = minimal("model.path=/models/mine")
    assert (loaded.config.model.path, loaded.config.model.make) == ("/models/mine", None)
    assert not any(key.startswith("model.make") for key in loaded.user_keys)


def test_data_of_the_users_own_replaces_the_task_and_its_reward(minimal: Load) -> None:
    loaded = minimal("data.train=mine.jsonl")
    assert (loaded.config.data.train, loaded.config.data.task) == ("mine.jsonl", None)
    assert loaded.config.reward.function == "exact_match"
    assert loaded.notes == ["reward.function is exact_match: data.train replaced the task whose verifier it was"]


def test_a_reward_of_the_users_own_is_kept_with_data_of_the_users_own(minimal: Load) -> None:
    loaded = minimal("data.train=mine.jsonl", "reward.function=mine.py:score")
    assert (loaded.config.reward.function, loaded.notes) == ("mine.py:score", [])


def test_another_task_does_not_get_the_parameters_of_the_first(write: Write) -> None:
    path = write(
        "data: {task: {name: sort, size: 99, params: {longest: 9}}}\n"
        "model: {make: {}, warmup: {params: {longest: 3}}}\n"
    )
    same = load(path, ["data.task.name=sort"]).config
    assert same.data.task is not None
    assert same.data.task.params == {"longest": 9}
    other = load(path, ["data.task.name=reverse", "data.task.params.mean=4"]).config
    assert other.data.task is not None
    assert other.model.warmup is not None
    assert (other.data.task.size, other.data.task.params, other.model.warmup.params) == (99, {"mean": 4}, {})


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.path=/m", "model.make.hidden_size=64"),
        ("model.path=/m", "model.warmup={}"),
        ("data.train=a.jsonl", "data.task.name=sort"),
        ("reward.functions=[{function: format}]", "reward.function=regex"),
        ("reward.functions=[{function: format}]", "reward.params={a: 1}"),
    ],
)
def test_two_choices_in_one_place_are_refused(overrides: tuple[str, ...]) -> None:
    assert "but both are given on the command line" in refusal(*overrides)


def test_several_rewards_replace_the_one_of_a_layer_before_and_one_replaces_several(write: Write) -> None:
    one = write("reward: {function: regex, params: {pattern: a}}\n", "one.yaml")
    several = load(one, ["reward.functions=[{function: format}]"])
    assert [part.function for part in several.config.reward.all] == ["format"]
    assert several.user_keys == {"reward.functions"}
    path = write("defaults: [one.yaml]\nreward: {functions: [{function: format}]}\n")
    reward = load(path, ["reward.function=math_verify", "reward.params.strict=false"]).config.reward
    assert (reward.function, reward.params, reward.functions) == ("math_verify", {"strict": False}, None)


@pytest.mark.parametrize(("function", "params"), [("regex", {"pattern": "a", "group": 1}), ("format", {"group": 1})])
def test_another_reward_does_not_get_the_parameters_of_the_first(write: Write, function: str, params: object) -> None:
    path = write("reward: {function: regex, params: {pattern: a}}\n")
    assert load(path, [f"reward.function={function}", "reward.params.group=1"]).config.reward.params == params


def test_several_rewards_with_data_of_the_users_own_need_no_note(minimal: Load) -> None:
    loaded = minimal("data.train=mine.jsonl", "reward.functions=[{function: format}]")
    assert (loaded.config.reward.all[0].function, loaded.notes) == ("format", [])


# ------------------------------------------------------------------------------------------- dump, and η


def equal_after_dump(loaded: LoadedConfig, folder: Path) -> None:
    path = folder / "dumped.yaml"
    path.write_text(dump(loaded.config))
    assert load(path).config == loaded.config


DUMPED = [
    (),
    ("model.path=/m",),
    ("data.train=a.parquet", "data.epochs=2", "rollout.total_rollout_steps=null", "run.dir=runs/x"),
    ("trainer.generate_ahead_steps=3",),
    ("async_training.partial_rollout=true",),
    ("async_training.partial_rollout=true", "async_training.on_update=keep"),
    ("async_training.order=fifo", "async_training.staleness_threshold=1/3"),
    ("trainer.use_nodes_ratios=[1/3, 0, 1/3, 1/3]", "trainer.n_gpus_per_node=3", "actor.use_kl_loss=true"),
    (
        "run.name='on'",
        "data.task.params={deep: {list: [1, [2, x]], text: 'null', number: '1e9'}}",
        'model.make.vocabulary="\'\\"#"',
    ),
]


@mostly_slow(
    ("mode", "overrides"),
    product(PRESETS, DUMPED),
    quick=[
        *zip(
            ["one_step_off", "async_stale", "overlapped", "colocate_async"],
            [DUMPED[6], DUMPED[8], DUMPED[2], DUMPED[5]],
            strict=True,
        )
    ],
)
def test_a_dumped_configuration_loads_back_to_an_equal_one(
    minimal: Load, tmp_path: Path, mode: str, overrides: tuple[str, ...]
) -> None:
    equal_after_dump(minimal(f"mode={mode}", *overrides), tmp_path)


@a_share_and_all
def test_text_that_looks_like_a_reference_is_text_after_a_dump_too(tmp_path: Path, share: float) -> None:
    """Takes seconds: configurations are written, read and checked."""

    def check(text: str) -> None:
        params = {"text": text, "listed": [text, {"within": text}]}
        config = Config.model_validate({"data": {"prompt_key": text, "task": {"name": "sort", "params": params}}})
        equal_after_dump(LoadedConfig(config), tmp_path)

    parts = ("${", "}", "\\", "\\${", "$", "{", "'", '"', "\n", ": ", "a")
    for_each(st.lists(st.sampled_from(parts), max_size=8).map("".join), share * 40, check)


def test_a_reference_that_was_escaped_stays_so_from_dump_to_dump(minimal: Load, tmp_path: Path) -> None:
    loaded = minimal(r"data.task.params={prompt_format: '\${sequence}='}")
    assert loaded.config.data.task.params == {"prompt_format": "${sequence}="}
    equal_after_dump(loaded, tmp_path)


@searched(100, st.fractions(min_value=0, max_value=1000))
def test_eta_is_kept_exactly_through_a_dump(eta: Fraction) -> None:
    settings = AsyncTrainingConfig(staleness_threshold=eta)
    again = AsyncTrainingConfig.model_validate(settings.model_dump(mode="json"))
    assert again.staleness_threshold == settings.staleness_threshold == eta


@searched(100, st.integers(0, 999), st.integers(1, 6), st.integers(1, 10_000))
def test_eta_written_as_a_decimal_is_that_decimal(digits: int, places: int, b: int) -> None:
    eta = AsyncTrainingConfig.model_validate({"staleness_threshold": digits / 10**places}).staleness_threshold
    assert eta == Fraction(digits, 10**places)
    assert math.floor(eta * b) == digits * b // 10**places


def test_a_model_in_the_users_home_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(None, ["model.path=~/llama"]).config.model.path == "/home/me/llama"
    assert load(None, ["model.path=org/llama"]).config.model.path == "org/llama"


@pytest.mark.parametrize("empty", ["null", "{}"])
@pytest.mark.parametrize("on_top", ["command line", "file"])
def test_null_and_an_empty_mapping_clear_what_a_layer_below_set(write: Write, empty: str, on_top: str) -> None:
    below = write(
        "mode: async_stale\nreward: {function: f.py:score, params: {a: 1}}\n"
        "actor: {optim: {lr: 0.5}}\nasync_training: {order: fifo}\n",
        "below.yaml",
    )
    keys = ("reward.params", "actor.optim", "async_training")
    if on_top == "file":
        text = "defaults: [below.yaml]\n" + "".join(f"{key}: {empty}\n" for key in keys)
        config = load(write(text), ["reward.params.b=2"]).config
    else:
        config = load(below, [*(f"{key}={empty}" for key in keys if key != "reward.params")]).config
        assert config.reward.params == {"a": 1}
        assert load(below, [f"reward.params={empty}"]).config.reward.params == {}
        config = load(below, [f"{key}={empty}" for key in keys[1:]] + ["reward.params={}", "reward.params.b=2"]).config
    assert config.reward.params == {"b": 2}
    assert config.actor.optim == mode_config("async_stale").actor.optim
    assert config.async_training == mode_config("async_stale").async_training  # the mode's, not the schema's


def test_names_with_dots_survive_files_layers_the_command_line_and_a_runs_own_file(write: Write) -> None:
    reward = "reward: {function: f.py:score, params: {a.b: 1, c: {d.e: [{f.g: 2}]}}}\n"
    write(f"{reward}agent.env: {{A.B: x}}\n", "below.yaml")
    path = write("defaults: [below.yaml]\nreward: {params: {h.i: 3}}\n")
    config = load(path, ["rollout.engine_kwargs={x.y: 1}", 'reward.params={"a.b": 4}']).config
    assert config.reward.params == {"a.b": 4, "c": {"d.e": [{"f.g": 2}]}, "h.i": 3}
    assert config.agent.env == {"A.B": "x"} and config.rollout.engine_kwargs == {"x.y": 1}
    assert load(write(dump(config), "own.yaml")).config == config


def test_giving_one_key_of_a_section_leaves_the_defaults_of_its_others() -> None:
    config = load(None, ["critic.optim.weight_decay=0.1", "sft.optim.lr=1e-3"]).config
    assert (config.critic.optim.lr, config.critic.optim.weight_decay) == (1e-5, 0.1)
    assert (config.sft.optim.lr, config.sft.optim.lr_scheduler_type) == (1e-3, "cosine")
    assert config.actor.optim.lr == 1e-6


def test_what_is_the_environments_is_written_as_a_reference_and_read_again(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    monkeypatch.setenv("SIZE", "7")
    path = write(
        "reward: {function: f.py:score, params: {token: '${oc.env:TOKEN}', url: 'x?${reward.params.token}', "
        "deep: ['a', {b: 'Bearer ${oc.env:TOKEN}'}], plain: '\\${oc.env:TOKEN}'}}\nrollout: {n: '${oc.env:SIZE}'}\n"
    )
    config = load(path, ["agent.env={KEY: '${oc.env:TOKEN}'}"]).config
    assert config.reward.params["url"] == "x?s3cret" and config.agent.env == {"KEY": "s3cret"}
    assert config.reward.params["deep"] == ["a", {"b": "Bearer s3cret"}] and config.rollout.n == 7
    for text in (dump(config), str(written_values(config))):
        assert "s3cret" not in text
    assert written_values(config)["rollout.n"] == 7
    own = write(dump(config), "own.yaml")
    assert load(own).config == config
    assert load(own, ["reward.params.token=other"]).config.reward.params["url"] == "x?other"
    monkeypatch.delenv("TOKEN")
    with pytest.raises(ConfigError, match="TOKEN"):
        load(own)
    looked_at = load(own, environment=os.environ).config
    assert looked_at.reward.params["token"] == "${oc.env:TOKEN}"
    assert "s3cret" not in dump(looked_at)


def test_a_length_that_is_no_multiple_is_rounded_up_and_said(minimal: Load) -> None:
    loaded = minimal("rollout.total_rollout_steps=100")
    assert loaded.config.rollout.total_rollout_steps == 128
    assert loaded.notes[-1].startswith("rollout.total_rollout_steps=100 is rounded up to 128, a multiple of B=64")
    exact = minimal("rollout.total_rollout_steps=128")
    assert exact.config == loaded.config and not any("rounded" in note for note in exact.notes)


@pytest.mark.parametrize("further", [(), ("mode=colocate_sync",), ("rollout.name=vllm",)])
def test_a_replica_of_one_device_is_never_an_error(minimal: Load, further: tuple[str, ...]) -> None:
    assert "rollout.tensor_model_parallel_size" not in without_effect(
        minimal("rollout.tensor_model_parallel_size=1", *further).config
    )
