"""The configuration reference, ``docs/configuration.md``, written from the schema.

tables(): sections and keys ─▶ page(): Markdown
PRESETS, VERL, USUAL, FIXED ──────┘

python -m headway.config.reference > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.config.aliases import FIXED
from headway.config.migration_tables.projects import USUAL, VERL
from headway.config.migration_tables.table_rows import ReportPart
from headway.config.presets import PRESETS
from headway.config.schema_keys import REQUIRED, keys, one_of, spelled, tables
from headway.config.transport_facts import TRANSPORTS


def page() -> str:
    """Return the whole configuration reference, in Markdown."""
    lines = [INTRODUCTION]
    for part in tables():
        if part.name:
            level = "####" if part.chosen_by else "###" if "." in part.name else "##"
            lines += [f"{level} `{part.name}`{f' with `{part.chosen_by}`' * bool(part.chosen_by)}", part.meaning]
        rows = [
            [f"`{key.name}`", key.value, REQUIRED if key.default == REQUIRED else f"`{key.default}`", key.meaning]
            for key in part.keys
        ]
        lines += [_table(("key", "value", "default", "meaning"), rows)] if rows else []
        if any(key.value == one_of(["auto", *TRANSPORTS]) for key in part.keys):
            carried = [[f"`{name}`", facts.meaning, one_of(facts.backends)] for name, facts in TRANSPORTS.items()]
            lines += [_table(("transport", "how the weights travel", "`cluster.backend`"), carried)]
    names = list(dict.fromkeys(key for values in PRESETS.values() for key in values))
    presets = [[f"`{key}`", *(f"`{spelled(values[key])}`" for values in PRESETS.values())] for key in names]
    lines += [MODES, _table(("key", *(f"`{mode}`" for mode in PRESETS)), presets)]
    known = {key.name for key in keys()}
    renamed = [
        [f"`{old}`", f"`{row.here}`"]
        for old, row in VERL.rows.items()
        if row.here in known and "." in old and "*" not in old and old not in known and row.part is ReportPart.TAKEN
    ]
    fixed = [[f"`{key}`", ", ".join(f"`{spelled(v)}`" for v in values), why] for key, (values, why) in FIXED.items()]
    lines += [OTHER_NAMES, _table(("verl's", "here"), renamed)]
    usual = [[f"`{name}`", ", ".join(f"`{key}`" for key in here)] for name, here in USUAL.items()]
    lines += [USUAL_ELSEWHERE, _table(("elsewhere", "here"), usual)]
    lines += [ONE_VALUE, _table(("key", "accepted at", "because"), fixed)]
    return "\n\n".join(line for line in lines if line) + "\n"


INTRODUCTION = """\
# Configuration

<!-- Written by `python -m headway.config.reference > docs/configuration.md`; a test compares the two. -->

Every key, from the schema. A configuration is a YAML file with the values that differ from the defaults, and settings
on the command line over it: `headway train CONFIG rollout.n=4 'actor.optim.betas=[0.9, 0.99]'`. From the bottom up:

1. the defaults in the tables below;
2. the values of the [mode](#what-each-mode-sets), which are only defaults, too;
3. the files that a file names under `defaults:`, relative to it, and then the file, without keys at its top that begin
   with `x-`, which are for anchors;
4. `a.b=c` on the command line, whose values are YAML. Of two for the same key the last counts.

`null`, where it is among a key's values, means that the key was not given. For a section or a mapping, `null` and `{}`
remove what an earlier file has set in it; what the mode sets stays. `${oc.env:NAME}` is a variable of the environment.
It is written unresolved to a run's `config.yaml`, to trackers and by `--dry-run`, so that secrets stay secret, and a
resumed run reads it again. A section that is `null` by default gets its own defaults by `{}`, or by any key in it. `[]`
after a section's name: there is a list of such sections. An unknown key, a value out of range, settings that
contradict each other and a setting that would have no effect are errors before anything starts, with exit code 2;
`headway doctor CONFIG …` looks for them alone, and `headway train CONFIG … --dry-run` prints all values as they are
resolved. *Integer*, *number* and *text* are YAML's; an *exact number* may also be a fraction like `3/10`."""

MODES = """\
## What each mode sets

How to choose one: [modes.md](modes.md)."""

OTHER_NAMES = """\
## verl's names

Keys have verl's names wherever verl has one, and a leading `actor_rollout_ref.` or `+` is taken off. These have others
here; an error names the new one."""

USUAL_ELSEWHERE = """\
So it is with the settings of TRL, AReaL, prime-rl and OpenRLHF, whose files `headway import` turns into recipes
([coming from them](coming-from.md)), and with names that several have:"""

ONE_VALUE = "These keys of verl's are accepted, and change nothing:"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
