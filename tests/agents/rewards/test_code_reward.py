"""The reward ``code``: forms of tests, what passes, and what an answer that cheats does not get."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.agents.rewards import code_reward as code_module
from headway.agents.rewards.built_in import make_rule
from headway.agents.rewards.code_driver import ANSWER, JOB, PREPARE
from headway.agents.rewards.code_reward import code_of, same_text, same_value
from headway.agents.rewards.code_tests import AssertTest, CallTest, StdinTest, unit_tests_of
from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import RewardSpec, Scorer
from headway.errors import ConfigError, SandboxFailed, ScoringFailed
from headway.runtime.sandbox import sandbox as door
from headway.runtime.sandbox.sandbox_call import ENDS_S, SandboxLimits, SandboxResult, SandboxSpec
from tests.agents.rewards.parts import part_of
from tests.tiers import mostly_slow, searched

SPEC = SandboxSpec("bubblewrap", SandboxLimits(memory_mib=256, processes=16, output_kib=32, scratch_mib=8))
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap here: apt install bubblewrap")
DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]}
ADDS = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}


def value(response: str, answer: Any, extra: dict[str, Any] | None = None, **params: Any) -> float:
    rule = make_rule("code", {"timeout_s": 20, **params}, sandbox=SPEC, within_s=60)
    request = ScoreRequest("?", [response], answer, "test", extra or {})
    return rule(request, request.response(0))


def fenced(code: str) -> str:
    return f"I think so:\n```python\n{code}\n```\nThat is it."


# ---------------------------------------------------------------------------------------------- forms


FORMS = [
    ("print(int(input()) * 2)", DOUBLE, {}, 1.0),
    ("print(2)", DOUBLE, {}, 0.0),
    ("def add(a, b): return a + b", json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}), {}, 1.0),
    ("class Solution:\n  def add(self, a: List[int]): return sum(a)",
     {"inputs": [[[1, 2]]], "outputs": [[3]], "fn_name": "add"}, {}, 1.0),
    ("def f(a, b): print(7); return a + b",
     [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}], {}, 1.0),
    ("print(input())", [{"input": "a", "output": "a", "type": "stdin_stdout"}], {}, 1.0),
    ("def add(a, b): return a + b", ADDS, {}, 1.0),
    ("def add(a, b): return 3", ADDS, {}, 0.0),
    ("def add(a, b): return a + b", "assert add(1, 2) == 3\nassert add(1, 1) == 2", {}, 1.0),
    ("def add(a, b): return a + b", "def check(candidate):\n    assert candidate(1, 2) == 3\n",
     {"entry_point": "add"}, 1.0),
    ("def add(a, b): return a - b", {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
                                     "entry_point": "add"}, {}, 0.0),
]  # fmt: skip


@needs_bwrap
@mostly_slow(("code", "answer", "extra", "score"), FORMS, quick=[FORMS[0], FORMS[3], FORMS[9]])
def test_each_form_of_tests_is_recognised_and_run(code: str, answer: Any, extra: dict[str, Any], score: float) -> None:
    """Starts a sandbox and an interpreter for the trial of the tests and for each test."""
    assert value(fenced(code), answer, extra) == score


@pytest.mark.parametrize(
    ("answer", "extra", "tests"),
    [
        (DOUBLE, {}, [StdinTest("1\n", "2\n"), StdinTest("21\n", "42\n")]),
        ({"inputs": np.array(["1"], object), "outputs": np.array(["2"], object)}, {}, [StdinTest("1", "2")]),
        ({"inputs": [["a", "b"]], "outputs": [["c"]]}, {}, [StdinTest("a\nb", "c")]),
        (DOUBLE | {"inputs": ["1", "2"]}, {"fn_name": "f"}, [CallTest("f", [1], 2), CallTest("f", [2], 42)]),
        ({"inputs": ["1"], "outputs": ["2"]}, {"metadata": "{'difficulty': 'easy'}"}, [StdinTest("1", "2")]),
        ({"inputs": ["1"], "outputs": ["2"]}, {"metadata": {"func_name": "g"}, "func_name": "g"},
         [StdinTest("1", "2")]),
        ({"inputs": ["1"], "outputs": ["2"]}, {"metadata": {"func_name": "g"}, "fn_name": "f"},
         [CallTest("f", [1], 2)]),
        ([{"input": "[1]\n2", "output": "text", "type": "function_call", "fn_name": "f"}], {},
         [CallTest("f", [[1], 2], "text")]),
        ({"tests": [{"input": "1", "output": "2"}]}, {}, [StdinTest("1", "2")]),
        ({"tests": '[{"input": "1", "output": "2"}]'}, {}, [StdinTest("1", "2")]),
        ({"test_list": ["assert a"], "test_setup_code": "import re"}, {}, [AssertTest("import re\nassert a")]),
        ({"test_list": np.array(["assert a"], object), "test_imports": None}, {}, [AssertTest("assert a")]),
        ('["assert a", "assert b"]', {}, [AssertTest("assert a"), AssertTest("assert b")]),
        ("def check(candidate): pass\ncheck(f)", {}, [AssertTest("def check(candidate): pass\ncheck(f)")]),
    ],
)  # fmt: skip
def test_data_of_each_form_become_tests(answer: Any, extra: dict[str, Any], tests: list[Any]) -> None:
    assert unit_tests_of(answer, extra) == tests


@pytest.mark.parametrize(
    ("answer", "extra", "message"),
    [
        (None, {}, "there are no tests in the answer None"),
        (5, {}, "there are no tests in the answer 5"),
        ("", {}, "no tests in the answer ''"),
        ("42", {}, "the answer '42' has no assert"),
        (["f(1)"], {}, r"the answer 'f\(1\)' has no assert"),
        ("{not json", {}, "like JSON"),
        ([], {}, r"the answer \[\] has no tests"),
        ({"inputs": [], "outputs": []}, {}, "has no tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "have 1 and 0 inputs and outputs"),
        ({"inputs": 1, "outputs": []}, {}, "have 1 and 0 inputs and outputs"),
        ({"question": "?"}, {}, "no tests in the answer"),
        ([{"input": "1"}], {}, "of the tests in the answer is {'input': '1'}"),
        ([1, "assert a"], {}, "of the tests in the answer is 1"),
        ({"tests": 3}, {}, "the tests in the answer are 3"),
        ([{"input": "1", "output": "2", "type": "vision"}], {}, "has the type 'vision'; known are stdin"),
        ([{"input": "1", "output": "2", "type": "functional"}], {}, "fn_name does not name"),
        ([{"input": "x y", "output": "2", "fn_name": "f"}], {}, "the arguments of f, 'x y', are no JSON"),
        ({"inputs": [3], "outputs": [3], "fn_name": "f"}, {}, "the arguments of f are 3; expected a list"),
        ("# assert add(1, 2) == 3", {}, "has no assert"),
        ("import numpy\nassert f(1)", {}, "module numpy"),
        ("import pytest\n@pytest.fixture\ndef x(): assert 1", {}, "use pytest.fixture"),
        ("def test_f(tmp_path):\n    assert f(tmp_path)", {}, r"test_f\(tmp_path\), which nothing calls"),
        ("assert f(1) = 2", {}, "are no Python"),
        ("def check(candidate): pass", {}, r"have check\(candidate\), and entry_point is None"),
        ("def check(candidate): pass", {"entry_point": "a b"}, "entry_point is 'a b'"),
    ],
)
def test_wrong_data_is_told_in_one_line(answer: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoringFailed, match=message) as failed:
        unit_tests_of(answer, extra)
    assert "\n" not in str(failed.value)


CONTENTS = ["inputs", "outputs", "input", "output", "tests", "test", "test_imports", "test_setup_code"]
KEYS = [*CONTENTS, "fn_name", "type", "metadata"]


@searched(
    100,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    ),
)
def test_any_data_gives_tests_or_one_message(answer: Any) -> None:
    with suppress(ScoringFailed):
        assert unit_tests_of(answer, {})


# ---------------------------------------------------------------------------------------------- tests that are called

PYTEST_CLASS = """
import pytest
class TestAdd:
    def setup_method(self):
        self.three = 3
    def test_add(self):
        assert add(1, 2) == pytest.approx(self.three)
        with pytest.raises(TypeError):
            add(1, "a")
