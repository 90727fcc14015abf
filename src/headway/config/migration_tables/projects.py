"""Projects with tables, and the search for a key among them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from headway.config.aliases import FIXED
from headway.config.conditions import holds
from headway.config.migration_tables import areal, openrlhf, prime_rl, trl, verl
from headway.config.migration_tables.table_rows import Given, ReportPart, TableRow, row_of


@dataclass(frozen=True, slots=True)
class Project:
    """Another project: its name and its table. In the table's keys ``*`` matches any part of a key."""

    name: str
    rows: Mapping[str, TableRow]
    marks: tuple[str, ...] = ()
    """Patterns with ``*`` of keys that no other project has."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Key of an earlier release of the project → the table's key."""
    usual: tuple[Mapping[str, Any], ...] = ()
    """Parts of the project's defaults, each with its conditions ``when`` and ``unless``."""
    guessed: Callable[[Given], Mapping[str, Any]] = lambda given: {}
    """Function of a file's settings that infers values of settings that it leaves out."""

    def row(self, key: str) -> TableRow | None:
        """Return the row of ``key``: its own, or that of the first matching pattern; None if there is none.

        The text that matches ``*`` at a pattern's end replaces the ``*`` in ``here``.
        """
        # First: an earlier pattern of the table may match this key, too.
        if key in self.rows:
            return self.rows[key]
        for pattern, row in self.rows.items():
            if "*" in pattern and fnmatchcase(key, pattern):
                rest = key.removeprefix(pattern.removesuffix("*"))
                return replace(row, here=row.here[:-1] + rest) if row.here.endswith("*") else row
        return None

    def marked(self, keys: Iterable[str]) -> int:
        """Return the number of keys that only this project has."""
        return sum(any(fnmatchcase(key, mark) for mark in self.marks) for key in keys)

    def defaults(self, given: Given) -> dict[str, Any]:
        """Return the project's defaults of settings that a file leaves out, if they differ from Headway's."""
        found = dict(self.guessed(given))
        for part in self.usual:
            if holds(part, found | dict(given)):
                found |= {key: None if value == "null" else value for key, value in part["values"].items()}
        return found


def read_project(module: ModuleType, further: Mapping[str, Mapping[str, Any]] | None = None) -> Project:
    """Return the project whose table lies beside ``module``. ``further``: rows that the table does not have."""
    functions = vars(module)
    table = tomllib.loads(Path(functions["__file__"]).with_suffix(".toml").read_text(encoding="utf-8"))
    rows: dict[str, TableRow] = {}
    for names, entry in ((further or {}) | table["rows"]).items():
        row = row_of(entry, functions)
        prefix, several, rest = names.partition(": ") if not names.startswith(": ") else ("", ": ", names[2:])
        rows |= {prefix + name: row for name in rest.split()} if several else {names: row}
    guessed = functions.get("guessed", lambda given: {})
    project = Project(
        table["name"], rows, tuple(table["marks"]), table.get("before", {}), tuple(table["defaults"]), guessed
    )
    rows |= {old: found for old, new in project.before.items() if (found := project.row(new)) is not None}
    alike = {
        one["there"] + key.removeprefix(one["section"]): TableRow("", one["no"], ReportPart.WITHOUT)
        for one in table.get("like", ())
        for key in rows
        if key.startswith(one["section"])
    }
    # In this order: a table's own row wins over one that is copied from another section.
    return replace(project, rows=alike | rows)


VERL = read_project(verl, {key: {"always": list(values), "note": why} for key, (values, why) in FIXED.items()})
TRL = read_project(trl)
AREAL = read_project(areal)
PRIME_RL = read_project(prime_rl)
OPENRLHF = read_project(openrlhf)
PROJECTS: Mapping[str, Project] = MappingProxyType(
    {"verl": VERL, "trl": TRL, "areal": AREAL, "prime-rl": PRIME_RL, "openrlhf": OPENRLHF}
)


USUAL: Mapping[str, list[str]] = tomllib.loads(Path(__file__).with_name("usual.toml").read_text(encoding="utf-8"))
"""Key, or last part of a key, that several projects have → the nearest keys here."""


def whole_key(key: str) -> tuple[str, str, TableRow] | None:
    """Find another project's setting with exactly this key. Returns the project's name, the key and its row, or None.

    A pattern counts if each matching key has its own counterpart, or if it has no section (``lora_*``).
    """
    for project in PROJECTS.values():
        if key in project.rows:
            return project.name, key, project.rows[key]
    for project in PROJECTS.values():
        row = project.row(key)
        if row is not None and ("." not in key or row.here.endswith(key.rpartition(".")[2])):
            return project.name, key, row
    return None


def last_part(key: str) -> tuple[str, str, TableRow] | None:
    """Find another project's setting, with a counterpart here, whose name is the last part of ``key``.

    Within sections only names of several words count: many projects have a ``type`` and a ``path``.
    """
    name = key.rpartition(".")[2]
    for project in PROJECTS.values():
        for theirs, row in project.rows.items():
            of_a_section = "_" in name and theirs.rpartition(".")[2] == name != row.here.rpartition(".")[2]
            if row.here and "*" not in theirs and (theirs == name or of_a_section):
                return project.name, theirs, row
    return None
