"""Values of AReaL's settings: conversions for its table."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from headway.config.migration_tables.table_rows import (
    Given,
    Translated,
    groups_of_steps,
    lost,
    other,
    taken,
    warmup_share,
    whole,
)

SIZES = re.compile(r"([a-z])(\d+)")
DIMENSIONS = {"t": "tp", "c": "cp", "s": "cp", "e": "ep"}
"""Letters of AReaL's allocations → dimensions of ``actor.parallel``."""


def mini_batches(given: Given) -> int:
    return max(1, whole(given["actor.ppo_n_minibatches"]))


def mini(given: Given) -> int:
    return ceil(whole(given["train_dataset.batch_size"]) / mini_batches(given))


def batch(value: Any, given: Given) -> Translated:
    batches, size = mini_batches(given), mini(given)
    values = {"actor.ppo_mini_batch_size": size, "async_training.require_batches": batches}
    return other(values, f"prompts of a version: {batches} mini-batches of {size}")


def steps(value: Any, given: Given) -> Translated:
    return groups_of_steps(value, mini(given) * mini_batches(given))


def devices(value: Any, given: Given, role: str) -> Translated:
    """Return a role's devices and mesh from an allocation like ``fsdp:d4t2``."""
    allocation = str(value)
    sizes = {letter: int(size) for letter, size in SIZES.findall(allocation.rpartition(":")[2].split("|")[0])}
    if not sizes:
        return lost(f"give {role}.nnodes and {role}.n_gpus_per_node")
    copies, inner = sizes.get("d", 1), sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("c", 1) * sizes.get("s", 1)
    count = copies * inner
    nodes = ceil(count / (whole(given.get("cluster.n_gpus_per_node", 8)) or count))
    values: dict[str, Any] = {f"{role}.nnodes": nodes, f"{role}.n_gpus_per_node": ceil(count / nodes)}
    note = f"{count} devices"
    if role == "trainer":
        for letter, dimension in DIMENSIONS.items():
            if sizes.get(letter, 1) > 1:
                values[f"actor.parallel.{dimension}"] = sizes[letter]
        if sizes.get("p", 1) > 1:
            note += "; there are no pipelines of layers here, so FSDP2 shards over those ranks, too"
        return other(values, note)
    engine = allocation.partition(":")[0]
    values["rollout.name"] = "vllm"  # the only engine that both projects have
    if engine not in ("vllm", allocation):
        note += f" of vllm: Headway has no {engine}"
    if inner > 1:
        values["rollout.tensor_model_parallel_size"] = inner
        note += f", {copies} engines of {inner} each"
    return other(values, note)


def allocation_mode(value: Any, given: Given) -> Translated:
    generate, _, train = str(value).partition("+")
    if not train:
        return lost("give trainer.n_gpus_per_node and rollout.n_gpus_per_node")
    rollout, trainer = devices(generate.replace(".", ":"), given, "rollout"), devices(train, given, "trainer")
    return other({**rollout.values, **trainer.values}, f"generation: {rollout.note}; training: {trainer.note}")


def warmup(value: Any, given: Given) -> Translated:
    steps = given.get("total_train_steps")
    return warmup_share(value, None if steps is None else whole(steps) * mini_batches(given))


def trackers_on(value: Any, given: Given) -> Translated:
    used = [one for one in ("wandb", "trackio") if given.get(f"stats_logger.{one}.mode") not in (None, "disabled")]
    return taken({"reports.trackers": used}) if used else taken(note="off, as here")
