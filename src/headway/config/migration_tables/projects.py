"""The projects that there are tables of, and the search for a key among them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.config.migration_tables import areal, openrlhf, prime_rl, trl, verl
from headway.config.migration_tables.table_rows import Project, TableRow, read_project

VERL = read_project("verl.toml", verl)
TRL = read_project("trl.toml", trl)
AREAL = read_project("areal.toml", areal)
PRIME_RL = read_project("prime_rl.toml", prime_rl)
OPENRLHF = read_project("openrlhf.toml", openrlhf)
PROJECTS: Mapping[str, Project] = MappingProxyType(
    {"verl": VERL, "trl": TRL, "areal": AREAL, "prime-rl": PRIME_RL, "openrlhf": OPENRLHF}
)


def whole_key(key: str) -> tuple[str, str, TableRow] | None:
    """Find another project's setting of this very key: the project's name, the key, its row.

    A pattern counts where it has a counterpart of its own for each key, and for names without a section (``lora_*``).
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

    Only names of several words count where they lie in sections: ``type`` and ``path`` are everybody's.
    """
    name = key.rpartition(".")[2]
    for project in PROJECTS.values():
        for theirs, row in project.rows.items():
            of_a_section = "_" in name and theirs.rpartition(".")[2] == name != row.here.rpartition(".")[2]
            if row.here and "*" not in theirs and (theirs == name or of_a_section):
                return project.name, theirs, row
    return None
