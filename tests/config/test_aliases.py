from fractions import Fraction

import pytest

from headway.config.loading import load
from headway.errors import ConfigError

from .conftest import Load

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


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(None, overrides)
    return str(refused.value)


@pytest.mark.parametrize(("key", "values"), [(key, values) for key, values, _ in FIXED])
@pytest.mark.parametrize("prefix", ["", "+", "actor_rollout_ref.", "+actor_rollout_ref."])
def test_a_key_of_the_recipes_is_accepted_at_the_value_that_headway_always_has(
    prefix: str, key: str, values: list[str]
) -> None:
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


def test_generate_ahead_steps_and_eta_together_are_refused() -> None:
    message = refusal("trainer.generate_ahead_steps=2", "async_training.staleness_threshold=1")
    assert "say the same thing" in message


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


def test_verls_parameters_of_a_reward_are_found_by_whatever_lies_in_them(minimal: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"reward_kwargs\.scale: unknown key .*; did you mean reward\.params\.scale\?"
    ):
        minimal("custom_reward_function.reward_kwargs.scale=2")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rate", "actor.optim.lr"),
        ("actor.learning_rate", "actor.optim.lr"),
        ("actor.lr", "actor.optim.lr"),
        ("critic.learning_rate", "critic.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("batch_size", "actor.ppo_mini_batch_size"),
        ("model.batch_size", "model.warmup.batch_size"),
        ("num_generations", "rollout.n"),
        ("beta", "actor.kl_loss_coef"),
        ("kl_coef", "actor.kl_loss_coef or algorithm.kl_ctrl.kl_coef"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("rollout.max_new_tokens", "data.max_response_length"),
    ],
)
def test_the_name_that_other_systems_have_is_answered_with_the_one_here(written: str, meant: str) -> None:
    assert refusal(f"{written}=1").endswith(f"{written}: unknown key (on the command line); did you mean {meant}?")
