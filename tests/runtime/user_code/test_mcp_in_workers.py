"""MCP servers in worker processes: called from shared ones and from those without a loop, and ended with them."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from pathlib import Path

import pytest

from headway.agents.episodes.program_workers import ProgramWorkers
from headway.agents.interface.program_messages import EpisodeStart, TurnRequest, said
from headway.config.schema import Config
from headway.config.sections.agent_section import AgentConfig
from tests.agents.programs.scripted import Script, calling
from tests.tiers import mostly_slow

pytest.importorskip("mcp", reason="the extra mcp")

SERVER = Path(__file__).parents[2] / "agents" / "programs" / "a_server.py"
BLOCKING = 'def wait() -> str:\n    """Wait."""\n    return "waited"\n'


def wait_for_the_end(process: int) -> None:
    """Wait for a process that is no child of this one."""
    try:
        ends = os.pidfd_open(process)
    except ProcessLookupError:
        return
    waiting = select.poll()
    waiting.register(ends, select.POLLIN)
    assert waiting.poll(60_000), f"process {process} has survived its worker"
    os.close(ends)


@mostly_slow("tools", ["asynchronous", "synchronous"], quick=[])
async def test_a_servers_process_serves_the_episodes_of_a_worker_and_none_survives_it(tmp_path, tools):
    """WorkerPool and servers are processes of Python, some of which import transformers or the SDK."""
    (tmp_path / "tools.py").write_text(BLOCKING)
    agent = AgentConfig(
        tools=[f"{tmp_path}/tools.py:wait"] if tools == "synchronous" else [],
        mcp={"digits": {"command": [sys.executable, str(SERVER), "stays"]}},
        workers=1,
        environment_processes=1,
    )
    workers = ProgramWorkers("episode-worker", Config(agent=agent), tmp_path)
    try:
        described = await workers.start()
        assert described.is_async is (tools == "asynchronous")
        counted = []
        for k in range(2):
            ask = Script(calling(("count", {})), "done")

            async def turn(request: TurnRequest, ask=ask):
                return await ask(request)

            await workers.run(EpisodeStart(f"episode {k}", [said("user", "Count.")], {}, k), turn)
            counted.append(ask.last[-1][1])
        assert [text.partition(" ")[0] for text in counted] == ["1", "2"], counted
        server = int(counted[-1].rpartition(" ")[2])
        os.kill(server, 0)
    finally:
        await workers.close()
    await asyncio.to_thread(wait_for_the_end, server)
    assert "has started threads" not in (tmp_path / "episode-worker-programs.log").read_text(), "a process was forked"
