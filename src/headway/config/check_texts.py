"""The doctor's messages about a key, read from the source of its checks, to need no second list.

a module's ``yield "a.b=… is more than …"`` ─▶ Check: the text, with … where a value stands
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from types import ModuleType

from headway.config import algorithm_checks, doctor, settings_without_effect
from headway.config.sections import agent_section, parallel

MODULES: tuple[ModuleType, ...] = (doctor, settings_without_effect, algorithm_checks, agent_section, parallel)
"""Modules whose generators yield what is wrong with a configuration, or a key without effect and the reason."""
VALUE = "…"
"""Text that stands for a value of the configuration that is checked."""

Names = Mapping[str, str]


def checks_of(key: str) -> list[str]:
    """Return the texts that name the dotted ``key``, in the order of the checks."""
    named = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)")
    return [text for text in _texts() if named.search(text)]


@cache
def _texts() -> tuple[str, ...]:
    found = (text for module in MODULES for text in _yielded(ast.parse(inspect.getsource(module)), [{}]))
    return tuple(dict.fromkeys(found))


def _yielded(node: ast.AST, names: list[Names]) -> Iterator[str]:
    """Yield the texts of all ``yield`` below ``node``. ``names``: the values that names have there, by each round."""
    if isinstance(node, ast.For):
        names = [{**outer, **inner} for outer, inner in product(names, _rounds(node))]
    if isinstance(node, ast.Yield) and node.value is not None:
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for values in names:
            yield " has no effect: ".join(_text(part, values) for part in parts)
    for inside in ast.iter_child_nodes(node):
        yield from _yielded(inside, names)


def _rounds(loop: ast.For) -> list[Names]:
    """Return what the loop's names are in each round, where it goes over texts that are written there."""
    names = [one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)]
    try:
        rounds = [[one] if isinstance(one, str) else list(one) for one in ast.literal_eval(loop.iter)]
    except (ValueError, TypeError):
        return [{}]
    written = [one for one in rounds if len(one) == len(names) and all(isinstance(text, str) for text in one)]
    return [dict(zip(names, one, strict=True)) for one in written] or [{}]


def _text(node: ast.expr, values: Names) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, values) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in values:
            return values[name]
    return VALUE
