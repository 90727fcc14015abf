"""When something breaks: the run fails with that error, by name, in bounded time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import product

import pytest

from headway.errors import (
    LedgerImbalance,
    NothingToTrain,
    RunError,
    StageFailed,
    StalenessExceeded,
    StallError,
    WorkerDied,
)
from headway.events import (
    BatchTaken,
    CheckpointSaved,
    GroupAdmitted,
    GroupRewarded,
    ReplicaLost,
    RunFinished,
    TrajectoryFinished,
    VersionReached,
)
from tests.pipeline.fake_policies import FakeReference
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import crossed, mostly_slow


def failed(scenario: Scenario, error: type[BaseException], match: str) -> Run:
    run = scenario.run()
    assert run.error is not None, "the run went on as if nothing had happened"
    with pytest.raises(error, match=match):
        raise run.error
    run.assert_clean()
    finished = run.of(RunFinished)[0]
    assert finished.status == "failed"
    assert finished.reason is not None and finished.reason.startswith(error.__name__)
    return run


# ---------------------------------------------------------------------------------------------- workers


def dies_at(seconds: float, replica: int = 0):
    async def beside(run: Run) -> None:
        await asyncio.sleep(seconds)
        run.rollouts[replica].die(WorkerDied(f"rollout-{replica} was killed"))

    return beside


MOMENTS = (0.0, 0.3, 2.0, 5.125, 8.0, 11.7, 14.0)


@crossed(("mode", "seconds"), MODES, MOMENTS)
def test_the_only_replica_that_dies_at_any_moment_ends_the_run_with_its_name(mode: str, seconds: float):
    run = failed(Scenario(mode, problems=2, beside=dies_at(seconds)), WorkerDied, "rollout-0")
    assert run.ended < seconds + 20, "in bounded time: as soon as anything asks the dead replica"


@mostly_slow(
    ("mode", "replica", "seconds"),
    product(MODES, [0, 1], MOMENTS),
    quick=[(mode, place % 2, MOMENTS[place % len(MOMENTS)]) for place, mode in enumerate(MODES)],
)
def test_one_replica_of_two_may_die_at_any_moment_and_the_other_takes_its_calls_over(
    mode: str, replica: int, seconds: float
):
    scenario = Scenario(mode, replicas=2, problems=2, beside=dies_at(seconds, replica))
    run = scenario.run().assert_completed()
    assert [e.replica for e in run.of(ReplicaLost)] == [f"rollout-{replica}"]
    assert run.groups["dropped"] == 0
    assert all(e.attempt == 0 for e in run.of(GroupAdmitted))
    after = [t for t in run.of(TrajectoryFinished) if t.finished > seconds]
    assert {t.replica for t in after} <= {f"rollout-{1 - replica}"}


def test_the_calls_of_a_dead_replica_are_taken_over_though_the_data_has_given_out():
    for seconds in MOMENTS:
        run = Scenario("async_partial", rows=20, epochs=1, replicas=2, beside=dies_at(seconds)).run()
        assert run.assert_completed().groups["trained"] == 20


def test_when_all_replicas_die_one_after_another_the_last_one_ends_the_run():
    async def beside(run: Run) -> None:
        for replica in run.rollouts:
            await asyncio.sleep(2.0)
            replica.die(WorkerDied(f"{replica.name} was killed"))

    run = failed(Scenario("async_partial", replicas=3, beside=beside), WorkerDied, "rollout-2 was killed")
    assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-0", "rollout-1", "rollout-2"]


@mostly_slow("policy", ["drain", "interrupt"], quick=["interrupt"])
def test_a_replica_that_dies_in_the_middle_of_an_update_ends_the_run(policy: str):
    """The transfer begins at 1.25 s after the version's last step began and takes half a second."""
    healthy = Scenario("async_stale", async_training={"on_update": policy}).run().assert_completed()
    loaded = healthy.rollouts[0].loads[0][1]
    for before in (0.5, 0.375, 0.25, 0.125, 0.0625, 0.0):
        scenario = Scenario("async_stale", async_training={"on_update": policy}, beside=dies_at(loaded - before))
        failed(scenario, WorkerDied, "rollout-0 was killed")


