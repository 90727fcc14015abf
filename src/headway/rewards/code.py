"""A reward that runs a row's unit tests on the code of a response, in the sandbox.

response ─▶ its last block of code ─┬▶ a program for standard input ─▶ what it prints ─┐
answer   ─▶ tests                  ─┼▶ a function, called           ─▶ its value      ─┼▶ compared here, outside
                                    └▶ asserts, run behind it       ─▶ a secret word  ─┘

Expected outputs never enter the sandbox. Asserts do: they have passed where the process says a word that it was told.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headway.errors import ConfigError, SandboxFailed, ScoringFailed
from headway.rewards.code_tests import AssertTest, CallTest, StdinTest, Test, unit_tests_of
from headway.rewards.compare import same_text, same_value
from headway.rewards.request import Response, ScoreRequest
from headway.sandbox.limits import Limits, SandboxSpec
from headway.sandbox.sandbox import Sandbox

ANSWER, JOB = "answer.py", "job.json"
BLOCK = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
USUAL = "\n".join(
    [
        "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys",
        *(
            f"from {name} import *"
            for name in ["collections", "heapq", "bisect", "math", "itertools", "functools", "typing", "builtins"]
        ),
    ]
)
"""Imports that data sets take for granted."""
PYTHONS = ("python", "py", "python3")
DRIVER = f"""
import builtins, json, os
def main():
    with open({JOB!r}, encoding="utf-8") as file:
        job = json.load(file)
    os.unlink({JOB!r})
    word, write, leave, dumps = job.pop("word"), os.write, os._exit, json.dumps
    result = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    names = {{"__name__": "answer", "__builtins__": builtins}}
    exec({USUAL!r}, names)
    with open({ANSWER!r}, encoding="utf-8") as file:
        exec(compile(file.read(), {ANSWER!r}, "exec"), names)
    told = ""
    if "tests" in job:
        exec(compile(job["tests"], "tests.py", "exec"), names)
    else:
        function = names.get(job["function"])
        if function is None and "Solution" in names:
            function = getattr(names["Solution"](), job["function"])
        plain = lambda one: sorted(one) if isinstance(one, (set, frozenset)) else list(one)
        told = dumps(function(*job["arguments"]), default=plain)
    write(result, (word + told).encode("utf-8", "backslashreplace"))
    leave(0)
main()
"""
"""Program that runs an answer behind the usual imports, and then asserts, or calls its function."""


def code(
    *,
    sandbox: SandboxSpec,
    within_s: float,
    partial: bool = False,
    most_tests: int | None = 20,
    timeout_s: float = 5.0,
) -> Callable[[ScoreRequest, Response], float]:
    """Make the rule: 1 where the code of the response passes the row's tests, else 0.

    Args:
        sandbox: where it runs.
        within_s: seconds for all tests of a response; what has not run by then has not passed.
        partial: give the share of tests that pass instead.
        most_tests: most tests of a row that are run, those with the longest inputs; null for all.
        timeout_s: most seconds of one test.

    Raises:
        ConfigError: a parameter that cannot be, or a machine without such a sandbox.
    """
    _check(partial, most_tests, timeout_s)
    runs = Sandbox(sandbox)
    runs.probe()

    def rule(request: ScoreRequest, response: Response) -> float:
        end = time.monotonic() + within_s
        tests = _longest(unit_tests_of(request.answer, request.extra), most_tests)
        answer, passed = code_of(response.answer), 0
        for test in tests:
            left = min(timeout_s, end - time.monotonic())
            ok = left > 0 and _passes(runs, test, answer, replace(sandbox.limits, wall_s=left))
            passed += ok
            if not ok and not partial:
                return 0.0
        return passed / len(tests)

    return rule


def code_of(response: str) -> str:
    """The code of a response: its last block that is marked as Python, else its last block, else all of the text.

    A block that never ends goes to the end.
    """
    blocks = [(found[2].lower(), found[3]) for found in BLOCK.finditer(response)]
    marked = [content for mark, content in blocks if mark in PYTHONS]
    return (marked or [content for _, content in blocks] or [response])[-1]


def _passes(sandbox: Sandbox, test: Test, answer: str, limits: Limits) -> bool:
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


def _told(sandbox: Sandbox, answer: str, job: dict[str, Any], limits: Limits) -> str | None:
    """Run a job behind the answer; returns what it tells behind the secret word, None where it does not get so far."""
    word = secrets.token_hex(16)
    files = {ANSWER: answer, JOB: json.dumps(job | {"word": word})}
    ran = sandbox.run_blocking(sandbox.python("-c", DRIVER), files=files, limits=limits)
    said, found, told = ran.stdout.rpartition(word)
    return told if ran.limit is None and ran.code == 0 and found and not said else None


def _longest(tests: Sequence[Test], most: int | None) -> Sequence[Test]:
    """The ``most`` tests with the longest inputs, in their order."""
    if most is None or len(tests) <= most:
        return tests
    places = sorted(range(len(tests)), key=lambda place: -len(repr(tests[place].size)))[:most]
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
