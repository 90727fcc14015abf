"""Values of AReaL's settings: conversions for its table, and its defaults."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    TableRow,
    Translated,
    differs,
    groups,
    number,
    off,
    other,
    path,
    same,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

SERVER = "nothing to do: replicas get weights, dtype and memory from the run (docs/rollout-engines.md)"
SIZES = re.compile(r"([a-z])(\d+)")
DIMENSIONS = {"t": "tp", "c": "cp", "s": "cp", "e": "ep"}
"""Letters of AReaL's allocations → dimensions of ``actor.parallel``."""


def prompts(given: Given) -> int:
    return whole(given["train_dataset.batch_size"], given)


def mini_batches(given: Given) -> int:
    return max(1, whole(given["actor.ppo_n_minibatches"], given))


def mini(given: Given) -> int:
    return ceil(prompts(given) / mini_batches(given))


def batch(value: Any, given: Given) -> Translated:
    batches = mini_batches(given)
    values = {"actor.ppo_mini_batch_size": mini(given), "async_training.require_batches": batches}
    return other(values, f"prompts of a version: {batches} mini-batches of {mini(given)}")


def mini_batch_count(value: Any, given: Given) -> Translated:
    return taken({"async_training.require_batches": mini_batches(given)}, "mini-batches of a step")