def test_the_watch_ends_the_run_as_soon_as_any_worker_dies():
    async def beside(run: Run) -> None:
        await asyncio.sleep(3.0)
        raise WorkerDied("reward-2 was killed")

    run = failed(Scenario("async_partial", beside=beside, watched=True), WorkerDied, "reward-2")
    assert run.ended == 3.0


def test_a_watch_that_has_nothing_to_tell_does_not_keep_the_run_from_ending():
    async def beside(run: Run) -> None:
        await asyncio.Event().wait()

    Scenario("async_partial", beside=beside, watched=True).run().assert_completed()


# ---------------------------------------------------------------------------------------------- stages


@mostly_slow(
    ("mode", "step"), product(MODES, [0, 3, 9]), quick=[("on_policy", 0), ("async_partial", 3), ("overlapped", 9)]
)
def test_a_trainer_that_raises_ends_the_run_and_names_the_stage(mode: str, step: int):
    def script(run: Run) -> None:
        run.trainer.raises_at[step] = ArithmeticError("overflow")

    run = failed(Scenario(mode, script=script, total=48), StageFailed, "ActorTrain failed: ArithmeticError: overflow")
    assert isinstance(run.error.__cause__, ArithmeticError)
    assert run.groups["in_flight"] >= 4, "the groups of the batch met no other fate"
    assert run.of(CheckpointSaved) == []


def test_a_trainer_that_dies_ends_the_run_with_that_error():
    def script(run: Run) -> None:
        run.trainer.raises_at[2] = WorkerDied("actor-0 was killed")

    failed(Scenario("async_partial", script=script), WorkerDied, "actor-0")


def test_a_foreign_exception_in_the_rewards_machinery_is_no_failed_group_but_a_failed_run():
    def rewards(prompt) -> list[float]:
        if prompt.row == 5:
            raise ConnectionError("pool is gone")
        return [0.0, 1.0]

    failed(Scenario("async_partial", reward=FakeReward(rewards)), StageFailed, "Reward failed: ConnectionError: pool")


def test_a_foreign_exception_while_validation_is_scored_names_validate():
    def rewards(prompt) -> list[float]:
        if prompt.epoch == -1:
            raise ConnectionError("pool is gone")
        return [0.0, 1.0]

    failed(Scenario("async_partial", problems=2, reward=FakeReward(rewards)), StageFailed, "Validate failed: Conn")


def test_a_stage_that_fails_does_not_pass_for_the_end_of_the_data():
    """One group of two waits for the trainer when the rest of the run fails: it is no batch, and makes no version."""
    reward = FakeReward(lambda prompt: [0.0, 1.0] if prompt.row == 0 else [1.0, 1.0])
    run = failed(
        Scenario("async_stale", mini_batch=2, total=8, reward=reward, filters=True),
        NothingToTrain,
        "groups in a row were discarded",
    )
    assert run.of(GroupRewarded)[-1].rewards == [1.0, 1.0] and [0.0, 1.0] in [e.rewards for e in run.of(GroupRewarded)]
    assert run.of(BatchTaken) == [] and [event.version for event in run.of(VersionReached)] == [0]


def test_a_source_that_raises_ends_the_run():
    def script(run: Run) -> None:
        def broken() -> None:
            raise OSError("disk is gone")

        run.source.next = broken  # type: ignore[assignment]

    failed(Scenario("async_partial", script=script), StageFailed, "PromptLoader failed: OSError")


def test_a_reference_that_raises_ends_the_run():
    class Broken(FakeReference):
        async def forward_logprobs(self, samples):
            raise ValueError("no such column")

    failed(Scenario("async_stale", reference=Broken()), StageFailed, "RefLogProb failed: ValueError")


def test_the_last_checkpoint_fails_the_run_where_it_cannot_be_saved():
    def script(run: Run) -> None:
        async def save(*_: object) -> None:
            raise OSError("no space left on device")

        run.trainer.save = save  # type: ignore[method-assign]

    run = Scenario("async_partial", script=script).run()
    assert isinstance(run.error, RunError)
    assert "not saved: could not write the checkpoint checkpoints/version_6: OSError: no space left on device" in str(
        run.error
    )
    run.assert_clean()
    assert run.of(RunFinished)[0].status == "failed"
    assert run.groups["trained"] == 96


# ---------------------------------------------------------------------------------------------- updates