"""
UNITTEST = """
import unittest
class Adds(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
if __name__ == "__main__":
    unittest.main()
"""
CASES = """
import pytest
from solution import add
@pytest.mark.parametrize("a, b", [(1, 2), (2, 1)])
@pytest.mark.parametrize("expected", [3])
def test_add(a, b, expected):
    assert add(a, b) == expected
"""


DEFINED = [
    ["def test_add():\n    assert add(1, 2) == 3"],
    PYTEST_CLASS,
    UNITTEST,
    CASES,
    "if __name__ == '__main__':\n    assert add(1, 2) == 3",
    "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3",
    "async def test_add():\n    assert add(1, 2) == 3",
    "def test_it(want):\n    assert add(1, 2) == want\ntest_it(3)",
]


@mostly_slow("tests", DEFINED, quick=[UNITTEST])
def test_tests_that_are_only_defined_are_called(tests: Any) -> None:
    rule = make_rule("code", {}, sandbox=SandboxSpec("process_limits"), within_s=60)
    codes = ["def add(a, b): return a + b", "def add(a, b): return 0", ""]
    request = ScoreRequest("?", [fenced(code) for code in codes], tests, "test", {})
    assert [rule(request, request.response(k)) for k in range(3)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "tests",
    [
        "def run():\n    assert add(1, 2) == 3",
        pytest.param("try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass", marks=pytest.mark.slow),
        "def add(a, b): return a + b\nassert add(1, 2) == 3",
        pytest.param({"inputs": ["1"], "outputs": [""]}, marks=pytest.mark.slow),
    ],
)
def test_tests_that_no_answer_can_fail_are_refused(tests: Any) -> None:
    rule = make_rule("code", {}, sandbox=SandboxSpec("process_limits"), within_s=60)
    request = ScoreRequest("?", ["def add(a, b): return 0"], tests, "test", {})
    with pytest.raises(ScoringFailed, match="are passed by an empty answer"):
        rule(request, request.response(0))


# ---------------------------------------------------------------------------------------------- code of a response


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\n\n```python\nb\n```", "b\n"),
        ("```py\na\n```\nIt prints\n```\n42\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\nwas cut off", "was cut off"),
        ("````python\n```\na\n```\n````", "```\na\n```\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("", ""),
    ],
)
def test_the_last_block_of_python_is_the_answers_code(response: str, code: str) -> None:
    assert code_of(response) == code


# ---------------------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("1  2", "1 2", True),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("nan", "1.0", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("", "1", False),
        ("1e400", "1.0", False),
    ],
)
def test_printed_text_is_compared_line_by_line(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("told", "expected", "same"),
    [
        ("3", 3, True),
        ("3", [3], True),
        ("[1, 2]", [[1, 2]], True),
        ("[1, 2]", [1, 2], True),
        ("[1, 2]", (1, 2), True),
        ("0.1", 0.10000000001, True),
        ("[0.1]", [[0.2]], False),
        ("true", 1.0, False),
        ('{"a": [1.0]}', {"a": [1]}, True),
        ('{"1": 2}', {1: 2}, True),
        ("no json", 3, False),
        ("1" * 5000, 1.5, False),
        ("[" * 100000, 3, False),
    ],
)
def test_returned_values_are_compared_as_plain_data(told: str, expected: Any, same: bool) -> None:
    assert same_value(told, expected) is same


# ---------------------------------------------------------------------------------------------- cheating


LEAVING = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "print('passed'); raise SystemExit",
    "import os\nos.write(1, b'passed')\nos._exit(0)",
    "import json, os\nprint([open('/proc/self/fd/0').read(), os.listdir('.')]); os._exit(0)",
    "import os\nfor fd in range(20):\n  try: os.write(fd, b'0' * 32)\n  except OSError: pass\nos._exit(0)",
    "import atexit, os; atexit.register(os._exit, 0); 1 / 0",
    "import threading, os; threading.Timer(0, os._exit, (0,)).start(); import time; time.sleep(9)",
    "raise KeyboardInterrupt",
    "import signal, os; os.kill(os.getpid(), signal.SIGTERM)",
    "def add(a, b): import os; os._exit(0)",
]


@needs_bwrap
@mostly_slow("code", LEAVING, quick=[LEAVING[1], LEAVING[7]])
def test_asserts_are_not_passed_by_leaving_or_printing(code: str) -> None:
    """Starts a sandbox and an interpreter for the trial of the tests and for each test."""
    assert value(code, ADDS, most_tests=1) == 0.0


@needs_bwrap
def test_an_answer_finds_no_expected_output() -> None:
    code = """
import gc, os, sys
seen = []
for where, _, files in os.walk("/tmp"):
    seen += [open(os.path.join(where, name)).read() for name in files]
for pid in filter(str.isdigit, os.listdir("/proc")):
    seen.append(open(f"/proc/{pid}/cmdline").read() + open(f"/proc/{pid}/environ").read())
print("the-expected" + "-output" if any("the-expected" + "-output" in one for one in seen) else "not found")
"""
    assert value(code, {"inputs": [""], "outputs": ["not found"]}) == 1.0
    assert value(code, {"inputs": [""], "outputs": ["the-expected-output"]}) == 0.0


@needs_bwrap
def test_tests_that_are_malicious_stay_inside(tmp_path) -> None:
    target = tmp_path / "written"
    assert value("pass", f"open({str(target)!r}, 'w').close()\nassert True") == 0.0
    assert not target.exists()


# ---------------------------------------------------------------------------------------------- parameters and limits


@needs_bwrap
def test_with_partial_the_share_of_passed_tests_is_the_reward() -> None:
    assert value("print(2)", DOUBLE, partial=True) == 0.5


@needs_bwrap
def test_the_longest_tests_are_run_where_there_are_too_many() -> None:
    answer = {"inputs": ["1", "333", "22", ""], "outputs": ["wrong", "333", "22", "wrong"]}
    assert value("print(input())", answer, most_tests=2) == 1.0
    assert value("print(input())", answer, most_tests=None, partial=True) == 0.5


@needs_bwrap
def test_an_answer_that_does_not_end_gets_nothing_within_its_time() -> None:
    began = time.monotonic()
    rule = make_rule("code", {"partial": True}, sandbox=SPEC, within_s=1.0)
    tests = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    request = ScoreRequest("?", ["while True: pass"], tests, "test", {})
    assert rule(request, request.response(0)) == 0.0
    assert time.monotonic() - began < 10


@needs_bwrap
def test_the_scorer_hands_sandbox_and_time_to_the_reward() -> None:
    spec = RewardSpec((part_of("code", partial=True),), timeout_s=60.0, sandbox=SPEC)
    responses = [fenced("print(int(input()) * 2)"), fenced("print(2)"), "no code at all"]
    scores = asyncio.run(Scorer(spec).serve(ScoreRequest("?", responses, DOUBLE, "test", {})))
    assert scores.rewards.tolist() == [1.0, 0.5, 0.0]


@needs_bwrap
def test_a_sandbox_that_fails_is_no_reward_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = make_rule("code", {}, sandbox=SPEC, within_s=10)

    def fail(*_: object, **__: object) -> None:
        raise SandboxFailed("no memory is left")

    monkeypatch.setattr(door.Sandbox, "run_blocking", fail)
    with pytest.raises(ScoringFailed, match="no memory is left"):
        rule(request := ScoreRequest("?", ["print(1)"], DOUBLE, "test", {}), request.response(0))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"partial": "yes"}, "reward.params.partial: expected true or false, not 'yes'"),
        ({"most_tests": 0}, "reward.params.most_tests: expected a number from 1"),
        ({"most_tests": True}, "reward.params.most_tests: expected a number from 1"),
        ({"timeout_s": 0}, "reward.params.timeout_s: .*above 0"),
        (
            {"timeout": 3},
            r"code has no parameter 'timeout' \(did you mean 'timeout_s'\?\); it takes partial, most_tests",
        ),
        ({"sandbox": 3}, "code has no parameter 'sandbox'"),
    ],
)
def test_parameters_that_do_not_fit_are_told(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rule("code", params, sandbox=SPEC, within_s=10)


def test_code_that_uses_up_its_time_is_scored_however_long_its_sandbox_takes_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []

    def run(*_: object, limits: SandboxLimits, **__: object) -> SandboxResult:
        left.append(signal.getitimer(signal.ITIMER_REAL)[0] - limits.wall_s)
        return SandboxResult("", "", 137, "wall")

    monkeypatch.setattr(door.Sandbox, "probe", lambda _: None)
    monkeypatch.setattr(door.Sandbox, "run_blocking", run)
    part = part_of("code", timeout_s=20)
    scorer = Scorer(RewardSpec((part,), timeout_s=0.5, sandbox=SandboxSpec("process_limits")))
    scores = asyncio.run(scorer.serve(ScoreRequest("?", [""], DOUBLE, "test", {})))
    assert scores.rewards.tolist() == [0.0]
    assert left[0] > 4 * ENDS_S, "all that a call waits for, beside its code, is waited for less long"


@pytest.mark.parametrize(("workers", "at_once"), [(1, 4), (2, 2)])
def test_as_many_responses_of_a_group_run_side_by_side_as_the_worker_has_cores(
    monkeypatch: pytest.MonkeyPatch, workers: int, at_once: int
) -> None:
    """Each call ends only when so many are under way."""
    meeting, waiting, most = threading.Barrier(at_once, timeout=60), [], []

    def run(*_: object, files: dict[str, str], **__: object) -> SandboxResult:
        waiting.append(1)
        most.append(len(waiting))
        meeting.wait()
        waiting.pop()
        meeting.wait()
        return SandboxResult(files[ANSWER], "", 0)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(door.Sandbox, "probe", lambda _: None)
    monkeypatch.setattr(door.Sandbox, "run_blocking", run)
    spec = RewardSpec((part_of("code"),), 60.0, sandbox=SandboxSpec("process_limits"), workers=workers)
    request = ScoreRequest("?", ["2", "3", "2", "2", "3", "2", "3", "3"], {"inputs": ["1"], "outputs": ["2"]}, "", {})
    scores = asyncio.run(Scorer(spec).serve(request))
    assert scores.rewards.tolist() == [1, 0, 1, 1, 0, 1, 0, 0]
    assert max(most) == at_once


def test_the_trial_of_a_rows_tests_has_as_long_as_the_tests_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test takes all of its time, and is passed."""
    now = [0.0]

    def run(*_: object, files: dict[str, str], limits: SandboxLimits, **__: object) -> SandboxResult:
        now[0] += limits.wall_s
        return SandboxResult(json.loads(files[JOB])["word"], "", 0)

    monkeypatch.setattr(code_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(door.Sandbox, "probe", lambda _: None)
    monkeypatch.setattr(door.Sandbox, "run_blocking", run)
    rule = make_rule("code", {"timeout_s": 5}, sandbox=SandboxSpec("process_limits"), within_s=12)
    tests = ["try:\n  assert f()\nexcept ValueError: pass"] * 20
    request = ScoreRequest("?", ["f = None"], tests, "test", {})
    assert rule(request, request.response(0)) == 0.0
    assert now == [24]


def test_a_machine_without_a_sandbox_refuses_the_reward(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        make_rule("code", {}, sandbox=SPEC, within_s=10)


def test_raises_of_a_rows_tests_fails_where_nothing_or_another_text_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", pytest)  # to be there again: rows get one of their own
    exec(PREPARE, names := dict[str, Any]())
    with names["raises"](ValueError, match="too la.ge") as info:
        raise ValueError("it is too large")
    assert str(info.value) == "it is too large"
    with pytest.raises(AssertionError, match="nothing was raised"), names["raises"](ValueError):
        pass
    with pytest.raises(AssertionError), names["raises"](ValueError, match="small"):
        raise ValueError("it is too large")
    with pytest.raises(KeyError), names["raises"](ValueError):
        raise KeyError("another")
