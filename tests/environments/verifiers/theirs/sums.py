"""An environment of verifiers as its users write them: a tool server, and the package's own chat harness."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """A tool."""

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsData(vf.TaskData):
    """A sum."""

    answer: int


class SumsTask(vf.Task[SumsData]):
    """A sum to be said."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Name the tools."""
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """One for the right answer."""
        return float(str(self.data.answer) in (trace.messages[-1].content or ""))


class SumsTaskset(vf.Taskset[SumsTask]):
    """Two sums."""

    def load(self) -> Iterator[SumsTask]:
        """Make the tasks."""
        for a, b in ((12, 34), (1, 2)):
            yield SumsTask(SumsData(prompt=f"{a} + {b}?", system_prompt="Add.", answer=a + b), self.config.task)


if __name__ == "__main__":
    Calculator.run()
