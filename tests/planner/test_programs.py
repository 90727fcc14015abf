"""Programs that only take time, and the record of lengths: what they ask for, and what a plan makes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.interface.program_messages import TurnRequest
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, SamplingParams
from headway.data.types import FinishReason, Prompt, RowAt, Trajectory
from headway.events import ReplicaActivity, TrajectoryFinished
from headway.planner.grid import DeviceSplit, setting_of
from headway.planner.planner import plan
from headway.planner.profiles.job_profile import (
    LognormalNumber,
    Profile,
    ProgramProfile,
    RecordedNumber,
)
from headway.planner.simulation.simulated_prompts import SimulatedEpisodeTokens, said_in_tokens
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.planner.simulation.virtual_clock import run_virtual
from tests.planner.jobs import Recorder, profile
from tests.planner.planning import profile_of
from tests.planner.replica import replica
from tests.planner.troubled_programs import NO_TROUBLES, TroubledPrograms, Troubles

THREE_TURNS = {
    "turns": {"kind": "constant", "value": 3},
    "step_s": {"kind": "constant", "value": 2},
    "step_tokens": {"kind": "constant", "value": 5},
}
LIMITS = EpisodeLimits(max_length=10_000, max_turns=100, step_timeout_s=1e6, episode_timeout_s=1e6)


def made(
    program: dict[str, Any], troubles: Troubles = NO_TROUBLES, *, n: int = 1, engine: SimulatedRollout | None = None
) -> tuple[Sequence[Trajectory], float, SimulatedRollout]:
    """A group of ``n`` episodes with a prompt of 10 tokens and turns of 4; a token takes a second."""

    async def main() -> tuple[Sequence[Trajectory], float, SimulatedRollout]:
        replica_ = engine or replica(lambda row, k: 4, slots=8, decode=[(1, 1.0)])
        programs = TroubledPrograms(ProgramProfile.model_validate(program), troubles)
        prompt = Prompt(0, 0, 0, "", "", np.zeros(10, np.int32), messages=[said_in_tokens("user", "", 10)])
        async with local_episode_worker(
            replica_, hosting=Hosting(programs, SimulatedEpisodeTokens, LIMITS, seed=1)
        ) as worker:
            (group,) = [g async for g in worker.generate([Group(0, prompt, n, SamplingParams(1000))])]
            assert group.tokens is None, "there is nothing behind lengths"
            return group.trajectories, asyncio.get_running_loop().time(), replica_

    return run_virtual(main())


def test_an_episode_takes_its_turns_and_its_steps_and_is_one_row_of_all_that_was_read_and_sampled():
    (episode,), seconds, _ = made(THREE_TURNS)
    assert (episode.turns, episode.length, seconds) == (3, 12, 3 * 4 + 3 * 2)
    assert episode.rows == (RowAt(0, 10, 3 * 4 + 2 * 5),)
    assert (episode.metrics["environment_s"], episode.metrics["step_tokens"]) == (6.0, 10)


def test_a_fork_begins_a_row_at_the_prompt():
    (episode,), _, _ = made({**THREE_TURNS, "forks": 1.0})
    assert episode.rows == tuple(RowAt(k, 10 + 5 * (k > 0), 4) for k in range(3))
    assert episode.metrics["forks"] == 2


@pytest.mark.parametrize(("forks", "found"), [(0.0, [0, 14, 23]), (1.0, [0, 10, 10])])
def test_a_turn_finds_in_the_cache_what_its_context_goes_on_from(forks: float, found: list[int]):
    engine = replica(lambda row, k: 4, slots=8, decode=[(1, 1.0)])
    cached: list[int] = []

    def tell(client: str, batch: Sequence[Completion]) -> None:
        cached.extend(call.cached for call in batch)
        deliver(client, batch)

    deliver, engine._replica._deliver = engine._replica._deliver, tell
    made({**THREE_TURNS, "forks": forks}, engine=engine)
    assert cached == found


def test_further_turns_have_lengths_of_their_own_which_are_the_same_in_every_run():
    lognormal = {"kind": "lognormal", "mean": 60, "sigma": 0.8, "max": 500}

    def lengths(seed: int) -> list[tuple[int, int]]:
        recorder = Recorder()
        job = profile(response=lognormal, program=THREE_TURNS)
        config = config_for(job, "on_policy", train_devices=1, replicas=1, versions=2)
        Simulation(job, config, seed=seed, observers=[recorder]).run()
        return [(event.tokens, len(event.version_spans)) for event in recorder.of(TrajectoryFinished)]

    assert lengths(1) == lengths(1) != lengths(2)
    assert any(tokens % 3 for tokens, _ in lengths(1)), "three turns of one length"


def test_no_more_episodes_are_open_than_there_are_environments():
    _, alone, _ = made({**THREE_TURNS, "environments": 1}, n=4)
    _, together, _ = made(THREE_TURNS, n=4)
    assert (alone, together) == (4 * 18, 18)


def test_troubles_are_those_of_the_seed_and_what_was_answered_before_is_not_sampled_again():
    troubles = Troubles(failing=0.2, away=0.3, lost=0.2)
    episodes, seconds, engine = made(THREE_TURNS, troubles, n=40)
    again, same, _ = made(THREE_TURNS, troubles, n=40)
    assert ([e.failure for e in episodes], seconds) == ([e.failure for e in again], same)
    tries = [episode.metrics["tries"] for episode in episodes]
    assert {1, 2, 3} <= set(tries)
    assert {e.failure is None for e in episodes if e.metrics["tries"] > 1} == {True, False}
    assert {sizes(e) for e in episodes if e.failure is None} == {((10, 22),)}
    sampled = sampled_by(engine)
    assert sum(e.length for e in episodes) <= sampled <= 40 * 12, "a try that goes as the one before asks for nothing"


def sizes(episode: Trajectory) -> tuple[tuple[int, int], ...]:
    return tuple((row.prompt_length, row.length) for row in episode.rows)


def sampled_by(engine: SimulatedRollout) -> int:
    return round(engine._replica._sharing.sampled)


def test_a_program_that_drifts_is_answered_anew_and_trained_on_its_last_try_alone():
    engine = replica(lambda row, k: 4, slots=8, decode=[(1, 1.0)])
    troubles = Troubles(away=0.6, drifts=1.0)
    episodes, _, _ = made(THREE_TURNS, troubles, n=20, engine=engine)
    assert sampled_by(engine) > sum(e.length for e in episodes)
    assert {sizes(e) for e in episodes if e.failure is None} == {((10, 22),)}


def test_a_lost_worker_ends_its_programs_which_are_run_again():
    async def main() -> list[Trajectory]:
        programs = TroubledPrograms(ProgramProfile.model_validate(THREE_TURNS))
        prompt = Prompt(0, 0, 0, "", "", np.zeros(10, np.int32), messages=[said_in_tokens("user", "", 10)])
        engine = replica(lambda row, k: 4, slots=8, decode=[(1, 1.0)])
        async with local_episode_worker(engine, hosting=Hosting(programs, SimulatedEpisodeTokens, LIMITS)) as worker:
            asyncio.get_running_loop().call_later(5.0, programs.lose_worker, 0)  # in the first step
            (group,) = [g async for g in worker.generate([Group(0, prompt, 3, SamplingParams(1000))])]
        return list(group.trajectories)

    episodes = run_virtual(main())
    assert [(e.failure, e.metrics["tries"], e.turns) for e in episodes] == [(None, 2, 3)] * 3


def test_parallel_turns_are_rows_of_their_own():
    (episode,), seconds, _ = made({**THREE_TURNS, "turns": {"kind": "constant", "value": 4}}, Troubles(parallel=1.0))
    assert (episode.turns, seconds) == (4, 2 * 4 + 2 * 2)
    assert episode.rows == (RowAt(0, 10, 4 + 5 + 4), RowAt(1, 11, 4), RowAt(2, 20, 4))


# ---------------------------------------------------------------------------------------------- the record


def finished(call: int, tokens: int) -> Completion:
    return Completion(call, tokens, [[0, 0]], FinishReason.STOP, 0.0, 0.0)


def test_keys_of_calls_tell_contexts_apart_and_are_the_same_at_every_try():
    def keys() -> list[int]:
        record, found = SimulatedEpisodeTokens(), []
        start = [said_in_tokens("user", "", 10)]
        for messages in (start, start, [said_in_tokens("user", "other", 10)]):
            prompted = asyncio.run(record.prompt(request := TurnRequest(list(messages)), found))
            answer = record.answered(prompted, request, finished(len(found), 3), len(found))
            found.append(prompted.key)
            follow = [answer.message, said_in_tokens("tool", "", 1)]
            further = asyncio.run(record.prompt(TurnRequest([*messages, *follow]), found))
            assert len(further.ids) == 14
            found.append(further.key)
        return found

    first = keys()
    assert first == keys()
    assert 0 not in first and len(set(first)) == 6


# ---------------------------------------------------------------------------------------------- numbers


def test_bounds_of_numbers_are_those_of_their_draws():
    number = LognormalNumber(kind="lognormal", mean=2.0, sigma=1.2, max=9.0)
    draws = [number.draw(episode=0.5, own=(k + 0.5) / 20_000) for k in range(20_000)]
    assert max(draws) == number.largest == 9.0
    recorded = RecordedNumber(kind="recorded", values=[1, 2, 6])
    assert [recorded.draw(episode=e, own=0.9) for e in (0.1, 0.5, 0.99)] == [1, 2, 6]
    assert recorded.largest == 6


# ---------------------------------------------------------------------------------------------- plans


def steps_s(job: Profile) -> dict[int, float]:
    """Step time of `on_policy` with so many replicas, one device for training."""
    settings = [setting_of(job, "on_policy", DeviceSplit(1, replicas, replicas, shared=False)) for replicas in (1, 4)]
    found = plan(job, settings=settings, budget_s=1000.0)
    return {row.setting.split.replicas: row.step_s for row in found.rows}


@pytest.mark.slow
def test_more_replicas_help_where_generation_is_the_bottleneck_and_not_where_environments_are(monkeypatch):
    """Simulates several runs."""
    monkeypatch.setattr("headway.planner.measure.MOST_VERSIONS", 8)  # no small differences are looked for
    quick = {**THREE_TURNS, "step_s": {"kind": "constant", "value": 0.01}}
    slow = {**THREE_TURNS, "step_s": {"kind": "lognormal", "mean": 20, "sigma": 1.0, "max": 200}, "environments": 8}
    costs = {"decode": [[1, 0.1], [16, 1.6]]}  # a step costs as much for each sequence
    generation, environment = (steps_s(profile_of(rollout=costs, program=p)) for p in (quick, slow))
    assert generation[1] > 2.5 * generation[4]
    assert environment[1] < 1.3 * environment[4]
    assert environment[4] > 2 * generation[4]


def test_groups_that_a_drain_has_held_back_spread_over_all_replicas():
    recorder = Recorder()
    job = profile_of(program=THREE_TURNS)
    Simulation(job, config_for(job, "on_policy", train_devices=4, replicas=4, versions=3), observers=[recorder]).run()
    begun = Counter((event.version_spans[0][1], event.replica) for event in recorder.of(TrajectoryFinished))
    assert len(begun) == 3 * 4 and set(begun.values()) == {4}


def test_a_step_of_the_environment_holds_no_slot():
    def simulated(step_s: float) -> tuple[float, float]:
        job = profile_of(program={**THREE_TURNS, "step_s": {"kind": "constant", "value": step_s}})
        recorder = Recorder()
        simulation = Simulation(
            job, config_for(job, "on_policy", train_devices=4, replicas=4, versions=2), observers=[recorder]
        )
        simulation.run()
        return simulation.seconds, sum(event.slot_seconds for event in recorder.of(ReplicaActivity))

    without, with_steps = simulated(0.0), simulated(5.0)
    assert with_steps[1] == pytest.approx(without[1])
    assert with_steps[0] == pytest.approx(without[0] + 2 * 3 * 5.0)
