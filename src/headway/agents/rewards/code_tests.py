"""Unit tests of code-contest data, in the forms in which data sets have them.

| form | of |
|---|---|
| ``{"inputs": […], "outputs": […], "fn_name"?}`` | APPS, TACO, PRIME |
| ``[{"input", "output", "type" or "testtype", "fn_name"? or "metadata": {"func_name"}}, …]`` | LiveCodeBench |
| ``{"test_list": ["assert …", …], "test_setup_code"?}``, ``{"tests": […]}``, ``["assert …", …]`` | MBPP |
| text with asserts, or with ``check(candidate)``; ``{"test", "entry_point"}`` | HumanEval |
| text with functions and classes as pytest or unittest find them, ``from solution import …`` | KodCode |

Each may be JSON text, too.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.agents.interface.user_calls import plain
from headway.agents.rewards.code_driver import PYTEST, SOLUTIONS
from headway.errors import ScoringFailed, said_by, shown

EXPECTED = (
    'expected {"inputs": […], "outputs": […]}, a list of {"input": …, "output": …}, {"test_list": ["assert …"]}, or '
    "text of asserts or with check(candidate) (docs/sandbox.md)"
)
TEST_LISTS = ("test_list", "tests", "test_cases", "assert_case", "public_test_cases")
STDIN_TYPES = ("stdin", "stdin_stdout")
FAILING = ("assert", "check", "raise", "fail")
"""Beginnings of the names of functions that can fail."""
CALL_TYPES = ("functional", "function_call", "function")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program's standard input and expected output."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function's arguments and expected result, as plain JSON data."""

    function: str
    given: Sequence[Any]
    expected: Any


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Code that raises if the answer before it is wrong."""

    given: str


Test = StdinTest | CallTest | AssertTest


def unit_tests_of(answer: Any, extra: Mapping[str, Any]) -> Sequence[Test]:
    """Return the tests of a row's ``answer``; ``entry_point`` and ``fn_name`` may be columns in ``extra``.

    Raises:
        ScoringFailed: there are no tests in it; says what was found, and what is expected.
    """
    found = _parsed(plain(answer))
    tests = _tests(found, extra)
    if not tests:
        raise ScoringFailed(f"the answer {shown(found)} has no tests; {EXPECTED}")
    return tests


def _tests(found: Any, extra: Mapping[str, Any]) -> list[Test]:
    match found:
        case str() if found.strip():
            return [AssertTest(_checked(found, extra.get("entry_point")))]
        case {"inputs": _, "outputs": _}:
            return _paired(found, extra)
        case {"test": str(test), **rest}:
            return [AssertTest(_checked(test, rest.get("entry_point", extra.get("entry_point"))))]
        case Mapping():
            for key in TEST_LISTS:
                if key in found:
                    inner, imports = _parsed(plain(found[key])), plain(found.get("test_imports")) or []
                    lines = [*([imports] if isinstance(imports, str) else imports), found.get("test_setup_code") or ""]
                    setup = "\n".join(map(str, lines))
                    return _listed([inner] if isinstance(inner, str) else inner, {**extra, **found}, setup)
        case list():
            return _listed(found, extra, "")
    raise ScoringFailed(f"there are no tests in the answer {shown(found)}; {EXPECTED}")


def _listed(found: Any, extra: Mapping[str, Any], setup: str) -> list[Test]:
    if not isinstance(found, list):
        raise ScoringFailed(f"the tests in the answer are {shown(found)}; {EXPECTED}")
    if found and all(isinstance(one, str) for one in found):
        before = f"{setup}\n" if setup.strip() else ""
        return [AssertTest(before + _checked(one, extra.get("entry_point"), before)) for one in found]
    return [_single(one, extra) for one in found]


def _single(one: Any, extra: Mapping[str, Any]) -> Test:
    if not isinstance(one, Mapping) or not {"input", "output"} <= set(one):
        raise ScoringFailed(f"one of the tests in the answer is {shown(one)}; {EXPECTED}")
    kind = one.get("type", one.get("testtype"))
    metadata = _parsed(one.get("metadata") or extra.get("metadata"))
    named_there = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    named = [one.get("fn_name"), named_there, extra.get("fn_name"), extra.get("func_name")]
    name = next((name for name in named if name), None)
    if kind in STDIN_TYPES or (kind is None and name is None):
        return StdinTest(_text(one["input"]), _text(one["output"]))
    if kind is not None and kind not in CALL_TYPES:
        known = ", ".join((*STDIN_TYPES, *CALL_TYPES))
        raise ScoringFailed(f"a test in the answer has the type {shown(kind)}; known are {known}")
    if name is None:
        raise ScoringFailed(f"a test in the answer calls a function that fn_name does not name: {shown(one)}")
    return _call(str(name), one["input"], one["output"])


def _paired(found: Mapping[str, Any], extra: Mapping[str, Any]) -> list[Test]:
    inputs, outputs = plain(found["inputs"]), plain(found["outputs"])
    name = found.get("fn_name") or extra.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        counts = " and ".join(str(len(one)) if isinstance(one, list) else shown(one) for one in (inputs, outputs))
        raise ScoringFailed(f"the tests in the answer have {counts} inputs and outputs; expected as many of both")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        return [_call(str(name), given, expected) for given, expected in pairs]
    return [StdinTest(_text(given), _text(expected)) for given, expected in pairs]


def _call(name: str, given: Any, expected: Any) -> CallTest:
    """Return a call from a list of arguments, or from text with one JSON argument on each line."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError:
            raise ScoringFailed(f"the arguments of {name}, {shown(given)}, are no JSON, one on each line") from None
    if not isinstance(given, list):
        raise ScoringFailed(f"the arguments of {name} are {shown(given)}; expected a list of them")
    if isinstance(expected, str):
        with suppress(ValueError):  # not JSON: the text itself
            expected = json.loads(expected)
    return CallTest(name, given, expected)


