"""TRL's environments: those that it comes with, over a sandbox and a server that are here, and one as in its guide."""

import asyncio
import subprocess
from functools import partial
from types import SimpleNamespace

from trl.experimental.harbor import HarborBashEnv
from trl.experimental.openreward.environment import _RolloutEnvironment


class Sandbox:
    """Harbor's sandbox, as a shell in a folder."""

    def __init__(self, folder):
        self.folder = folder

    async def exec(self, command, timeout_sec=None):
        run = partial(subprocess.run, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)
        done = await asyncio.to_thread(run, ["bash", "-c", command])
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    async def stop(self, delete):
        pass


class LocalHarbor(HarborBashEnv):
    """TRL's environment over Harbor; only where the sandbox comes from is changed."""

    async def _start(self, task_dir):
        self._env = Sandbox(task_dir)
        return "How many lines has data.txt? Write the number to answer.txt."

    async def _verify(self):
        answer = await self._env.exec("cat answer.txt")
        return float(answer.stdout.strip() == "3")


class Session:
    """A session of an ORS server: a game of three rooms."""

    def __init__(self, task):
        self.task, self.room = task, 0

    def __enter__(self):
        return self

    def __exit__(self, *exit):
        pass

    def get_prompt(self):
        return [{"type": "text", "text": f"Task {self.task}: find the exit."}]

    def call_tool(self, name, arguments):
        self.room += arguments["steps"]
        out = self.room >= 3
        block = {"type": "text", "text": f"room {self.room}"}
        return SimpleNamespace(blocks=[block], reward=1.0 if out else 0.0, metadata=None, finished=out)


SCHEMA = {
    "type": "object",
    "properties": {"steps": {"type": "integer", "description": "how far"}},
    "required": ["steps"],
}
TOOLS = [{"name": "walk", "description": "Walk on.", "input_schema": SCHEMA}]


def rooms():
    """TRL's environment over an ORS server, with the server's answers made here."""
    server = SimpleNamespace(session=lambda split, index, secrets: Session(index))
    return _RolloutEnvironment(base_url="http://localhost", _client=object(), _env=server, _tool_specs=TOOLS)


class Counter:
    """An environment as TRL's guide has them: the reward is an attribute, the end of the game an exception."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward, self.done, self.count = 0.0, False, kwargs["begin"]
        return f" It begins at {self.count}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated value.
        """
        if self.done:
            raise ValueError("Game over.")
        self.count += step
        self.done = self.count >= 5
        self.reward = float(self.count == 5)
        return self.count
