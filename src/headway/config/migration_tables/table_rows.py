"""Tables of other projects' settings: what each is here, read from a file in TOML.

"num_generations" = {same = "rollout.n", by = "whole"}
"max_steps" = {differs = "rollout.total_rollout_steps", by = "steps", note = "steps in groups"}
"use_liger_kernel" = {no = "nothing to do: log-probs are computed in slices of logits"}

| row | setting |
|---|---|
| `same`, `differs` | has a counterpart, which means the same, or something else as `note` says; `by` converts values |
| `no`, `off` | has none: what to do, always or where it is on |
| `always` | is fixed here at these values |
| `choice` | has other `names` of values |
| `is`, `of` | has the row that a function makes, or one that several projects have |

`says` is a remark in place of a value. `"prefix.: a b"` are several keys. A name after `by` and `is` is a function of
the project's module, or of this one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any

Given = Mapping[str, Any]
"""Settings of a file of another project by dotted key, laid over the project's defaults."""


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


Convert = Callable[[Any, Given], Any]
"""Function of a setting's value and all settings of the file: our value, or a whole `Translated`."""


def unchanged(value: Any, given: Given) -> Any:
    """Return the value as it is."""
    return value


@dataclass(frozen=True, slots=True)
class TableRow:
    """A key of another project: the nearest key here ("" where there is none), how values are converted, a remark."""

    here: str = ""
    convert: Convert = unchanged
    note: str = ""
    part: ReportPart = ReportPart.TAKEN

    def answer(self, value: Any, given: Given) -> Translated:
        """Say what becomes of ``value``. Raises what the conversion raises for a value that it cannot read."""
        result = self.convert(value, given)
        if isinstance(result, Translated):
            return result
        return Translated(self.part, {self.here: result} if self.here else {}, self.note)


def same(here: str, convert: Convert = unchanged, note: str = "") -> TableRow:
    """Make the row of a key that means what ``here`` means."""
    return TableRow(here, convert, note)


def differs(here: str, note: str, convert: Convert = unchanged) -> TableRow:
    """Make the row of a key whose nearest counterpart counts, names or does something else, as ``note`` says."""
    return TableRow(here, convert, note, ReportPart.DIFFERS)


def no(note: str) -> TableRow:
    """Make the row of a key without a counterpart; ``note`` says what to do."""
    return TableRow(convert=lambda value, given: without(note), note=note, part=ReportPart.WITHOUT)


def always(*values: Any, note: str) -> TableRow:
    """Make the row of a key that Headway has at ``values`` alone, without any setting; ``note`` says why."""

    def convert(value: Any, given: Given) -> Translated:
        return taken(note=f"always so here: {note}") if _among(value, values) else without(note)

    return TableRow(convert=convert, note=note, part=ReportPart.WITHOUT)


def off(note: str) -> TableRow:
    """Make the row of a feature that Headway lacks: nothing is lost where it is off, else ``note`` says what to do."""

    def convert(value: Any, given: Given) -> Translated:
        is_off = value is None or value is False or value in (0, "", "null", "none", "disable", "disabled", [], {})
        return taken(note="off, as here") if is_off else without(note)

    return TableRow(convert=convert, note=note, part=ReportPart.WITHOUT)


def choice(here: str, names: Mapping[Any, Any]) -> TableRow:
    """Make the row of a key whose values have other names here; one may be a whole `Translated`."""

    def convert(value: Any, given: Given) -> Any:
        if value in names:
            return names[value]
        return without(f"Headway has nothing of that name; choose {here} (docs/configuration.md)")

    return TableRow(here, convert)


def taken(values: Mapping[str, Any] | None = None, note: str = "") -> Translated:
    """Make the answer of a setting that is taken over."""
    return Translated(ReportPart.TAKEN, values or {}, note)


def other(values: Mapping[str, Any], note: str) -> Translated:
    """Make the answer of a setting that means something else here."""
    return Translated(ReportPart.DIFFERS, values, note)


def without(note: str) -> Translated:
    """Make the answer of a setting without a counterpart."""
    return Translated(ReportPart.WITHOUT, {}, note)


