"""Comparing what code has printed or returned with what was expected."""

from __future__ import annotations

import json
import math
from typing import Any

TOLERANCE = 1e-6
"""Relative and absolute difference below which two numbers with a fraction are equal."""


def same_text(printed: str, expected: str) -> bool:
    """Tell whether two outputs are equal: line by line, space at ends and empty lines at the end aside.

    Words of a line are compared as numbers where the expected one has a fraction.
    """
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(told: str, expected: Any) -> bool:
    """Tell whether the JSON ``told`` is the value ``expected``, or the one that it is a list of, as APPS writes it."""
    try:
        value = json.loads(told)
    except (ValueError, RecursionError):
        return False
    expected = json.loads(json.dumps(expected))
    return _same(value, expected) or (isinstance(expected, list) and len(expected) == 1 and _same(value, expected[0]))


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, float) or isinstance(expected, float):
        return _is_number(value) and _is_number(expected) and _close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in expected)
    return bool(value == expected)


def _same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    words, expected = given.split(), wanted.split()
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        return False
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:
        return False
