"""Schema errors for users: the key, the given value and its place, the expected or probably meant value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.config.aliases import canonical_key
from headway.config.layers import lies_in
from headway.config.schema import Config
from headway.config.schema_keys import Node, Schema, keys, known_keys, schema_of
from headway.config.sections.section import Section
from headway.errors import shown

SIMILARITY = 0.75
"""Minimum similarity of two keys, in [0, 1], for one to be suggested for the other."""
NEARLY_EQUAL = 0.9
"""Minimum similarity of two whole keys with the same last name for other keys of that name not to be suggested."""

NUMBERS = ("a number", "a whole number")
"""Beginnings of descriptions of expected numbers."""

_MISSING = object()
_NO_ALTERNATIVE = ("union_tag_not_found", "union_tag_invalid")
"""Pydantic's error types for a value of a union whose choosing key is missing or names no alternative."""


def explain(error: ValidationError, origins: dict[str, str], root: type[Section] = Config) -> str:
    """Describe all errors in a ``root``, one line each. ``origins``: key → place where it was written; "" is not shown.

    pydantic reports the alternatives of a union one by one. Here they become one line, joined by "or".
    """
    expected: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    lines: list[str] = []
    schema = schema_of(root)
    nullable = {key.plain for key in keys(root) if key.default == "null"}
    for detail in error.errors():
        key, sections = _find(detail, schema)
        if detail["type"] == "extra_forbidden":
            # As it was written: an unknown section is reported by each of its keys.
            written = [written for written in reversed(origins) if lies_in(written, key)] or [key]
            if reason := _of_another_alternative(detail, key, schema, sections):
                lines.append(f"{key}{_where(key, origins)} has no effect: {reason}")
            else:
                lines += [f"{one}: unknown key{_where(one, origins)}{_suggest(one, root)}" for one in written]
            continue
        value = _MISSING if detail["type"] == "missing" else detail["input"]
        if detail["type"] in _NO_ALTERNATIVE and isinstance(value, Mapping):
            choice, values = schema.told_apart_by(sections)
            key, value = f"{key}.{choice}", value.get(choice, _MISSING)
            expectation = _one_of(list(chain(*values)), value)
        else:
            expectation = _expectation(detail, key)
        expected.setdefault(key, []).append(expectation)
        given[key] = "nothing" if value is _MISSING else "null" if value is None else shown(value, 60)
    for key, expectations in expected.items():
        what = " or ".join(dict.fromkeys(expectations))
        if what.startswith(NUMBERS) and re.sub(r"\[\d+\]\.", ".", key) in nullable:
            what += ", or null, as where it is left out"
        lines.append(f"{key}: got {given[key]}{_where(key, origins)}, expected {what}")
    return "\n".join(lines)


def _find(detail: ErrorDetails, schema: Schema) -> tuple[str, list[Node]]:
    """Return the dotted key of a validation error, and the sections that its value may be.

    For an unknown key these are the sections that lack it. The error's location also names alternatives of unions;
    these are left out of the key.
    """
    key, sections, named = "", [schema.root], False
    location = detail["loc"]
    for position, part in enumerate(location):
        if named:
            key, named = f"{key}.{part}", False
            continue
        fields = [field for section in sections if (field := schema.keys(section).get(str(part))) is not None]
        named = any(schema.by_name(field) and schema.sections(field) for field in fields)
        at_unknown = detail["type"] == "extra_forbidden" and position == len(location) - 1
        if isinstance(part, int):
            key += f"[{part}]"
        elif at_unknown or fields:
            key = f"{key}.{part}" if key else part
            sections = sections if at_unknown else schema.sections(fields[-1])
    return key, sections


def _of_another_alternative(detail: ErrorDetails, key: str, schema: Schema, sections: Sequence[Node]) -> str:
    """Explain that an unknown key belongs to another alternative of the union; "" if none has it."""
    section, _, name = key.rpartition(".")
    if not any(name in schema.keys(other) for other in sections):
        return ""
    choice, values = schema.told_apart_by(sections)
    users = [
        value for other, names in zip(sections, values, strict=True) for value in names if name in schema.keys(other)
    ]
    return f"{section}.{choice} is {detail['loc'][-2]}, and this is a key of {_listed(users)}"


_WANTED: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "union_tag_not_found", "union_tag_invalid"), "a section with keys of its own"),
    "missing": "a value",
    **dict.fromkeys(("tuple_type", "list_type"), "a list of values in brackets"),
    "dict_type": "a section of names and values",
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "string_type": "text",
    "path_type": "a path, as text",
}
"""Pydantic's error type → the expected value, in words."""


def _expectation(detail: ErrorDetails, key: str) -> str:
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"]).removeprefix("expected ")
        case "too_short":
            return f"at least {detail['ctx']['min_length']} value{'s' * (detail['ctx']['min_length'] > 1)}"
        case "too_long":
            return f"at most {detail['ctx']['max_length']} values"
        case "literal_error":
            values = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
            return _one_of(values, detail["input"], _elsewhere(key, detail["input"], values))
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return detail["msg"].replace("Input should be", "a number")
        case known:
            return _WANTED.get(known) or detail["msg"].removeprefix("Input should be ")


