"""Rows of the tables of other projects' settings, in their TOML form, and the translation of a value.

"num_generations" = {same = "rollout.n", by = "whole"}
"max_steps" = {differs = "rollout.total_rollout_steps", by = "steps", note = "steps in groups"}
"use_liger_kernel" = {no = "nothing to do: log-probs are computed in slices of logits"}
"actor.kl_ctl" = {same = "algorithm.kl_ctrl.kl_coef", cases = [{value = 0, taken = "off, as here"}]}

| row | setting |
|---|---|
| `same`, `differs` | has a counterpart, which means the same, or something else as `note` says |
| `no`, `off` | has none: what to do, always or where it is on |
| `always` | is fixed here at these values |
| `choice` | has other `names` of values |

`by` converts values: a function of the project's module, which is called with the value, all settings of the file and
what `of` lists; or one of `CONVERSIONS`. The first of `cases` that holds is the answer in place of the row's own. It
asks for a `value`, and for other settings by `when` and `unless`, as `headway.config.conditions` has them. It says
`taken`, `other` or `lost` with a remark, and which `values` the recipe gets: `$` is the converted value, and `$key`
another setting. `says` is one case that is always `taken`. `"prefix.: a b"` are several keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any

from headway.config.conditions import filled, holds, matches

Given = Mapping[str, Any]
"""Settings of another project's file by dotted key, over the project's defaults."""


class ReportPart(Enum):
    """Parts of the report, each with its headline."""

    TAKEN = "Taken over"
    DIFFERS = "Means something else here"
    WITHOUT = "No counterpart, and what to do"


@dataclass(frozen=True, slots=True)
class Translated:
    """Translation of one setting: values by dotted key, part of the report, and a remark."""

    part: ReportPart
    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def taken(values: Mapping[str, Any] | None = None, note: str = "") -> Translated:
    """Return the translation of a setting that is taken over."""
    return Translated(ReportPart.TAKEN, values or {}, note)


def other(values: Mapping[str, Any], note: str) -> Translated:
    """Return the translation of a setting that means something else here."""
    return Translated(ReportPart.DIFFERS, values, note)


def lost(note: str) -> Translated:
    """Return the translation of a setting without a counterpart."""
    return Translated(ReportPart.WITHOUT, {}, note)


PARTS = {"taken": ReportPart.TAKEN, "other": ReportPart.DIFFERS, "lost": ReportPart.WITHOUT}
"""Key of a case → the part of the report for its setting."""
Convert = Callable[[Any, Given], Any]
"""Function from a setting's value and all settings of the file to Headway's value, or to a whole `Translated`."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Row of another project's key: the nearest key here ("" if there is none), the conversion of values, a remark."""

    here: str = ""
    note: str = ""
    part: ReportPart = ReportPart.TAKEN
    convert: Convert | None = None
    """Conversion of a value; None: the value is taken as it is, null included."""
    cases: tuple[Mapping[str, Any], ...] = ()

    def answer(self, value: Any, given: Given) -> Translated:
        """Return the translation of ``value``. Raises the conversion's error for a value that it cannot read."""
        # Before null counts as not given: a case may match null.
        for case in self.cases:
            if ("value" not in case or matches(value, case["value"])) and holds(case, given):
                return self._answer_of(case, value, given)
        if self.part is ReportPart.WITHOUT:
            return lost(self.note)
        if value is None and self.convert is not None:
            return taken(note="not given, here either")
        result = self._converted(value, given)
        if isinstance(result, Translated):
            return result
        return Translated(self.part, {self.here: result}, self.note)

    def _converted(self, value: Any, given: Given) -> Any:
        return value if self.convert is None else self.convert(value, given)

    def _answer_of(self, case: Mapping[str, Any], value: Any, given: Given) -> Translated:
        def meant(one: Any) -> Any:
            match one:
                case "$":
                    return self._converted(value, given)
                case str() if one.startswith("$"):
                    return given[one[1:]]
                case list():
                    return [meant(item) for item in one]
            return one

        says = next(name for name in PARTS if name in case)
        values = {key: meant(one) for key, one in case.get("values", {}).items()}
        return Translated(PARTS[says], values, filled(case[says], given, value))


_NAMES = {"true": [True, 1], "false": [False, 0], "null": "absent"}
"""Name in a ``choice`` → the values that it stands for. Many scripts write 1 and 0."""


def row_of(entry: Mapping[str, Any], functions: Mapping[str, Any]) -> TableRow:
    """Return the row for a table's ``entry``. ``functions``: the project's conversions by name."""
    convert, note, cases = _conversion(entry, functions), entry.get("note", ""), tuple(entry.get("cases", ()))
    if "says" in entry:
        cases = ({"taken": entry["says"]},)
    match entry:
        case {"same": here}:
            return TableRow(here, note, ReportPart.TAKEN, convert, cases)
        case {"differs": here}:
            return TableRow(here, note, ReportPart.DIFFERS, convert, cases)
        case {"no": what}:
            return TableRow("", what, ReportPart.WITHOUT, cases=cases)
        case {"off": what}:
            return TableRow("", what, ReportPart.WITHOUT, cases=({"value": "off", "taken": "off, as here"},))
        case {"always": values}:
            fixed = {"value": values, "taken": f"always so here: {note}"}
            return TableRow("", note, ReportPart.WITHOUT, cases=(fixed,))
        case {"choice": here, "names": names}:
            chosen = [
                {**(meant if isinstance(meant, Mapping) else {"taken": "", "values": {here: meant}})}
                | {"value": _NAMES.get(name, name)}
                for name, meant in names.items()
            ]
            unknown = f"Headway has nothing of that name; choose {here} (docs/configuration.md)"
            return TableRow(here, cases=(*cases, *chosen, {"value": "given", "lost": unknown}), convert=convert)
    raise AssertionError(f"no row of a table: {entry}")