def steps(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    size = mini(given) * mini_batches(given)
    return groups(whole(value, given) * size, size, f"{value} steps of {size} prompts, in prompts")


def epochs(value: Any, given: Given) -> Translated:
    if given.get("total_train_steps") is not None:
        return lost("total_train_steps, which is given too, ends the run; Headway takes one of the two")
    return taken({"data.epochs": whole(value, given)})


def offpolicyness(value: Any, given: Given) -> Translated:
    eta = whole(value, given)
    if eta == 0:
        return other({"mode": "on_policy"}, "modes are sets of values here; nothing runs ahead")
    return other(
        {"mode": "async_partial", "async_training.trigger_parameter_sync_step": 1}
        | {"async_training.staleness_threshold": eta},
        "the same rule, of versions of B prompts (docs/staleness.md); answers in flight go on under new weights",
    )


def devices(role: str) -> TableRow:
    """Make the row of a backend like ``fsdp:d4t2``: devices of a role, and how they divide the model."""

    def convert(value: Any, given: Given) -> Translated:
        return allocated(role, str(value), given)

    return differs(f"{role}.n_gpus_per_node", "an allocation", convert)


def allocated(role: str, allocation: str, given: Given) -> Translated:
    sizes = {letter: int(size) for letter, size in SIZES.findall(allocation.rpartition(":")[2].split("|")[0])}
    if not sizes:
        return lost(f"give {role}.nnodes and {role}.n_gpus_per_node")
    copies, inner = sizes.get("d", 1), sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("c", 1) * sizes.get("s", 1)
    values = on_nodes(role, copies * inner, given)
    note = f"{copies * inner} devices"
    if role == "trainer":
        dimensions = {DIMENSIONS[letter]: size for letter, size in sizes.items() if letter in DIMENSIONS and size > 1}
        values |= {f"actor.parallel.{name}": size for name, size in dimensions.items()}
        if sizes.get("p", 1) > 1:
            note += "; there are no pipelines of layers here, so FSDP2 shards over those ranks, too"
        return other(values, note)
    engine = allocation.partition(":")[0]
    values["rollout.name"] = "vllm"  # the only engine here that another project has, too
    if engine not in ("vllm", allocation):
        note += f" of vllm: Headway has no {engine}"
    if inner > 1:
        values["rollout.tensor_model_parallel_size"] = inner
        note += f", {copies} engines of {inner} each"
    return other(values, note)


def on_nodes(role: str, devices: int, given: Given) -> dict[str, Any]:
    per_node = whole(given.get("cluster.n_gpus_per_node", 8), given) or devices
    nodes = ceil(devices / per_node)
    return {f"{role}.nnodes": nodes, f"{role}.n_gpus_per_node": ceil(devices / nodes)}


def allocation_mode(value: Any, given: Given) -> Translated:
    if not value:
        return taken(note="not given: actor.backend and rollout.backend say it")
    generate, _, train = str(value).partition("+")
    if not train:
        return lost("give trainer.n_gpus_per_node and rollout.n_gpus_per_node")
    rollout, trainer = allocated("rollout", generate.replace(".", ":"), given), allocated("trainer", train, given)
    return other({**rollout.values, **trainer.values}, f"generation: {rollout.note}; training: {trainer.note}")


def estimator(value: Any, given: Given) -> Translated:
    """Return the estimator that the normalisation of rewards and advantages amounts to."""
    mean, deviation = given.get("actor.reward_norm.mean_level"), given.get("actor.reward_norm.std_level")
    whitened = given.get("actor.adv_norm.std_level") == "batch"
    if "critic.path" in given:
        return other({"algorithm.adv_estimator": "gae"}, "with a critic")
    if mean == "group" and given.get("actor.reward_norm.mean_leave1out") is True:
        return other({"algorithm.adv_estimator": "rloo"}, "the others' mean is the baseline")
    if mean == "group" and deviation in (None, "none") and whitened:
        return other(
            {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, "the group's mean, then the batch's deviation"
        )
    if mean == "group":
        by_std = deviation not in (None, "none")
        values = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": by_std}
        return other(values, "rewards less the group's mean; batches are not whitened a second time")
    if whitened:
        return other({"algorithm.adv_estimator": "reinforce_plus_plus"}, "the batch's mean and deviation")
    return other({"algorithm.adv_estimator": "grpo"}, "choose an estimator (docs/algorithms)")


def with_estimator(value: Any, given: Given) -> Translated:
    return other({}, f"in algorithm.adv_estimator={estimator(value, given).values['algorithm.adv_estimator']}")


def loss(given: Given) -> str:
    if given.get("actor.use_sapo_loss") is True:
        return "sapo"
    if given.get("actor.importance_sampling_level") == "sequence":
        return "gspo"
    return "dual_clip" if given.get("actor.c_clip") is not None else "ppo_clip"


def loss_of(value: Any, given: Given) -> Translated:
    return taken({"algorithm.policy_loss.loss_mode": loss(given)}) if value not in (False, "token", None) else taken()


def higher(value: Any, given: Given) -> Any:
    return taken(note="not given, here either") if value is None else number(value, given)


def dual(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="off, as here")
    name = "algorithm.policy_loss"
    return taken({f"{name}.loss_mode": "dual_clip", f"{name}.clip_ratio_c": number(value, given)})


def tau(which: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if given.get("actor.use_sapo_loss") is not True:
            return taken(note="without effect there and here: the loss is another")
        return taken({f"algorithm.policy_loss.{which}": number(value, given)})

    return same(f"algorithm.policy_loss.{which}", convert)


def kl(value: Any, given: Given) -> Translated:
    coefficient = number(value, given)
    if coefficient == 0:
        return taken(note="off, as here")
    values = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coefficient}
    return taken(values | {"algorithm.kl_penalty": str(given.get("actor.kl_estimator", "k1"))})


def decoupled(value: Any, given: Given) -> Translated:
    return taken({"async_training.use_rollout_log_probs": not value}, "π_prox is recomputed" if value else "")


def recompute(value: Any, given: Given) -> Translated:
    decoupled = bool(given.get("actor.use_decoupled_loss"))
    return taken({"async_training.use_rollout_log_probs": not (value or decoupled)})


def cap(value: Any, given: Given) -> Translated:
    if value is None or not given.get("actor.use_decoupled_loss"):
        return taken(note="off, as here")
    name = "algorithm.rollout_correction"
    level = str(given.get("actor.rejection_sampling.level", "token"))
    metric = given.get("actor.rejection_sampling.metric", "ratio")
    if metric != "ratio":
        return lost(f"{metric}: choose algorithm.rollout_correction (docs/algorithms/corrections.md)")
    how = "truncate" if given.get("actor.rejection_sampling.action") == "clamp" else "mask"
    values = {f"{name}.name": how, f"{name}.level": "sequence" if level == "sequence" else "token"}
    return other(values | {f"{name}.bound": number(value, given)}, "weights of π_prox/π_behav up to this")


def affine(neutral: float) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if number(value, given) == neutral:
            return taken(note="off, as here")
        if given.get("actor.reward_norm.mean_level") == "group":
            return lost("nothing to do: advantages of a group do not change with it (but for a scale without std)")
        return lost("scale in the reward function, or give reward.functions a weight (docs/rewards.md)")

    return same("", convert)


def dataset(side: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        name = str(value)
        if name.endswith((".jsonl", ".parquet")):
            return other(
                {f"data.{side}": path(name, given)}, "AReaL's loader makes prompts of rows; here they are as they are"
            )
        source: dict[str, Any] = {"dataset": path(name, given)}
        note = (
            "AReaL's loader makes prompts of rows; here data.prompt_key and data.answer_key name columns (docs/data.md)"
        )
        values: dict[str, Any] = {}
        if name.rstrip("/").endswith("gsm8k"):
            source["subset"] = "main"
            values = {"data.prompt_key": "question", "data.answer_key": "answer", "data.chat_template": "always"}
            values |= {"reward.function": "math_verify"}
        return other({f"data.{side}": source, **values}, note)

    return differs(f"data.{side}", "a source", convert)


def warmup(value: Any, given: Given) -> Translated:
    if not value:
        return taken(note="off, as here")
    if given.get("total_train_steps") is None:
        return lost(f"{value} of the run, whose steps are not known here: give actor.optim.lr_warmup_steps")
    steps = int(float(value) * whole(given["total_train_steps"], given) * mini_batches(given))
    return other({"actor.optim.lr_warmup_steps": steps}, f"{value} of the run, in optimizer steps")


def frequency(here: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        return taken(note="not given, here either") if value is None else taken({here: whole(value, given)}, "versions")

    return same(here, convert)


def never(here: str) -> TableRow:
    return off(f"give {here}, which counts versions: steps of train_dataset.batch_size prompts")


def tracker(name: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        used = [one for one in ("wandb", "trackio") if given.get(f"stats_logger.{one}.mode") not in (None, "disabled")]
        return taken({"reports.trackers": used}) if used else taken(note="off, as here")

    return same("reports.trackers", convert)


def greedy(value: Any, given: Given) -> Translated:
    return taken(note="off, as here") if not value else lost("answers are sampled: greedy ones are all equal")


def defaults(given: Given) -> dict[str, Any]:
    """Return AReaL's defaults where they are not Headway's."""
    return {
        "train_dataset.batch_size": 1,
        "actor.ppo_n_minibatches": 4,
        "rollout.max_head_offpolicyness": 0,
        "gconfig.n_samples": 1,
        "gconfig.max_new_tokens": 16384,
        "actor.kl_ctl": 0.1,
        "actor.eps_clip": 0.2,
        "actor.optimizer.lr": 1e-3,
        "actor.optimizer.weight_decay": 0.01,
        "actor.adv_norm.std_level": None,
        "saver.freq_steps": None,
    }


def server(given: Given) -> str:
    return str(given.get("rollout.backend") or given.get("allocation_mode") or "")


def vllm_memory(value: Any, given: Given) -> Any:
    return number(value, given) if "vllm" in server(given) else lost(SERVER)


def penalty(value: Any, given: Given) -> Any:
    return taken(note="off, as here") if number(value, given) == 1 else number(value, given)


def top_k(value: Any, given: Given) -> int:
    """Return the number of tokens: AReaL's 10⁸ is all of them."""
    return 0 if whole(value, given) >= 10**6 else max(whole(value, given), 0)


def stops(value: Any, given: Given) -> list[str]:
    return list(value or [])


def beta1(value: Any, given: Given) -> Any:
    return [number(value, given), given.get("actor.optimizer.beta2", 0.999)]


def beta2(value: Any, given: Given) -> Any:
    return [given.get("actor.optimizer.beta1", 0.9), number(value, given)]


def centred(value: Any, given: Given) -> str:
    return "grpo" if value == 1 else "reinforce_plus_plus"


def text(value: Any, given: Given) -> Any:
    return str(value) if value else taken()