def _where(key: str, origins: Mapping[str, str]) -> str:
    """Return " (origin)" of ``key``, or of a key below it, for a message; "" if unknown."""
    origin = next((origin for written, origin in origins.items() if lies_in(written, key.split("[")[0])), "")
    return f" ({origin})" if origin else ""


def meant(key: str, root: type[Section] = Config) -> list[str]:
    """Return the keys that ``key`` probably means: itself if it is known; empty if nothing is similar.

    Also empty for another project's key without a counterpart. Candidates: a renamed key, another project's name for a
    key or its section, the same name in other sections, or the most similar spelling.
    """
    from headway.config.migration_tables.projects import USUAL, last_part, whole_key  # large tables, for messages alone

    known = known_keys(root)
    plain = canonical_key(re.sub(r"\[\d+\]", "", key))
    if plain in known:
        return [plain]
    if (found := whole_key(plain)) and any(lies_in(found[2].here, key) for key in known):
        return [found[2].here]
    if found and found[1] == plain and found[2].note and not found[2].here and plain not in USUAL:
        return []  # it has no counterpart: a similar spelling means something else
    same_name = [key for key in known if _name(key) == _name(plain)]
    section, theirs = plain.partition(".")[0], last_part(plain)
    of_section = [key for key in known if key.startswith(f"{section}.")]
    return (
        difflib.get_close_matches(plain, same_name, n=1, cutoff=NEARLY_EQUAL)
        or [key for key in same_name if key in of_section]
        or _in_section(USUAL.get(plain) or USUAL.get(_name(plain)) or [], section, known)
        or _in_section([theirs[2].here] if theirs else [], section, known)
        or ([] if of_section else _in_section(USUAL.get(section, []), section, known))
        or same_name
        or _similar(plain, known)
    )


def _in_section(candidates: Sequence[str], section: str, keys: Sequence[str]) -> list[str]:
    """Return the candidates that are keys here; only those in ``section`` if there are any."""
    found = [known for known in candidates if known in keys]
    own = [f"{section}.{known.partition('.')[2]}" for known in found]
    return [known for known in own if known in keys] or found


def _suggest(key: str, root: type[Section]) -> str:
    candidates = meant(key, root)
    if root is Config and (theirs := of_another_project(key, candidates)):
        return f"; {theirs}"
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def of_another_project(key: str, candidates: Sequence[str]) -> str:
    """Return the message on another project's ``key`` if ``candidates`` are its counterparts; else ""."""
    from headway.config.migration_tables.projects import USUAL, last_part, whole_key

    plain = canonical_key(re.sub(r"\[\d+\]", "", key))
    found = whole_key(plain)
    if found and not found[2].here and not candidates:
        return f"{found[0]}'s {found[1]} has no counterpart: {found[2].note.removeprefix('nothing to do: ')}"
    if found is None or not found[2].here:
        found = None if _name(plain) in USUAL else last_part(plain)
    if found is None or found[1] == found[2].here or plain in USUAL or not candidates:
        return ""
    if _name(found[2].here) != _name(candidates[0]):
        return ""
    return f"{found[0]}'s {found[1]} is {' or '.join(candidates)} here"


def _elsewhere(key: str, given: Any, values: Sequence[str]) -> str:
    """Return a hint which of ``values`` another project's value ``given`` of ``key`` means here; "" if none."""
    from headway.config.migration_tables.projects import PROJECTS

    for project in PROJECTS.values():
        for case in (case for row in project.rows.values() if row.here == key for case in row.cases):
            if case.get("value") == given and (here := case.get("values", {}).get(key)) in values:
                return f"{project.name}'s {given} is {here} here"
    return ""


def _one_of(values: Sequence[str], given: Any, hint: str = "") -> str:
    """List the allowed ``values`` for a message, with ``hint`` or the value that ``given`` probably means."""
    # difflib accepts only texts.
    if not hint and isinstance(given, str) and (close := difflib.get_close_matches(given, values, n=1)):
        hint = f"did you mean {close[0]!r}?"
    return _listed([repr(value) for value in values]) + (f"; {hint}" if hint else "")


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _similar(key: str, keys: Sequence[str]) -> list[str]:
    """Return the known key most similar to ``key``, if any: by name in its section, by whole path, or by name alone;
    else the only key that begins with it."""
    siblings = [known for known in keys if known.rpartition(".")[0] == key.rpartition(".")[0]]
    ways: list[tuple[Callable[[str], str], Sequence[str]]] = [(_name, siblings), (str, keys), (_name, keys)]
    for spell, candidates in ways:
        by_spelling = {spell(known): known for known in candidates}
        if close := difflib.get_close_matches(spell(key), by_spelling, n=1, cutoff=SIMILARITY):
            return [by_spelling[close[0]]]
    begun = [known for known in siblings if known.startswith(key)]
    return begun if len(begun) == 1 else []


def _name(key: str) -> str:
    return key.rpartition(".")[2]
