"""Program that runs an answer in the sandbox, and then its tests, or the call of its function.

It also runs tests that are only defined: functions and classes as pytest finds them, `unittest.TestCase`. The answer
can be imported as the modules `SOLUTIONS`; of pytest there is only what `PYTEST` names.
"""

from __future__ import annotations

ANSWER, JOB = "answer.py", "job.json"
SOLUTIONS = ("solution", "answer", "submission")
"""Modules from which tests may import the answer's names."""
PYTEST = ("raises", "approx", "mark", "main")
"""Names of pytest, which the sandbox lacks, that tests may use; of its marks, those that need no plugin."""
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
PREPARE = """
import contextlib, inspect, math, re, sys, types
pytest = types.ModuleType("pytest")
@contextlib.contextmanager
def raises(expected, match=None):
    info = types.SimpleNamespace(value=None)
    try:
        yield info
    except expected as error:
        info.value = error
        assert match is None or re.search(match, str(error))
    else:
        raise AssertionError("nothing was raised")
class approx:
    def __init__(self, expected, rel=None, abs=None):
        self.expected, self.rel, self.abs = expected, rel, abs
    def __eq__(self, other):
        one = self.expected
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(approx(one[k], self.rel, self.abs) == other[k] for k in one)
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(approx(a, self.rel, self.abs) == b for a, b in zip(one, other))
        rel = 1e-6 if self.rel is None and self.abs is None else self.rel or 0.0
        return one == other or math.isclose(one, other, rel_tol=rel, abs_tol=1e-12 if self.abs is None else self.abs)
class mark:
    def __getattr__(self, name):
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda test: test
    def parametrize(self, names, values, **_):
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, value if len(keys) > 1 else [value])) for value in values]
        def decorate(test):
            test.cases = [{**row, **case} for row in rows for case in getattr(test, "cases", [{}])]
            return test
        return decorate
pytest.raises, pytest.approx, pytest.mark, pytest.main = raises, approx, mark(), lambda *_, **__: 0
sys.modules["pytest"] = pytest
def call(test):
    for case in getattr(test, "cases", [{}]):
        given = test(**case)
        if inspect.iscoroutine(given):
            import asyncio
            asyncio.run(given)
def needs(test):
    parameters = inspect.signature(test).parameters.values()
    return [one for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
def call_all(names, before):
    unittest = sys.modules.get("unittest")
    for name, one in list(names.items()):
        if before.get(name) is one:
            continue
        if inspect.isclass(one) and unittest and issubclass(one, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(one).run(result)
            assert result.wasSuccessful()
        elif inspect.isclass(one) and name.startswith("Test"):
            for method in [method for method in vars(one) if method.startswith("test")]:
                instance = one()
                setup = getattr(instance, "setup_method", lambda: None)
                setup(*map(getattr, [instance] * len(needs(setup)), [method]))
                call(getattr(instance, method))
        elif inspect.isfunction(one) and name.startswith("test") and (hasattr(one, "cases") or not needs(one)):
            call(one)
def prepare(names, tests):
    if "unittest" in tests:
        import unittest
        unittest.main = lambda *_, **__: None
    for name in SOLUTIONS:
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update({key: value for key, value in names.items() if not key.startswith("__")})
    names["__name__"] = "__main__"
"""
"""Code that defines `prepare` and `call_all`, which the driver calls for tests once the answer has run."""
# The job is unlinked and output redirected before the answer runs: it must neither read the word nor print.
# `write`, `leave` and `dumps` have names of their own: the answer may replace them in their modules.
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
    tools = {{"SOLUTIONS": {SOLUTIONS!r}}}
    if "tests" in job:
        exec({PREPARE!r}, tools)
    with open({ANSWER!r}, encoding="utf-8") as file:
        exec(compile(file.read(), {ANSWER!r}, "exec"), names)
    told = ""
    if "tests" in job:
        tools["prepare"](names, job["tests"])
        before = dict(names)
        exec(compile(job["tests"], "tests.py", "exec"), names)
        tools["call_all"](names, before)
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
"""Program that runs an answer after the usual imports, and then asserts, or calls its function."""
