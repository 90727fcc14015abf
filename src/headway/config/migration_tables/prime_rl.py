"""Values of prime-rl's settings: conversions for its table, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    TableRow,
    Translated,
    differs,
    file_name,
    groups,
    number,
    other,
    same,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

GROUP_SIZES = (
    *("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    *("orchestrator.train.source.group_size", "orchestrator.train.env.group_size"),
)
"""Settings that say how many answers a problem gets; the first one that is given counts."""
LOSSES: Mapping[Any, str] = {"default": "dppo_tv", "dppo": "dppo_tv", "gspo": "gspo", "cispo": "cispo"}
ENGINE = "the inference server"
"""Name of the setting that says which engine answers: prime-rl has vLLM alone."""


def n(given: Given) -> int:
    for key in GROUP_SIZES:
        if key in given:
            return whole(given[key], given)
    return 1


def mini(given: Given) -> int:
    return max(1, whole(given["orchestrator.batch_size"], given) // n(given))


def batch(value: Any, given: Given) -> Translated:
    size = mini(given)
    return other(
        {"actor.ppo_mini_batch_size": size}, f"{value} rollouts / {n(given)} of a problem = {size} prompts a step"
    )


def steps(value: Any, given: Given) -> Translated:
    size = mini(given)
    return groups(whole(value, given) * size, size, f"{value} steps of {size} prompts, in prompts")


def total_length(given: Given) -> int:
    """Return the tokens of prompt and answer together: the orchestrator's bound, within the engine's context."""
    own = given.get("orchestrator.seq_len") or given.get("seq_len") or given.get("trainer.model.seq_len")
    contexts = [whole(given[key], given) for key in given if key.endswith("max_model_len") and given[key]]
    return min([whole(own or given.get("model.seq_len") or min(contexts, default=2048), given), *contexts])


def micro_batch(given: Given) -> int:
    """Return the tokens of a micro-batch: the trainer's length, no shorter than an episode."""
    own = given.get("trainer.model.seq_len") or given.get("model.seq_len") or given.get("seq_len")
    return max(whole(own or 2048, given), total_length(given))


def trained_length(value: Any, given: Given) -> Translated:
    if any(given.get(key) for key in ("orchestrator.seq_len", "seq_len")):
        return other({"actor.ppo_max_token_len_per_gpu": micro_batch(given)}, "tokens of a micro-batch there, too")
    return length(value, given)


