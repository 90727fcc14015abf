"""Episodes of several turns: what is asked of the policy, what is trained, and what becomes of programs that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headway.data.types import FinishReason, Prompt, RowTokens, SampledTokens, TrajectoryId
from headway.episodes.alone import keeping
from headway.episodes.keeper import GroupKeeper
from headway.episodes.limits import Limits
from headway.episodes.programs import Hosting, Turn
from headway.episodes.record import Chats
from headway.episodes.step_times import MOST_STEPS, StepTimes
from headway.errors import DataError, EpisodeOver, ProgramAway, ProgramFailed, RunError, RunnerLost
from headway.interfaces import Call, FinishedCall, FinishedGroup, GroupRequest, SamplingParams
from headway.programs.messages import EpisodeEnd, EpisodeStart, Message, TurnRequest, said
from headway.programs.own import OwnProgram
from headway.programs.program import LoadedProgram
from headway.simulate.clock import run_virtual
from tests.episodes.conftest import renderer_of

RENDERER = renderer_of("qwen2_5")
LIMITS = Limits(max_length=400, max_turns=5, step_timeout_s=10, episode_timeout_s=100)
Program = Callable[[EpisodeStart, Turn], Awaitable[EpisodeEnd]]


class Policy:
    """An engine that answers each call, after ``seconds``, with a text of the call's number in its episode."""

    def __init__(self, name: str = "a", seconds: float = 1.0) -> None:
        self.name, self.slots, self.seconds, self.version = name, 8, seconds, 0
        self.calls: list[Call] = []
        self.aborted: list[int] = []
        self.released: list[TrajectoryId] = []
        self.says: Callable[[Call], str] = lambda call: f"turn {len(call.input_ids)}"
        self._batches: asyncio.Queue[list[FinishedCall]] = asyncio.Queue()

    async def submit(self, client: str, calls: Sequence[Call]) -> None:
        for call in calls:
            self.calls.append(call)
            asyncio.get_running_loop().call_later(self.seconds, self._answer, call)

    async def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]:
        while True:
            yield await self._batches.get()

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        self.aborted += numbers

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        self.released += trajectories

    def end(self, *calls: Call, lengths: Sequence[int], version: int = 7) -> None:
        """End calls after so many tokens of ``version``, all at once."""
        self._batches.put_nowait(
            [
                FinishedCall(call.number, n, [[0, version]], FinishReason.ABORTED, 0.0, 0.0)
                for call, n in zip(calls, lengths, strict=True)
            ]
        )

    def _answer(self, call: Call) -> None:
        ids = np.append(RENDERER.encode(self.says(call)), min(RENDERER.end_ids)).astype(np.int32)
        reason = FinishReason.STOP if len(ids) <= call.sampling.max_tokens else FinishReason.LENGTH
        ids = ids[: call.sampling.max_tokens]
        n, version, now = len(ids), self.version, asyncio.get_running_loop().time()
        tokens = SampledTokens(ids, -np.arange(n, dtype=np.float32), np.full(n, version, np.int32))
        self._batches.put_nowait([FinishedCall(call.number, n, [[0, version]], reason, now, now, tokens)])


class Here:
    """Runs programs on the test's own loop; ``lose`` names the tries whose runner dies, and after how many turns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.starts: list[EpisodeStart] = []
        self.lost: dict[int, tuple[int, bool | None]] = {}
        """Number of the try → turns after which its runner dies, and whether it was this program's doing."""

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        self.starts.append(job)
        turns, culprit = self.lost.get(len(self.starts), (10**9, None))
        asked = 0
        if on_begin is not None:
            on_begin()

        async def ask(request: TurnRequest) -> Any:
            nonlocal asked
            if asked == turns:
                raise RunnerLost("its runner was killed by SIGKILL", culprit=culprit)
            asked += 1
            return await on_ask(request)

        return await self.program(job, ask)

    async def close(self) -> None: ...


async def talk(start: EpisodeStart, ask: Turn, turns: int = 3) -> EpisodeEnd:
    """Go on for ``turns`` turns, or until a limit; the reward is the number of answers."""
    chat: list[Message] = list(start.messages)
    answers = 0
    try:
        for _ in range(turns):
            answer = await ask(TurnRequest(list(chat)))
            answers += 1
            chat += [answer.message, said("user", "go on")]
    except EpisodeOver:
        pass
    return EpisodeEnd(reward=float(answers))