@dataclass(frozen=True, slots=True)
class Project:
    """Another project: its name and its table, whose keys may have ``*`` for any part of a key."""

    name: str
    rows: Mapping[str, TableRow]
    defaults: Callable[[Given], Mapping[str, Any]] = lambda given: {}
    """Function of a file's settings: the values of settings that it leaves out."""
    marks: tuple[str, ...] = ()
    """Keys that no other project has, with ``*``."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Keys of earlier releases of the project → those that the table has."""

    def row(self, key: str) -> TableRow | None:
        """Return the row of ``key``: its own, or that of the first pattern that fits it.

        What ``*`` at the end of a pattern stands for takes the place of the one in ``here``.
        """
        if key in self.rows:
            return self.rows[key]
        for pattern, row in self.rows.items():
            if "*" in pattern and fnmatchcase(key, pattern):
                rest = key.removeprefix(pattern.removesuffix("*"))
                return replace(row, here=row.here[:-1] + rest) if row.here.endswith("*") else row
        return None

    def marked(self, keys: Iterable[str]) -> int:
        """Count the keys that only this project has."""
        return sum(any(fnmatchcase(key, mark) for mark in self.marks) for key in keys)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


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


def file_name(value: Any, given: Given) -> Any:
    """Return a run's name, without what cannot stand in the name of a directory; nothing where there is none."""
    if value is None:
        return taken()
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


def not_null(value: Any, given: Given) -> Any:
    return taken() if value is None else value


def numbers(value: Any, given: Given) -> list[float]:
    return [float(one) for one in value]


def number_or_zero(value: Any, given: Given) -> float:
    return float(value or 0)


def top_k(value: Any, given: Given) -> int:
    """Return the number of tokens, with 0 for all."""
    return max(whole(value or 0, given), 0)


def bfloat16(value: Any, given: Given) -> Any:
    return "bfloat16" if value else taken()


def wandb(value: Any, given: Given) -> Translated:
    return taken({"reports.trackers": ["wandb"]})


_VALUES = {"true": True, "false": False, "null": None}
"""Names of values in a ``choice`` that are no texts."""


def read_project(file: str, module: Any) -> Project:
    """Return the project of the table ``file`` beside this one. ``module``: its conversions, and its ``defaults``."""
    table = tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    known = {**globals(), **vars(module)}
    rows = {key: always(*rule.values, note=rule.reason) for key, rule in known.get("FIXED", {}).items()}
    for names, entry in table["rows"].items():
        row = _row(entry, known)
        prefix, several, rest = names.partition(": ") if not names.startswith(": ") else ("", ": ", names[2:])
        rows |= {prefix + name: row for name in rest.split()} if several else {names: row}
    project = Project(table["name"], rows, known["defaults"], tuple(table["marks"]), table.get("before", {}))
    rows |= {old: found for old, new in project.before.items() if (found := project.row(new)) is not None}
    alike = {
        one["there"] + key.removeprefix(one["section"]): no(one["no"])
        for one in table.get("like", ())
        for key in rows
        if key.startswith(one["section"])
    }
    return replace(project, rows=alike | rows)


def _row(entry: Mapping[str, Any], known: Mapping[str, Any]) -> TableRow:
    convert, note = known[entry.get("by", "unchanged")], entry.get("note", "")
    if "says" in entry:
        convert = lambda value, given: taken(note=entry["says"])  # noqa: E731
    match entry:
        case {"same": here}:
            return same(here, convert, note)
        case {"differs": here}:
            return differs(here, note, convert)
        case {"no": what}:
            return no(what)
        case {"off": what}:
            return off(what)
        case {"always": values}:
            return always(*values, note=note)
        case {"choice": here, "names": names}:
            return choice(here, {_VALUES.get(name, name): _answer(value, known) for name, value in names.items()})
        case {"is": name}:
            made = known[name]
            if isinstance(made, TableRow):
                return made
            row: TableRow = made(*entry.get("of", ()), *([convert] if "by" in entry else []))
            return row
    raise AssertionError(f"no row of a table: {entry}")


def _answer(value: Any, known: Mapping[str, Any]) -> Any:
    """Return what a value is called here: its name, or a whole answer."""
    match value:
        case {"is": name}:
            return known[name]
        case {"taken": note}:
            return taken(note=note)
        case {"values": values, "note": note}:
            return other(values, note)
    return value
