"""Values of prime-rl's settings: conversions for its table."""

from __future__ import annotations

from typing import Any

from headway.config.migration_tables import table_rows
from headway.config.migration_tables.table_rows import Given, Translated, first_given, other, taken, whole

SECTIONS = ("", "trainer.", "orchestrator.", "inference.")
"""Prefixes that a file's keys may lack: none for a whole run, else those of one process."""
GROUP_SIZES = (
    *("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    *("orchestrator.train.source.group_size", "orchestrator.train.env.group_size"),
)
"""Settings for the number of answers to a problem; the first given one counts."""
LENGTHS = ("orchestrator.seq_len", "seq_len", "trainer.model.seq_len", "model.seq_len")
"""Settings for the tokens of prompt and answer together, the orchestrator's first."""
TRAINED_LENGTHS = ("trainer.model.seq_len", "model.seq_len", "seq_len")
"""Settings for the tokens of a micro-batch."""
ANSWERS = (
    *("orchestrator.train.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens"),
    "orchestrator.sampling.max_completion_tokens",
)
"""Settings for the tokens of an answer."""
ENGINE_SIZES = ("inference.parallel.tp", "inference.vllm.tensor_parallel_size")


def n(given: Given) -> int:
    return whole(first_given(given, GROUP_SIZES, 1))


def mini(given: Given) -> int:
    return max(1, whole(given["orchestrator.batch_size"]) // n(given))


def batch(value: Any, given: Given) -> Translated:
    size = mini(given)
    note = f"{value} rollouts / {n(given)} of a problem = {size} prompts a step"
    return other({"actor.ppo_mini_batch_size": size}, note)


def steps(value: Any, given: Given) -> Translated:
    return table_rows.groups_of_steps(value, mini(given))


def total_length(given: Given) -> int:
    """Return the maximum tokens of prompt and answer together: the orchestrator's, limited by the engine's context."""
    contexts = [whole(given[key]) for key in given if key.endswith("max_model_len") and given[key]]
    return min([whole(first_given(given, LENGTHS, min(contexts, default=2048))), *contexts])


def micro_batch(given: Given) -> int:
    """Return the tokens of a micro-batch: the trainer's length, and at least an episode's."""
    return max(whole(first_given(given, TRAINED_LENGTHS, 2048)), total_length(given))


def trained_length(value: Any, given: Given) -> Translated:
    if first_given(given, LENGTHS[:2]):
        return other({"actor.ppo_max_token_len_per_gpu": micro_batch(given)}, "tokens of a micro-batch there, too")
    return length(value, given)


def context(value: Any, given: Given) -> Translated:
    if first_given(given, LENGTHS):
        return other({}, f"in the lengths of prompt and answer, together {total_length(given)}")
    return length(value, given)


def length(value: Any, given: Given) -> Translated:
    """Divide the length of a sequence between prompt and answer."""
    total, said = total_length(given), first_given(given, ANSWERS)
    values = {"actor.ppo_max_token_len_per_gpu": micro_batch(given)}
    if said is not None and whole(said) < total:
        values["data.max_prompt_length"] = total - whole(said)
        return other(values, "the tokens of a micro-batch, and of prompt and answer")
    response = total - min(512, total // 2)
    values |= {"data.max_prompt_length": total - response, "data.max_response_length": response}
    return other(values, "the tokens of a micro-batch, and of prompt and answer, divided by guess")


def answer(value: Any, given: Given) -> Translated:
    if whole(value) >= (total := total_length(given)):
        return other({}, f"no shorter than seq_len={total}, which bounds prompt and answer together: that holds")
    return taken({"data.max_response_length": whole(value)}, "tokens of a turn; of several turns together here")


def off_policy(value: Any, given: Given) -> Translated:
    lag = whole(value)
    ahead = next((whole(given[key]) for key in given if key.endswith("async_level")), min(lag, 1))
    if lag == 0 or ahead == 0:
        return other({"mode": "on_policy"}, "modes are sets of values here; nothing runs ahead")
    return other(
        {
            "mode": "async_partial",
            "async_training.trigger_parameter_sync_step": 1,
            "async_training.staleness_threshold": ahead,
            "async_training.order": "ready",
            "async_training.max_lag": lag,
            "async_training.on_overdue": "drop",
        },
        "older groups are dropped; how far generation runs ahead is η: max_async_level, or one version without it",
    )


def min_lr(value: Any, given: Given) -> Translated:
    rate = float(given.get("trainer.optim.lr", 1e-6))
    return other({"actor.optim.min_lr_ratio": min(1.0, float(value) / rate)}, "as a share of the learning rate")


def gpus(value: Any, given: Given) -> int:
    return len(value) if isinstance(value, list) else whole(value)


def engines(value: Any, given: Given) -> Translated:
    return table_rows.engines(value, first_given(given, ENGINE_SIZES, 1))


def nodes(value: Any, given: Given, role: str) -> Translated:
    count = whole(value) * (whole(given.get("deployment.num_infer_replicas", 1)) if role == "rollout" else 1)
    per_node = whole(given.get("deployment.gpus_per_node", 8))
    return taken({f"{role}.nnodes": count, f"{role}.n_gpus_per_node": per_node})


def guessed(given: Given) -> dict[str, Any]:
    """Return the defaults of settings with several names, and those of validation if there is one."""
    ends = {"async_level": ("orchestrator.max_off_policy_steps", 8), "ckpt.interval": ("ckpt.interval", -1)}
    values = {key: value for end, (key, value) in ends.items() if not any(one.endswith(end) for one in given)}
    if any(key.startswith("orchestrator.eval.") for key in given):
        values["orchestrator.eval.sampling.temperature"] = 1
    return values if any(key in given for key in GROUP_SIZES) else values | {"orchestrator.group_size": 1}