def request(n: int = 1, number: int = 0) -> GroupRequest:
    prompt = Prompt(0, 7, 0, "test", "begin", np.zeros(1, np.int32), answer=5, messages=[said("user", "begin")])
    return GroupRequest(number, prompt, n, SamplingParams(50))


def hosting(programs: Here, limits: Limits = LIMITS) -> Hosting:
    stop_ids = tuple(RENDERER.end_ids)
    return Hosting(programs, Chats(RENDERER).record, limits, stop_ids=stop_ids, keeps_conversations=True)


def made(
    program: Program | Here,
    policies: Sequence[Policy] | None = None,
    *,
    limits: Limits = LIMITS,
    n: int = 1,
    meanwhile: Callable[[GroupKeeper], Awaitable[None]] | None = None,
) -> FinishedGroup:
    """One group of ``n`` episodes, on the virtual clock."""
    programs = program if isinstance(program, Here) else Here(program)

    async def main() -> FinishedGroup:
        async with keeping(*(policies or [Policy()]), hosting=hosting(programs, limits)) as keeper:
            beside = None if meanwhile is None else asyncio.ensure_future(meanwhile(keeper))
            (group,) = [group async for group in keeper.generate([request(n)])]
            if beside is not None:
                await beside
            return group

    return run_virtual(main())


def trained(row: RowTokens) -> list[int]:
    return row.ids[row.loss_mask].tolist()


def test_an_episode_of_three_turns_is_one_row_of_what_the_engine_saw_and_sampled():
    policy = Policy()
    group = made(talk, [policy])
    (episode,), (row,) = group.trajectories, group.tokens.rows
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


