"""An environment of verifiers: the policy is told a letter, three times, and has to say the one that follows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    """Letters, and those that follow them."""

    letters: str
    following: str


class LettersTask(vf.Task[LettersData]):
    """A few letters."""

    @vf.reward
    async def followed(self, trace: vf.Trace) -> float:
        """Share of the answers that are right."""
        said = [message.content for message in trace.messages if message.role == "assistant"]
        return sum(map(str.__eq__, self.data.following, map(str, said))) / len(self.data.following)


class LettersConfig(vf.TasksetConfig):
    """The tasks that there are."""

    alphabet: str = "ABCDEFGH"
    length: int = 3
    tasks: int = 64
    seed: int = 0


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    """Random letters; A follows the last one."""

    def load(self) -> Iterator[LettersTask]:
        """Make the tasks."""
        draw, alphabet = random.Random(self.config.seed), self.config.alphabet
        for _ in range(self.config.tasks):
            letters = "".join(draw.choices(alphabet, k=self.config.length))
            following = letters.translate(str.maketrans(alphabet, alphabet[1:] + alphabet[0]))
            yield LettersTask(LettersData(prompt=letters[0], letters=letters, following=following), self.config.task)


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
