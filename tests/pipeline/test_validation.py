"""Validation in whole runs: first in priority, beside training, of exactly the version that it is said to be of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from headway.agents.episodes.program_episode import EpisodeLimits, Hosting
from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Scores
from headway.data.types import Prompt, TrajectoryId
from headway.errors import WorkerDied
from headway.events import GroupSettled, OptimizerStepped, UpdateFinished, ValidationFinished
from headway.planner.profiles.job_profile import ProgramProfile
from headway.planner.simulation.simulated_prompts import SimulatedEpisodeTokens, SimulatedPrograms
from headway.reports.live.plain_log import validation_line
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow

PROGRAM = {"agent": {"program": "x.py:run"}}


def slow_validation(trajectory: TrajectoryId) -> int:
    """Held-out answers take 25 s, training answers about one."""
    return 200 if trajectory.epoch == -1 else 8 + trajectory.row % 5


def test_a_run_that_goes_on_at_version_0_makes_no_validation_again_whose_result_is_known(tmp_path: Path):
    scenario = Scenario("on_policy", problems=3, sections={"trainer": {"save_freq": 10}})
    (start,) = replace(scenario, journal=tmp_path / "journal").run().starts
    for known, versions in ((None, [0, 1, 2, 3, 4, 5, 6]), (0, [1, 2, 3, 4, 5, 6])):
        run = replace(scenario, resume_from=start, validated=known).run().assert_completed()
        assert run.validated() == versions


def test_a_run_that_goes_on_at_its_last_version_makes_no_validation_whose_result_is_known():
    scenario = Scenario("on_policy", problems=3)
    (_, end), *_ = reversed(scenario.run().assert_completed().trainer.saved)
    for known, versions in ((None, [6]), (6, [])):
        run = replace(scenario, resume_from=end, validated=known).run()
        assert (run.error, run.version, run.validated()) == (None, 6, versions)


@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial", "overlapped"])
def test_a_replica_loads_nothing_newer_until_its_validation_is_done(mode: str):
    run = Scenario(mode, problems=3, lengths=slow_validation).run().assert_completed()
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]
    loads = dict(run.rollouts[0].loads)
    for validation in run.of(ValidationFinished):
        assert validation.version == 0 or loads[validation.version] <= validation.span[0]
        assert validation.version == 6 or validation.span[1] - 0.25 <= loads[validation.version + 1]


def test_the_wait_for_a_validation_is_told_as_such():
    run = Scenario("async_partial", problems=3, lengths=slow_validation).run().assert_completed()
    first, *_ = run.of(UpdateFinished)
    assert first.trainer_stall_s > first.validation_stall_s > 10
    assert first.rollout_stall_s == 0.125


@mostly_slow(
    ("mode", "test_freq"),
    product(MODES, [1, 2, 4, 5, -1]),
    quick=[("on_policy", -1), ("one_step_off", 4), ("async_stale", 5), ("overlapped", 2)],
)
def test_the_first_and_the_last_version_are_validated_exactly_once(mode: str, test_freq: int):
    run = Scenario(mode, problems=2, test_freq=test_freq).run().assert_completed()
    between = [version for version in range(1, 6) if test_freq > 0 and version % test_freq == 0]
    assert run.validated() == [0, *between, 6]


def test_training_generation_goes_on_beside_a_validation_and_refills_are_not_held_back():
    """Group 20 fails while version 1 waits for the validation of version 0: its refill starts at once."""
    reward = FakeReward(
        lambda prompt: fails("no") if (prompt.epoch, prompt.row) == (0, 20) else [0.0, 1.0],
        seconds=lambda prompt: 15.0 if (prompt.epoch, prompt.row) == (0, 20) else 0.25,
    )
    scenario = Scenario("async_stale", problems=3, lengths=slow_validation, reward=reward, slots=64)
    run = scenario.run().assert_completed()
    failed = next(event for event in run.of(GroupSettled) if event.fate == "failed")
    version, loaded = run.rollouts[0].loads[0]
    assert version == 1 and loaded > failed.time > max(s.time for s in run.of(OptimizerStepped) if s.version == 0)
    assert run.launches()[24] == failed.time


def test_validation_starts_before_training_groups_that_wait():
    run = Scenario("async_stale", problems=4, slots=4, lengths=slow_validation).run().assert_completed()
    for version, loaded in run.rollouts[0].loads[:-1]:
        after = [(time, priority) for time, _, priority in run.rollouts[0].submitted if time >= loaded]
        assert after[0] == (loaded, "validation"), f"version {version}"


def test_a_run_without_held_out_problems_validates_nothing():
    assert Scenario(problems=0).run().assert_completed().validated() == []


def test_problems_that_cannot_be_scored_count_as_wrong_and_are_told():
    reward = FakeReward(lambda p: fails("cannot") if p.epoch == -1 and p.row == 0 else [1.0, 0.0])
    run = Scenario("on_policy", problems=4, reward=reward, total=4).run().assert_completed()
    first, last = run.of(ValidationFinished)
    assert (first.problems, first.failed, first.accuracy) == (4, 1, 0.75)
    assert last.version == 1


def test_episodes_that_failed_are_told_and_leave_their_problem_the_mean_of_the_others():
    fails = {(0, 1), (2, 0), (2, 1)}

    def failing(number: int, k: int) -> str | None:
        return "the sandbox has burnt down" if (number, k) in fails else None

    reward = FakeReward(lambda prompt: [1.0, 0.0] if prompt.epoch == -1 else [0.0, 1.0])
    sections = {"rollout": {"val_n": 2, "val_temperature": 1.0}}
    run = Scenario("on_policy", problems=3, total=4, failing=failing, reward=reward, sections=sections).run()
    for event in run.assert_completed().of(ValidationFinished):
        assert (event.problems, event.failed, event.failed_episodes) == (3, 1, 3)
        assert event.accuracy == (1 + 0.5 + 0) / 3
        assert ", 1 failed, failed episodes not counted: 3, " in validation_line(event)


def test_validation_asks_for_val_n_answers_at_val_temperature():
    seen = []
    scenario = Scenario("on_policy", problems=3, total=4, sections={"rollout": {"val_n": 4, "val_temperature": 0.5}})

    def script(run) -> None:
        (worker,) = run.pipeline.parts.machinery.episode_workers
        generate = worker.generate
        worker.generate = lambda requests, on=None: seen.extend(requests) or generate(requests, on=on)

    scenario.script = script
    scenario.run().assert_completed()
    held_out = [request for request in seen if request.priority == "validation"]
    assert {(r.n, r.sampling.temperature, r.sampling.top_p) for r in held_out} == {(4, 0.5, 1.0)}
    assert [r.number for r in held_out] == [0, 1, 2, 0, 1, 2]


# --------------------------------------------------------------------------------------------- programs

ON_TIME = ("colocate_sync", "on_policy", "stream_off_policy")
"""Modes without staleness."""


def two_turns(config: Config) -> Hosting:
    """Episodes of two turns with 4 s between them, in which nothing decodes and a drain by turns would be over."""
    profile = ProgramProfile.model_validate(
        {"turns": {"kind": "constant", "value": 2}, "step_s": {"kind": "constant", "value": 4}}
    )
    limits = EpisodeLimits(max_length=100_000, max_turns=9, step_timeout_s=1e6, episode_timeout_s=1e6)
    return Hosting(SimulatedPrograms(profile), SimulatedEpisodeTokens, limits)


def validated_programs(mode: str, **further: Any) -> Run:
    scenario = Scenario(mode, problems=6, lengths=slow_validation, sections=PROGRAM, hosting=two_turns, **further)
    return scenario.run().assert_completed()


@mostly_slow("mode", ON_TIME, quick=["colocate_sync"])
def test_without_staleness_all_replicas_validate_programs_and_load_nothing_newer_meanwhile(mode: str):
    run = validated_programs(mode, replicas=3)
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]
    for validation in run.of(ValidationFinished):
        assert validation.versions == [validation.version]
    for rollout in run.rollouts:
        assert rollout.validated, "it answers, too"
        loads = dict(rollout.loads)
        for validation in run.of(ValidationFinished):
            assert validation.version == 0 or loads[validation.version] <= validation.span[0]
            assert validation.version == 6 or validation.span[1] - 0.25 <= loads[validation.version + 1]


@mostly_slow("mode", [mode for mode in MODES if mode not in ON_TIME], quick=["one_step_off"])
def test_with_staleness_no_update_waits_for_a_validation_by_programs(mode: str):
    run = validated_programs(mode, replicas=3, async_training={"on_update": "interrupt"})
    assert (run.validated()[0], run.validated()[-1]) == (0, 6)
    assert {update.validation_stall_s for update in run.of(UpdateFinished)} == {0.0}
    assert max(len(validation.versions) for validation in run.of(ValidationFinished)) > 1
    assert all(rollout.validated for rollout in run.rollouts)


@mostly_slow(
    ("mode", "test_freq"),
    product(MODES, [1, 2, 5, -1]),
    quick=[("on_policy", 5), ("one_step_off", 2), ("overlapped", -1), ("colocate_async", 2)],
)
def test_versions_are_validated_by_programs_exactly_once(mode: str, test_freq: int):
    run = Scenario(mode, problems=2, test_freq=test_freq, replicas=2, sections=PROGRAM).run().assert_completed()
    between = [version for version in range(1, 6) if test_freq > 0 and version % test_freq == 0]
    assert run.validated() == [0, *between, 6]


@mostly_slow("mode", ["on_policy", "async_partial"], quick=["on_policy"])
def test_a_replica_that_dies_in_a_validation_by_programs_leaves_its_answers_to_the_others(mode: str):
    def script(run: Run) -> None:
        asyncio.get_running_loop().call_at(12.0, run.rollouts[0].die, WorkerDied("killed"))

    run = validated_programs(mode, replicas=2, script=script, supervised=True)
    assert (run.validated()[0], run.validated()[-1]) == (0, 6)
    assert {(validation.problems, validation.failed) for validation in run.of(ValidationFinished)} == {(6, 0)}


def test_a_reward_reads_the_conversations_of_programs_in_training_and_in_validation():
    read: dict[int, set[tuple[int, int]]] = {}

    class Reader(FakeReward):
        async def score(self, prompt: Prompt, responses: Sequence[str], conversations: Any = None) -> Scores:
            lengths = {(len(one.prompt), len(one.completion)) for one in conversations}
            read.setdefault(prompt.epoch, set()).update(lengths)
            return await super().score(prompt, responses)

    run = Scenario("on_policy", problems=2, total=4, sections=PROGRAM, hosting=two_turns, reward=Reader()).run()
    run.assert_completed()
    assert read == {-1: {(1, 3)}, 0: {(1, 3)}}