def test_of_several_conversations_the_last_one_is_told():
    async def two(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
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


@pytest.mark.parametrize(("limits", "turns", "limit"), [
    (Limits(max_length=400, max_turns=2), 2, "turns"),
    (Limits(max_length=75, max_turns=9), 2, "tokens"),
])  # fmt: skip
def test_a_limit_ends_an_episode_which_is_trained_with_the_reward_that_it_has(limits, turns, limit):
    (episode,) = made(lambda start, ask: talk(start, ask, 9), limits=limits).trajectories
    assert (episode.limit, episode.failure, episode.reward, episode.turns) == (limit, None, turns, turns)
    assert sum(at.prompt_length + at.length for at in episode.rows) <= limits.max_length


def test_a_limit_that_is_not_trained_on_fails_the_episode_and_no_other():
    def program(start: EpisodeStart, ask: Turn) -> Awaitable[EpisodeEnd]:
        return talk(start, ask, 2 if start.seed % 2 else 9)

    group = made(program, limits=Limits(400, max_turns=4, train_on=()), n=8)
    failed = [episode for episode in group.trajectories if episode.failure is not None]
    assert 0 < len(failed) < 8
    assert {episode.failure for episode in failed} == {"rollout.max_turns=4 was reached"}
    assert all(episode.rows == () for episode in failed)
    assert [at.index for episode in group.trajectories for at in episode.rows] == list(range(len(group.tokens.rows)))


def test_a_turn_is_cut_at_its_limit_and_says_so():
    reasons = []

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        reasons.append((await ask(TurnRequest(start.messages, max_tokens=2))).finish_reason)
        reasons.append((await ask(TurnRequest([*start.messages, said("user", "more")]))).finish_reason)
        return EpisodeEnd(0.0)

    policy = Policy()
    made(program, [policy], limits=Limits(400, 5, max_turn_tokens=30))
    assert reasons == ["length", "stop"]
    assert [call.sampling.max_tokens for call in policy.calls] == [2, 30]


def test_a_context_that_does_not_go_on_begins_a_row_of_its_own():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        for text in ("one", "two"):
            await ask(TurnRequest([said("user", text)]))
        return EpisodeEnd(1.0)

    group = made(program)
    assert len(group.trajectories[0].rows) == 2
    assert group.trajectories[0].metrics["forks"] == 1
    assert len(group.tokens.rows) == 2


def test_turns_that_are_asked_at_once_are_both_trained():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await asyncio.gather(*(ask(TurnRequest([said("user", text)])) for text in ("one", "two")))
        return EpisodeEnd(1.0)

    group = made(program)
    assert (group.trajectories[0].turns, len(group.tokens.rows)) == (2, 2)


# ---------------------------------------------------------------------------------------------- time


async def slow(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
    """A step of 8 seconds between two turns."""
    answer = await ask(TurnRequest(start.messages))
    await asyncio.sleep(8)
    await ask(TurnRequest([*start.messages, answer.message, said("user", "go on")]))
    return EpisodeEnd(1.0)


def test_a_step_that_takes_too_long_ends_the_episode_where_it_is():
    limits = Limits(400, 5, step_timeout_s=5)
    (episode,) = made(slow, limits=limits).trajectories
    assert episode.failure == "a step took longer than rollout.step_timeout_s=5"
    (episode,) = made(slow, limits=Limits(400, 5, step_timeout_s=5, train_on=("step",))).trajectories
    assert (episode.failure, episode.turns, len(episode.rows)) == (None, 1, 1)


def test_an_episode_that_takes_too_long_is_refused_its_next_turn():
    limits = Limits(400, 5, step_timeout_s=20, episode_timeout_s=6.5, train_on=("time",))
    (episode,) = made(talk_slowly, limits=limits).trajectories
    assert (episode.failure, episode.limit, episode.turns) == (None, "time", 2)


async def talk_slowly(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
    async def ask_later(request: TurnRequest) -> Any:
        await asyncio.sleep(2.5)
        return await ask(request)

    return await talk(start, ask_later)


def test_clocks_stand_still_while_the_policy_is_halted():
    async def halt(keeper: GroupKeeper) -> None:
        await asyncio.sleep(3)
        await keeper.route(["a"], halted=True)
        await asyncio.sleep(50)
        await keeper.route(["a"])

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        answer = await ask(TurnRequest(start.messages))
        await asyncio.sleep(51)
        await ask(TurnRequest([*start.messages, answer.message, said("user", "go on")]))
        return EpisodeEnd(1.0)

    (episode,) = made(program, limits=Limits(400, 5, step_timeout_s=5), meanwhile=halt).trajectories
    assert (episode.failure, episode.turns) == (None, 2)
    assert episode.metrics["environment_s"] == pytest.approx(2.0)


@pytest.mark.parametrize("catches", [False, True])
def test_a_program_that_asks_for_ever_ends_in_bounded_time(catches):
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        while True:
            try:
                await ask(TurnRequest(start.messages))
            except EpisodeOver:
                if not catches:
                    raise
                await asyncio.sleep(0.01)

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert len(policy.calls) == LIMITS.max_turns
    assert episode.limit == "turns" and episode.failure is None


def test_a_program_that_never_returns_is_ended_by_its_step():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await ask(TurnRequest(start.messages))
        await asyncio.sleep(10**6)
        return EpisodeEnd()

    (episode,) = made(program).trajectories
    assert episode.failure == "a step took longer than rollout.step_timeout_s=10"


# ---------------------------------------------------------------------------------------------- failures


def test_a_program_that_fails_fails_its_episode_alone():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        if start.seed % 2:
            raise ProgramFailed("guess.py:Guess: step() returned None")
        return await talk(start, ask)

    group = made(program, n=8)
    failures = [episode.failure for episode in group.trajectories]
    assert set(failures) == {None, "guess.py:Guess: step() returned None"}


def test_a_program_without_a_turn_has_failed():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        return EpisodeEnd(1.0)

    (episode,) = made(program).trajectories
    assert str(episode.failure).startswith("the program made no turn: it ended without an answer of the model")


def test_what_is_away_for_a_time_is_tried_again_after_a_pause_and_its_turns_are_not_asked_twice():
    tries: list[float] = []

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        end = await talk(start, ask, 2)
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 3:
            raise ProgramAway("ConnectionError: no route to host")
        return end

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert (episode.failure, episode.metrics["tries"], len(policy.calls)) == (None, 3, 2)
    assert tries[2] - tries[1] > tries[1] - tries[0] > 0
    tries.clear()
    limits = Limits(400, 5, retries=1)
    (episode,) = made(program, limits=limits).trajectories
    assert episode.failure == "ConnectionError: no route to host"


def test_an_episode_tells_when_its_program_worked_and_when_it_waited_to_begin():
    class Slow(Here):
        """Keeps its first program waiting for 3 s."""

        async def run(self, job: EpisodeStart, on_ask: Turn, **begin: Any) -> EpisodeEnd:
            await asyncio.sleep(3)
            return await super().run(job, on_ask, **begin)

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
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
    times = StepTimes()
    for step in range(1000):
        times.begin(10 * step + (0.0 if step % 100 else 5.0))
        times.end(10 * step + 9)
    assert len(times.steps) == MOST_STEPS
    assert (times.steps[0][0], times.steps[-1][1]) == (5, 9999)
    pauses = [after[0] - before[1] for before, after in pairwise(times.steps)]
    assert pauses.count(6) == 9, "the longest ones are kept"
    assert all(pause > 0 for pause in pauses)


def test_a_lost_runner_has_its_program_run_again_with_the_calls_that_the_log_knows():
    whole = made(talk).tokens.rows
    programs, policy = Here(talk), Policy()
    programs.lost = {1: (2, None), 2: (1, False)}
    group = made(programs, [policy])
    assert len(policy.calls) == 3, "no call is made twice"
    assert trained(group.tokens.rows[0]) == trained(whole[0])
    assert group.trajectories[0].metrics["tries"] == 3


def test_what_a_program_does_not_ask_again_is_not_trained():
    tries = 0

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        nonlocal tries
        tries += 1
        await ask(TurnRequest(start.messages))
        for text in ("one", "two") if tries == 1 else ("three",):
            await ask(TurnRequest([said("user", text)]))
        if tries == 1:
            raise RunnerLost("its runner was killed by SIGKILL", culprit=False)
        return EpisodeEnd(1.0)

    policy = Policy()
    group = made(program, [policy])
    assert len(policy.calls) == 4
    kept = [policy.calls[0], policy.calls[3]]
    assert [row.prompt_ids.tolist() for row in group.tokens.rows] == [call.input_ids.tolist() for call in kept]


def test_a_program_that_loses_its_own_runners_is_given_up():
    programs = Here(talk)
    programs.lost = dict.fromkeys(range(1, 20), (1, True))
    (episode,) = made(programs).trajectories
    assert (episode.failure, len(programs.starts)) == ("its runner was killed by SIGKILL", 1 + LIMITS.retries)


# ---------------------------------------------------------------------------------------------- replicas, updates


def test_a_turn_whose_replica_leaves_is_asked_of_another_and_the_episode_goes_on_there():
    first, second = Policy("a"), Policy("b")

    async def leave(keeper: GroupKeeper) -> None:
        await asyncio.sleep(1.5)
        await keeper.leave("a")

    group = made(talk, [first, second], meanwhile=leave)
    assert [len(first.calls), len(second.calls)] == [2, 2]
    assert second.calls[0].input_ids.tolist() == first.calls[1].input_ids.tolist()
    assert second.calls[0].key == first.calls[1].key
    assert group.trajectories[0].turns == 3


def test_turns_go_to_the_replica_that_has_the_prefix():
    policies = [Policy("a"), Policy("b")]
    made(talk, policies)
    assert sorted(len(policy.calls) for policy in policies) == [0, 3]


def test_groups_are_aborted_between_turns_by_the_age_of_what_was_sampled():
    async def abort(keeper: GroupKeeper) -> None:
        await asyncio.sleep(5)
        await keeper.abort_older_than(0)
        await keeper.abort_older_than(1)

    group = made(slow, meanwhile=abort)
    (episode,) = group.trajectories
    assert (episode.finish_reason, episode.rows, episode.turns) == (FinishReason.ABORTED, (), 1)


def test_held_groups_wait_while_those_that_were_started_finish():
    async def main() -> list[str]:
        told: list[str] = []
        async with keeping(Policy(), hosting=hosting(Here(talk))) as keeper:

            async def group(number: int) -> None:
                (finished,) = [group async for group in keeper.generate([request(number=number)])]
                told.append(f"group {finished.number}")

            first = asyncio.ensure_future(group(1))
            await asyncio.sleep(0.5)
            holding = asyncio.ensure_future(keeper.hold())
            await asyncio.sleep(0)
            second = asyncio.ensure_future(group(2))
            await holding
            told.append("held")
            await asyncio.sleep(100)
            told.append("goes on")
            await keeper.go_on()
            await asyncio.gather(first, second)
        return told

    assert run_virtual(main()) == ["group 1", "held", "goes on", "group 2"]


def test_a_group_is_aborted_with_a_turn_in_flight():
    async def abort(keeper: GroupKeeper) -> None:
        await asyncio.sleep(1.5)
        await keeper.abort_older_than(5)

    (episode,) = made(talk, meanwhile=abort).trajectories
    assert (episode.finish_reason, episode.turns) == (FinishReason.ABORTED, 1)


def test_a_call_that_an_engine_ends_aborts_its_group():
    policy = Policy()

    async def abort(keeper: GroupKeeper) -> None:
        await asyncio.sleep(1.5)
        nothing = SampledTokens.nothing()
        finished = FinishedCall(policy.calls[-1].number, 0, [], FinishReason.ABORTED, 0.0, 0.0, nothing)
        policy._batches.put_nowait([finished])

    (episode,) = made(talk, [policy], meanwhile=abort).trajectories
    assert (episode.finish_reason, episode.turns) == (FinishReason.ABORTED, 1)


def test_tokens_of_the_calls_that_an_engine_ends_count_in_every_episode_of_the_group():
    """The second one's came with the first one's, by whose end the group was aborted before it was read."""
    policy = Policy()

    async def abort(keeper: GroupKeeper) -> None:
        await asyncio.sleep(1.5)
        policy.end(*policy.calls[-2:], lengths=(3, 2))

    episodes = made(talk, [policy], n=2, meanwhile=abort).trajectories
    first = len(RENDERER.encode(policy.says(policy.calls[0]))) + 1
    for episode, cut in zip(episodes, (3, 2), strict=True):
        assert (episode.finish_reason, episode.turns, episode.length) == (FinishReason.ABORTED, 2, first + cut)
        assert (episode.version_spans, episode.rows) == ([[0, 0], [first, 7]], ())


def test_what_only_a_lost_try_had_asked_for_makes_no_episode_old():
    """The second turn of the first try is not asked again: its version is that of nothing that is trained."""
    tries, policy = 0, Policy()

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        nonlocal tries
        tries += 1
        await ask(TurnRequest([said("user", f"one of try {tries}")]))
        if tries == 1:
            await ask(TurnRequest([said("user", "two")]))
            raise RunnerLost("its runner was killed by SIGKILL", culprit=False)
        await asyncio.sleep(1)
        return EpisodeEnd(1.0)

    async def abort_overdue(keeper: GroupKeeper) -> None:
        await asyncio.sleep(2.5)
        policy.version = 3
        await asyncio.sleep(1)
        await keeper.abort_older_than(3)

    (episode,) = made(program, [policy], meanwhile=abort_overdue).trajectories
    assert (tries, len(policy.calls)) == (2, 3)
    assert (episode.finish_reason, episode.oldest_version) == (FinishReason.STOP, 3)


# ---------------------------------------------------------------------------------------------- a program's own ways


def own(run: Callable[..., Awaitable[Any]]) -> Program:
    """The program of a user's own function, as a runner serves it."""
    loaded = LoadedProgram(OwnProgram(run, "own.py:run", {}), "program own.py:run")
    return loaded.serve


class Slow(Policy):
    """A policy whose first call takes 5 seconds, and all others 1."""

    async def submit(self, client: str, calls: Sequence[Call]) -> None:
        for call in calls:
            self.calls.append(call)
            seconds = 5.0 if len(self.calls) == 1 else 1.0
            asyncio.get_running_loop().call_later(seconds, self._answer, call)


def test_rewards_of_turns_go_to_their_tokens_in_whatever_order_turns_end():
    texts = []

    async def run(row: Any, chat: Any) -> None:
        first = asyncio.ensure_future(chat.turn([said("user", "the long one, asked first")]))
        await asyncio.sleep(0.1)
        second = await chat.turn([said("user", "b")])
        texts.extend([(await first).text, second.text])
        chat.reward(10.0, await first)
        chat.reward(1.0, second)

    group = made(own(run), [Slow()])
    rewards = group.trajectories[0].turn_rewards
    by_text = {RENDERER.text(trained(row)): rewards[row.turns[0].number] for row in group.tokens.rows}
    assert by_text == {texts[0]: 10.0, texts[1]: 1.0}


def test_a_turn_that_was_given_up_has_no_number():
    async def run(row: Any, chat: Any) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(chat.turn([said("user", "slow")]), 2.0)
        for reward, text in ((1.0, "one"), (2.0, "two, which is longer")):
            chat.reward(reward, await chat.turn([said("user", text)]))

    group = made(own(run), [Slow()])
    assert group.trajectories[0].turn_rewards == (1.0, 2.0)
    assert sorted(span.number for row in group.tokens.rows for span in row.turns) == [0, 1]


def test_an_episode_whose_first_context_is_too_long_has_failed():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        with suppress(EpisodeOver):
            await ask(TurnRequest([said("user", "word " * 500)]))
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program).trajectories
    assert (episode.failure, episode.rows) == ("its conversation has the 400 tokens that there may be", ())


def test_a_short_turn_asks_for_no_more_tokens_than_it_may_have():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await ask(TurnRequest(start.messages, max_tokens=1))
        return EpisodeEnd(1.0)

    policy = Policy()

    async def main() -> None:
        async with keeping(policy, hosting=hosting(Here(program))) as keeper:
            sampling = SamplingParams(50, min_tokens=4)
            _ = [group async for group in keeper.generate([replace(request(), sampling=sampling)])]

    run_virtual(main())
    assert [(call.sampling.min_tokens, call.sampling.max_tokens) for call in policy.calls] == [(1, 1)]


def test_a_call_that_an_engine_refuses_fails_its_episode_alone():
    class Refusing(Policy):
        async def submit(self, client: str, calls: Sequence[Call]) -> None:
            if len(self.calls) == 2:
                raise DataError("the context is too long for this engine")
            await super().submit(client, calls)

    (episode,) = made(talk, [Refusing()]).trajectories
    assert episode.failure == "the context is too long for this engine"


@pytest.mark.parametrize("odd", [{(1, 2): "x"}, {1: "a", "b": 2}])
def test_messages_that_cannot_be_compared_fail_their_episode_alone(odd):
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await ask(TurnRequest([{"role": "user", "content": "hi", "meta": odd}]))
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program).trajectories
    assert episode.failure is None or "the messages of a turn cannot be used" in episode.failure


def test_a_reward_that_hangs_after_a_limit_fails_the_episode():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await talk(start, ask, 9)
        await asyncio.Event().wait()
        return EpisodeEnd()

    (episode,) = made(program).trajectories
    assert episode.failure == "a step took longer than rollout.step_timeout_s=10"


def test_a_turn_in_flight_is_waited_for_after_another_one_met_a_limit():
    class Long(Slow):
        async def submit(self, client: str, calls: Sequence[Call]) -> None:
            for call in calls:
                self.calls.append(call)
                seconds = 30.0 if len(self.calls) == 1 else 1.0
                asyncio.get_running_loop().call_later(seconds, self._answer, call)

    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        long = asyncio.ensure_future(ask(TurnRequest([said("user", "the long one")])))
        await asyncio.sleep(0.01)
        await talk(start, ask, 9)
        await long
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program, [Long()]).trajectories
    assert (episode.reward, episode.failure, episode.limit) == (1.0, None, "turns")


