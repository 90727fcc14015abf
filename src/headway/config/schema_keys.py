"""Sections and keys of the schema, from pydantic's JSON schema.

Config ─▶ schema_of() ─▶ tables(): sections with their keys ─▶ reference, headway config
                     └─▶ known_keys() ─▶ messages about unknown keys, headway import
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import chain
from typing import Any

import yaml
from pydantic import BaseModel

from headway.config.schema import Config
from headway.config.sections.section import EXACT_NUMBER, shortest_spelling

REQUIRED = "required"
"""Text shown for a key without a default."""
Node = Mapping[str, Any]
"""A part of a JSON schema."""
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_WORDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "null": "`null`",
}
_PAGES = re.compile(r"docs/([\w/-]+\.md)")


@dataclass(frozen=True, slots=True)
class Key:
    """A configuration key that holds a value, as the reference describes it."""

    name: str
    """The key's dotted name, with ``[]`` after a list of sections and ``NAME`` for a name that the user chooses."""
    schema: Schema
    node: Node
    """The key's part of the JSON schema."""
    default: str
    """The key's default as YAML on one line, or `REQUIRED`."""
    meaning: str
    """The key's meaning: Markdown on one line; empty if it has no docstring."""
    only_sections: bool = False
    """True if a value other than null is one section or several."""

    @property
    def value(self) -> str:
        """The key's type and range, in Markdown. Raises `TypeError` for a type without words here."""
        return self.schema.described(self.node)

    @property
    def plain(self) -> str:
        """The name without ``[]``."""
        return self.name.replace("[]", "")


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A section and its own keys, without those of its subsections."""

    name: str
    """The section's dotted name; empty for the whole configuration."""
    meaning: str
    keys: tuple[Key, ...]
    chosen_by: str = ""
    """Setting that chooses this section among alternatives; empty without alternatives."""


class Schema:
    """A model's JSON schema, with its references resolved.

    Example:
        schema = schema_of(Config)
        schema.keys(schema.root)["mode"]["type"]                # "string"
        [rollout] = schema.sections(schema.root["properties"]["rollout"])
        rollout["properties"]["n"]["maximum"]                   # 65536
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self.root: Node = model.model_json_schema()
        self._definitions: Mapping[str, Node] = self.root.get("$defs", {})

    def resolved(self, node: Node) -> Node:
        """Return ``node``, or the definition that it refers to."""
        return self._definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def keys(self, section: Node) -> Mapping[str, Node]:
        """Return key → field of a section."""
        fields: Mapping[str, Node] = section.get("properties", {})
        return fields

    def sections(self, field: Node) -> list[Node]:
        """Return the sections that a field may hold, by itself or in a list or mapping; each once."""
        node = self.resolved(field)
        if "properties" in node:
            return [node]
        found: list[Node] = []
        for inner in [*_alternatives(node), *_items(node), *_named(node)]:
            found += [section for section in self.sections(inner) if section not in found]
        return found

    def is_list(self, field: Node) -> bool:
        """Tell whether a field's value may be a list."""
        node = self.resolved(field)
        return node.get("type") == "array" or any(map(self.is_list, _alternatives(node)))

    def is_text(self, field: Node) -> bool:
        """Tell whether a field's value may be text, or a list of texts."""
        node = self.resolved(field)
        return node.get("type") == "string" or any(map(self.is_text, [*_alternatives(node), *_items(node)]))

    def by_name(self, field: Node) -> bool:
        """Tell whether a field's value is a mapping whose names the user chooses."""
        return field.get("type") == "object" and "properties" not in field

    def told_apart_by(self, sections: Sequence[Node]) -> tuple[str, list[list[str]]]:
        """Return the key that distinguishes the alternatives of a union, and its values for each alternative.

        For a key with free values these are examples (``file.py:function``).
        """
        for key in self.keys(sections[0]):
            fields = [self.keys(section)[key] for section in sections if key in self.keys(section)]
            values = [_names(field) or list(field.get("examples", ())) for field in fields]
            if len(fields) == len(sections) and all(values):
                return key, values
        raise AssertionError(f"{[section['title'] for section in sections]} are not told apart by a key of their own")

    def described(self, field: Node) -> str:
        """Describe a field's type with its range, in Markdown. Raises `TypeError` for a type without words here."""
        node = self.resolved(field)
        if EXACT_NUMBER in node:
            return f"exact number{_range(node)}"
        if inner := _alternatives(node):
            return " or ".join(dict.fromkeys(map(self.described, inner)))
        if names := _names(node):
            return one_of(names)
        match node.get("type"):
            case "array":
                items = list(dict.fromkeys(map(self.described, _items(node))))
                if len(items) != 1:
                    raise TypeError(f"the reference has no words for a list of {node}")
                several = f"list of {node['maxItems']}" if "prefixItems" in node else "list"
                return f"{'non-empty ' * bool(node.get('minItems') and several == 'list')}{several}: {items[0]}"
            case "object" if "properties" in node:
                return "section"
            case "object":
                held = ", ".join(map(self.described, _named(node)))
                names = node.get("propertyNames", {"type": "string"})
                return f"mapping of {self.described(names)} to {held}" if held else "mapping"
            case "string" if node.get("format") == "path":
                return "path"
            case str(kind) if kind in _WORDS and "format" not in node:
                return _WORDS[kind] + _range(node)
        raise TypeError(f"the reference has no words for {dict(node)}")


