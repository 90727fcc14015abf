"""Programs that are run again: tools that must not be called twice, and contexts that do not come again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.episodes.program_workers import ProgramWorkers
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import GenerateRequest
from headway.data.journal import CompletionJournal, JournalWriter
from headway.errors import ConfigError
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.program_episodes import Here, Policy, Program, hosting, request, talk, trained

PAY = {
    "type": "function",
    "function": {"name": "pay", "description": "Pay.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "pay", "arguments": {}}\n</tool_call>'
ONCE = EpisodeLimits(400, 5, side_effects=("pay",))


class Shop:
    """A program that looks, pays once and says thanks: three turns, of which the second calls the tool."""

    def __init__(self) -> None:
        self.paid: list[str] = []

    async def __call__(self, start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        chat = [*start.messages]
        for _ in range(3):
            answer = await ask(TurnRequest(list(chat), [PAY]))
            for call in answer.calls:
                self.paid.append(answer.text)
                assert call.name == "pay"
            chat += [answer.message, *answer.results(["done" for _ in answer.calls]), said("user", "go on")]
        return EpisodeEnd(1.0)


def buys() -> Policy:
    """A policy whose second answer of an episode calls the tool; each answer has the number of its call."""
    policy, numbers = Policy(), count()

    def says(call: GenerateRequest) -> str:
        return f"{next(numbers)} {CALL if call.key and len(policy.calls) % 3 == 2 else ''}"

    policy.says = says
    return policy


def lives(
    programs: Sequence[Program | Here], policies: Sequence[Policy], journal: Path, limits: EpisodeLimits = ONCE
) -> Group:
    """The group of the last life. Each life has a program and a policy; all but the last one end after 2.5 seconds."""

    async def life(number: int, program: Program | Here, policy: Policy, last: bool) -> Group | None:
        writer = JournalWriter(journal, f"worker-{number}", groups_per_block=4, sync_s=None)
        here = program if isinstance(program, Here) else Here(program)
        worker = EpisodeWorker(f"worker-{number}", None, hosting(here, limits), journal=CompletionJournal(writer))
        await worker.join(policy)
        await worker.route([policy.name])
        groups = worker.generate([request()])
        try:
            if last:
                return await anext(groups)
            async with asyncio.timeout(2.5):
                await anext(groups)
        except TimeoutError:
            return None
        finally:
            await groups.aclose()
            await worker.close()
        raise AssertionError("the life is over too early")

    async def main() -> Group:
        for number, (program, policy) in enumerate(zip(programs, policies, strict=True)):
            group = await life(number, program, policy, number == len(programs) - 1)
        assert group is not None
        return group

    return run_virtual(main())


def test_an_episode_that_may_have_called_a_tool_with_side_effects_is_begun_anew_at_a_resume(tmp_path: Path):
    """It is over its second turn, whose answer calls the tool, when the first process ends."""
    shop, policies = Shop(), [buys(), buys()]
    group = lives([shop, shop], policies, tmp_path)
    (episode,) = group.trajectories
    assert episode.again == "pay was called before, and must not be called again"
    assert episode.failure is None
    assert len(shop.paid) == 2, "each answer of the policy is paid for once"
    assert [call.key == policies[0].calls[0].key for call in policies[1].calls] == [False] * 3
    assert len({call.key for policy in policies for call in policy.calls}) == len(policies[0].calls) + 3


def test_without_the_mark_the_tool_is_called_again_and_nothing_is_sampled_twice(tmp_path: Path):
    shop, policies = Shop(), [buys(), buys()]
    (episode,) = lives([shop, shop], policies, tmp_path, EpisodeLimits(400, 5)).trajectories
    assert (episode.again, len(policies[1].calls)) == (None, 1)
    assert shop.paid[0] == shop.paid[1]


def test_answers_that_were_sampled_anew_are_found_at_the_next_resume_and_called_for_no_further_time(tmp_path: Path):
    shop, policies = Shop(), [buys(), buys(), buys()]
    lives([shop, shop, shop], policies, tmp_path)
    assert len(shop.paid) == 3
    keys = [{call.key for call in policy.calls} for policy in policies]
    assert not keys[1] & keys[2]


def test_a_program_all_of_which_has_side_effects_is_begun_anew_from_its_first_answer(tmp_path: Path):
    policies = [Policy(), Policy()]
    (episode,) = lives([talk, talk], policies, tmp_path, EpisodeLimits(400, 5, side_effects=("*",))).trajectories
    assert episode.again == "its program was called before, and must not be called again"
    assert len(policies[1].calls) == 3


@pytest.mark.parametrize(("turns", "paid"), [(1, 1), (2, 2)])
def test_a_worker_that_is_lost_before_the_tool_was_called_replays_and_behind_it_begins_anew(
    turns: int, paid: int, tmp_path: Path
):
    shop, policy = Shop(), buys()
    programs = Here(shop)
    programs.lost = {1: (turns, False)}
    (episode,) = lives([programs], [policy], tmp_path).trajectories
    assert len(shop.paid) == paid
    assert (episode.again == "pay was called before, and must not be called again") == (turns == 2)
    assert len(policy.calls) == (3 if turns == 1 else 5)


def test_a_program_whose_contexts_do_not_come_again_is_told_with_what_is_lost(tmp_path: Path):
    """It puts something into its prompt that is another one each time."""
    times = count()

    async def clock(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        now = next(times)
        for turn in range(3):
            await ask(TurnRequest([said("user", f"It is {now}. {turn}")]))
        return EpisodeEnd(1.0)

    policies = [Policy(), Policy()]
    group = lives([clock, clock], policies, tmp_path)
    (episode,) = group.trajectories
    assert episode.again == "the program asks otherwise than before: 2 finished answers are not used"
    assert len(policies[1].calls) == 3
    assert all(trained(row) for row in group.tokens)


@pytest.mark.slow
def test_a_tool_that_is_named_and_not_there_is_one_message(tmp_path: Path):
    """Starts a process that loads the tools."""
    (tmp_path / "tools.py").write_text(
        'def pay(sum: int) -> str:\n    """Pay.\n\n    Args:\n        sum: how much.\n    """\n'
    )
    agent = {"tools": [f"{tmp_path}/tools.py:pay"], "side_effects": ["pya"]}

    async def main() -> None:
        workers = ProgramWorkers("episode-worker", Config(agent=agent), tmp_path)
        try:
            await workers.describe()
        finally:
            await workers.close()

    with pytest.raises(ConfigError, match=r"agent\.side_effects: .*\bpya; .*: pay; "):
        asyncio.run(main())
