"""Choices as a recipe: YAML, with each reason behind its value."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from headway.api.init.choices import Choice
from headway.config.layers import nest

WIDTH = 110
COMMENTS_FROM = 34
"""Column of comments, where the value before them leaves it free."""
SECTIONS = ("mode", "run", "model", "data", "reward", "rollout", "actor", "algorithm", "trainer", "cluster")


def render(choices: Sequence[Choice], header: Sequence[str]) -> str:
    """Return the text of a recipe that says ``choices`` and their reasons, under lines of ``header``.

    Lines that begin with spaces, which are commands, stay whole.
    """
    reasons = {choice.key: choice.reason for choice in choices}
    order = {name: place for place, name in enumerate(SECTIONS)}
    placed = sorted(choices, key=lambda choice: order.get(choice.key.partition(".")[0], len(order)))
    lines = [f"# {part}" for line in header for part in ([line] if line[:1] == " " else _wrapped(line, WIDTH - 2))]
    for name, value in nest({choice.key: choice.value for choice in placed}).items():
        if isinstance(value, Mapping):
            lines.append("")
        lines += _lines(name, value, name, reasons, 0)
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, key: str, reasons: Mapping[str, str], depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(value, Mapping) and value and key not in reasons:
        inner = [line for part in value for line in _lines(part, value[part], f"{key}.{part}", reasons, depth + 1)]
        return [f"{indent}{name}:", *inner]
    written = f"{indent}{name}: {scalar(value)}"
    return _commented(written, reasons.get(key, ""), indent)


def _commented(written: str, reason: str, indent: str) -> list[str]:
    if not reason:
        return [written]
    line = f"{written.ljust(COMMENTS_FROM - 2)}  # {reason}"
    if len(line) <= WIDTH:
        return [line]
    return [*(f"{indent}# {part}" for part in _wrapped(reason, WIDTH - len(indent) - 2)), written]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=2**31)
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")
