"""The built-in tool ``python``: what it tells the model of code, and how it is chosen."""

from __future__ import annotations

import asyncio
import pickle
import shutil

import pytest

from headway.agents.adapters.program_loader import ProgramSpec, Tool, load_tools
from headway.errors import ConfigError, SandboxFailed, Unavailable, UserCodeError
from headway.runtime.sandbox import sandbox as door
from headway.runtime.sandbox.python_tool import MOST_SHOWN, told
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxResult, SandboxSpec
from tests.agents.programs.scripted import Script, calling, play

SPEC = SandboxSpec("bubblewrap", SandboxLimits(wall_s=20.0, memory_mib=256, processes=16, output_kib=32, scratch_mib=8))


@pytest.fixture(scope="module")
def python() -> Tool:
    if shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap here: apt install bubblewrap")
    [tool] = load_tools(["python"], SPEC)
    return tool


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(1)\n1 + 1", "1\n2"),
        pytest.param("x = 3", "(the code printed nothing)", marks=pytest.mark.slow),
        pytest.param("x = 3\nx", "3", marks=pytest.mark.slow),
        pytest.param("None", "(the code printed nothing)", marks=pytest.mark.slow),
        pytest.param("'a'", "'a'", marks=pytest.mark.slow),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(10)", "3628800"),
        ("import sys; print('warning', file=sys.stderr); 1", "1\nwarning"),
        ("import sys; sys.exit(3)", "Error: the code ended with exit code 3"),
        pytest.param("print('ü')", "ü", marks=pytest.mark.slow),
        pytest.param("if __name__ == '__main__': print('main')", "main", marks=pytest.mark.slow),
        ("import inspect\ndef g(): return 1\nprint(g.__module__)", "__main__"),
    ],
)
async def test_the_model_is_told_what_was_printed_and_the_last_value(python: Tool, code: str, says: str) -> None:
    result = await python.call({"code": code})
    assert (result.text, result.failed) == (says, False)


async def test_the_model_is_told_where_its_code_failed(python: Tool) -> None:
    result = await python.call({"code": "def f():\n    return 1 / 0\n\nprint('before')\nf()"})
    lines = result.text.splitlines()
    assert lines[:2] == ["before", "Traceback (most recent call last):"]
    assert '  File "code.py", line 5, in <module>' in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_the_model_is_told_of_code_that_is_no_python(python: Tool) -> None:
    assert (await python.call({"code": "def"})).text.endswith("SyntaxError: invalid syntax")


async def test_a_deep_traceback_is_told_by_its_end(python: Tool) -> None:
    result = await python.call({"code": "def f(n): return f(n + 1) + (n and 1)\ndef g(n): return f(n)\nf(0)"})
    assert result.text.startswith("…\n")
    assert "RecursionError" in result.text.splitlines()[-1]


async def test_each_call_is_a_fresh_interpreter_and_scratch_space(python: Tool) -> None:
    await python.call({"code": "x = 1; open('f', 'w').close()"})
    assert (await python.call({"code": "import os; ('x' in globals(), os.path.exists('f'))"})).text == "(False, False)"


async def test_calls_of_several_episodes_run_side_by_side(python: Tool) -> None:
    results = await asyncio.gather(*(python.call({"code": f"{n} * 2"}) for n in range(5)))
    assert [result.text for result in results] == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize(
    ("ran", "says"),
    [
        (SandboxResult("a\n", "", 137, "wall"), "a\nError: the code was ended, for it took longer than 20 s"),
        (SandboxResult("", "", 137, "memory"), "Error: the code was ended, for it took more than 256 MiB of memory"),
        (SandboxResult("", "", 137, "output"), "Error: the code was ended, for it printed more than 32 KiB"),
        (SandboxResult("", "", 139, None), "Error: the code ended with exit code 139"),
    ],
)
def test_the_model_is_told_which_limit_ended_its_code(ran: SandboxResult, says: str) -> None:
    assert told(ran, SPEC.limits) == says


def test_the_model_is_told_that_loopback_is_refused_too(python: Tool) -> None:
    result = asyncio.run(python.call({"code": "import socket; socket.create_server(('127.0.0.1', 0))"}))
    assert result.text.endswith("IPv4 and IPv6 are refused, loopback (127.0.0.1, ::1) included")


def test_long_output_is_told_by_its_beginning_and_its_end() -> None:
    text = told(SandboxResult("a" * 10000 + "z", "", 0), SPEC.limits)
    assert len(text) < MOST_SHOWN + 100
    assert text.startswith("aaa") and text.endswith("az")
    assert "6001 characters left out" in text


def test_the_tool_is_asynchronous_so_that_episodes_share_a_worker(python: Tool) -> None:
    assert python.is_async
    function = python.schema["function"]
    assert function["name"] == "python"
    assert list(function["parameters"]["properties"]) == ["code"]


async def test_an_episode_calls_the_tool_and_goes_on(python: Tool) -> None:
    spec = pickle.loads(pickle.dumps(ProgramSpec(tools=("python",), sandbox=SPEC).resolved()))
    loaded = spec.load()
    assert loaded.describe().is_async
    ask = Script(calling(("python", {"code": "6 * 7"})), "42")
    await play(loaded, ask)
    assert [content for role, content in ask.last if role == "tool"] == ["42"]


async def test_a_sandbox_that_fails_is_no_news_for_the_model(python: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> SandboxResult:
        raise SandboxFailed("no memory is left")

    monkeypatch.setattr(door.Sandbox, "run", fail)
    with pytest.raises(Unavailable, match="no memory is left"):
        await python.call({"code": "1"})


def test_another_bare_name_is_no_tool() -> None:
    with pytest.raises(UserCodeError, match="pythn"):
        load_tools(["pythn"], SPEC)


def test_a_machine_without_a_sandbox_refuses_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        ProgramSpec(tools=("python",), sandbox=SPEC).load()
