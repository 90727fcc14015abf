"""Values of verl's settings: conversions for its table, and the defaults of its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any

from headway.config.migration_tables.table_rows import (
    Convert,
    Given,
    TableRow,
    Translated,
    differs,
    groups,
    interval,
    number,
    other,
    path,
    reward_file,
    same,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

PROGRAM = "the program"
"""Name of the setting that says which of verl's programs a file is for: one of the keys of `MODES`."""
PPO, ONE_STEP_OFF, FULLY_ASYNC = "main_ppo", "one_step_off_policy", "fully_async_policy"
TRAINER_MODE = "trainer.v1.trainer_mode"
COLOCATE_ASYNC, SEPARATE_ASYNC = "colocate_async", "separate_async"
"""Values of `TRAINER_MODE` that make `main_ppo` a program of its own."""
SHARED = (PPO, COLOCATE_ASYNC)
"""Programs that generate on the trainer's devices."""
MODES: Mapping[str, tuple[str, str]] = {
    PPO: ("colocate_sync", "the same devices generate and train by turns"),
    ONE_STEP_OFF: ("one_step_off", "the next batch is generated while this one is trained"),
    FULLY_ASYNC: ("async_stale", "prompts stream; its limits are the async_training keys"),
    COLOCATE_ASYNC: ("colocate_async", "sides take turns on the devices; what is unfinished goes on in the next turn"),
    SEPARATE_ASYNC: ("async_partial", "generation goes on while others train, and across updates"),
}
CLIPPED = ("vanilla", "dual_clip")
"""Names of verl's PPO loss."""
LOSSES = {
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "gpg": "gpg",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of verl's recipe that is fixed in Headway: ``values`` are accepted, all others refused for ``reason``."""

    values: tuple[Any, ...]
    reason: str


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
"""Beginnings of keys of verl's section ``reward`` → those of the older keys, which the rows have."""
FIXED: Mapping[str, Fixed] = {
    "rollout.mode": Fixed(("async",), "the rollout engine is always asynchronous"),
    "rollout.calculate_log_probs": Fixed((True,), "the engine always reports the log-prob of every token it samples"),
    "actor.strategy": Fixed(("fsdp2", "fsdp"), "the train engine is FSDP2"),
    "actor.use_dynamic_bsz": Fixed(
        (True,), "micro-batches are always packed by tokens; actor.ppo_max_token_len_per_gpu sets how many"
    ),
    "hybrid_engine": Fixed((False,), "cluster.placement=shared (mode=colocate_sync) is how devices are shared"),
    "data.return_raw_chat": Fixed((True,), "prompts stay as they are until the chat template is applied"),
    "data.train_batch_size": Fixed((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
    "data.gen_batch_size": Fixed((1,), "the unit that streams is one prompt with its rollout.n trajectories"),
    "train_batch_size": Fixed((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
}
"""Keys that Headway itself reads, at one value only."""


def program(given: Given) -> str:
    """Return the program that the settings are for: `main_ppo` has three, by `TRAINER_MODE`."""
    chosen = given.get(TRAINER_MODE)
    if chosen in (COLOCATE_ASYNC, SEPARATE_ASYNC) and given.get("trainer.use_v1") is not False:
        return str(chosen)
    return str(given[PROGRAM])


def mini(given: Given) -> int:
    """Prompts of one optimizer step. Forks with ``n_agent`` count answers there."""
    return max(1, whole(given["actor.ppo_mini_batch_size"], given) // agent_answers(given))


def agent_answers(given: Given) -> int:
    return max(1, whole(given.get("rollout.n_agent") or 1, given))


def mini_batch(value: Any, given: Given) -> Translated:
    values = {"actor.ppo_mini_batch_size": mini(given)}
    if (several := agent_answers(given)) > 1:
        return other(values, f"with n_agent verl's forks count answers: {value} of them, {several} of a prompt")
    return taken(values, "prompts, each with rollout.n answers")


def answers(value: Any, given: Given) -> int:
    """Answers of a prompt: the engine's, for each of the copies of it that forks with ``n_agent`` make."""
    return whole(value, given) * agent_answers(given)


def agents(value: Any, given: Given) -> Translated:
    n = answers(given.get("rollout.n", 1), given)
    return taken({"rollout.n": n}, "copies of a prompt, each with rollout.n answers")


def batches(given: Given) -> Fraction:
    """Mini-batches of one of verl's training steps."""
    if program(given) == FULLY_ASYNC:
        return Fraction(whole(given.get("async_training.require_batches", 1), given))
    return Fraction(whole(given["data.train_batch_size"], given), mini(given))


def version(given: Given) -> int:
    """Groups of one version."""
    trigger = given.get("async_training.trigger_parameter_sync_step", 4) if program(given) == FULLY_ASYNC else 1
    return max(1, int(batches(given))) * mini(given) * whole(trigger, given)


def mode(value: Any, given: Given) -> Translated:
    mode, why = MODES[program(given)]
    return other({"mode": mode}, f"modes are sets of values here: {why}")


def train_batch_size(value: Any, given: Given) -> Translated:
    if program(given) == FULLY_ASYNC:
        return taken(note="always so here: prompts stream one by one")
    several = batches(given)
    if program(given) == SEPARATE_ASYNC:
        steps = max(1, int(several))
        values = {"async_training.require_batches": 1, "async_training.trigger_parameter_sync_step": steps}
        return other(values, f"prompts of a version: {steps} mini-batches of {mini(given)}, fetched one by one")
    note = f"prompts of a step: {max(1, int(several))} mini-batches of {mini(given)}; one step is one version here"
    if several.denominator != 1:
        note += f", of {version(given)} prompts, since {value} is no multiple of {mini(given)}"
    return other({"async_training.require_batches": max(1, int(several))}, note)


def steps(value: Any, given: Given) -> Translated:
    if value is None or whole(value, given) < 0:
        return taken(note="not given, here either")
    if program(given) == FULLY_ASYNC:
        return lost("its fully asynchronous program does not look at it either")
    steps = whole(value, given)
    return groups(steps * version(given), version(given), f"{steps} steps of {version(given)} prompts, in prompts")


def rollout_steps(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    return groups(value, version(given), "prompts that are trained on; verl counts those that are generated")


def epochs(value: Any, given: Given) -> Translated:
    steps = given.get(
        "rollout.total_rollout_steps" if program(given) == FULLY_ASYNC else "trainer.total_training_steps"
    )
    if steps is not None:
        return lost("the number of steps, which is given too, ends the run; Headway takes one of the two")
    return taken({"data.epochs": whole(value, given)})


def held_out(value: Any, given: Given) -> Translated:
    rows = whole(value, given)
    return taken({"data.val_max_samples": rows}, "chosen by the seed") if rows > 0 else taken(note="all, as here")


def devices(role: str, key: str) -> TableRow:
    """Make the row of a count of devices: in `main_ppo` generation has the trainer's."""

    def convert(value: Any, given: Given) -> Translated:
        count = whole(value, given)
        if program(given) in SHARED and role == "trainer":
            return other(
                {f"trainer.{key}": count, f"rollout.{key}": count}, "training and generation take turns on them"
            )
        if program(given) in SHARED:
            return lost("main_ppo generates on the trainer's devices")
        return taken({f"{role}.{key}": count})

    return same(f"{role}.{key}", convert)


def validation(of: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if (program(given) == FULLY_ASYNC) != (of == FULLY_ASYNC):
            return lost(f"only {of} looks at it")
        return taken({"rollout.test_freq": interval(value, given)})

    return same("rollout.test_freq", convert)


def ranks(given: Given) -> int:
    """Devices that train."""
    return whole(given["trainer.nnodes"], given) * whole(given["trainer.n_gpus_per_node"], given)


def micro_batch(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    if given.get("actor.use_dynamic_bsz") is True:
        return lost("nothing to do: with use_dynamic_bsz it has no effect, and tokens are counted here, too")
    rows = whole(value, given)
    longest = whole(given["data.max_prompt_length"], given) + whole(given["data.max_response_length"], given)
    return other(
        {"actor.ppo_max_token_len_per_gpu": rows * longest},
        f"verl counts answers, Headway tokens: {rows} × {longest}, the longest ones; lower it where memory is short",
    )


def micro_batch_of_all(value: Any, given: Given) -> Translated:
    """Return the answer for answers of a micro-batch over all ranks, which verl divides by the ranks of data."""
    if value is None:
        return taken(note="not given, here either")
    lines = ranks(given) // whole(given.get("actor.ulysses_sequence_parallel_size", 1), given)
    return micro_batch(max(1, whole(value, given) // max(1, lines)), given)


def token_budget(value: Any, given: Given) -> Translated:
    if given.get("actor.use_dynamic_bsz") is not True:
        return lost("nothing to do: without use_dynamic_bsz it has no effect")
    return taken({"actor.ppo_max_token_len_per_gpu": whole(value, given)})


def loss(value: Any, given: Given) -> Any:
    if value in CLIPPED:
        bound = number(given["actor.clip_ratio_c"], given)
        values = {"algorithm.policy_loss.loss_mode": "dual_clip", "algorithm.policy_loss.clip_ratio_c": bound}
        return other(values, "verl's PPO loss has a bound for negative advantages, which ppo_clip has not")
    if value in LOSSES:
        return LOSSES[value]
    return lost(f"there is no loss {value}; choose one (docs/algorithms), or write it (docs/your-own.md)")


def only_in(loss: str, here: str) -> TableRow:
    """Make the row of a parameter that belongs to one loss."""

    def convert(value: Any, given: Given) -> Translated:
        chosen = given.get("actor.policy_loss.loss_mode", "vanilla")
        if chosen != loss:
            return taken(note=f"without effect there and here: the loss is {chosen}")
        return taken({f"algorithm.policy_loss.{here}": number(value, given)})

    return same(f"algorithm.policy_loss.{here}", convert)


def clip(value: Any, given: Given) -> Translated:
    return taken(note="not given, here either") if value is None else taken({"actor.clip_ratio": number(value, given)})


def reward_manager(value: Any, given: Given) -> Translated:
    if given.get("custom_reward_function.path"):
        return taken(note="answers are scored by reward.function; an overlong penalty is reward.overlong_buffer")
    return other(
        {"reward.function": "math_verify"},
        "verl picks a scorer by data_source. math_verify takes the last number, \\boxed{…} or what follows ####; for "
        "others give reward.function=file.py:function, which may be verl's own compute_score",
    )


def steps_of_ratio(value: Any, given: Given) -> Translated:
    if not value or float(value) <= 0:
        return taken(note="off, as here")
    steps = given.get("trainer.total_training_steps")
    if steps is None:
        return lost("it needs the length of the run in steps: give actor.optim.lr_warmup_steps in optimizer steps")
    count = int(float(value) * whole(steps, given) * updates("actor", given))
    return other({"actor.optim.lr_warmup_steps": count}, f"{value} of {steps} steps, in optimizer steps")


def updates(role: str, given: Given) -> int:
    """Optimizer steps of one of verl's training steps, after each of which its learning rate moves once."""
    return max(1, int(batches(given))) * whole(given.get(f"{role}.ppo_epochs", 1), given)


def warmup(role: str) -> TableRow:
    """Make the row of a warmup in training steps, where ours counts optimizer steps."""
    here = f"{role}.optim.lr_warmup_steps"

    def convert(value: Any, given: Given) -> Translated:
        if float(value) < 0:
            return taken(note="not given, here either")
        count, several = whole(value, given), updates(role, given)
        if several == 1 or not count:
            return taken({here: count})
        return other({here: count * several}, f"training steps there, each of {several} optimizer steps")

    return same(here, convert)


def optimizer_offload(value: Any, given: Given) -> Translated:
    if not value:
        return taken(note="off, as here")
    if given.get("actor.fsdp_config.param_offload") is True:
        return taken(note="actor.fsdp_config.param_offload moves the optimizer's state, too")
    return other(
        {"actor.fsdp_config.param_offload": True},
        "parameters, gradients and optimizer state go together, or not at all",
    )


def replicas(value: Any, given: Given) -> Translated:
    size = whole(value, given)
    count = ranks(given)
    if size <= 0 or size >= count:
        return taken(note="the model is sharded over all ranks, as here")
    if count % size:
        return lost(f"{size} ranks do not divide the trainer's {count}; choose actor.parallel.replicate")
    lines = count // whole(given.get("actor.ulysses_sequence_parallel_size", 1), given)
    copies = gcd(count // size, lines)
    return other({"actor.parallel.replicate": copies}, f"copies of the sharded model; there ranks of one: {size}")


def correction(value: Any, given: Given) -> Translated:
    if value in (None, "null"):
        return taken(note="off, as here")
    if value not in ("token", "sequence"):
        return lost("choose algorithm.rollout_correction (docs/algorithms/corrections.md)")
    if given.get("algorithm.rollout_correction.bypass_mode"):
        return lost(
            "with bypass_mode π_prox is the engine's own, and the loss has its ratio already; to weight beside it, "
            "recompute π_prox: async_training.use_rollout_log_probs=false (docs/algorithms/corrections.md)"
        )
    bound = number(given.get("algorithm.rollout_correction.rollout_is_threshold") or 2.0, given)
    name = "algorithm.rollout_correction"
    return taken({f"{name}.name": "truncate", f"{name}.level": value, f"{name}.bound": bound})


REJECTED = {
    "token": "reject, level: token",
    "seq_sum": "reject, level: sequence",
    "seq_mean": "reject, level: geometric",
    "seq_max": "veto",
}
"""Beginnings of verl's names for what is rejected → the same here."""


def rejection(value: Any, given: Given) -> Translated:
    if value in (None, "null"):
        return taken(note="off, as here")
    name = next((name for start, name in REJECTED.items() if str(value).startswith(start)), "reject")
    return lost(
        f"give it under algorithm.rollout_correction: {{name: {name}, bound: …, lower: …}}, beside a truncation as a "
        "list of the two; thresholds are on π_prox/π_behav here (docs/algorithms/corrections.md)"
    )


def override(value: Any, given: Given) -> Translated:
    if value in (None, {}, ""):
        return taken(note="empty: the model's config.json says it, as here")
    return lost("not taken over: change config.json in the model's folder")


def penalty(value: Any, given: Given) -> Translated:
    factor = number(value, given)
    name = "reward.overlong_buffer.penalty_factor"
    if given.get("custom_reward_function.path"):
        return taken({name: factor})
    return other(
        {name: factor / 2},
        f"beside scores of 1 and -1, as verl's of DAPO's data are; math_verify's are 1 and 0, where {factor / 2:g} "
        "weighs as much",
    )


def context(value: Any, given: Given) -> Translated:
    return taken(note="the longest context is prompt and response; the model's folder says how many positions it has")


def tools(value: Any, given: Given) -> Translated:
    return taken(note="off, as here") if not value else taken({"agent.tools": [path(value, given)]})


def turns(value: Any, given: Given) -> Translated:
    if value is None or not given.get("rollout.multi_turn.tool_config_path"):
        return taken(note="not given, or of no effect without tools")
    return taken({"agent.max_turns": whole(value, given)})


def partial(value: Any, given: Given) -> Translated:
    how = "interrupt" if value else "drain"
    return taken({"async_training.on_update": how}, "answers in flight at an update")


def of_async(here: str, convert: Convert) -> TableRow:
    def only(value: Any, given: Given) -> Translated:
        if program(given) != FULLY_ASYNC:
            return lost(f"nothing to do: only {FULLY_ASYNC} looks at it")
        result = convert(value, given)
        return result if isinstance(result, Translated) else taken({here: result})

    return same(here, only)


def of_trainer_mode(here: str, note: str, mode: str) -> TableRow:
    """Make the row of a whole number that only one value of `TRAINER_MODE` looks at."""

    def only(value: Any, given: Given) -> Translated:
        if program(given) != mode:
            return lost(f"nothing to do: only {TRAINER_MODE}={mode} looks at it")
        return other({here: whole(value, given)}, note)

    return differs(here, note, only)


def rollout_log_probs(value: Any, given: Given) -> Translated:
    recomputed = bool(given.get("async_training.compute_prox_log_prob"))
    note = "async_training.compute_prox_log_prob has the trainer recompute them" if recomputed else ""
    return taken({"async_training.use_rollout_log_probs": bool(value) and not recomputed}, note)


def defaults(given: Given) -> dict[str, Any]:
    """Return verl's defaults where they are not Headway's, for the program that the settings are for."""
    asynchronous = any(key.startswith("async_training.") for key in given)
    apart = given.get("rollout.nnodes", 0) not in (0, None)  # a whole configuration of main_ppo says 0
    guessed = FULLY_ASYNC if asynchronous else ONE_STEP_OFF if apart else PPO
    chosen = program({PROGRAM: guessed, **given})
    values: dict[str, Any] = {
        PROGRAM: guessed,
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": 0 if chosen == FULLY_ASYNC else 1024,
        "actor.ppo_mini_batch_size": 256,
        "rollout.n": 1,
        "rollout.name": "vllm",
        "actor.policy_loss.loss_mode": "vanilla",
        "actor.clip_ratio_c": 3.0,
        "actor.optim.weight_decay": 0.01,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "model.enable_gradient_checkpointing": True,
        "reward_model.reward_manager": "naive",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.save_freq": -1,
        "trainer.max_actor_ckpt_to_keep": None,
    }
    if chosen == FULLY_ASYNC:
        values |= {
            "async_training.staleness_threshold": 0.1,
            "async_training.trigger_parameter_sync_step": 4,
            "async_training.require_batches": 1,
            "async_training.partial_rollout": True,
            "rollout.test_freq": 1,
            "rollout.total_rollout_steps": 100,
        }
    else:
        values |= {
            "algorithm.rollout_correction.bypass_mode": chosen == ONE_STEP_OFF,
            "trainer.test_freq": -1,
            "trainer.total_epochs": 30,
        }
    if chosen in (COLOCATE_ASYNC, SEPARATE_ASYNC):
        values |= {f"trainer.v1.{chosen}.num_warmup_batches": 1}
    if chosen not in SHARED:
        values |= {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
    return values


def reward_function(value: Any, given: Given) -> Translated:
    return reward_file(value, given.get("custom_reward_function.name", "compute_score"))


def trainer_mode(value: Any, given: Given) -> Translated:
    return taken(note=f"the mode is {MODES[program(given)][0]}")


def validation_answers(value: Any, given: Given) -> Translated:
    count = whole(value, given)
    if count > 1 and not float(given.get("rollout.val_kwargs.temperature") or 0.0):
        return other({"rollout.val_n": 1}, "greedy answers are all equal; several need rollout.val_temperature above 0")
    return taken({"rollout.val_n": count})


def recomputed(value: Any, given: Given) -> Any:
    return False if value else taken(note="off, as here")
