"""Text of a generated recipe: YAML in sections, with comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from headway.config.layers import DOT
from headway.config.schema_keys import spelled

Commented = Callable[[str, str, str], list[str]]
"""Function from a setting's key, its line and the line's indent to the line with its comment, and lines above it."""


def sections(values: Mapping[str, Any], commented: Commented) -> Iterator[str]:
    """Yield the lines of ``values``, which are flat and sorted by section. A blank line precedes each top section."""
    opened: list[str] = []
    for key, value in values.items():
        *inside, name = (part.replace(DOT, ".") for part in key.split("."))
        pairs = zip(opened, inside, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if inside[:1] != opened[:1] and inside:
            yield ""
        yield from (f"{'  ' * depth}{inside[depth]}:" for depth in range(shared, len(inside)))
        opened, indent = inside, "  " * len(inside)
        yield from commented(key, f"{indent}{name}: {spelled(value)}", indent)
