"""Episodes whose program asks for its turns at a real endpoint over loopback, by a policy that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.types import FinishReason, RowTokens, SampledTokens, Trajectory
from headway.endpoint.dialect import Texts
from headway.endpoint.dialects import DIALECTS
from headway.endpoint.server import Endpoint
from headway.episodes.alone import keeping
from headway.episodes.limits import Limits
from headway.episodes.programs import Hosting, Turn
from headway.episodes.record import Chats
from headway.episodes.rendering import ChatRenderer
from headway.interfaces import Call, FinishedCall, GroupRequest
from headway.programs.messages import Access, EpisodeEnd, EpisodeStart
from tests.episodes.conftest import renderer_of
from tests.episodes.program_episodes import Here, Policy, request

LIMITS = Limits(max_length=4000, max_turns=20, step_timeout_s=20, episode_timeout_s=60)
Agent = Callable[[Access], Awaitable[float | None]]
ADD = {"name": "add", "description": "Add two numbers."}
ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class Scripted(Policy):
    """An engine that says what it is told to, with a version of its own for each call, and keeps its record."""

    def __init__(self, says: Callable[[Call], str], renderer: ChatRenderer) -> None:
        super().__init__(seconds=0.0)
        self.says, self.renderer = says, renderer
        self.record: list[tuple[Call, SampledTokens]] = []

    def _answer(self, call: Call) -> None:
        ids, reason = self._sampled(call)
        n, version, now = len(ids), len(self.record), asyncio.get_running_loop().time()
        logprobs = -np.random.default_rng(version).random(n, np.float32)
        tokens = SampledTokens(ids, logprobs, np.full(n, version, np.int32))
        self.record.append((call, tokens))
        self._batches.put_nowait([FinishedCall(call.number, n, [[0, version]], reason, now, now, tokens)])

    def _sampled(self, call: Call) -> tuple[NDArray[np.int32], FinishReason]:
        """The tokens up to the first that ends them, by itself or with a string."""
        whole = np.append(self.renderer.encode(self.says(call)), min(self.renderer.end_ids)).astype(np.int32)
        for n in range(1, len(whole) + 1):
            text = self.renderer.text(whole[:n])
            if int(whole[n - 1]) in call.sampling.stop_token_ids or any(one in text for one in call.sampling.stop):
                return whole[:n], FinishReason.STOP
            if n == call.sampling.max_tokens:
                return whole[:n], FinishReason.LENGTH
        raise AssertionError("the last token ends every turn")


class Agents(Here):
    """Runs agents on the test's own loop."""

    def __init__(self, agent: Agent) -> None:
        async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
            assert start.access is not None
            return EpisodeEnd(await agent(start.access))

        super().__init__(program)

    async def start(self) -> None: ...


@dataclass
class Made:
    """An episode that is over, with the engine's record."""

    episode: Trajectory
    rows: list[RowTokens]
    record: list[tuple[Call, SampledTokens]] = field(repr=False)

    def check(self, rows: int | None = 1) -> None:
        """Check the rows against the engine's record: all that was sampled is trained once, with what came before."""
        assert self.episode.failure is None
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


def endpoint_of(renderer: ChatRenderer, **options: Any) -> Endpoint:
    texts = Texts(
        lambda text: renderer.encode(text).tolist(),
        lambda ids: renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )
    return Endpoint(DIALECTS, texts, **options)


async def made(
    agent: Agent,
    texts: Sequence[str],
    *,
    limits: Limits = LIMITS,
    template: str = "qwen2_5",
    max_tokens: int = 500,
    **options: Any,
) -> Made:
    """One episode of ``agent``, whose turns say ``texts``; ``options`` are the endpoint's."""
    renderer = renderer_of(template)
    policy = Scripted(_one_by_one(texts), renderer)
    endpoint = endpoint_of(renderer, **options)
    stop_ids = tuple(sorted(renderer.end_ids))
    hosting = Hosting(Agents(agent), Chats(renderer).record, limits, stop_ids=stop_ids, endpoint=endpoint)
    await hosting.start()
    async with keeping(policy, hosting=hosting) as keeper:
        asked: GroupRequest = request()
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=max_tokens))
        (group,) = [group async for group in keeper.generate([asked])]
    return Made(group.trajectories[0], list(group.tokens.rows) if group.tokens else [], policy.record)


def _one_by_one(texts: Sequence[str]) -> Callable[[Call], str]:
    left = iter(texts)
    return lambda call: next(left)


def calling(a: int, b: int, said: str = "", template: str = "qwen2_5") -> str:
    """What the policy says in order to add two numbers."""
    call = renderer_of(template).example_call("add", {"a": a, "b": b})
    assert call is not None
    return said + call.removeprefix("<think>\n\n</think>\n\n")
