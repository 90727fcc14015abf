"""Agents of smolagents, openai-agents and inspect-ai, as their packages have them, at the endpoint of an episode."""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.interface.program_chat import Program
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart, TurnAnswer, TurnRequest, said
from tests.agents.endpoint.served import Served, served
from tests.agents.episodes.program_episodes import Policy, trained

THEIRS = Path(__file__).parent / "theirs"


def calling(name: str, **arguments: Any) -> str:
    """A call of a tool as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Writes(Policy):
    """Says one text after the other, and the last one again."""

    def __init__(self, *texts: str) -> None:
        super().__init__(seconds=0.01)
        self.says = lambda call: texts[min(len(self.calls), len(texts)) - 1]


async def nobody(request: TurnRequest) -> TurnAnswer:
    raise AssertionError("an agent asks over HTTP")


async def ended(program: Program, access: Access) -> EpisodeEnd:
    start = EpisodeStart("episode", [said("user", "What is 6*7?")], {"answer": "42"}, 3, access)
    if program.is_async:
        return await program.serve(start, nobody)

    def without_a_loop() -> EpisodeEnd:
        serving = program.serve(start, nobody)
        try:
            serving.send(None)
        except StopIteration as stopped:
            end: EpisodeEnd = stopped.value
            return end
        raise AssertionError("it waited for a loop")

    return await asyncio.to_thread(without_a_loop)


async def play(name: str, policy: Policy, **params: Any) -> Served:
    program = ProgramSpec(agent=f"{THEIRS}/agents.py:{name}", params=params).load()
    limits = EpisodeLimits(max_length=50_000, max_turns=20, step_timeout_s=20, episode_timeout_s=60)
    return await served(lambda access: ended(program, access), policies=[policy], limits=limits)


def check_exact(made: Served, policy: Policy) -> None:
    """Check that what is trained is what the engine has sampled, call by call, and nothing else."""
    sampled = [policy.said[call.number].ids.tolist() for call in policy.calls]
    assert sorted(chain(*(trained(row) for row in made.rows))) == sorted(chain(*sampled))
    for row in made.rows:
        whole = [*row.prompt_ids.tolist(), *row.ids.tolist()]
        for span in row.turns:
            start = len(row.prompt_ids) + span.start
            contexts = [call.input_ids.tolist() for call in policy.calls]
            assert whole[:start] in contexts
            tokens = policy.said[policy.calls[contexts.index(whole[:start])].number]
            assert np.array_equal(row.logprobs[span.start : span.stop], tokens.logprobs)


@pytest.mark.parametrize(
    ("name", "params", "texts", "forks"),
    [
        ("smol_tools", {}, [calling("calculate", expression="6*7"), calling("final_answer", answer="42")], None),
        ("smol_code", {}, ["Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code>"], 0),
        ("openai_agents", {}, [calling("calculate", expression="6*7"), "42"], 0),
        ("openai_agents", {"streamed": True}, [calling("calculate", expression="6*7"), "42"], 0),
        ("openai_agents", {"api": "chat"}, [calling("calculate", expression="6*7"), "42"], 0),
        ("inspect_react", {}, [calling("calculate", expression="6*7"), calling("submit", answer="42")], 0),
    ],
)
async def test_an_agent_of_another_package_makes_an_episode(
    name: str, params: dict[str, Any], texts: list[str], forks: int | None
) -> None:
    """Their packages take seconds to import."""
    policy = Writes(*texts)
    made = await play(name, policy, **params)
    [end] = made.returned
    assert made.episode.failure is None, made.episode.failure
    assert end.reward == 1.0
    assert made.episode.turns == len(texts)
    if forks is not None:
        assert made.episode.metrics["forks"] == forks
    check_exact(made, policy)