@cache
def schema_of(model: type[BaseModel]) -> Schema:
    """Return the JSON schema of a model. It is made once."""
    return Schema(model)


def _alternatives(node: Node) -> list[Node]:
    return [*node.get("anyOf", ()), *node.get("oneOf", ())]


def _items(node: Node) -> list[Node]:
    return [*node.get("prefixItems", ()), *([node["items"]] if isinstance(node.get("items"), Mapping) else [])]


def _named(node: Node) -> list[Node]:
    held = node.get("additionalProperties")
    return [held] if isinstance(held, Mapping) else []


def _names(node: Node) -> list[str]:
    return list(node.get("enum", ())) or ([node["const"]] if "const" in node else [])


def _range(node: Node) -> str:
    """Describe a range: its bounds, as in `` > 0 and ≤ 1``, and further conditions."""
    bounds = [f"{sign} {node[bound]:g}" for bound, sign in _BOUNDS.items() if bound in node]
    rules = ["not empty"] if node.get("minLength") else []
    rules += [f"not {node['not']['const']}"] if "not" in node else []
    return "".join([f" {' and '.join(bounds)}" if bounds else "", *(f", {rule}" for rule in rules)])


def tables(model: type[BaseModel] = Config) -> Iterator[KeyTable]:
    """Yield every section in the schema's order, each followed by its subsections."""
    schema = schema_of(model)
    yield from _tables(schema, schema.root, "", None)


def _tables(schema: Schema, section: Node, name: str, given: Mapping[str, Any] | None) -> Iterator[KeyTable]:
    """Yield a section and its subsections. ``given``: the section's default; None: its keys' own defaults hold."""
    own: list[Key] = []
    inner: list[tuple[list[Node], str, Any, str]] = []
    required = section.get("required", ())
    for key, node in schema.keys(section).items():
        full = f"{name}.{key}".lstrip(".")
        sections = schema.sections(node)
        default = REQUIRED if key in required else node.get("default", {})
        default = default if given is None else given.get(key, default)
        is_section = bool(sections) and isinstance(default, Mapping) and not schema.by_name(node)
        if not is_section:
            text = REQUIRED if key in required and given is None else spelled(_exact(node, default))
            only = bool(sections) and not schema.is_text(node)
            own.append(Key(full, schema, node, text, meaning(node.get("description")), only))
        suffix = ".NAME" if schema.by_name(node) else "[]" if schema.is_list(node) and not is_section else ""
        if sections:
            inner.append((sections, full + suffix, default if is_section else None, node.get("description", "")))
    yield KeyTable(name, meaning(section.get("description")), tuple(own))
    for sections, where, held, about in inner:
        if len(sections) == 1:
            yield from _tables(schema, sections[0], where, held)
        else:
            yield from _of_choice(schema, sections, where, held, about)


def _of_choice(
    schema: Schema, sections: Sequence[Node], name: str, default: Mapping[str, Any] | None, about: str
) -> Iterator[KeyTable]:
    """Yield the table of the key that chooses among sections, then each section's own table."""
    choice, values = schema.told_apart_by(sections)
    key = f"{name}.{choice}"
    says = next((text for one in sections if (text := schema.keys(one)[choice].get("description"))), "")
    given = REQUIRED if default is None else spelled(default[choice])
    chosen = Key(key, schema, {"enum": [*chain(*values)]}, given, meaning(says))
    yield KeyTable(name, meaning(about), (chosen,))
    for section, names in zip(sections, values, strict=True):
        table, *inner = _tables(schema, section, name, None)
        own = tuple(one for one in table.keys if one.name != key)
        yield KeyTable(name, table.meaning, own, chosen_by=f"{choice}: {' or '.join(names)}")
        yield from inner


def keys(model: type[BaseModel] = Config) -> Iterator[Key]:
    """Yield every key of the schema, in its order."""
    for table in tables(model):
        yield from table.keys


@cache
def known_keys(model: type[BaseModel] = Config) -> tuple[str, ...]:
    """Return every dotted key that holds a value other than sections, in order. Keys in lists have no index."""
    return tuple(dict.fromkeys(key.plain for key in keys(model) if not key.only_sections))


def one_of(values: Sequence[Any]) -> str:
    return ", ".join(f"`{value if isinstance(value, str) else spelled(value)}`" for value in values)


def _exact(field: Node, value: Any) -> Any:
    """Return the default of a field. An exact number, which is text in JSON, is returned as a user would type it."""
    return shortest_spelling(Fraction(str(value))) if EXACT_NUMBER in field and value != REQUIRED else value


def spelled(value: Any) -> str:
    """Spell a value as YAML on one line, which reads back as the value."""
    # Without quotes only if YAML reads the text back: not `on`, `12` or `null`.
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) and yaml.safe_load(value) == value:
        return value
    if isinstance(value, float) and value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa)}e{int(exponent)}"
    # width: YAML would break longer texts. It also ends a document of one scalar with a line of dots.
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def meaning(text: str | None) -> str:
    """Return a docstring as Markdown on one line, with links to the pages that it names."""
    plain = " ".join((text or "").split()).replace("``", "`")
    return _PAGES.sub(r"[\1](\1)", plain).replace("(docs/algorithms)", "([algorithms](algorithms))")
