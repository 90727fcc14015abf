"""Values of verl's settings: conversions for its table, and its programs."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import gcd
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    Translated,
    groups,
    groups_of_steps,
    lost,
    other,
    path,
    taken,
    warmup_share,
    whole,
)

PROGRAM = "the program"
"""Name of the setting for the verl program that a file names."""
TRAINER = "the trainer"
"""Name of the fact derived from program and `TRAINER_MODE`, for conditions in the table."""
PPO, ONE_STEP_OFF, FULLY_ASYNC = "main_ppo", "one_step_off_policy", "fully_async_policy"
TRAINER_MODE = "trainer.v1.trainer_mode"
COLOCATE_ASYNC, SEPARATE_ASYNC = "colocate_async", "separate_async"
"""Values of `TRAINER_MODE` with which `main_ppo` counts as another program."""
RENAMED: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.": "reward_manager.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.": "reward_model.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
}
"""Prefix of keys in verl's section ``reward`` → the prefix of the older keys, which the table has."""


def mini(given: Given) -> int:
    """Number of prompts of one optimizer step. Forks with ``n_agent`` count answers."""
    return max(1, whole(given["actor.ppo_mini_batch_size"]) // agent_answers(given))


def agent_answers(given: Given) -> int:
    return max(1, whole(given.get("rollout.n_agent") or 1))


def mini_batch(value: Any, given: Given) -> Translated:
    values = {"actor.ppo_mini_batch_size": mini(given)}
    if (several := agent_answers(given)) > 1:
        return other(values, f"with n_agent verl's forks count answers: {value} of them, {several} of a prompt")
    return taken(values, "prompts, each with rollout.n answers")


def answers(value: Any, given: Given) -> int:
    """Number of answers to a prompt: the engine's, times the copies of a prompt in forks with ``n_agent``."""
    return whole(given.get("rollout.n", 1)) * agent_answers(given)


def batches(given: Given) -> Fraction:
    """Number of mini-batches of one of verl's training steps."""
    if given[TRAINER] == FULLY_ASYNC:
        return Fraction(whole(given.get("async_training.require_batches", 1)))
    # Exact, so that a remainder is noticed and reported.
    return Fraction(whole(given["data.train_batch_size"]), mini(given))


def version(given: Given) -> int:
    """Number of groups of one version."""
    trigger = given.get("async_training.trigger_parameter_sync_step", 4) if given[TRAINER] == FULLY_ASYNC else 1
    return max(1, int(batches(given))) * mini(given) * whole(trigger)


def train_batch_size(value: Any, given: Given) -> Translated:
    several = batches(given)
    steps = max(1, int(several))
    if given[TRAINER] == SEPARATE_ASYNC:
        values = {"async_training.require_batches": 1, "async_training.trigger_parameter_sync_step": steps}
        return other(values, f"prompts of a version: {steps} mini-batches of {mini(given)}, fetched one by one")
    note = f"prompts of a step: {steps} mini-batches of {mini(given)}; one step is one version here"
    if several.denominator != 1:
        note += f", of {version(given)} prompts, since {value} is no multiple of {mini(given)}"
    return other({"async_training.require_batches": steps}, note)


def steps(value: Any, given: Given) -> Translated:
    return groups_of_steps(value, version(given))


def rollout_steps(value: Any, given: Given) -> Translated:
    return groups(value, version(given), "prompts that are trained on; verl counts those that are generated")


def ranks(given: Given) -> int:
    """Number of training devices."""
    return whole(given["trainer.nnodes"]) * whole(given["trainer.n_gpus_per_node"])


def lines(given: Given) -> int:
    """Number of ranks with different rows."""
    return max(1, ranks(given) // whole(given.get("actor.ulysses_sequence_parallel_size", 1)))


def micro_batch(value: Any, given: Given) -> Translated:
    rows = whole(value)
    longest = whole(given["data.max_prompt_length"]) + whole(given["data.max_response_length"])
    return other(
        {"actor.ppo_max_token_len_per_gpu": rows * longest},
        f"verl counts answers, Headway tokens: {rows} × {longest}, the longest ones; lower it where memory is short",
    )


def micro_batch_of_all(value: Any, given: Given) -> Translated:
    """Return `micro_batch` for a size over all ranks. verl divides such a size by the data ranks."""
    return micro_batch(max(1, whole(value) // lines(given)), given)


def warmup_of_ratio(value: Any, given: Given) -> Translated:
    steps = given.get("trainer.total_training_steps")
    return warmup_share(value, None if steps is None else whole(steps) * updates("actor", given))


def updates(role: str, given: Given) -> int:
    """Number of optimizer steps in a training step of verl. verl changes the learning rate once per training step."""
    return max(1, int(batches(given))) * whole(given.get(f"{role}.ppo_epochs", 1))


def warmup(value: Any, given: Given, role: str) -> Translated:
    """Convert a warmup in training steps to optimizer steps."""
    if float(value) < 0:
        return taken(note="not given, here either")
    here, several = f"{role}.optim.lr_warmup_steps", updates(role, given)
    if several == 1 or not whole(value):
        return taken({here: whole(value)})
    return other({here: whole(value) * several}, f"training steps there, each of {several} optimizer steps")


def replicas(value: Any, given: Given) -> Translated:
    size, count = whole(value), ranks(given)
    if size <= 0 or size >= count:
        return taken(note="the model is sharded over all ranks, as here")
    if count % size:
        return lost(f"{size} ranks do not divide the trainer's {count}; choose actor.parallel.replicate")
    copies = gcd(count // size, lines(given))
    return other({"actor.parallel.replicate": copies}, f"copies of the sharded model; there ranks of one: {size}")


def penalty(value: Any, given: Given) -> Translated:
    factor = float(value)
    name = "reward.overlong_buffer.penalty_factor"
    if given.get("custom_reward_function.path"):
        return taken({name: factor})
    return other(
        {name: factor / 2},
        f"beside scores of 1 and -1, as verl's of DAPO's data are; math_verify's are 1 and 0, where {factor / 2:g} "
        "weighs as much",
    )


def reward_function(value: Any, given: Given) -> Translated:
    spec = f"{path(value)}:{given.get('custom_reward_function.name', 'compute_score')}"
    return taken({"reward.function": spec}, "a function of verl's form is called as it is (docs/rewards.md)")


def guessed(given: Given) -> dict[str, Any]:
    """Return the program of the settings, if the file does not name it, and its trainer."""
    is_async = any(key.startswith("async_training.") for key in given)
    apart = given.get("rollout.nnodes", 0) not in (0, None)  # a whole configuration of main_ppo says 0
    program = given.get(PROGRAM, FULLY_ASYNC if is_async else ONE_STEP_OFF if apart else PPO)
    chosen = given.get(TRAINER_MODE) if given.get("trainer.use_v1") is not False else None
    return {PROGRAM: program, TRAINER: chosen if chosen in (COLOCATE_ASYNC, SEPARATE_ASYNC) else program}
