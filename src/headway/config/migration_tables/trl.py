"""Values of TRL's settings: conversions for its table, and the defaults of its classes."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    TableRow,
    Translated,
    differs,
    groups,
    number,
    other,
    path,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

CONFIG = "the configuration's class"
"""Name of the setting that says which class the settings are for."""
PROCESSES = "num_processes"
"""Training processes of ``accelerate launch``."""
REWARDS = {
    "accuracy_reward": "math_verify",
    "accuracy": "math_verify",
    "think_format_reward": "format",
    "reasoning_accuracy_reward": "math_verify",
}
PARAMS = {"think_format_reward": {"pattern": "<think>(?!.*<think>).*?</think>.*"}}
"""TRL's rewards → parameters with which Headway's give the same."""
AGGREGATION = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
"""TRL's losses → modes of aggregation; all others are means over tokens."""
LOSSES = {"cispo": "cispo", "sapo": "sapo"}
"""TRL's losses that are losses here, too, and not ways of aggregation alone."""
OVERLONG = "get_soft_overlong_punishment"
OF_TOKENS = ("dapo", "bnpo", *LOSSES)


def completions(given: Given) -> int:
    """Completions of one optimizer step."""
    sizes = (given["per_device_train_batch_size"], given["gradient_accumulation_steps"], given.get(PROCESSES, 1))
    return whole(sizes[0], given) * whole(sizes[1], given) * whole(sizes[2], given)


