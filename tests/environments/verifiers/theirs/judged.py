"""An environment of verifiers with two agents, of which one is not to be trained."""

from __future__ import annotations

import verifiers.v1 as vf
from letters import LettersHarness, LettersTaskset

__all__ = ["JudgedEnv", "LettersHarness", "LettersTaskset"]


class JudgedConfig(vf.EnvConfig):
    """The two agents."""

    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class JudgedEnv(vf.Env[JudgedConfig]):
    """Plays a task twice."""

    async def setup(self, agents: vf.Agents) -> None:
        """Leave the judge untrained."""
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play the task, by both."""
        await agents.player.run(task)
        await agents.judge.run(task)
