"""The text of a recipe that a command writes: YAML in sections, with comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from headway.config.layers import DOT
from headway.config.schema_keys import spelled

Commented = Callable[[str, str, str], list[str]]
"""Function of a setting's key, its line and that line's indent: the line with its comment, and lines above it."""


def sections(values: Mapping[str, Any], commented: Commented) -> Iterator[str]:
    """Yield the lines of ``values``, which are flat and in order; a blank one comes before each section at the top."""
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