def test_a_timeout_inside_an_engine_is_not_mistaken_for_the_updates_own():
    def script(run: Run) -> None:
        async def send(version: int, receivers: list[str]) -> None:
            raise TimeoutError("the store did not answer")

        run.trainer.send_weights = send  # type: ignore[assignment]

    failed(Scenario("async_partial", script=script), StageFailed, "TimeoutError: the store did not answer")


# ---------------------------------------------------------------------------------------------- stalls


def test_a_replica_that_decodes_no_more_is_noticed_and_the_error_says_who_waits_for_whom():
    def script(run: Run) -> None:
        run.rollouts[0].hangs = True

    scenario = Scenario("on_policy", script=script, sections={"cluster": {"stall_timeout_s": 20}})
    run = failed(scenario, StallError, r"nothing moved for 20 s \(cluster.stall_timeout_s\)")
    assert "Generate waits for rollout-0 (1 item(s))" in str(run.error)
    assert "ActorTrain waits for groups from the message queue" in str(run.error)
    assert "PromptLoader waits for room under the staleness limit" in str(run.error)
    assert "ParamUpdate waits for ActorTrain" in str(run.error)
    assert run.ended == 20


def test_a_drain_that_never_ends_is_noticed_and_named():
    def script(run: Run) -> None:
        run.rollouts[0].hangs_on_drain = True

    scenario = Scenario("async_stale", script=script, sections={"cluster": {"stall_timeout_s": 30}})
    run = failed(scenario, StallError, "ParamUpdate waits for rollout-0 to drain")
    assert "ActorTrain waits for ParamUpdate" in str(run.error)


def test_a_replica_that_does_not_even_answer_the_monitor_cannot_hide_a_stall():
    def script(run: Run) -> None:
        run.rollouts[0].silent_on.add("stats")
        run.rollouts[0].hangs = True

    scenario = Scenario("on_policy", script=script, sections={"cluster": {"stall_timeout_s": 20}})
    failed(scenario, StallError, "Generate waits for rollout-0")


def test_slow_is_not_stalled():
    scenario = Scenario("on_policy", total=4, lengths=lambda _: 4000, sections={"cluster": {"stall_timeout_s": 20}})
    run = scenario.run().assert_completed()
    assert run.ended > 500


def test_a_step_of_hours_is_no_stall_as_long_as_it_moves():
    sections = {"cluster": {"stall_timeout_s": 20}, "reports": {"activity_interval_s": 1000}}
    run = Scenario("on_policy", total=8, trainer={"step_s": lambda _: 10_000}, sections=sections).run()
    run.assert_completed()
    assert run.ended > 20_000


def test_a_step_in_which_nothing_moves_is_a_stall_and_the_message_names_who_is_in_it():
    def script(run: Run) -> None:
        run.trainer.hangs_at = {1}

    scenario = Scenario("on_policy", script=script, sections={"cluster": {"stall_timeout_s": 20}})
    run = failed(scenario, StallError, r"ActorTrain waits for .*\. Workers: trainer: an optimizer step$")
    assert run.groups["trained"] == 4


# ---------------------------------------------------------------------------------------------- promises, checked


def test_a_group_older_than_the_bound_fails_the_run_with_every_number():
    def script(run: Run) -> None:
        run.rollouts[0].stamps_version_0 = True

    run = failed(Scenario("on_policy", script=script), StalenessExceeded, "group 4 has lag 1 .*η=0, B=4, W=1")
    assert run.groups["trained"] == 4


def test_a_call_that_is_returned_twice_counts_once():
    def script(run: Run) -> None:
        finished = run.rollouts[0].finished

        async def twice(client):
            async for batch in finished(client):
                yield batch
                yield batch

        run.rollouts[0].finished = twice  # type: ignore[method-assign]

    run = Scenario("async_partial", script=script).run().assert_completed()
    assert max(Counter((t.number, t.k) for t in run.of(TrajectoryFinished)).values()) == 1


def test_a_group_that_is_returned_twice_fails_the_run():
    def script(run: Run) -> None:
        (worker,) = run.pipeline.parts.machinery.episode_workers
        generate = worker.generate

        async def twice(requests, *, on=None):
            async for finished in generate(requests, on=on):
                yield finished
                yield finished

        worker.generate = twice  # type: ignore[method-assign]

    run = Scenario("async_partial", script=script).run()
    assert isinstance(run.error, LedgerImbalance | StageFailed)
    run.assert_clean()
