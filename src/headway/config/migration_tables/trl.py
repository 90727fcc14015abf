"""Values of TRL's settings: conversions for its table."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    Translated,
    groups,
    listed,
    lost,
    other,
    path,
    taken,
    warmup_share,
    whole,
)

CONFIG = "the configuration's class"
"""Name of the setting for the configuration's class."""
PROCESSES = "num_processes"
"""Name of the setting for the number of processes of ``accelerate launch``."""
REWARDS = {
    "accuracy_reward": "math_verify",
    "accuracy": "math_verify",
    "think_format_reward": "format",
    "reasoning_accuracy_reward": "math_verify",
}
PARAMS = {"think_format_reward": {"params": {"pattern": "<think>(?!.*<think>).*?</think>.*"}}}
"""TRL's reward → parameters with which Headway's reward gives the same values."""
OVERLONG = "get_soft_overlong_punishment"


def completions(given: Given) -> int:
    """Number of completions of one optimizer step."""
    sizes = (given["per_device_train_batch_size"], given["gradient_accumulation_steps"], given.get(PROCESSES, 1))
    return whole(sizes[0]) * whole(sizes[1]) * whole(sizes[2])


def mini(given: Given) -> int:
    """Number of prompts of one optimizer step, at least one."""
    # With fewer completions than a group, one group takes several steps.
    return max(1, completions(given) // whole(given["num_generations"]))


def batches(given: Given) -> int:
    """Number of optimizer steps for each generated batch."""
    steps = given.get("steps_per_generation")
    if steps is None and given.get("generation_batch_size") is not None:
        return max(1, whole(given["generation_batch_size"]) // completions(given))
    return max(1, whole(steps) // whole(given["gradient_accumulation_steps"])) if steps else 1


def uses(given: Given) -> int:
    """Number of optimizer steps that train on each prompt of a batch."""
    return max(1, whole(given.get("num_iterations", 1)))


def version(given: Given) -> int:
    return mini(given) * batches(given) * whole(given.get("weight_sync_steps", 1))


def batch(value: Any, given: Given) -> Translated:
    n, several = whole(given["num_generations"]), completions(given)
    factors = f"{given['per_device_train_batch_size']} × {given['gradient_accumulation_steps']}"
    note = f"{factors} × {given.get(PROCESSES, 1)} processes = {several} completions, / {n} of a prompt"
    if several % n:
        note += f"; no multiple of {n}, which is {lcm(several, n) // several} steps"
    if PROCESSES not in given:
        note += "; multiply by your processes"
    return other({"actor.ppo_mini_batch_size": mini(given)}, note)


def generation(value: Any, given: Given) -> int:
    return batches(given)


def steps(value: Any, given: Given) -> Translated:
    size, steps, each = mini(given), whole(value), uses(given)
    note = f"{steps} optimizer steps of {size} prompts{f', each seen {each} times' if each > 1 else ''}, in prompts"
    return groups(steps * size / each, version(given), note)


def epochs(value: Any, given: Given) -> int:
    return max(1, round(float(value)))


def every(value: Any, given: Given, here: str) -> Translated:
    """Convert an interval in optimizer steps to versions."""
    if float(value) < 1:
        return lost(f"a share of the run; give {here} in versions")
    versions = max(1, round(whole(value) * mini(given) / (version(given) * uses(given))))
    return other({here: versions}, f"optimizer steps there, versions of {version(given)} prompts here")


def data(value: Any, given: Given, side: str) -> Translated:
    """Return the settings for a data set: a name on the Hub with subset and split, or the files that a script loads."""
    source = dict(value) if isinstance(value, Mapping) else {"dataset": str(value)}
    subset, split = given.get("dataset_config"), given.get(f"dataset_{side}_split")
    source |= ({"subset": subset} if subset else {}) | ({"split": split} if split else {})
    key = f"data.{'train' if side == 'train' else 'val'}"
    if source["dataset"] in ("json", "parquet", "csv") and "files" in source:
        return other({key: path(source["files"])}, "files are given by their paths")
    source.pop("files", None)
    return other(
        {key: source},
        "the rows as they are: what the script does to them (map, filter) is not done; data.prompt_key and "
        "data.answer_key name columns (docs/data.md)",
    )


def importable(name: str) -> str:
    """Convert ``package.module.function`` to a function of a file. Other names stay as they are."""
    module, dot, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if dot and ":" not in name else name


def rewards(value: Any, given: Given) -> Translated:
    names = [importable(str(one)) for one in listed(value)]
    if OVERLONG in names:
        penalty = {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 256}
        rest = rewards([name for name in names if name != OVERLONG], given)
        return other({**rest.values, **penalty}, "; ".join(filter(None, (rest.note, "the penalty is a setting here"))))
    if not names:
        return taken(note="none: the environment gives the reward")
    if unknown := [name for name in names if name not in REWARDS and ":" not in name]:
        return lost(
            f"{', '.join(unknown)}: give reward.function=file.py:function; TRL's form is called as it is "
            "(docs/rewards.md)"
        )
    note = "Headway's own, which compare with data.answer_key"
    if any(":" in name for name in names):
        note = (
            "functions of TRL's form are called as they are; a script that trains when it is imported must not be the "
            "file: move them to one of their own"
        )
    found = [{"function": REWARDS.get(name, name)} | PARAMS.get(name, {}) for name in names]
    if len(found) == 1:
        return other({f"reward.{key}": value for key, value in found[0].items()}, note)
    weights = map(float, given.get("reward_weights") or [1.0] * len(names))
    parts = [one | {"weight": weight} for one, weight in zip(found, weights, strict=False) if weight]
    return other({"reward.functions": parts}, note)


def of_files(value: Any, given: Given, here: str, example: str) -> Translated:
    """Return names in files, for the setting ``here``, of functions or classes that a script defines."""
    names = [str(one) for one in listed(value)]
    if not names or not all(":" in name for name in names):
        return lost(f"give {here}={example} (docs/agents.md)")
    return other({here: names if example.startswith("[") else names[0]}, "move it out of a script that trains")


def warmup_ratio(value: Any, given: Given) -> Translated:
    steps = whole(given.get("max_steps", -1))
    return warmup_share(value, steps if steps > 0 else None)


def warmup(value: Any, given: Given) -> Any:
    return warmup_ratio(value, given) if 0 < float(value) < 1 else whole(value)
