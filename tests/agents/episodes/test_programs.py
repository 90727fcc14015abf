"""Episodes of several turns: what is asked of the policy, what is trained, and what becomes of programs that fail."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from headway.agents.episodes.episode_limits import MOST_STEPS, EpisodeClock, EpisodeTime
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.errors import ProgramFailed
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.program_episodes import LIMITS, RENDERER, Here, Policy, made, talk, trained


def test_an_episode_of_three_turns_is_one_row_of_what_the_engine_saw_and_sampled():
    policy = Policy()
    group = made(talk, [policy])
    (episode,), (row,) = group.trajectories, group.tokens
    assert (episode.turns, episode.reward, episode.failure, episode.limit) == (3, 3.0, None, None)
    assert episode.rows[0].prompt_length + episode.rows[0].length == len(row.prompt_ids) + len(row.ids)
    whole = [*row.prompt_ids.tolist(), *row.ids.tolist()]
    assert len(policy.calls) == 3
    for call in policy.calls:
        assert call.input_ids.tolist() == whole[: len(call.input_ids)], "the context is what the row has before it"
    ends = [len(call.input_ids) for call in policy.calls]
    sampled = [[*RENDERER.encode(f"turn {end}").tolist(), min(RENDERER.end_ids)] for end in ends]
    assert trained(row) == [id for ids in sampled for id in ids]
    assert [whole[end : end + len(ids)] for end, ids in zip(ends, sampled, strict=True)] == sampled
    assert [(span.number, span.start) for span in row.turns] == [(k, e - ends[0]) for k, e in enumerate(ends)]
    assert row.versions[row.loss_mask].tolist() == [0] * len(trained(row))
    assert episode.length == len(trained(row))
    assert policy.calls[0].key == 0 and len({call.key for call in policy.calls}) == 3
    assert policy.released == [episode.id]
    assert set(RENDERER.end_ids) <= set(policy.calls[0].sampling.stop_token_ids)


def test_a_conversation_is_what_it_began_with_and_all_that_was_said_behind_it():
    (episode,) = made(talk).trajectories
    conversation = episode.conversation
    assert conversation is not None and conversation.prompt == [said("user", "begin")]
    assert [message["role"] for message in conversation.completion] == ["assistant", "user"] * 2 + ["assistant"]
    assert conversation.completion[1] == said("user", "go on")
    assert conversation.completion[-1]["content"] == episode.text


def test_a_conversation_tells_whether_the_template_opened_a_thought_for_its_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (plain,) = made(talk).trajectories
    draft = RENDERER.__class__.render

    def thinking(*args: Any, generation_prompt: bool = True, **kwargs: Any) -> str:
        return draft(*args, generation_prompt=generation_prompt, **kwargs) + "<think>\n" * generation_prompt

    monkeypatch.setattr(RENDERER.__class__, "render", thinking)
    (opened,) = made(talk).trajectories
    assert plain.conversation is not None and plain.conversation.opened == ""
    assert opened.conversation is not None and opened.conversation.opened == "<think>"


def test_of_several_conversations_the_last_one_is_told():
    async def two(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await talk(start, ask)
        other = [said("user", "judge")]
        other.append((await ask(TurnRequest(other))).message)  # the list is the program's own, which it goes on with
        other.append(said("user", "are you sure"))
        await ask(TurnRequest(other))
        return EpisodeEnd(1.0)

    (episode,) = made(two).trajectories
    conversation = episode.conversation
    assert conversation is not None and conversation.prompt == [said("user", "judge")]
    assert [message["role"] for message in conversation.completion] == ["assistant", "user", "assistant"]


def test_the_program_gets_its_prompt_its_row_and_a_seed_of_its_own():
    programs = Here(talk)
    made(programs, n=2)
    one, other = programs.starts
    assert one.messages == [said("user", "begin")]
    assert one.row == {"answer": 5, "source": "test"}
    assert one.seed != other.seed


def test_a_context_that_does_not_go_on_begins_a_row_of_its_own():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        for text in ("one", "two"):
            await ask(TurnRequest([said("user", text)]))
        return EpisodeEnd(1.0)

    group = made(program)
    assert len(group.trajectories[0].rows) == 2
    assert group.trajectories[0].metrics["forks"] == 1
    assert len(group.tokens) == 2


def test_turns_that_are_asked_at_once_are_both_trained():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await asyncio.gather(*(ask(TurnRequest([said("user", text)])) for text in ("one", "two")))
        return EpisodeEnd(1.0)

    group = made(program)
    assert (group.trajectories[0].turns, len(group.tokens)) == (2, 2)


def test_a_program_that_fails_fails_its_episode_alone():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        if start.seed % 2:
            raise ProgramFailed("guess.py:Guess: step() returned None")
        return await talk(start, ask)

    group = made(program, n=8)
    failures = [episode.failure for episode in group.trajectories]
    assert set(failures) == {None, "guess.py:Guess: step() returned None"}


def test_a_program_that_raises_cancelled_error_fails_its_episode_alone():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        if start.seed % 2:
            raise asyncio.CancelledError
        return await talk(start, ask)

    failures = [episode.failure for episode in made(program, n=8).trajectories]
    assert set(failures) == {None, "the program ended with CancelledError, and nobody has cancelled it"}


def test_a_program_without_a_turn_has_failed():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        return EpisodeEnd(1.0)

    (episode,) = made(program).trajectories
    assert str(episode.failure).startswith("the program made no turn: it ended without an answer of the model")


@pytest.mark.parametrize("odd", [{(1, 2): "x"}, {1: "a", "b": 2}])
def test_messages_that_cannot_be_compared_fail_their_episode_alone(odd):
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await ask(TurnRequest([{"role": "user", "content": "hi", "meta": odd}]))
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program).trajectories
    assert episode.failure is None or "the messages of a turn cannot be used" in episode.failure


def test_an_episode_tells_when_its_program_worked_and_when_it_waited_to_begin():
    class Slow(Here):
        """Keeps its first program waiting for 3 s."""

        async def run(self, job: EpisodeStart, on_ask: Ask, **begin: Any) -> EpisodeEnd:
            await asyncio.sleep(3)
            return await super().run(job, on_ask, **begin)

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        for seconds in (2, 4):
            await ask(TurnRequest(start.messages))
            await asyncio.sleep(seconds)
        return EpisodeEnd(1.0, metrics={"environment_s": 99.0, "won": 1.0})

    (episode,) = made(Slow(program)).trajectories
    assert episode.waits == ((0, 3),)
    assert episode.steps == ((3, 3), (4, 6), (7, 11)), "turns take 1 s"
    assert episode.metrics["environment_s"] == 6, "not what the program calls so"
    assert episode.metrics["won"] == 1


def test_the_steps_of_a_long_episode_are_joined_where_the_policy_was_fast():
    async def steps() -> EpisodeTime:
        times = EpisodeTime(EpisodeClock(), LIMITS)
        for step in range(1000):
            await asyncio.sleep(1.0 if step % 100 else 6.0)
            times.begin_step(lambda: None)
            await asyncio.sleep(9.0 if step % 100 else 4.0)
            times.end_step()
        return times

    times = run_virtual(steps())
    assert len(times.steps) == MOST_STEPS
    assert (times.steps[0][0], times.steps[-1][1]) == (6, 10_000)
    pauses = [after[0] - before[1] for before, after in pairwise(times.steps)]
    assert pauses.count(6) == 9, "the longest ones are kept"
    assert all(pause > 0 for pause in pauses)