def test_a_prefix_is_released_also_where_its_call_was_given_up():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        asking = asyncio.ensure_future(ask(TurnRequest(start.messages)))
        await asyncio.sleep(0.5)
        asking.cancel()
        raise ProgramFailed("no more")

    policy = Policy(seconds=100)
    (episode,) = made(program, [policy]).trajectories
    assert policy.released == [episode.id]


def test_a_program_that_has_to_give_a_reward_and_gives_none_has_failed_alone():
    async def program(start: EpisodeStart, ask: Turn) -> EpisodeEnd:
        await ask(TurnRequest(start.messages))
        return EpisodeEnd(None if start.seed % 2 else 1.0)

    async def main() -> FinishedGroup:
        asked = replace(hosting(Here(program)), gives_reward=True)
        async with keeping(Policy(), hosting=asked) as keeper:
            (group,) = [group async for group in keeper.generate([request(8)])]
            return group

    failures = {episode.failure for episode in run_virtual(main()).trajectories}
    assert failures == {
        None,
        "the program gave no reward; return one from it, or name a reward.function that scores answers",
    }


def test_held_groups_hear_of_the_end():
    async def main() -> None:
        keeper = GroupKeeper("keeper")
        await keeper.hold()
        waiting = asyncio.ensure_future(anext(keeper.generate([request()])))
        await asyncio.sleep(0)
        keeper.end(RunError("all is over"))
        with pytest.raises(RunError, match="all is over"):
            await waiting

    run_virtual(main())
