"""The configuration reference, ``docs/configuration.md``, written from the schema.

Section classes ─▶ keys(): type, range, default, docstring ─▶ page(): Markdown
PRESETS, VERL, USUAL, FIXED ──────────────────────────────────────┘

python -m headway.config.reference > docs/configuration.md
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from inspect import cleandoc
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from headway.config.aliases import USUAL
from headway.config.migration_tables.table_rows import ReportPart
from headway.config.migration_tables.verl import VERL
from headway.config.migration_tables.verl_values import FIXED
from headway.config.presets import PRESETS
from headway.config.schema import Config
from headway.config.sections.section import Section, never_or_every, sections_in, shortest_spelling, told_apart_by
from headway.config.transport_facts import TRANSPORTS, known_transport

REQUIRED = "required"
"""Text shown as the default of a key that has none."""

CHOICES: Mapping[str, Sequence[str]] = {"mode": tuple(PRESETS)}
"""Keys whose type is text but whose values are looked up elsewhere → those values."""
RULES: Mapping[Callable[..., Any], str] = {never_or_every: "not 0"}
"""Validators of a type → the words for what each one adds to a range."""
NAMES: Mapping[Callable[..., Any], Sequence[str]] = {known_transport: ("auto", *TRANSPORTS)}
"""Validators of a type → the names that each accepts."""

_BOUNDS: Mapping[str, str] = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
"""Attributes of a type's metadata that hold a bound → the sign of that bound."""
_PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    Fraction: "exact number",
    Path: "path",
    bool: "`true` or `false`",
    type(None): "`null`",
    Any: "any value",
}
_PAGES = re.compile(r"docs/([\w/-]+\.md)")


@dataclass(frozen=True, slots=True)
class Key:
    """A configuration key that holds a value, as the reference describes it."""

    name: str
    """The key's dotted name; ``[]`` after a list of sections."""
    value: str
    """The key's type and range, in Markdown."""
    default: str
    """The key's default as YAML on one line, or `REQUIRED`."""
    meaning: str
    """The key's meaning: plain Markdown on one line; empty where nobody has said it."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A section and its own keys, without those of the sections in it."""

    name: str
    """The section's dotted name; empty for the whole configuration."""
    meaning: str
    keys: tuple[Key, ...]
    chosen_by: str = ""
    """The setting that chooses this section, where there are alternatives."""


def parts(section: type[Section] = Config, name: str = "", default: Section | None = None) -> Iterator[KeyTable]:
    """Yield every section in the schema's order, each followed by the sections in it.

    ``default`` is the section's default value; where it is None, or absent from a list, its class's own defaults
    hold once it is given.
    """
    own: list[Key] = []
    inner: list[tuple[list[type[Section]], str, Any]] = []
    for field_name, field in section.model_fields.items():
        key = f"{name}.{field.alias or field_name}".lstrip(".")
        sections = sections_in(field.annotation)
        if default is not None:
            value = getattr(default, field_name)
        elif field.is_required():
            value = REQUIRED
        else:
            value = field.get_default(call_default_factory=True, validated_data={})
        if not (sections and isinstance(value, Section)):
            accepted = _one_of(CHOICES[key]) if key in CHOICES else _described(field.annotation, field.metadata)
            own.append(Key(key, accepted, spelled(value), _meaning(field.description)))
        suffix = "[]" if _holds_a_list(field.annotation) and not isinstance(value, Section) else ""
        suffix = ".NAME" if get_origin(field.annotation) is dict else suffix
        inner += [(sections, key + suffix, value)] if sections else []
    yield KeyTable(name, _meaning(section.__doc__), tuple(own))
    for alternatives, where, given in inner:
        if len(alternatives) > 1:
            yield from _alternatives(alternatives, where, given)
        else:
            yield from parts(alternatives[0], where, given if isinstance(given, Section) else None)


def _alternatives(sections: Sequence[type[Section]], name: str, default: Section) -> Iterator[KeyTable]:
    """Yield the table of the key that chooses among sections of one base class, then each section's own table."""
    choice, values = told_apart_by(sections)
    base = sections[0].__base__
    assert base is not None and issubclass(base, Section)
    key = f"{name}.{choice}"
    chosen = Key(
        key,
        _one_of(list(chain(*values))),
        spelled(getattr(default, choice)),
        _meaning(base.model_fields[choice].description),
    )
    yield KeyTable(name, _meaning(base.__doc__), (chosen,))
    for section, names in zip(sections, values, strict=True):
        [part] = parts(section, name)
        own = tuple(one for one in part.keys if one.name != key)
        yield KeyTable(name, part.meaning, own, chosen_by=f"{choice}: {' or '.join(names)}")


def keys() -> Iterator[Key]:
    """Every key of the schema, in its order."""
    for part in parts():
        yield from part.keys


