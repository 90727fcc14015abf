"""The examples of docs/agents.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from tests.agents.programs.scripted import Script, calling, play, start

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The examples, each in the file that its first line names."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    return tmp_path


async def test_the_tool(files):
    ask = Script(calling(("look_up", {"key": "y"})), "4")
    await play(ProgramSpec(tools=(f"{files}/tools.py:look_up",)), ask)
    assert ask.last[-1] == ("tool", "4")


async def test_the_tool_in_verls_form(files):
    [config] = re.findall(r"```yaml\n# tools.yaml.*?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (files / "tools.yaml").write_text(config)
    ask = Script(calling(("check", {"answer": "7"})), calling(("check", {"answer": "42"})), "42")
    row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "42"}}}}}
    end = await play(ProgramSpec(tools=(f"{files}/tools.yaml",)), ask, start(**row))
    assert (end.turn_rewards, ask.last[-1]) == ((-0.1, 0.0, 0.0), ("tool", "True"))


async def test_the_environment_in_trls_form(files):
    ask = Script(calling(("increment", {"step": 3})), "done")
    end = await play(ProgramSpec(environment=f"{files}/counter.py:Counter"), ask, start("Go."))
    assert (end.reward, ask.last[0]) == (1.0, ("user", "Go. Count to 3."))


async def test_the_environment_in_gymnasiums_form(files):
    end = await play(ProgramSpec(environment=f"{files}/guess.py:Guess"), Script(*map(str, range(16))))
    assert end.turn_rewards[-1] == sum(end.turn_rewards) == 1.0


async def test_the_environment_in_skyrls_form(files):
    end = await play(ProgramSpec(environment=f"{files}/sums.py:Sums"), Script("41", "42"))
    assert end.turn_rewards == (0.0, 1.0)


async def test_the_program(files):
    end = await play(ProgramSpec(program=f"{files}/debate.py:run"), Script("41", "42", "yes"))
    assert (end.reward, end.turn_rewards) == (1.0, (0.0, 0.0, 1.0))
