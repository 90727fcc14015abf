"""The section of the sandbox, in which code of the model's runs: the tool ``python`` and the reward ``code``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from pydantic import Field

from headway.config.sections.agent_section import AgentConfig
from headway.config.sections.section import Section
from headway.runtime.sandbox.process_limits import TELLS
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.sandbox.sandbox_limits import SandboxLimits, SandboxSpec

CODE = "code"
"""Name of the reward that runs a row's unit tests."""
LEAST_CPU_S = 10.0
"""Least limit of processor time, in seconds."""
LEAST_MIB = 64
"""Memory that an interpreter needs to start."""


class SandboxConfig(Section):
    """The sandbox of the tool ``python`` and the reward ``code`` (docs/sandbox.md). A bare name is ``{kind: …}``."""

    kind: Literal["bubblewrap", "process_limits"] = "bubblewrap"
    """The kind: ``bubblewrap`` puts each call into namespaces of its own; ``process_limits`` bounds what it takes, and
    protects nothing else."""
    wall_s: float = Field(10.0, gt=0, le=3600)
    """Most seconds of a call, and of processor time of its processes (10 at least). A test of the reward ``code`` has
    its own limit, ``reward.params.timeout_s``."""
    memory_mib: int = Field(512, ge=LEAST_MIB)
    """Most MiB of memory, of all processes of a call together, its files included."""

    @property
    def spec(self) -> SandboxSpec:
        """The sandbox that the section asks for."""
        limits = SandboxLimits(self.wall_s, max(LEAST_CPU_S, self.wall_s), self.memory_mib)
        return SandboxSpec(self.kind, limits)


def runs_code(tools: Collection[str], rewards: Collection[str]) -> bool:
    """Tell whether a run with these tools and reward functions has a use for the sandbox."""
    return PYTHON in tools or CODE in rewards


def sandbox_problems(sandbox: SandboxConfig, agent: AgentConfig) -> Iterator[str]:
    """Yield problems of the sandbox's limits."""
    if PYTHON in agent.tools and sandbox.wall_s >= agent.step_timeout_s:
        yield (
            f"sandbox.wall_s={sandbox.wall_s:g} lets one call of the tool python take as long as a whole step, "
            f"agent.step_timeout_s={agent.step_timeout_s:g}; lower the one or raise the other"
        )


def idle_sandbox_keys(tools: Collection[str], rewards: Collection[str]) -> Iterator[tuple[str, str]]:
    """Keys of the sandbox that change nothing → why."""
    if not runs_code(tools, rewards):
        for key in SandboxConfig.model_fields:
            yield f"sandbox.{key}", "nothing runs in it: agent.tools has no python, and reward.function is not code"
    elif PYTHON not in tools:
        yield "sandbox.wall_s", "each test of the reward code has a limit of its own, reward.params.timeout_s"


def sandbox_notes(sandbox: SandboxConfig, tools: Collection[str], rewards: Collection[str]) -> Iterator[str]:
    """Yield warnings about the sandbox at the start."""
    if runs_code(tools, rewards) and sandbox.kind == "process_limits":
        yield TELLS
