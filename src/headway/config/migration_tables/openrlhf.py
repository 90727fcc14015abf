"""Values of OpenRLHF's settings: conversions for its table, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    TableRow,
    Translated,
    differs,
    no,
    number,
    other,
    path,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

DEFAULTS: Mapping[str, Any] = {
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": False,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "rollout.name": "vllm",
    "rollout.n_samples_per_prompt": 1,
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "train.seed": 42,
    "train.async_enable": False,
    "data.input_key": "input",
    "eval.steps": -1,
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
}
"""OpenRLHF's defaults where they are not Headway's, or where other values are made of them."""


def prompts(given: Given) -> int:
    return whole(given["rollout.batch_size"], given)


def mini(given: Given) -> int:
    return max(1, whole(given["train.batch_size"], given) // whole(given["rollout.n_samples_per_prompt"], given))


def train_batch(value: Any, given: Given) -> Translated:
    return other({"actor.ppo_mini_batch_size": mini(given)}, "it counts samples, Headway prompts")


def rollout_batch(value: Any, given: Given) -> Translated:
    batches = max(1, prompts(given) // mini(given))
    note = f"prompts of a step: {batches} mini-batches of {mini(given)}"
    return other({"async_training.require_batches": batches}, note)


def engines(value: Any, given: Given) -> Translated:
    size = whole(given.get("vllm.tensor_parallel_size", 1), given)
    values = {"rollout.n_gpus_per_node": whole(value, given) * size}
    return taken(values, "replicas") if size == 1 else other(values, f"devices of {value} engines of {size} each")


def asynchronous(value: Any, given: Given) -> Translated:
    return other({"mode": "async_stale" if value else "colocate_sync"}, "modes are sets of values here")


def clip_range(value: Any, given: Given) -> Translated:
    low, high = value if isinstance(value, list) else str(value).split()
    return taken({"actor.clip_ratio_low": float(low), "actor.clip_ratio_high": float(high)})


def remote(value: Any, given: Given) -> Translated:
    if str(value).endswith(".py"):
        return other({}, "a file with reward_func: reward.function=file.py:function, of another form (docs/rewards.md)")
    return lost("call the server in a reward function (docs/rewards.md)")


def length(value: Any, given: Given) -> Translated:
    total, answer = whole(value, given), given.get("rollout.max_new_tokens")
    if answer is None:
        halves = {"data.max_prompt_length": total - total // 2, "data.max_response_length": total // 2}
        return other(halves, "prompt and answer together, here in halves: an answer takes what a prompt leaves there")
    length = max(1, total - whole(answer, given))
    return other({"data.max_prompt_length": length}, "prompt and answer together, less the answer")


def dataset(value: Any, given: Given) -> Translated:
    name = str(value)
    source = path(name, given) if name.endswith((".jsonl", ".parquet")) else {"dataset": path(name, given)}
    return other({"data.train": source}, "rows as they are (docs/data.md)")


def held_out(value: Any, given: Given) -> Translated:
    return other({"data.val": dataset(value, given).values["data.train"]}, "rows as they are (docs/data.md)")


def kl(value: Any, given: Given) -> Translated:
    coefficient = number(value, given)
    if coefficient == 0:
        return taken(note="off, as here")
    if given.get("algo.kl.use_loss"):
        return taken({"actor.use_kl_loss": True, "actor.kl_loss_coef": coefficient})
    return taken({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coefficient})


def kl_estimator(value: Any, given: Given) -> Translated:
    return taken({"actor.kl_loss_type" if given.get("algo.kl.use_loss") else "algorithm.kl_penalty": value})


def two(value: Any, given: Given) -> list[float]:
    first, second = value if isinstance(value, list | tuple) else str(value).split()
    return [float(first), float(second)]


def scheduler(role: str) -> TableRow:
    here = f"{role}.optim"

    def convert(value: Any, given: Given) -> Translated:
        name = str(value).removesuffix("_with_warmup").removesuffix("_with_min_lr")
        if name not in ("constant", "linear", "cosine"):
            return lost(f"choose {here}.lr_scheduler_type: constant, linear or cosine")
        lowest = {f"{here}.min_lr_ratio": number(given.get(f"{role}.min_lr_ratio", 0.1), given)}
        return other(
            {f"{here}.lr_scheduler_type": name} | (lowest if str(value).endswith("min_lr") else {}),
            f"there its warmup is {given.get(f'{role}.lr_warmup_ratio', 0.03)} of the run's optimizer steps, and none "
            f"here: give {here}.lr_warmup_steps",
        )

    return differs(f"{here}.lr_scheduler_type", "with a warmup", convert)


def warmup(role: str) -> TableRow:
    return no(f"it needs the run's length in steps: give {role}.optim.lr_warmup_steps in optimizer steps")


def defaults(given: Given) -> dict[str, Any]:
    """Return the defaults, of the critic where there is one, and of the lengths by the names that the file has."""
    values = dict(DEFAULTS)
    if given.get("algo.advantage.estimator", "gae") == "gae":
        values |= {
            "critic.adam.lr": 9e-6,
            "critic.adam.betas": [0.9, 0.95],
            "critic.lr_scheduler": "cosine_with_min_lr",
        }
    if "eval.dataset" in given:
        values |= {"eval.temperature": 0.6, "eval.n_samples_per_prompt": 4}
    if "data.max_len" in given:
        return values
    if any("." not in key for key in given):  # names without a section, as they were before
        return values | {"prompt_max_len": 1024, "rollout.max_new_tokens": 1024}
    return values | {"data.max_len": 2048}


def on_update(value: Any, given: Given) -> Any:
    return "interrupt" if value else taken(note="off, as here")
