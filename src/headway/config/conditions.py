"""Conditions on values of settings, in the form of TOML tables, and placeholders in texts.

{when = {"rollout.name" = "vllm", "actor.clip_ratio" = "given"}, unless = {"rollout.n" = [1, 2]}}
{above = ["agent.min_episodes", "rollout.n"]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from operator import ge, gt
from typing import Any

Values = Mapping[str, Any]
"""Values of settings by dotted key."""
_OFF = ("null", "none", "disable", "disabled")
_NAMED = re.compile(r"\$(\w+(?:\.\w+)*)?")
"""Pattern of a placeholder in a text."""


def matches(value: Any, wanted: Any) -> bool:
    """Tell whether a value matches ``wanted``: equals it, is in it if it is a list, matches it as a pattern with ``*``,
    or is ``given``, ``absent``, ``off`` or ``positive``.
    """
    match wanted:
        case list():
            return any(matches(value, one) for one in wanted)
        case "given":
            return value is not None
        case "absent":
            return value is None
        case "off":
            return not value or value in _OFF
        case "positive":
            return value is not None and float(value) > 0
        case str():
            return isinstance(value, str) and fnmatchcase(value, wanted)
    # In Python 1 == True, but a rule about 1 must not match true.
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def holds(condition: Values, values: Values) -> bool:
    """Tell whether all of ``when`` match and not all of ``unless`` do. With ``above`` or ``reaches``, the first key's
    value must also be greater than the second's, or at least as great.
    """

    def match(wanted: Values) -> bool:
        return all(matches(values.get(key), one) for key, one in wanted.items())

    for name, compare in (("above", gt), ("reaches", ge)):
        first, second = map(values.get, condition.get(name, ("", "")))
        # A value that is not given is neither above nor below.
        if name in condition and (first is None or second is None or not compare(first, second)):
            return False
    return match(condition.get("when", {})) and not ("unless" in condition and match(condition["unless"]))


def filled(text: str, values: Values, value: Any = None) -> str:
    """Return ``text`` with ``$key`` replaced by that setting's value, and a bare ``$`` by ``value``."""

    def shown(at: re.Match[str]) -> str:
        found = values[at[1]] if at[1] else value
        return f"{found:g}" if isinstance(found, float) else str(found)

    return _NAMED.sub(shown, text)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to each text in a value, also within lists and mappings (not their keys)."""
    match value:
        case str():
            return change(value)
        case list():
            return [with_texts(item, change) for item in value]
        case dict():
            return {name: with_texts(item, change) for name, item in value.items()}
    return value
