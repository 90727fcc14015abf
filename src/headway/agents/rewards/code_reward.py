"""A reward that runs a row's unit tests on the code of a response, in the sandbox.

response ─▶ its last block of code ─┬▶ a program for standard input ─▶ what it prints ─┐
answer   ─▶ tests                  ─┼▶ a function, called           ─▶ its value      ─┼▶ compared here, outside
                                    └▶ asserts, run behind it       ─▶ a secret word  ─┘

Expected outputs never enter the sandbox. Asserts do: they have passed if the process prints its driver's secret word.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any

from headway.agents.rewards.code_driver import ANSWER, DRIVER, JOB
from headway.agents.rewards.code_tests import AssertTest, CallTest, StdinTest, Test, unit_tests_of
from headway.agents.rewards.score_request import ScoreRequest
from headway.data.thoughts import end_of_thought
from headway.errors import ConfigError, SandboxFailed, ScoringFailed, shown
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxSpec

BLOCK = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
MOST_KNOWN = 10_000
"""Maximum number of rows for which a process remembers that their tests can fail."""
PYTHONS = ("python", "py", "python3")


def code(
    *, sandbox: SandboxSpec, within_s: float, partial: bool = False, most_tests: int | None = 20, timeout_s: float = 5.0
) -> Callable[[ScoreRequest, str], float]:
    """Make the rule: 1 if the code of the response passes the row's tests, else 0. Threads may call it concurrently.

    Args:
        sandbox: sandbox in which the code runs.
        within_s: limit in seconds for all tests of a response; tests that have not run by then count as failed. A trial
            of the row's tests has the same limit.
        partial: return the share of passed tests instead.
        most_tests: maximum number of tests of a row, those with the longest inputs; null for all.
        timeout_s: limit in seconds for one test.

    Raises:
        ConfigError: a parameter is wrong, or the machine has no such sandbox.
    """
    _check(partial, most_tests, timeout_s)
    runs = Sandbox(sandbox)
    runs.probe()
    known: dict[int, bool] = {}
    trying = threading.Lock()  # of concurrent responses the first one tries the tests

    def passes(test: Test, answer: str, end: float) -> bool:
        left = min(timeout_s, end - time.monotonic())
        # A test may compute all the time: the limit on wall-clock time then ends it.
        limits = replace(sandbox.limits, wall_s=left, cpu_s=max(sandbox.limits.cpu_s, left))
        return left > 0 and _passes(runs, test, answer, limits)

    def pass_by_themselves(tests: Sequence[Test]) -> bool:
        """Tell whether an empty answer passes all ``tests``. Each row is tried once."""
        if not all(isinstance(test, AssertTest) for test in tests):
            return all(isinstance(test, StdinTest) and same_text("", test.expected) for test in tests)
        key = hash(tuple(tests))  # the tests of many rows take much memory
        if key not in known:
            if len(known) >= MOST_KNOWN:
                known.clear()
            end = time.monotonic() + within_s
            known[key] = all(passes(test, "", end) for test in tests)
        return known[key]

    def rule(request: ScoreRequest, response: str) -> float:
        tests = _longest(unit_tests_of(request.answer, request.extra), most_tests)
        with trying:
            passed = pass_by_themselves(tests)
        if passed:
            raise ScoringFailed(
                f"the tests in the answer {shown(request.answer)} are passed by an empty answer, so that any answer "
                "would be; give tests that call what they test, or leave the row out"
            )
        end = time.monotonic() + within_s
        answer, right = code_of(response), 0
        for test in tests:
            ok = passes(test, answer, end)
            right += ok
            if not ok and not partial:
                return 0.0
        return right / len(tests)

    return rule


def code_of(response: str) -> str:
    """Return the code of a response: its last block marked as Python, else its last block, else the whole text.

    Only the text after its thought counts, none if that never ended. A block without an end goes to the text's end.
    """
    begin = end_of_thought(response)
    if begin is None:
        return ""
    response = response[begin:]
    blocks = [(found[2].lower(), found[3]) for found in BLOCK.finditer(response)]
    marked = [content for mark, content in blocks if mark in PYTHONS]
    return (marked or [content for _, content in blocks] or [response])[-1]


def _passes(sandbox: Sandbox, test: Test, answer: str, limits: SandboxLimits) -> bool:
    try:
        match test:
            case StdinTest(given, expected):
                ran = sandbox.run_blocking(sandbox.python(ANSWER), stdin=given, files={ANSWER: answer}, limits=limits)
                return ran.limit is None and ran.code == 0 and same_text(ran.stdout, expected)
            case CallTest(function, arguments, expected):
                told = _told(sandbox, answer, {"function": function, "arguments": arguments}, limits)
                return told is not None and same_value(told, expected)
            case AssertTest(tests):
                return _told(sandbox, answer, {"tests": tests}, limits) is not None
    except SandboxFailed as cause:
        raise ScoringFailed(str(cause)) from cause


def _told(sandbox: Sandbox, answer: str, job: dict[str, Any], limits: SandboxLimits) -> str | None:
    """Run a job after the answer. Returns its output after the secret word; None without the word."""
    word = secrets.token_hex(16)
    files = {ANSWER: answer, JOB: json.dumps(job | {"word": word})}
    ran = sandbox.run_blocking(sandbox.python("-c", DRIVER), files=files, limits=limits)
    said, found, told = ran.stdout.rpartition(word)
    # Nothing may precede the word: the driver prints it first, and anything else there comes from the answer.
    return told if ran.limit is None and ran.code == 0 and found and not said else None


def _longest(tests: Sequence[Test], most: int | None) -> Sequence[Test]:
    """Return the ``most`` tests with the longest inputs, in their order."""
    if most is None:
        return tests
    places = nlargest(most, range(len(tests)), key=lambda place: len(repr(tests[place].given)))
    return [tests[place] for place in sorted(places)]


def _check(partial: Any, most_tests: Any, timeout_s: Any) -> None:
    if not isinstance(partial, bool):
        raise ConfigError(f"reward.params.partial: expected true or false, not {partial!r}")
    whole = isinstance(most_tests, int) and not isinstance(most_tests, bool)
    if most_tests is not None and not (whole and most_tests > 0):
        raise ConfigError(f"reward.params.most_tests: expected a number from 1, or null for all, not {most_tests!r}")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (number and 0 < timeout_s < 3600):
        raise ConfigError(f"reward.params.timeout_s: expected a number of seconds above 0, not {timeout_s!r}")


TOLERANCE = 1e-6
"""Relative and absolute difference below which two numbers with a fraction are equal."""


def same_text(printed: str, expected: str) -> bool:
    """Tell whether two outputs are equal: line by line, except space at line ends and empty lines at the end.

    Words of a line are compared as numbers if the expected one has a fraction.
    """
    given, wanted = ([line.split() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return len(given) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(given, wanted, strict=True)
    )


def same_value(told: str, expected: Any) -> bool:
    """Tell whether the JSON ``told`` is the value ``expected``, or its only item if that is a list, as in APPS."""
    try:
        value = json.loads(told)
    except (ValueError, RecursionError):
        return False
    # Through JSON, as the value came: it has lists for tuples and text for keys.
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


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        return False
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)  # True is an int, too


def _close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
