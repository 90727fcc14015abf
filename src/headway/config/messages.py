"""Schema errors in the user's terms: which key, what was given and where, what was expected or probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.config.aliases import RENAMED
from headway.config.layers import lies_in
from headway.config.schema import Config, Section

SIMILARITY = 0.75
"""How alike two keys must be for one to be suggested instead of the other, in [0, 1]."""


def explain(error: ValidationError, origins: dict[str, str]) -> str:
    """All problems, one on each line. ``origins`` says where a dotted key was written.

    The alternatives of a union are reported one by one; they become one line, joined by "or".
    """
    expected: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    unknown: list[str] = []
    for detail in error.errors():
        key = _key_of(detail)
        if detail["type"] == "extra_forbidden":
            unknown += [written for written in reversed(origins) if lies_in(written, key)] or [key]
        else:
            expected.setdefault(key, []).append(_expectation(detail))
            given[key] = "nothing" if detail["type"] == "missing" else _brief(detail["input"])
    lines = [f"{key}: unknown key{_where(key, origins)}{_suggest(key)}" for key in unknown]
    for key, expectations in expected.items():
        what = " or ".join(dict.fromkeys(expectations))
        lines.append(f"{key}: got {given[key]}{_where(key, origins)}, expected {what}")
    return "\n".join(lines)


def known_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema that holds a value, in its order."""
    for name, field in section.model_fields.items():
        inner = section_type(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from known_keys(inner, f"{prefix}{name}.")


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field holds (``X`` or ``X | None``), if it holds one."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def _key_of(detail: ErrorDetails) -> str:
    """The dotted key of an error. Its location also names alternatives of unions, which are no keys."""
    key = ""
    section: type[Section] | None = Config
    location = detail["loc"]
    for position, part in enumerate(location):
        at_unknown = detail["type"] == "extra_forbidden" and position == len(location) - 1
        if isinstance(part, int):
            key += f"[{part}]"
        elif at_unknown or (section is not None and part in section.model_fields):
            key = f"{key}.{part}" if key else part
            section = None if at_unknown or section is None else section_type(section.model_fields[part].annotation)
    return key


def _expectation(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "model_type":
            return "a section with keys of its own"
        case "value_error":
            return str(detail["ctx"]["error"]).removeprefix("expected ")
        case "missing":
            return "a value"
        case "tuple_type":
            return "a list of values in brackets"
        case "dict_type":
            return "a section of names and values"
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
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return detail["msg"].replace("Input should be", "a number")
        case _:
            return detail["msg"].removeprefix("Input should be ")


def _where(key: str, origins: Mapping[str, str]) -> str:
    """The place of ``key``, or of something below it where a whole section was at fault."""
    return next((f" ({origin})" for written, origin in origins.items() if lies_in(written, key.split("[")[0])), "")


def _suggest(key: str) -> str:
    """What was probably meant: a renamed key, the same name in other sections, or else the most similar spelling."""
    if key in RENAMED:
        return f"; did you mean {RENAMED[key]}?"
    keys = list(known_keys())
    name = _name(key)
    same_name = [known for known in keys if _name(known) == name]
    if candidates := same_name or _similar(key, keys):
        return f"; did you mean {' or '.join(candidates)}?"
    return ""


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
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
