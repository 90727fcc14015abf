"""Conversions of values that several tables share."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from headway.config.migration_tables.table_rows import Given, Translated, other, same, taken

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")
"""Trackers of ``reports.trackers``."""
LORA = "Headway trains all weights; full training takes a lower learning rate than LoRA (1/10 is usual)"
REWARD_MODEL = "Headway hosts no reward model: serve it, and call it in a reward function (docs/rewards.md)"
PACKED = other(
    {"model.packing": "shared"},
    "rows without padding, as there (that alone is packed); here what rows share is computed once, too",
)
"""Answer for packed rows: Headway's own layout gives the same log-probs and gradients for less work."""
_HOME = re.compile(r"^(~|\$HOME|\$\{HOME\})(?=/|$)")


def whole(value: Any, given: Given) -> int:
    """Return a whole number, also of one that is written ``1e3``. Raises `ValueError` for any other."""
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value} is not a whole number")
    return int(number)


def number(value: Any, given: Given) -> float:
    """Return a number. Raises `ValueError` for what is none."""
    return float(value)


def path(value: Any, given: Given) -> Any:
    """Return a path, or a list of paths, with a home directory that is found when the recipe is read."""
    if isinstance(value, list | tuple):
        return [path(one, given) for one in value]
    return _HOME.sub("${oc.env:HOME}", str(value))


def file_name(value: Any, given: Given) -> str:
    """Return a run's name, without what cannot stand in the name of a directory."""
    name = re.sub(r"(\$\{oc\.env:[^}]*\})|[^\w.+=-]+", lambda at: at[1] or "-", str(value))
    return name.strip("-.")[:100] or "imported"


def trackers(value: Any, given: Given) -> Translated:
    """Return the trackers that Headway has, of a name or a list of names."""
    names = [str(name) for name in (value if isinstance(value, list | tuple) else [value])]
    names = list(TRACKERS) if "all" in names else names
    known = [name for name in names if name in TRACKERS]
    if lost := [name for name in names if name not in (*TRACKERS, "console", "none", "None")]:
        return other({"reports.trackers": known}, f"Headway has no {' and no '.join(lost)} (docs/trackers.md)")
    return taken({"reports.trackers": known}, "" if known else "lines on the console are always there")


def interval(value: Any, given: Given) -> int:
    """Return a number of versions between two events: never is -1."""
    if value is None or value in (0, "0", "no", False):
        return -1
    return max(whole(value, given), -1)


def groups(value: Any, version: int, what: str) -> Translated:
    """Return the length of a run of ``value`` groups as a multiple of ``version`` groups."""
    total = ceil(float(value) / version) * version
    return other({"rollout.total_rollout_steps": total}, f"{what}; a multiple of B={version} groups")


def reward_file(file: Any, function: Any) -> Translated:
    """Return the reward that is a function of a Python file."""
    if not file:
        return taken(note="not given, here either")
    spec = f"{path(file, {})}:{function}"
    return taken({"reward.function": spec}, "a function of verl's or TRL's form is called as it is (docs/rewards.md)")


def _replica(value: Any, given: Given) -> Translated:
    size = whole(value, given)
    engine = {"rollout.name": "vllm"} if size > 1 else {}  # the only one here that has several
    return taken({"rollout.tensor_model_parallel_size": size, **engine})


REPLICA_SIZE = same("rollout.tensor_model_parallel_size", _replica)
"""Row of how many devices an engine is on."""
