"""Episodes of agents by a policy that says what it is told, and their rows against its record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.data.interfaces.rollout import Completion, GenerateRequest
from headway.data.types import FinishReason, RowTokens, SampledTokens, Trajectory
from tests.agents.endpoint.served import Agent, served
from tests.agents.episodes.conftest import renderer_of
from tests.agents.episodes.program_episodes import Policy

LIMITS = EpisodeLimits(max_length=4000, max_turns=20, step_timeout_s=20, episode_timeout_s=60)
ADD = {"name": "add", "description": "Add two numbers."}
ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class Scripted(Policy):
    """An engine that says what it is told to, with a version of its own for each call, and keeps its record."""

    def __init__(self, says: Callable[[GenerateRequest], str], renderer: ChatRenderer) -> None:
        super().__init__(seconds=0.0)
        self.says, self.renderer = says, renderer
        self.record: list[tuple[GenerateRequest, SampledTokens]] = []

    def _answer(self, call: GenerateRequest) -> None:
        ids, reason = self._sampled(call)
        n, version, now = len(ids), len(self.record), asyncio.get_running_loop().time()
        logprobs = -np.random.default_rng(version).random(n, np.float32)
        tokens = SampledTokens(ids, logprobs, np.full(n, version, np.int32))
        self.record.append((call, tokens))
        self._batches.put_nowait([Completion(call.number, n, [[0, version]], reason, now, now, tokens)])

    def _sampled(self, call: GenerateRequest) -> tuple[NDArray[np.int32], FinishReason]:
        """The tokens up to the first that ends them, by itself or with a string."""
        whole = np.append(self.renderer.encode(self.says(call)), min(self.renderer.end_ids)).astype(np.int32)
        for n in range(1, len(whole) + 1):
            text = self.renderer.text(whole[:n])
            if int(whole[n - 1]) in call.sampling.stop_token_ids or any(one in text for one in call.sampling.stop):
                return whole[:n], FinishReason.STOP
            if n == call.sampling.max_tokens:
                return whole[:n], FinishReason.LENGTH
        raise AssertionError("the last token ends every turn")


@dataclass
class Made:
    """An episode that is over, with the engine's record."""

    episode: Trajectory
    rows: list[RowTokens]
    record: list[tuple[GenerateRequest, SampledTokens]] = field(repr=False)
    returned: list[Any] = field(default_factory=list)
    """What the agent returned; empty if it failed."""

    def check(self, rows: int | None = 1) -> None:
        """Check the rows against the engine's record: all that was sampled is trained once, with what came before."""
        assert self.episode.failure is None, self.episode.failure
        assert rows is None or len(self.rows) == rows
        calls = {int(tokens.versions[0]): (call, tokens) for call, tokens in self.record}
        seen: list[int] = []
        for row in self.rows:
            ids = np.concatenate([row.prompt_ids, row.ids])
            covered = np.zeros(len(row.ids), np.bool_)
            for turn in row.turns:
                version = int(row.versions[turn.start])
                call, tokens = calls[version]
                seen.append(version)
                covered[turn.start : turn.stop] = True
                before = len(row.prompt_ids) + turn.start
                assert ids[:before].tolist() == call.input_ids.tolist()
                assert row.ids[turn.start : turn.stop].tolist() == tokens.ids.tolist()
                assert row.logprobs[turn.start : turn.stop].tolist() == tokens.logprobs.tolist()
                assert row.versions[turn.start : turn.stop].tolist() == tokens.versions.tolist()
            assert covered.tolist() == row.loss_mask.tolist()
        assert sorted(seen) == sorted(calls)


async def made(
    agent: Agent, texts: Sequence[str], *, template: str = "qwen2_5", limits: EpisodeLimits = LIMITS, **settings: Any
) -> Made:
    """One episode of ``agent``, whose turns say ``texts``; ``settings`` are the endpoint's."""
    renderer = renderer_of(template)
    policy = Scripted(_one_by_one(texts), renderer)
    done = await served(agent, policies=[policy], limits=limits, max_tokens=500, renderer=renderer, **settings)
    return Made(done.episode, done.rows if done.group.tokens else [], policy.record, done.returned)


def _one_by_one(texts: Sequence[str]) -> Callable[[GenerateRequest], str]:
    left = iter(texts)
    return lambda call: next(left)


def calling(a: int, b: int, said: str = "", template: str = "qwen2_5") -> str:
    """What the policy says in order to add two numbers."""
    call = renderer_of(template).example_call("add", {"a": a, "b": b})
    assert call is not None
    return said + call.removeprefix("<think>\n\n</think>\n\n")
