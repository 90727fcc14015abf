"""Values of OpenRLHF's settings: conversions for its table."""

from __future__ import annotations

from typing import Any

from headway.config.migration_tables import table_rows
from headway.config.migration_tables.table_rows import Given, Translated, numbers, other, taken, whole


def mini(given: Given) -> int:
    return max(1, whole(given["train.batch_size"]) // whole(given["rollout.n_samples_per_prompt"]))


def train_batch(value: Any, given: Given) -> Translated:
    return other({"actor.ppo_mini_batch_size": mini(given)}, "it counts samples, Headway prompts")


def rollout_batch(value: Any, given: Given) -> Translated:
    size = mini(given)
    batches = max(1, whole(value) // size)
    note = f"prompts of a step: {batches} mini-batches of {size}"
    return other({"async_training.require_batches": batches}, note)


def engines(value: Any, given: Given) -> Translated:
    return table_rows.engines(value, given.get("vllm.tensor_parallel_size", 1))


def clip_range(value: Any, given: Given) -> Translated:
    low, high = numbers(value)
    return taken({"actor.clip_ratio_low": low, "actor.clip_ratio_high": high})


def length(value: Any, given: Given) -> Translated:
    total, answer = whole(value), given.get("rollout.max_new_tokens")
    if answer is None:
        halves = {"data.max_prompt_length": total - total // 2, "data.max_response_length": total // 2}
        return other(halves, "prompt and answer together, here in halves: an answer takes what a prompt leaves there")
    prompt = max(1, total - whole(answer))
    return other({"data.max_prompt_length": prompt}, "prompt and answer together, less the answer")


def guessed(given: Given) -> dict[str, Any]:
    """Return the lengths under the file's names: with sections or, as in earlier releases, without."""
    if "data.max_len" in given:
        return {}
    if any("." not in key for key in given):
        return {"prompt_max_len": 1024, "rollout.max_new_tokens": 1024}
    return {"data.max_len": 2048}
