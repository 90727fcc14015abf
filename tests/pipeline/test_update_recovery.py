"""Updates in which somebody fails, dies or says nothing: recovery or a named error, in bounded time, nothing torn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise, product
from math import floor

import pytest

from headway.errors import UpdateFailed, WorkerDied
from headway.events import (
    Event,
    GroupAdmitted,
    ReplicaJoined,
    ReplicaLost,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    UpdateRetried,
)
from headway.pipeline.run import Status
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

TIMEOUT_S = 7.0
SCHEDULES = {"async_partial": "synchronous", "overlapped": "overlapped"}
"""Mode → its schedule."""

both_schedules = pytest.mark.parametrize("mode", SCHEDULES)


def scenario(mode: str = "async_partial", replicas: int = 3, **more: object) -> Scenario:
    sections = {"param_update": {"timeout_s": TIMEOUT_S, "schedule": SCHEDULES.get(mode, "synchronous")}}
    return Scenario(mode, replicas=replicas, sections=sections, **more)  # type: ignore[arg-type]


def failed(scenario_: Scenario, error: type[BaseException], match: str) -> Run:
    run = scenario_.run()
    with pytest.raises(error, match=match):
        raise run.error or AssertionError("the run went on as if nothing had happened")
    return run.assert_clean()


def when(happens: Callable[[Event], bool], what: Callable[[Run], object], later: float = 0.0):
    """A script that does ``what`` once, ``later`` seconds after such an event."""

    def script(run: Run) -> None:
        done = False

        def on(event: Event) -> None:
            nonlocal done
            if not done and happens(event):
                done = True
                asyncio.get_running_loop().call_later(later, what, run)

        run.recorder.on = on

    return script


def updated(version: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, UpdateFinished) and event.version == version


def lost(run: Run) -> list[str]:
    return [event.replica for event in run.of(ReplicaLost)]


def versions(run: Run, replica: int) -> list[int]:
    return [version for version, _ in run.rollouts[replica].loads]


# ---------------------------------------------------------------------------------------------- silence


def hangs_in_recv(run: Run) -> None:
    run.rollouts[1].never_receives = True


def hangs_in_load(run: Run) -> None:
    run.rollouts[1].silent_on.add("activate")


def hangs_in_resume(run: Run) -> None:
    run.rollouts[1].silent_on.add("resume")


def hangs_in_pause(run: Run) -> None:
    run.rollouts[1].silent_on.add("pause")


def hangs_in_stats(run: Run) -> None:
    run.rollouts[1].silent_on.add("stats")


HANGS = [hangs_in_recv, hangs_in_load, hangs_in_resume, hangs_in_pause, hangs_in_stats]


@mostly_slow(
    ("mode", "hangs"),
    product(SCHEDULES, HANGS),
    quick=[
        ("async_partial", hangs_in_recv),
        ("async_partial", hangs_in_resume),
        ("overlapped", hangs_in_load),
        ("overlapped", hangs_in_pause),
        ("overlapped", hangs_in_stats),
    ],
)
def test_a_replica_that_stops_answering_is_fenced_off_and_the_others_go_on(mode: str, hangs: Callable[[Run], None]):
    run = check_everything(scenario(mode, script=when(updated(1), hangs)).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    (event,) = run.of(ReplicaLost)
    assert f"did not answer within param_update.timeout_s = {TIMEOUT_S:g} s" in event.reason
    assert versions(run, 0) == versions(run, 2) == [1, 2, 3, 4, 5, 6]
    assert run.groups["dropped"] == 0
    assert not any(t.replica == "rollout-1" and t.finished > event.time for t in run.of(TrajectoryFinished))


@mostly_slow(
    ("mode", "hangs"),
    product(SCHEDULES, HANGS),
    quick=[("async_partial", hangs_in_pause), ("overlapped", hangs_in_recv), ("overlapped", hangs_in_resume)],
)
def test_fencing_takes_no_longer_than_the_time_out_allows(mode: str, hangs: Callable[[Run], None]):
    """One attempt together, and one for whoever hangs in a collective alone; everybody else is quick."""
    run = scenario(mode, script=when(updated(1), hangs)).run().assert_completed()
    healthy = {event.version: event.time for event in scenario(mode).run().of(UpdateFinished)}
    fenced = run.of(ReplicaLost)[0].time
    assert fenced - healthy[2] < 2 * TIMEOUT_S + 2


@mostly_slow(
    ("mode", "hangs"),
    product(SCHEDULES, HANGS),
    quick=[("async_partial", hangs_in_load), ("async_partial", hangs_in_stats), ("overlapped", hangs_in_recv)],
)
def test_the_only_replica_that_stops_answering_ends_the_run_with_its_name(mode: str, hangs: Callable[[Run], None]):
    def script(run: Run) -> None:
        run.rollouts.insert(0, run.rollouts[0])  # so that number 1 is the only one
        hangs(run)
        del run.rollouts[0]

    run = failed(scenario(mode, replicas=1, script=script), UpdateFailed, "rollout-0 .*did not answer within")
    first = scenario(mode, replicas=1).run().of(UpdateFinished)[0].time
    assert run.ended <= first + TIMEOUT_S
    assert run.pipeline._state.staleness.served_version <= 1 and lost(run) == ["rollout-0"]


def test_in_a_collective_that_waits_for_one_the_others_are_not_blamed():
    """Two wait for the third one: sent to one by one, only that does not answer."""
    run = check_everything(scenario(script=hangs_in_recv).run().assert_completed())
    (retry, rest) = run.of(UpdateRetried)[0], run.of(UpdateRetried)[1:]
    assert "rollout-0, rollout-1, rollout-2 did not answer within" in retry.reason
    assert rest == [] and lost(run) == ["rollout-1"]
    tried = [names for _, names in run.trainer.reached]
    assert tried[:4] == [("rollout-0", "rollout-1", "rollout-2"), ("rollout-0",), ("rollout-1",), ("rollout-2",)]
    assert set(tried[4:]) == {("rollout-0", "rollout-2")}


def test_a_replica_that_answers_too_late_counts_no_more():
    """It comes back to life after it was fenced: what it generates then is nobody's."""

    def wakes(run: Run) -> None:
        run.rollouts[1].silent_on.clear()
        run.rollouts[1]._replica.resume()

    def script(run: Run) -> None:
        hangs_in_resume(run)
        asyncio.get_running_loop().call_later(20.0, wakes, run)

    run = check_everything(scenario(script=script).run().assert_completed())
    assert run.ended > 20.0 and lost(run) == ["rollout-1"]