def page() -> str:
    """Return the whole configuration reference, in Markdown."""
    lines = [INTRODUCTION]
    for part in parts():
        if part.name:
            level = "####" if part.chosen_by else "###" if "." in part.name else "##"
            lines += [f"{level} `{part.name}`{f' with `{part.chosen_by}`' * bool(part.chosen_by)}", part.meaning]
        rows = [
            [f"`{key.name}`", key.value, REQUIRED if key.default == REQUIRED else f"`{key.default}`", key.meaning]
            for key in part.keys
        ]
        lines += [_table(("key", "value", "default", "meaning"), rows)] if rows else []
        if any(key.value == _one_of(NAMES[known_transport]) for key in part.keys):
            carried = [[f"`{name}`", facts.meaning, _one_of(facts.backends)] for name, facts in TRANSPORTS.items()]
            lines += [_table(("transport", "what carries the weights", "`cluster.backend`"), carried)]
    names = list(dict.fromkeys(key for values in PRESETS.values() for key in values))
    presets = [[f"`{key}`", *(f"`{spelled(values[key])}`" for values in PRESETS.values())] for key in names]
    lines += [MODES, _table(("key", *(f"`{mode}`" for mode in PRESETS)), presets)]
    known = {key.name for key in keys()}
    renamed = [
        [f"`{old}`", f"`{row.here}`"]
        for old, row in VERL.rows.items()
        if row.here in known and "." in old and "*" not in old and old not in known and row.part is ReportPart.TAKEN
    ]
    fixed = [
        [f"`{key}`", ", ".join(f"`{spelled(v)}`" for v in rule.values), rule.reason] for key, rule in FIXED.items()
    ]
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
3. the files that a file names under `defaults:`, relative to it, and then the file;
4. `a.b=c` on the command line, whose values are YAML. Of two for the same key the last counts.

`null`, where it is among a key's values, takes a value back: the key counts as not given. For a section or a mapping
`null` and `{}` take back what a file below has set in it, and leave what the mode sets. `${oc.env:NAME}` is a variable
of the environment: a run's `config.yaml`, trackers and `--dry-run` have it as it is written, so that secrets stay such,
and a resumed run reads it again. A section that is `null` by
default is made with its own defaults by `{}` or by any key in it; `[]` after a section's name means that there is a
list of such sections. An unknown key, a value out of range, settings that contradict each other and a setting that
would have no effect are errors before anything starts, with exit code 2; `headway doctor CONFIG …` looks for them
alone, and `headway train CONFIG … --dry-run` prints all values as they are resolved. *Integer*, *number* and *text*
are YAML's; an *exact number* may also be a fraction like `3/10`."""

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


def _holds_a_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_holds_a_list(argument) for argument in get_args(annotation))


def _described(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type with its range, in Markdown. Raises `TypeError` for a type or a validator without words here."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [entry for m in arguments[1:] for entry in (m.metadata if isinstance(m, FieldInfo) else [m])]
        return _described(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_described(argument, () if argument is type(None) else metadata) for argument in arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _list(arguments, metadata)
    if origin is dict:
        return "mapping" if arguments == (str, Any) else f"mapping of {' to '.join(map(_described, arguments))}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _one_of([one.value for one in annotation])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    for entry in metadata:
        if isinstance(entry, AfterValidator) and entry.func in NAMES:
            return _one_of(NAMES[entry.func])
    if annotation not in _PLAIN:
        raise TypeError(f"the reference has no words for {annotation!r}")
    return _PLAIN[annotation] + _range(metadata)


def _list(arguments: tuple[Any, ...], metadata: Sequence[Any]) -> str:
    if arguments[-1] is not Ellipsis and len(set(map(_described, arguments))) > 1:
        raise TypeError(f"the reference has no words for a list of {arguments!r}")
    several = "list" if arguments[-1] is Ellipsis else f"list of {len(arguments)}"
    return f"{'non-empty ' * _not_empty(metadata)}{several}: {_described(arguments[0])}"


def _not_empty(metadata: Sequence[Any]) -> bool:
    return any(getattr(entry, "min_length", None) for entry in metadata)


def _range(metadata: Sequence[Any]) -> str:
    """Describe a range: its bounds, as in `` > 0 and ≤ 1``, and what validators add."""
    bounds = [
        f"{sign} {bound:g}"
        for name, sign in _BOUNDS.items()
        for entry in metadata
        if (bound := getattr(entry, name, None)) is not None
    ]
    rules = ["not empty"] if _not_empty(metadata) else []
    for entry in metadata:
        if isinstance(entry, AfterValidator):
            if entry.func not in RULES:
                raise TypeError(f"the reference has no words for {entry.func!r}")
            rules.append(RULES[entry.func])
    text = f" {' and '.join(bounds)}" if bounds else ""
    return "".join([text, *(f", {rule}" for rule in rules)])


def _one_of(values: Sequence[Any]) -> str:
    return ", ".join(f"`{value if isinstance(value, str) else spelled(value)}`" for value in values)


def _plain(value: Any) -> Any:
    """Convert a value to YAML's own types."""
    match value:
        case Fraction():
            return shortest_spelling(value)
        case StrEnum():
            return value.value
        case Path():
            return str(value)
        case tuple() | list():
            return [_plain(one) for one in value]
        case Section():
            return {name: _plain(one) for name, one in value}
    return value


def spelled(value: Any) -> str:
    """Spell a value as YAML on one line, which reads back as the value."""
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) and yaml.safe_load(value) == value:
        return value
    if isinstance(value, float) and not isinstance(value, bool) and value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa)}e{int(exponent)}"
    text: str = yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _meaning(docstring: str | None) -> str:
    text = " ".join(cleandoc(docstring or "").split()).replace("``", "`")
    # Names of pages are links, relative to ``docs/``.
    return _PAGES.sub(r"[\1](\1)", text).replace("(docs/algorithms)", "([algorithms](algorithms))")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