def _checked(tests: str, entry_point: Any, before: str = "") -> str:
    """Return asserts as they are; a ``check(candidate)`` that nothing calls gets its call.

    Text that cannot fail is not a test; neither is text that needs more than the sandbox has. ``before``: code that
    stands before the asserts.
    """
    nodes = [*ast.walk(_tree(before)), *(own := [*ast.walk(_tree(tests))])]
    can_fail = any(isinstance(node, ast.Assert | ast.Raise) or _called(node).startswith(FAILING) for node in own)
    if not can_fail and "def check(" not in tests:
        raise ScoringFailed(f"the answer {shown(tests)} has no assert; {EXPECTED}")
    for node in nodes:
        if lacked := _lacked(node):
            raise ScoringFailed(
                f"the tests in the answer use {lacked}, and the sandbox has Python's standard library, pytest's "
                f"{', '.join(PYTEST)}, and the answer as the module {' or '.join(SOLUTIONS)}; leave the row out"
            )
    called = {_called(node) for node in nodes}
    for node in own:
        name, needed = _fixtures(node)
        if needed and name not in called:
            raise ScoringFailed(
                f"the tests in the answer have {name}({', '.join(needed)}), which nothing calls with arguments; "
                "call it, or leave the row out"
            )
    if "def check(" not in tests or any(line.startswith("check(") for line in tests.splitlines()):
        return tests
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise ScoringFailed(
            f"the tests in the answer have check(candidate), and entry_point is {shown(entry_point)}; name the "
            "function in the column entry_point"
        )
    return f"{tests}\ncheck({entry_point})\n"


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:  # of NUL bytes and of deep nesting, too
        raise ScoringFailed(f"the tests in the answer {shown(text)} are no Python: {said_by(cause)}") from None


def _called(node: ast.AST) -> str:
    """Return the name of the function or method that ``node`` calls; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _lacked(node: ast.AST) -> str:
    """Return the module or pytest name in ``node`` that tests cannot use; empty if there is none."""
    match node:
        case ast.Import(names=names):
            modules = [name.name.partition(".")[0] for name in names]
        case ast.ImportFrom(module="pytest", names=names):
            return next((f"pytest.{name.name}" for name in names if name.name not in PYTEST), "")
        case ast.ImportFrom(module=module, level=level):
            modules = [("." * level + (module or "")).partition(".")[0] or "."]
        case ast.Attribute(value=ast.Name(id="pytest"), attr=name):
            return "" if name in PYTEST else f"pytest.{name}"
        case _:
            return ""
    known = {*sys.stdlib_module_names, *SOLUTIONS, "pytest"}
    return next((f"the module {name}" for name in modules if name not in known), "")


def _fixtures(node: ast.AST) -> tuple[str, list[str]]:
    """Return the name of a test function, and its parameters that need a value and that no ``parametrize`` gives."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
        return "", []
    if any("parametrize" in ast.unparse(one) for one in node.decorator_list):
        return node.name, []
    arguments = [*node.args.posonlyargs, *node.args.args]
    needed = [one.arg for one in arguments[: len(arguments) - len(node.args.defaults)]]
    return node.name, [name for name in needed if name != "self"]


def _text(value: Any) -> str:
    """Return standard input or output as text, from text or a list of its lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else str(value)


def _parsed(value: Any) -> Any:
    """Parse JSON text; return other values as they are. Raises `ScoringFailed` for damaged JSON."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as cause:
        raise ScoringFailed(f"the tests in the answer begin like JSON, and are none: {cause}; {EXPECTED}") from None