def test_a_replica_that_validates_when_it_is_fenced_leaves_its_validation_to_another():
    def script(run: Run) -> None:
        run.rollouts[0].silent_on.add("resume")

    run = check_everything(scenario(problems=2, script=script).run().assert_completed())
    assert lost(run) == ["rollout-0"]
    assert run.validated()[-1] == 6 and 1 in run.validated()


def test_a_fenced_replica_may_join_again_under_a_new_name():
    def back(run: Run) -> None:
        run.join("back")

    async def beside(run: Run) -> None:
        await asyncio.sleep(25.0)
        back(run)

    run = check_everything(scenario(script=hangs_in_load, beside=beside, total=160).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    (joined,) = run.of(ReplicaJoined)
    assert joined.replica == "back" and joined.version > 1


def test_a_stop_does_not_wait_for_a_replica_that_does_not_stop():
    def script(run: Run) -> None:
        run.rollouts[1].silent_on.add("pause")
        asyncio.get_running_loop().call_later(2.0, run.request_stop)

    run = scenario(lengths=lambda _: 4000, script=script).run()
    assert run.error is None and run.status is Status.INTERRUPTED
    assert run.ended < 2.0 + TIMEOUT_S + 2 and lost(check_everything(run)) == ["rollout-1"]


def test_one_that_decodes_no_more_does_not_hold_up_a_drain():
    """Whoever waits for it to drain waits as long as it takes; that it says nothing of itself ends the wait."""

    def hangs(run: Run) -> None:
        run.rollouts[1].hangs = run.rollouts[1].hangs_on_drain = True
        run.rollouts[1].silent_on.add("stats")

    run = check_everything(scenario("async_stale", script=when(updated(1), hangs)).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    assert "was told to say what it does and did not answer" in run.of(ReplicaLost)[0].reason


def test_overlapped_the_others_go_on_while_one_hangs_and_the_bound_on_lag_holds():
    """The hanging one keeps its version, and admission waits for the oldest: it opens when that one is fenced."""
    hangs = when(updated(1), hangs_in_load)
    run = check_everything(scenario("overlapped", script=hangs, lengths=lambda _: 8).run().assert_completed())
    fenced = run.of(ReplicaLost)[0].time
    meanwhile = [(v, time) for v, time in run.rollouts[0].loads if fenced - TIMEOUT_S < time < fenced]
    assert [version for version, _ in meanwhile] == [2, 3], "⌊1 + η⌋ versions ahead of the oldest"
    loads = sorted((time, r.name, v) for r in run.rollouts for v, time in r.loads)
    serves = {r.name: 0 for r in run.rollouts}
    for time, name, version in loads:
        serves[name] = version
        there = [v for n, v in serves.items() if n != "rollout-1" or time < fenced]
        assert max(there) - min(there) <= floor(1 + 1)
    stuck = [event for event in run.of(GroupAdmitted) if fenced - TIMEOUT_S < event.time < fenced]
    assert all(event.version == 1 for event in stuck)


def test_a_trainer_that_never_finishes_sending_ends_the_run():
    def script(run: Run) -> None:
        send = run.trainer.send_weights

        async def never_ends(version, receivers):
            await send(version, receivers)
            await asyncio.Event().wait()

        run.trainer.send_weights = never_ends  # type: ignore[method-assign]

    run = failed(scenario(script=script), UpdateFailed, "the trainer did not answer within .*, for version 1$")
    assert lost(run) == []


# ---------------------------------------------------------------------------------------------- death


@mostly_slow(
    ("mode", "supervised"), product(SCHEDULES, [False, True]), quick=[("async_partial", True), ("overlapped", False)]
)
def test_a_replica_that_dies_in_recv_is_left_out(mode: str, supervised: bool):
    def dies(run: Run) -> None:
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    for quarter in range(3):
        script = when(lambda event: is_phase(event, 1, "load"), dies, later=2.5 + quarter / 4)
        run = check_everything(scenario(mode, script=script, supervised=supervised).run().assert_completed())
        assert lost(run) == ["rollout-1"]


def is_phase(event: Event, version: int, phase: str) -> bool:
    return isinstance(event, UpdatePhase) and (event.version, event.phase) == (version, phase)


@both_schedules
def test_a_replica_that_dies_in_load_is_left_out(mode: str):
    def dies(run: Run) -> None:
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    script = when(lambda event: is_phase(event, 2, "register"), dies, later=0.0625)
    run = check_everything(scenario(mode, script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"] and versions(run, 1) == [1]
    assert versions(run, 0) == [1, 2, 3, 4, 5, 6]


def test_failures_that_a_death_brought_about_cost_nobody_else_anything():
    """The trainer's error comes first, then another receiver's, then the death, half a second later."""

    def script(run: Run) -> None:
        broken = "the group broke"
        run.trainer.fails_to_send = [UpdateFailed(f"the trainer: {broken}")]
        stage = run.rollouts[0].stage_weights

        async def breaks(version):
            run.rollouts[0].stage_weights = stage  # type: ignore[method-assign]
            raise UpdateFailed(f"rollout-0: {broken}")

        async def dies(version):
            await asyncio.sleep(0.5)
            run.rollouts[1].die(WorkerDied("rollout-1 was killed"))
            raise WorkerDied("rollout-1 was killed")

        run.rollouts[0].stage_weights = breaks  # type: ignore[method-assign]
        run.rollouts[1].stage_weights = dies  # type: ignore[method-assign]

    run = check_everything(scenario(script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    (retry,) = run.of(UpdateRetried)
    assert retry.reason == "rollout-1 was killed" and retry.receivers == ["rollout-0", "rollout-2"]


def test_a_death_that_nobody_asks_about_is_noticed_where_processes_are_watched():
    """An engine that hangs answers nothing, not even that it died."""

    def dies_hanging(run: Run) -> None:
        replica = run.rollouts[1]
        replica._died = replica._died or WorkerDied("rollout-1 was killed")
        replica.died_at = asyncio.get_running_loop().time()
        replica._ended.set()

    lengths = lambda t: 4000 if t.row == 1 else 8  # noqa: E731
    script = when(lambda event: isinstance(event, GroupAdmitted), dies_hanging, later=2.0)
    run = scenario(lengths=lengths, script=script, supervised=True, rows=20, epochs=1).run().assert_completed()
    (event,) = run.of(ReplicaLost)
    assert (event.replica, event.time) == ("rollout-1", 2.0)
    assert run.groups["dropped"] == 0
    taken_over = [t for t in run.of(TrajectoryFinished) if t.tokens == 4000]
    assert taken_over and all(t.replica != "rollout-1" for t in taken_over)


def test_a_late_replica_is_watched_too():
    async def beside(run: Run) -> None:
        run.join("late")
        await asyncio.sleep(0.5)
        run.rollouts[-1].die(WorkerDied("late was killed"))

    run = check_everything(scenario(beside=beside, supervised=True).run().assert_completed())
    (event,) = run.of(ReplicaLost)
    assert (event.replica, event.time) == ("late", 0.5)


def test_the_last_replicas_death_ends_the_run_where_processes_are_watched():
    def dies(run: Run) -> None:
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

    script = when(lambda event: isinstance(event, GroupAdmitted), dies, later=3.0)
    run = failed(scenario(replicas=1, script=script, supervised=True), WorkerDied, "rollout-0 was killed")
    assert run.ended == 3.0


def test_the_trainers_death_in_send_ends_the_run():
    def script(run: Run) -> None:
        run.trainer.fails_to_send = [WorkerDied("actor-0 was killed")]

    run = failed(scenario(script=script), WorkerDied, "actor-0")
    assert lost(run) == [] and run.of(UpdateRetried) == []


# ---------------------------------------------------------------------------------------------- failures


@mostly_slow("mode", SCHEDULES, quick=["async_partial"])
def test_a_version_that_arrives_corrupted_once_is_sent_once_more(mode: str):
    def script(run: Run) -> None:
        run.rollouts[1].fails_to_receive = [UpdateFailed("the bytes of 'lm_head' are not those that the trainer sent")]

    run = check_everything(scenario(mode, script=script).run().assert_completed())
    (retry,) = run.of(UpdateRetried)
    assert retry.version == 1 and "lm_head" in retry.reason
    everybody = ["rollout-0", "rollout-1", "rollout-2"]
    assert retry.receivers == (everybody if mode == "async_partial" else ["rollout-1"])
    assert lost(run) == [] and all(versions(run, i)[-1] == 6 for i in range(3))


def test_a_checksum_that_differs_counts_as_corrupted():
    def heals(event: Event) -> bool:
        return isinstance(event, UpdateRetried)

    def script(run: Run) -> None:
        run.transport.corrupted.add(("rollout-1", 2))
        when(heals, lambda run: run.transport.corrupted.clear())(run)

    run = check_everything(scenario(script=script).run().assert_completed())
    assert "rollout-1 received weights of version 2 with checksum" in run.of(UpdateRetried)[0].reason
    assert lost(run) == []


@mostly_slow("mode", SCHEDULES, quick=["overlapped"])
def test_a_replica_that_alone_receives_corrupted_weights_again_is_fenced_off(mode: str):
    def script(run: Run) -> None:
        run.transport.corrupted.add(("rollout-1", 2))

    run = check_everything(scenario(mode, script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    assert "checksum" in run.of(ReplicaLost)[0].reason
    assert versions(run, 1) == [1] and versions(run, 0) == [1, 2, 3, 4, 5, 6]


def test_when_several_receive_corrupted_weights_twice_the_run_ends_and_the_old_version_is_served():
    def script(run: Run) -> None:
        run.transport.corrupted |= {("rollout-1", 2), ("rollout-2", 2)}

    run = failed(scenario(script=script), UpdateFailed, "rollout-[12] .*version 2.* checksum")
    assert [rollout.version for rollout in run.rollouts] == [1, 1, 1]
    assert len(run.of(UpdateRetried)) == 1


@both_schedules
def test_the_only_replica_that_receives_corrupted_weights_twice_ends_the_run(mode: str):
    def script(run: Run) -> None:
        run.transport.corrupted.add(("rollout-0", 2))

    run = failed(scenario(mode, replicas=1, script=script), UpdateFailed, "rollout-0 .*version 2.* checksum")
    assert run.rollouts[0].version == 1


@pytest.mark.parametrize("attempts", [1, 2])
@both_schedules
def test_a_trainer_that_cannot_send_tries_once_more(mode: str, attempts: int):
    """Receivers notice at once, too."""

    def script(run: Run) -> None:
        run.trainer.fails_to_send = [UpdateFailed("no space left on device") for _ in range(attempts)]
        run.rollouts[0].fails_to_receive = []
        for replica in run.rollouts:
            stage, left = replica.stage_weights, [None] * attempts

            async def breaks(version, stage=stage, left=left):
                if left:
                    left.pop()
                    raise UpdateFailed("the trainer gave up")
                return await stage(version)

            replica.stage_weights = breaks  # type: ignore[method-assign]

    scenario_ = scenario(mode, replicas=2 if mode == "async_partial" else 1, script=script)
    if attempts == 1:
        run = check_everything(scenario_.run().assert_completed())
        assert len(run.of(UpdateRetried)) == 1 and lost(run) == []
    else:
        failed(scenario_, UpdateFailed, "the trainer gave up")


def test_the_trainer_is_asked_to_reach_the_receivers_before_every_attempt():
    def script(run: Run) -> None:
        run.rollouts[1].fails_to_receive = [UpdateFailed("corrupted")]

    run = scenario(replicas=2, script=script).run().assert_completed()
    assert len(run.trainer.reached) == 6 + 1
    assert {names for _, names in run.trainer.reached} == {("rollout-0", "rollout-1")}
    run = scenario("overlapped", replicas=2).run().assert_completed()
    assert [names for _, names in run.trainer.reached[:2]] == [("rollout-0",), ("rollout-1",)]
    assert len(run.trainer.reached) == sum(len(r.received) for r in run.rollouts)


def test_a_meeting_that_fails_once_is_tried_again_with_each_alone():
    def script(run: Run) -> None:
        run.trainer.fails_to_reach = [UpdateFailed("rollout-2 did not come")]

    run = check_everything(scenario(script=script).run().assert_completed())
    assert "rollout-2 did not come" in run.of(UpdateRetried)[0].reason
    assert lost(run) == [] and [len(names) for _, names in run.trainer.reached][:5] == [3, 1, 1, 1, 3]


def test_a_meeting_is_given_up_as_soon_as_one_of_its_members_is_known_to_be_dead():
    died_after_s = 0.5

    def script(run: Run) -> None:
        reach = run.trainer.reach

        async def waits_for_the_dead(receivers):
            await reach(receivers)
            if "rollout-1" in receivers and len(run.trainer.reached) > 1:
                asyncio.get_running_loop().call_later(
                    died_after_s, run.rollouts[1].die, WorkerDied("its process ended")
                )
                await asyncio.Event().wait()

        run.trainer.reach = waits_for_the_dead  # type: ignore[method-assign]

    run = check_everything(scenario(replicas=2, script=script, supervised=True).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    second, third = run.trainer.reached[1:3]
    assert third[1] == ("rollout-0",)
    assert third[0] - second[0] == pytest.approx(died_after_s)


def test_a_meeting_that_never_takes_place_ends_the_run_in_bounded_time():
    def script(run: Run) -> None:
        async def reach(receivers):
            await asyncio.Event().wait()

        run.trainer.reach = reach  # type: ignore[method-assign]

    run = failed(scenario(replicas=2, script=script), UpdateFailed, "rollout-1 did not answer within")
    assert run.ended < scenario(replicas=2).run().of(UpdateFinished)[0].time + 3 * TIMEOUT_S


# ---------------------------------------------------------------------------------------------- versions


@both_schedules
def test_a_replica_loads_versions_in_order_whatever_was_tried_again(mode: str):
    def script(run: Run) -> None:
        for replica in run.rollouts:
            replica.fails_to_receive = [UpdateFailed("corrupted")]

    run = check_everything(scenario(mode, script=script).run().assert_completed())
    for index in range(3):
        assert all(a < b for a, b in pairwise(versions(run, index)))
    assert lost(run) == []
