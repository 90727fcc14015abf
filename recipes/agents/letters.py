"""An environment of verifiers: the policy is told letters, one a turn, and has to repeat each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    """A word."""

    letters: str


class LettersTask(vf.Task[LettersData]):
    """A word to be repeated, letter by letter."""

    @vf.reward
    async def repeated(self, trace: vf.Trace) -> float:
        """Share of the letters that were repeated."""
        said = [message.content for message in trace.messages if message.role == "assistant"]
        return sum(one == letter for one, letter in zip(said, self.data.letters, strict=False)) / len(self.data.letters)


class LettersConfig(vf.TasksetConfig):
    """The words."""

    alphabet: str = "ABCD"
    length: int = 3
    words: int = 64
    seed: int = 0


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    """Random words."""

    def load(self) -> Iterator[LettersTask]:
        """Make the tasks."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.words):
            letters = "".join(draw.choices(self.config.alphabet, k=self.config.length))
            yield LettersTask(LettersData(prompt=letters[0], letters=letters), self.config.task)


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Says the letters. It runs in the process of verifiers: it has no program of its own to install."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one task."""
        assert isinstance(data, LettersData)
        messages: list[Any] = []
        http = DefaultAsyncHttpxClient(verify=False)  # this machine has no TLS, for which to prepare takes 20 ms
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http) as client:
            for letter in data.letters:
                messages.append({"role": "user", "content": letter})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
