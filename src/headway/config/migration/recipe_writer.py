"""Writing of a recipe: values by dotted key as YAML in the schema's order, each with a comment on where it is from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from headway.config.layers import nest
from headway.config.schema_messages import known_keys

WIDTH = 100
"""Width of a recipe's lines, where values allow it."""


def body(values: Mapping[str, Any], comments: Mapping[str, tuple[str, str]]) -> str:
    """Return the YAML of ``values``.

    ``comments`` has, by key, the setting that a value is from, for the end of its line, and a remark for those above.
    """
    order = {key: i for i, key in enumerate(known_keys())}
    first = {section: i for i, section in reversed(list(enumerate(key.partition(".")[0] for key in order)))}

    def place(key: str) -> tuple[int, int, str]:
        return first.get(key.partition(".")[0], len(first)), order.get(key, len(order)), key

    ordered = {key: values[key] for key in sorted(values, key=place)}
    lines = list(_lines(nest({key: _Leaf(value) for key, value in ordered.items()}), "", 0, comments))
    return "\n".join(lines) + "\n" if lines else "{}\n"


class _Leaf:
    """A value, to tell it from a section."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _lines(tree: Mapping[str, Any], prefix: str, depth: int, comments: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    indent = "  " * depth
    for name, node in tree.items():
        key = f"{prefix}{name}"
        if not isinstance(node, _Leaf):
            if depth == 0:
                yield ""
            yield f"{indent}{name}:"
            yield from _lines(node, f"{key}.", depth + 1, comments)
            continue
        origin, remark = comments.get(key, ("", ""))
        line = f"{indent}{name}: {in_yaml(node.value)}"
        if remark:
            yield from (f"{indent}# {part}" for part in textwrap.wrap(remark, WIDTH - len(indent) - 2))
        yield f"{line}  # {origin}" if origin else line


def in_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1]