def _conversion(entry: Mapping[str, Any], functions: Mapping[str, Any]) -> Convert | None:
    name, further = entry.get("by", "as_it_is" if "choice" in entry else None), entry.get("of", ())
    if name is None:
        return None
    if name in CONVERSIONS:
        convert = CONVERSIONS[name]
        return lambda value, given: convert(value)
    function = functions[name]
    return lambda value, given: function(value, given, *further)


# ------------------------------------------------------------------------------------------ conversions of values

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")
"""Trackers of ``reports.trackers``."""
_HOME = re.compile(r"^(~|\$HOME|\$\{HOME\})(?=/|$)")


def whole(value: Any) -> int:
    """Return a value as an integer, also one written ``1e3``. Raises `ValueError` for other values."""
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value} is not a whole number")
    return int(number)


def listed(value: Any) -> list[Any]:
    """Return a list of values, given one value or several."""
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers(value: Any) -> list[float]:
    """Return the numbers of a list, or of a text with blanks between the numbers."""
    return [float(one) for one in (value.split() if isinstance(value, str) else value)]


def path(value: Any) -> Any:
    """Return a path, or a list of paths. A home directory is resolved when the recipe is read."""
    if isinstance(value, list | tuple):
        return [path(one) for one in value]
    return _HOME.sub("${oc.env:HOME}", str(value))


def source(value: Any) -> Any:
    """Return the setting for a file of prompts, or for a data set by its name."""
    name = str(value)
    if name.endswith((".jsonl", ".parquet")):
        return path(name)
    return {"dataset": path(name)} | ({"subset": "main"} if name.rstrip("/").endswith("gsm8k") else {})


def file_name(value: Any) -> str:
    """Return a run's name without characters that a directory's name cannot have."""
    name = re.sub(r"(\$\{oc\.env:[^}]*\})|[^\w.+=-]+", lambda at: at[1] or "-", str(value))
    return name.strip("-.")[:100] or "imported"


def trackers(value: Any) -> Translated:
    """Return those trackers of a name, or a list of names, that Headway has."""
    names = [str(name) for name in listed(value)]
    names = list(TRACKERS) if "all" in names else names
    known = [name for name in names if name in TRACKERS]
    if unknown := [name for name in names if name not in (*TRACKERS, "console", "none", "None")]:
        return other({"reports.trackers": known}, f"Headway has no {' and no '.join(unknown)} (docs/trackers.md)")
    return taken({"reports.trackers": known}, "" if known else "lines on the console are always there")


def interval(value: Any) -> int:
    """Return a number of versions between two events; -1 means never."""
    return -1 if value in (0, "0", "no", False) else max(whole(value), -1)


def top_k(value: Any) -> int:
    """Return the number of tokens. 0 means all; other projects write -1 or 10⁸."""
    return 0 if whole(value) >= 10**6 else max(whole(value), 0)


def schedule(value: Any) -> str:
    """Return the kind of a learning-rate schedule: the first word of its name in another project."""
    return str(value).rpartition(".")[2].lower().partition("_")[0]


def replica(value: Any) -> Translated:
    """Return the number of devices of a replica, and vLLM as the engine if there are several."""
    size = whole(value)
    return taken({"rollout.tensor_model_parallel_size": size} | ({"rollout.name": "vllm"} if size > 1 else {}))


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "as_it_is": lambda value: value,
    "file_name": file_name,
    "interval": interval,
    "listed": listed,
    "negated": lambda value: not value,
    "number": float,
    "numbers": numbers,
    "path": path,
    "replica": replica,
    "schedule": schedule,
    "source": source,
    "top_k": top_k,
    "trackers": trackers,
    "whole": whole,
}
"""Conversions of only the value. Null means a setting that is not given."""


def groups(value: Any, version: int, what: str) -> Translated:
    """Return a run's length of ``value`` groups, rounded up to a multiple of ``version`` groups."""
    total = ceil(float(value) / version) * version
    return other({"rollout.total_rollout_steps": total}, f"{what}; a multiple of B={version} groups")


def groups_of_steps(steps: Any, version: int) -> Translated:
    """Return the length of a run of ``steps`` steps, each with ``version`` groups."""
    return groups(whole(steps) * version, version, f"{steps} steps of {version} prompts, in prompts")


def engines(count: Any, size: Any) -> Translated:
    """Return the settings for ``count`` engines of ``size`` devices each."""
    devices = whole(count) * whole(size)
    return other({"rollout.n_gpus_per_node": devices}, f"devices of {count} engines of {size} each")


def warmup_share(share: Any, steps: int | None) -> Translated:
    """Return a warmup given as a share of the run's optimizer ``steps``; ``steps`` is None if unknown."""
    if not share or float(share) <= 0:
        return taken(note="off, as here")
    if steps is None:
        return lost("it needs the run's length in steps: give actor.optim.lr_warmup_steps in optimizer steps")
    count = int(float(share) * steps)
    return other({"actor.optim.lr_warmup_steps": count}, f"{share} of {steps} optimizer steps")


def first_given(given: Given, keys: Sequence[str], default: Any = None) -> Any:
    """Return the first of these settings with a value; ``default`` if none has one."""
    return next((given[key] for key in keys if given.get(key) is not None), default)
