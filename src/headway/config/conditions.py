"""Conditions on values of settings, as tables in TOML write them, and changes of the texts in values.

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
"""Pattern of a value's place in a text."""


def matches(value: Any, wanted: Any) -> bool:
    """Tell whether a value is as it is wanted: equal, or one of a list; ``given``, ``absent``, ``off`` or
    ``positive``; or a text that a pattern with ``*`` fits.
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
    # To Python 1 is True; a rule about 1 is none about true.
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def holds(condition: Values, values: Values) -> bool:
    """Tell whether ``values`` are all as ``condition`` wants them by ``when``, and not all as it says by ``unless``;
    and whether, of the two keys of ``above`` and ``reaches``, the first has a larger value, or at least as large a one.
    """

    def match(wanted: Values) -> bool:
        return all(matches(values.get(key), one) for key, one in wanted.items())

    for name, compare in (("above", gt), ("reaches", ge)):
        first, second = map(values.get, condition.get(name, ("", "")))
        # What is not given is neither above nor below.
        if name in condition and (first is None or second is None or not compare(first, second)):
            return False
    return match(condition.get("when", {})) and not ("unless" in condition and match(condition["unless"]))


def filled(text: str, values: Values, value: Any = None) -> str:
    """Return ``text`` with what settings are in place of ``$key``, and ``value`` in place of ``$`` alone."""

    def shown(at: re.Match[str]) -> str:
        found = values[at[1]] if at[1] else value
        return f"{found:g}" if isinstance(found, float) else str(found)

    return _NAMED.sub(shown, text)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with each text in it changed: in lists, and in mappings under their names."""
    match value:
        case str():
            return change(value)
        case list():
            return [with_texts(item, change) for item in value]
        case dict():
            return {name: with_texts(item, change) for name, item in value.items()}
    return value
