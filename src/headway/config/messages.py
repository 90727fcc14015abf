"""Schema errors in the user's terms: which key, what was given and where, what was expected or probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.config.aliases import RENAMED, USUAL, canonical_key
from headway.config.layers import lies_in
from headway.config.schema import Config
from headway.config.section import Section
from headway.errors import shown

SIMILARITY = 0.75
"""How alike two keys must be for one to be suggested instead of the other, in [0, 1]."""
NEARLY_EQUAL = 0.9
"""The same for two whole keys that end in the same name: then the others of that name are not suggested."""

_MISSING = object()
_NO_ALTERNATIVE = ("union_tag_not_found", "union_tag_invalid")
"""The value lacks the key that says which alternative of a union it is, or names none that there is."""


def explain(error: ValidationError, origins: dict[str, str], root: type[Section] = Config) -> str:
    """All problems of a ``root``, one on each line. ``origins`` says where a dotted key was written; "" is not shown.

    The alternatives of a union are reported one by one; they become one line, joined by "or".
    """
    expected: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    unknown: list[str] = []
    for detail in error.errors():
        key, sections = _find(detail, root)
        if detail["type"] == "extra_forbidden":
            unknown += [written for written in reversed(origins) if lies_in(written, key)] or [key]
            continue
        value = _MISSING if detail["type"] == "missing" else detail["input"]
        if detail["type"] in _NO_ALTERNATIVE and isinstance(value, Mapping):
            choice, alternatives = _tags(sections)
            key, value, expectation = f"{key}.{choice}", value.get(choice, _MISSING), _one_of(alternatives)
        else:
            expectation = _expectation(detail)
        expected.setdefault(key, []).append(expectation)
        given[key] = "nothing" if value is _MISSING else _brief(value)
    lines = [f"{key}: unknown key{_where(key, origins)}{_suggest(key, root)}" for key in unknown]
    for key, expectations in expected.items():
        what = " or ".join(dict.fromkeys(expectations))
        lines.append(f"{key}: got {given[key]}{_where(key, origins)}, expected {what}")
    return "\n".join(lines)


def known_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema that holds a value, in its order; those below a list are written without index."""
    for key, inner in _keys_of(section).items():
        if not inner:
            yield f"{prefix}{key}"
        for alternative in inner:
            yield from known_keys(alternative, f"{prefix}{key}.")


def _keys_of(section: type[Section]) -> dict[str, list[type[Section]]]:
    """A section's keys, as they are written, each with the sections that its value may be, or be a list of."""
    return {field.alias or name: _sections_in(field.annotation) for name, field in section.model_fields.items()}


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _tags(sections: Sequence[type[Section]]) -> tuple[str, list[str]]:
    """The key that tells the alternatives of a union apart, and its values."""
    for name in sections[0].model_fields:
        tags = [section.model_fields[name].annotation for section in sections if name in section.model_fields]
        if len(tags) == len(sections) and all(get_origin(tag) is Literal for tag in tags):
            return name, [value for tag in tags for value in get_args(tag)]
    raise AssertionError(f"{sections} are not told apart by a key of their own")


def _find(detail: ErrorDetails, root: type[Section]) -> tuple[str, list[type[Section]]]:
    """The dotted key of an error, and the sections that its value may be.

    Its location also names alternatives of unions, which are no keys.
    """
    key = ""
    sections = [root]
    location = detail["loc"]
    for position, part in enumerate(location):
        at_unknown = detail["type"] == "extra_forbidden" and position == len(location) - 1
        known = {name: inner for section in sections for name, inner in _keys_of(section).items()}
        if isinstance(part, int):
            key += f"[{part}]"
        elif at_unknown or part in known:
            key = f"{key}.{part}" if key else part
            sections = known.get(part, [])
    return key, sections


def _expectation(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "model_type" | "union_tag_not_found" | "union_tag_invalid":
            return "a section with keys of its own"
        case "value_error":
            return str(detail["ctx"]["error"]).removeprefix("expected ")
        case "missing":
            return "a value"
        case "tuple_type" | "list_type":
            return "a list of values in brackets"
        case "dict_type":
            return "a section of names and values"
        case "too_short":
            return f"at least {detail['ctx']['min_length']} value{'s' * (detail['ctx']['min_length'] > 1)}"
        case "too_long":
            return f"at most {detail['ctx']['max_length']} values"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "int_parsing" | "int_type" | "int_from_float":
            return "a whole number"
        case "float_parsing" | "float_type":
            return "a number"
        case "string_type":
            return "text"
        case "path_type":
            return "a path, as text"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return detail["msg"].replace("Input should be", "a number")
        case _:
            return detail["msg"].removeprefix("Input should be ")


def _where(key: str, origins: Mapping[str, str]) -> str:
    """The place of ``key``, or of something below it where a whole section was at fault."""
    origin = next((origin for written, origin in origins.items() if lies_in(written, key.split("[")[0])), "")
    return f" ({origin})" if origin else ""


def meant(key: str, root: type[Section] = Config) -> list[str]:
    """The keys that were probably meant by ``key``; itself, where it is one; none where nobody could tell.

    A renamed key, the name that other systems have for it, the same name in other sections, or else the most similar
    spelling.
    """
    keys = list(dict.fromkeys(known_keys(root)))
    plain = canonical_key(re.sub(r"\[\d+\]", "", key))
    if plain in keys:
        return [plain]
    if old := next((old for old, new in RENAMED.items() if lies_in(plain, old) and new in keys), None):
        return [f"{RENAMED[old]}{plain.removeprefix(old)}"]
    same_name = [known for known in keys if _name(known) == _name(plain)]
    section = f"{plain.partition('.')[0]}."
    return (
        difflib.get_close_matches(plain, same_name, n=1, cutoff=NEARLY_EQUAL)
        or [known for known in same_name if known.startswith(section)]
        or _usual(plain, section, keys)
        or same_name
        or _similar(plain, keys)
    )


def _usual(key: str, section: str, keys: Sequence[str]) -> list[str]:
    """What another system's name is here: in ``section``, where that has it, too (``critic.learning_rate``)."""
    found = [known for known in USUAL.get(_name(key), ()) if known in keys]
    own = [f"{section}{known.partition('.')[2]}" for known in found]
    return [known for known in own if known in keys] or found


def _suggest(key: str, root: type[Section]) -> str:
    candidates = meant(key, root)
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _one_of(values: Sequence[str]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}"


def _similar(key: str, keys: Sequence[str]) -> list[str]:
    """The known key most like ``key``: among its own section's, by its whole path, or by its name alone."""
    siblings = [known for known in keys if known.rpartition(".")[0] == key.rpartition(".")[0]]
    ways: list[tuple[Callable[[str], str], Sequence[str]]] = [(_name, siblings), (str, keys), (_name, keys)]
    for spell, candidates in ways:
        by_spelling = {spell(known): known for known in candidates}
        if close := difflib.get_close_matches(spell(key), by_spelling, n=1, cutoff=SIMILARITY):
            return [by_spelling[close[0]]]
    return []


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _brief(value: Any) -> str:
    return "null" if value is None else shown(value, 60)