def context(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    if any(given.get(key) for key in ("orchestrator.seq_len", "seq_len", "trainer.model.seq_len", "model.seq_len")):
        return other({}, f"in the lengths of prompt and answer, together {total_length(given)}")
    return length(value, given)


def length(value: Any, given: Given) -> Translated:
    """Divide the length of a sequence between prompt and answer."""
    total, answer = total_length(given), given.get("orchestrator.train.sampling.max_completion_tokens")
    answer = (
        answer
        or given.get("orchestrator.sampling.max_tokens")
        or given.get("orchestrator.sampling.max_completion_tokens")
    )
    values = {"actor.ppo_max_token_len_per_gpu": micro_batch(given)}
    if answer is not None and whole(answer, given) < total:
        prompt = total - whole(answer, given)
        return other(
            values | {"data.max_prompt_length": prompt}, "the tokens of a micro-batch, and of prompt and answer"
        )
    response = total - min(512, total // 2)
    values |= {"data.max_prompt_length": total - response, "data.max_response_length": response}
    return other(values, "the tokens of a micro-batch, and of prompt and answer, divided by guess")


def answer(value: Any, given: Given) -> Translated:
    total, length = total_length(given), whole(value, given)
    if length >= total:
        return other({}, f"no shorter than seq_len={total}, which bounds prompt and answer together: that holds")
    return taken({"data.max_response_length": length}, "tokens of a turn; of several turns together here")


def off_policy(value: Any, given: Given) -> Translated:
    lag = whole(value, given)
    ahead = next((whole(given[key], given) for key in given if key.endswith("async_level")), min(lag, 1))
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


def async_level(value: Any, given: Given) -> Translated:
    eta, lag = whole(value, given), given.get("orchestrator.max_off_policy_steps")
    if eta == 0 or lag == 0:
        return other({"mode": "on_policy"}, "modes are sets of values here; nothing runs ahead")
    if lag is not None:
        return taken({"async_training.staleness_threshold": eta}, "steps that inference may be behind")
    return other(
        {"mode": "async_partial", "async_training.trigger_parameter_sync_step": 1}
        | {"async_training.staleness_threshold": eta},
        "steps that inference may be behind, in versions that generation may run ahead (docs/staleness.md)",
    )


def algorithm(value: Any, given: Given) -> Translated:
    if value in ("grpo", "max_rl"):
        name = {"grpo": "dr_grpo", "max_rl": "maxrl"}[value]
        return other({"algorithm.adv_estimator": name}, "its advantage is the reward less the group's mean")
    return lost(f"Headway has no {value}: neither teachers, nor losses on what an environment says")


def loss(value: Any, given: Given) -> Translated:
    if value in LOSSES:
        mode = {"algorithm.policy_loss.loss_mode": LOSSES[value]}
        tau = number(given.get("trainer.loss.kl_tau", 1e-3), given)
        lost_term = f"; its KL to the policy that sampled, kl_tau={tau:g}, is not there" if tau else ""
        return taken(mode) if value == LOSSES[value] else other(mode, f"it masks tokens by probability{lost_term}")
    return lost(f"there is no loss {value}; choose one (docs/algorithms), or write it (docs/your-own.md)")


def optimizer(value: Any, given: Given) -> Translated:
    if value in ("adamw", "adam"):
        return taken(note="always so here: AdamW over float32 master weights")
    return lost(f"there is AdamW alone; its learning rate is another than that of {value}")


def checkpointing(value: Any, given: Given) -> Translated:
    return taken({"model.enable_gradient_checkpointing": value is not None})


def every(here: str) -> TableRow:
    return same(here, lambda value, given: taken() if value is None else taken({here: whole(value, given)}, "versions"))


def wandb_and(here: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        return taken({"reports.trackers": ["wandb"], here: file_name(value, given)})

    return same(here, convert)


def lower_min(value: Any, given: Given) -> Any:
    rate = number(given.get("trainer.optim.lr", 1e-6), given)
    return other({"actor.optim.min_lr_ratio": min(1.0, number(value, given) / rate)}, "as a share of the learning rate")


def gpus(role: str) -> TableRow:
    return differs(
        f"{role}.n_gpus_per_node",
        "devices of a list",
        lambda value, given: len(value) if isinstance(value, list) else whole(value, given),
    )


def replicas(value: Any, given: Given) -> Translated:
    size = next((whole(given[key], given) for key in given if key.endswith(("parallel.tp", "tensor_parallel_size"))), 1)
    return other({"rollout.n_gpus_per_node": whole(value, given) * size}, f"devices of {value} engines of {size} each")


def nodes(role: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        nodes = whole(value, given)
        if role == "rollout":
            nodes *= whole(given.get("deployment.num_infer_replicas", 1), given)
        per_node = whole(given.get("deployment.gpus_per_node", 8), given)
        return taken({f"{role}.nnodes": nodes, f"{role}.n_gpus_per_node": per_node})

    return same(f"{role}.nnodes", convert)


def one(here: str) -> TableRow:
    """Make the row of a dimension of the mesh, whose ``auto`` Headway lacks."""

    def convert(value: Any, given: Given) -> Translated:
        if value == "auto":
            return lost(f"choose {here} for a mixture of experts; 1 otherwise")
        return taken({here: whole(value, given)})

    return same(here, convert)


def defaults(given: Given) -> dict[str, Any]:
    """Return prime-rl's defaults where they are not Headway's."""
    values: dict[str, Any] = {
        ENGINE: "vllm",
        "orchestrator.batch_size": 128,
        "orchestrator.algo.type": "grpo",
        "trainer.loss.type": "default",
        "trainer.optim.weight_decay": 0.01,
        "trainer.model.ac": {},
    }
    if any(key.startswith("orchestrator.eval.") for key in given):
        values["orchestrator.eval.sampling.temperature"] = 1.0
    if not any(key in given for key in GROUP_SIZES):
        values["orchestrator.group_size"] = 1
    if not any(key.endswith(("max_async_level", "async_level")) for key in given):
        values["orchestrator.max_off_policy_steps"] = 8
    if not any(key.endswith("ckpt.interval") for key in given):
        values["ckpt.interval"] = -1
    return values


SECTIONS = ("", "trainer.", "orchestrator.", "inference.")
"""Beginnings that the keys of one file may lack: those of a whole run, or of one process."""


def clip(value: Any, given: Given) -> Any:
    return lost("gradients are always clipped: raise actor.grad_clip") if value is None else number(value, given)


def beta1(value: Any, given: Given) -> Any:
    return [number(value, given), given.get("trainer.optim.betas2", 0.999)]


def beta2(value: Any, given: Given) -> Any:
    return [given.get("trainer.optim.betas1", 0.9), number(value, given)]


def always_true(value: Any, given: Given) -> bool:
    return True


def negated(value: Any, given: Given) -> bool:
    return not value