def mini(given: Given) -> int:
    """Prompts of one optimizer step, at least one."""
    return max(1, completions(given) // whole(given["num_generations"], given))


def batches(given: Given) -> int:
    """Optimizer steps for each batch of generation."""
    steps = given.get("steps_per_generation")
    if steps is None and given.get("generation_batch_size") is not None:
        return max(1, whole(given["generation_batch_size"], given) // completions(given))
    return max(1, whole(steps, given) // whole(given["gradient_accumulation_steps"], given)) if steps else 1


def uses(given: Given) -> int:
    """Optimizer steps that see each prompt of a batch."""
    return max(1, whole(given.get("num_iterations", 1), given))


def version(given: Given) -> int:
    return mini(given) * batches(given) * whole(given.get("weight_sync_steps", 1), given)


def batch(value: Any, given: Given) -> Translated:
    n, several = whole(given["num_generations"], given), completions(given)
    factors = f"{given['per_device_train_batch_size']} × {given['gradient_accumulation_steps']}"
    note = f"{factors} × {given.get(PROCESSES, 1)} processes = {several} completions, / {n} of a prompt"
    if several % n:
        note += f"; no multiple of {n}, which is {lcm(several, n) // several} steps"
    if PROCESSES not in given:
        note += "; multiply by your processes"
    return other({"actor.ppo_mini_batch_size": mini(given)}, note)


def with_batch(value: Any, given: Given) -> Translated:
    return other({}, "is in actor.ppo_mini_batch_size, which counts the prompts of an optimizer step")


def generation(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    return other(
        {"async_training.require_batches": batches(given)}, "optimizer steps for each batch of generation, in prompts"
    )


def steps(value: Any, given: Given) -> Translated:
    if whole(value, given) <= 0:
        return taken(note="off, as here: epochs end the run")
    size, steps, each = mini(given), whole(value, given), uses(given)
    note = f"{steps} optimizer steps of {size} prompts{f', each seen {each} times' if each > 1 else ''}, in prompts"
    return groups(steps * size / each, version(given), note)


def epochs(value: Any, given: Given) -> Translated:
    if whole(given.get("max_steps", -1), given) > 0:
        return lost("max_steps, which is given too, ends the run; Headway takes one of the two")
    return taken({"data.epochs": max(1, round(float(value)))})


def every(here: str) -> TableRow:
    """Make the row of an interval in optimizer steps, where ours counts versions."""

    def convert(value: Any, given: Given) -> Translated:
        if float(value) < 1:
            return lost(f"a share of the run; give {here} in versions")
        versions = max(1, round(whole(value, given) * mini(given) / (version(given) * uses(given))))
        return other({here: versions}, f"optimizer steps there, versions of {version(given)} prompts here")

    return differs(here, "versions, not steps", convert)


def beta(value: Any, given: Given) -> Translated:
    coefficient = number(value, given)
    if given.get(CONFIG) == "RLOOConfig":
        on = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coefficient}
        return taken(on if coefficient else {})
    return taken(
        {"actor.use_kl_loss": True, "actor.kl_loss_coef": coefficient} if coefficient else {}, "KL in the loss"
    )


def loss(value: Any, given: Given) -> Translated:
    if value not in (*AGGREGATION, *OF_TOKENS):
        return lost(f"there is no loss {value}; choose one (docs/algorithms), or write it (docs/your-own.md)")
    mode = AGGREGATION.get(value, "token-mean")
    values: dict[str, Any] = {"actor.loss_agg_mode": mode}
    if mode.endswith("norm"):
        values["actor.loss_scale_factor"] = whole(given["max_completion_length"], given)
    values["algorithm.policy_loss.loss_mode"] = policy_loss(value, given)
    return other(values, "TRL's name says how the loss is summed; here that is actor.loss_agg_mode")


def policy_loss(loss_type: Any, given: Given) -> str:
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    if given.get("importance_sampling_level") in ("sequence", "sequence_token"):
        return "gspo"
    return "dual_clip" if given.get("delta") is not None else "ppo_clip"


def delta(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="off, as here")
    return other({"algorithm.policy_loss.clip_ratio_c": number(value, given)}, "the bound of loss_mode=dual_clip")


def level(value: Any, given: Given) -> Translated:
    if value == "token":
        return taken(note="the ratio of each token, as ppo_clip has it")
    return other({"algorithm.policy_loss.loss_mode": "gspo"}, "ratios of answers are a loss of their own here")


def scale(value: Any, given: Given) -> Translated:
    if value in (True, "group"):
        return taken({"algorithm.norm_adv_by_std_in_grpo": True})
    if value in (False, "none"):
        return taken({"algorithm.norm_adv_by_std_in_grpo": False})
    return lost("advantages are divided by the group's deviation, or not (algorithm.norm_adv_by_std_in_grpo)")


def mode(value: Any, given: Given) -> Translated:
    if value == "RLOOConfig":
        return other({"mode": "colocate_sync", "algorithm.adv_estimator": "rloo"}, "RLOO is an estimator here")
    if value == "AsyncGRPOConfig":
        return other({"mode": "async_stale"}, "modes are sets of values here: generation runs ahead of training")
    if given.get("use_vllm") is True and given.get("vllm_mode", "colocate") == "server":
        return other({"mode": "on_policy"}, "modes are sets of values here: generation has devices of its own")
    return other({"mode": "colocate_sync"}, "modes are sets of values here: devices generate and train by turns")


def vllm(value: Any, given: Given) -> Translated:
    return taken({"rollout.name": "vllm"}) if value else taken({"rollout.name": "native"}, "Headway's own engine")


def processes(value: Any, given: Given) -> Translated:
    count = whole(value, given)
    shared = mode(given[CONFIG], given).values["mode"] == "colocate_sync"
    values = {"trainer.n_gpus_per_node": count} | ({"rollout.n_gpus_per_node": count} if shared else {})
    return other(values, "training processes; replicas are rollout.n_gpus_per_node")


def data(side: str) -> TableRow:
    """Make the row of a data set: a name of the Hub with what goes with it, or what the script loads."""

    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        source = dict(value) if isinstance(value, Mapping) else {"dataset": str(value)}
        subset, split = (
            given.get("dataset_config"),
            given.get(f"dataset_{'train' if side == 'train' else 'test'}_split"),
        )
        source |= ({"subset": subset} if subset else {}) | ({"split": split} if split else {})
        if source["dataset"] in ("json", "parquet", "csv") and "files" in source:
            return other({f"data.{side}": path(source["files"], given)}, "files are given by their paths")
        source.pop("files", None)
        return other(
            {f"data.{side}": source},
            "the rows as they are: what the script does to them (map, filter) is not done; data.prompt_key and "
            "data.answer_key name columns (docs/data.md)",
        )

    return differs(f"data.{side}", "a source", convert)


def importable(name: str) -> str:
    """Return ``package.module.function`` as a function of a file, and any other name as it is."""
    module, dot, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if dot and ":" not in name else name


def rewards(value: Any, given: Given) -> Translated:
    names = [importable(str(one)) for one in (value if isinstance(value, list | tuple) else [value])]
    if OVERLONG in names:
        penalty = {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 256}
        rest = rewards([name for name in names if name != OVERLONG], given)
        return other({**rest.values, **penalty}, "; ".join(filter(None, (rest.note, "the penalty is a setting here"))))
    if not names:
        return taken(note="none: the environment gives the reward")
    weights = given.get("reward_weights") or [1.0] * len(names)
    if any(":" not in REWARDS.get(name, name) and name not in REWARDS for name in names):
        unknown = ", ".join(name for name in names if name not in REWARDS and ":" not in name)
        return lost(
            f"{unknown}: give reward.function=file.py:function; TRL's form is called as it is (docs/rewards.md)"
        )
    found = [REWARDS.get(name, name) for name in names]
    params = [{"params": PARAMS[name]} if name in PARAMS else {} for name in names]
    note = "functions of TRL's form are called as they are; a script that trains when it is imported must not be the "
    note = f"{note}file: move them to one of their own" if any(":" in one for one in found) else ""
    if len(found) == 1:
        values = {"reward.function": found[0]} | {f"reward.{key}": value for key, value in params[0].items()}
        return other(values, note or "Headway's own, which compares with data.answer_key")
    parts = [
        {"function": one, "weight": float(weight)} | further
        for one, weight, further in zip(found, weights, params, strict=False)
        if weight
    ]
    return other({"reward.functions": parts}, note or "Headway's own, which compare with data.answer_key")


def tools(value: Any, given: Given) -> Translated:
    names = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    if not all(":" in name for name in names):
        return lost("give agent.tools=[file.py:function, …] (docs/agents.md)")
    return other({"agent.tools": names}, "functions of files; move them out of a script that trains when imported")


def environment(value: Any, given: Given) -> Translated:
    if ":" not in str(value):
        return lost("give agent.environment=file.py:Class; TRL's form is taken as it is (docs/agents.md)")
    return other({"agent.environment": str(value)}, "a class of a file; move it out of a script that trains")


def schedule(value: Any, given: Given) -> Translated:
    name = str(value).rpartition(".")[2].lower().removesuffix("_with_warmup")
    if name in ("linear", "cosine", "constant"):
        return taken({"actor.optim.lr_scheduler_type": name})
    return lost("choose actor.optim.lr_scheduler_type: constant, linear or cosine")


def warmup_ratio(value: Any, given: Given) -> Translated:
    if not value:
        return taken(note="off, as here")
    steps = whole(given.get("max_steps", -1), given)
    if steps <= 0:
        return lost("it needs the run's length in steps: give actor.optim.lr_warmup_steps in optimizer steps")
    return other({"actor.optim.lr_warmup_steps": int(float(value) * steps)}, f"{value} of {steps} optimizer steps")


def warmup(value: Any, given: Given) -> Translated:
    return (
        warmup_ratio(value, given)
        if 0 < float(value) < 1
        else taken({"actor.optim.lr_warmup_steps": whole(value, given)})
    )


def betas(value: Any, given: Given) -> Translated:
    return taken({"actor.optim.betas": [float(given["adam_beta1"]), float(given["adam_beta2"])]})


def correction(value: Any, given: Given) -> Translated:
    if not value or not given.get("use_vllm"):
        return taken(note="off, as here" if not value else "it is for vLLM, which is not used")
    mode = str(given.get("vllm_importance_sampling_mode", "sequence_mask"))
    level, how = mode.partition("_")[::2]
    bound = given.get("vllm_importance_sampling_clip_max", given.get("vllm_importance_sampling_cap", 3.0))
    name = "algorithm.rollout_correction"
    return other(
        {
            "async_training.use_rollout_log_probs": False,
            f"{name}.name": "mask" if how == "mask" else "truncate",
            f"{name}.level": "sequence" if level == "sequence" else "token",
            f"{name}.bound": number(bound, given),
        },
        "the trainer's log-probs over the engine's: docs/algorithms/corrections.md",
    )


def staleness(value: Any, given: Given) -> Translated:
    return other(
        {"async_training.staleness_threshold": whole(value, given)},
        "versions that generation may run ahead; TRL drops what is older, Headway does not start it",
    )


def prompt_length(value: Any, given: Given) -> Translated:
    if value is None:
        return other({}, "no limit there; here prompts of more than data.max_prompt_length (512) tokens are left out")
    return taken({"data.max_prompt_length": whole(value, given)})


def answers_of_validation(value: Any, given: Given) -> Translated:
    if value is None:
        value = given["num_generations"]
    sampled = {"rollout.val_n": whole(value, given), "rollout.val_temperature": given.get("temperature", 1.0)}
    return taken(sampled, "validation samples as training does; one greedy answer is usual here")


def defaults(given: Given) -> dict[str, Any]:
    """Return the defaults of the class that the settings are for, where they are not Headway's."""
    of_class = given.get(CONFIG) or "GRPOConfig"
    asynchronous = of_class == "AsyncGRPOConfig"
    values: dict[str, Any] = {
        CONFIG: of_class,
        "num_generations": 2 if of_class == "RLOOConfig" else 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_prompt_length": None,
        "max_completion_length": 2048 if asynchronous else 512,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "constant" if asynchronous else "linear",
        "gradient_checkpointing": True,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "seed": 42,
        "save_steps": 500,
        "save_total_limit": None,
    }
    if given.get("eval_strategy", "no") not in ("no", False):
        values["num_generations_eval"] = None
    if of_class == "RLOOConfig":
        return values | {"beta": 0.05}
    if asynchronous:
        return values | {"max_staleness": 4, "use_vllm": True}
    return values | {"loss_type": "dapo", "use_vllm": False, "vllm_importance_sampling_correction": True}


def vllm_memory(value: Any, given: Given) -> Any:
    return number(value, given) if given.get("use_vllm") else taken(note="vLLM is not used")


def in_flight(value: Any, given: Given) -> Any:
    return taken(note="not bound") if whole(value, given) < 1 else whole(value, given)
