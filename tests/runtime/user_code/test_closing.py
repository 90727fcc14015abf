"""Environments are closed: at the end of the run those that are kept, and at once those that are not used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.agents.episodes.program_workers import ProgramWorkers
from headway.agents.interface.program_messages import EpisodeStart, TurnRequest, said
from headway.config.schema import Config
from headway.config.sections.agent_section import AgentConfig
from headway.errors import ProgramFailed
from tests.agents.programs.scripted import Script
from tests.tiers import mostly_slow

GAME = """
import os
from pathlib import Path
LOG = Path(__file__).with_name("log")
def note(what):
    with LOG.open("a") as file:
        file.write(what + "\\n")
class Game:
    def __init__(self):
        note("made")
    {a}def reset(self, seed=None, options=None):
        return "hello", {{}}
    {a}def step(self, action):
        if action == "fail":
            raise ValueError("no")
        return "over", 1.0, True, False, {{}}
    {a}def close(self):
        note("closed")
        raise RuntimeError("an end that fails costs nothing")
"""


@mostly_slow("a", ["", "async "], quick=["async "])
async def test_every_environment_that_was_made_is_closed(a: str, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME.format(a=a))

    agent = AgentConfig(environment=f"{tmp_path}/game.py:Game", workers=1, environment_processes=1)
    workers = ProgramWorkers("episode-worker", Config(agent=agent), tmp_path)

    async def episode(k: int, answer: str) -> None:
        script = Script(answer)

        async def ask(request: TurnRequest) -> object:
            return await script(request)

        await workers.run(EpisodeStart(f"episode {k}", [said("user", "go")], {}, k), ask)

    try:
        await workers.start()
        for k in range(2):
            await episode(k, "go")
        closed = read(tmp_path).count("closed")
        with pytest.raises(ProgramFailed, match="ValueError: no"):
            await episode(2, "fail")
        assert read(tmp_path).count("closed") == closed + 1
        await episode(3, "go")
    finally:
        await workers.close()
    assert read(tmp_path).count("closed") == read(tmp_path).count("made") >= 2


def read(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()
