"""Episode workers that are lost: their groups are made again, replicas drop their calls, and the run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.errors import ClientGone, HeadwayError, WorkerDied
from headway.events import EpisodeWorkerLost, Event, GroupSettled, Note, ReplicaActivity, TrajectoryFinished
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.recovery.liveness import ASK_AGAIN_S, LOOK_S
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.task_groups import Tasks, failing_as_one
from tests.pipeline.fakes import FakeEpisodeWorker, prompt
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow


def at(seconds: float, what: Callable[[Run], object]) -> Callable[[Run], Coroutine[Any, Any, None]]:
    async def beside(run: Run) -> None:
        await asyncio.sleep(seconds)
        what(run)

    return beside


def first_dies(run: Run) -> None:
    run.episode_workers[0].die()


@mostly_slow(
    ("mode", "seconds"),
    product(MODES, [0.0, 0.25, 2.0, 8.0, 14.0]),
    quick=[("colocate_sync", 0.0), ("one_step_off", 0.25), ("async_partial", 2.0), ("overlapped", 8.0)],
)
def test_the_only_episode_worker_may_die_at_any_moment(mode: str, seconds: float) -> None:
    run = check_everything(Scenario(mode, problems=2, beside=at(seconds, first_dies)).run().assert_completed())
    assert [event.worker for event in run.of(EpisodeWorkerLost)] == ["episode-worker-0"]
    assert [worker.name for worker in run.episode_workers] == ["episode-worker-0", "episode-worker-0+1"]
    assert (run.groups["dropped"], run.groups["failed"]) == (0, 0)


def test_what_a_lost_episode_worker_was_making_is_made_again_with_the_same_ids_and_told_once() -> None:
    run = check_everything(Scenario("async_partial", beside=at(3.0, first_dies)).run().assert_completed())
    remade = run.remade("episode-worker-0")
    assert len(remade) > 3
    told = Counter((t.number, t.k) for t in run.of(TrajectoryFinished))
    assert {told[number, k] for number in remade for k in range(2)} == {1}
    undisturbed = {(t.number, t.k): t.tokens for t in Scenario("async_partial").run().of(TrajectoryFinished)}
    for t in run.of(TrajectoryFinished):
        if t.number in remade:
            assert t.tokens == undisturbed[t.number, t.k], "the same ids have the same randomness"
            assert t.started > 3.0


def test_replicas_drop_the_calls_of_a_lost_episode_worker() -> None:
    """Until another one is there they have nothing to do."""
    scenario = Scenario("async_partial", replicas=2, beside=at(3.0, first_dies), episode_worker_start_s=10.0)
    run = check_everything(scenario.run().assert_completed())
    spans = [span for event in run.of(ReplicaActivity) for span in event.busy]
    assert any(end == 3.0 for _, end in spans)
    assert not any(start < 13.0 and end > 3.0 for start, end in spans)


def test_of_two_episode_workers_the_other_one_makes_the_groups_at_once() -> None:
    scenario = Scenario("async_partial", episode_workers=2, beside=at(3.0, first_dies), episode_worker_start_s=1000.0)
    run = check_everything(scenario.run().assert_completed())
    asked = [numbers for time, numbers, _ in run.episode_workers[1].asked if time == 3.0]
    assert run.remade("episode-worker-0") == {number for numbers in asked for number in numbers} != set()
    assert len(run.episode_workers) == 2, "the run was over before a third one was there"


def test_a_validation_is_finished_by_another_episode_worker() -> None:
    lengths = lambda t: 40 + 8 * t.row if t.epoch == -1 else 8  # noqa: E731
    scenario = Scenario("async_partial", problems=3, slots=64, lengths=lengths, beside=at(5.5, first_dies))
    run = check_everything(scenario.run().assert_completed())
    again = next(numbers for _, numbers, priority in run.episode_workers[1].asked if priority == "validation")
    assert again == [1, 2], "one problem was answered before"
    assert run.validated() == list(range(7))


def test_an_episode_worker_on_a_machine_that_falls_silent_is_given_up_when_that_is_noticed() -> None:
    """All calls to it stay open until then, those of `generate`, of orders, and the dropped ones."""

    def falls_silent(run: Run) -> None:
        run.episode_workers[0].fall_silent(noticed_after_s=8.0)

    scenario = Scenario("async_partial", problems=2, replicas=2, supervised=True, beside=at(4.0, falls_silent))
    run = check_everything(scenario.run().assert_completed())
    (lost,) = run.of(EpisodeWorkerLost)
    assert (lost.time, lost.reason) == (12.0, "episode-worker-0 is lost: its machine does not answer")
    assert not any(event.fate in ("dropped", "failed") for event in run.of(GroupSettled))


def test_an_episode_worker_that_comes_back_after_it_was_given_up_changes_nothing() -> None:
    """It goes on with the groups that another one has made meanwhile, and asks replicas, which refuse it."""

    async def is_cut_off(run: Run) -> None:
        await asyncio.sleep(4.0)
        run.episode_workers[0].fall_silent(noticed_after_s=4.0)
        await asyncio.sleep(5.0)
        run.episode_workers[0].come_back()
        for replica in run.rollouts:
            with pytest.raises(ClientGone, match="'episode-worker-0' was given up"):
                await replica.submit("episode-worker-0", [])

    scenario = Scenario("async_partial", problems=2, replicas=2, supervised=True, beside=is_cut_off)
    run = check_everything(scenario.run().assert_completed())
    assert [event.worker for event in run.of(EpisodeWorkerLost)] == ["episode-worker-0"]
    assert not any(event.fate in ("dropped", "failed") for event in run.of(GroupSettled))


def test_an_episode_worker_that_does_not_answer_is_fenced_off_though_it_is_told_nothing() -> None:
    def falls_silent(run: Run) -> None:
        run.episode_workers[0].silent = True

    scenario = Scenario("async_partial", replicas=2, supervised=True, beside=at(9.0, falls_silent))
    run = check_everything(scenario.run().assert_completed())
    (lost,) = run.of(EpisodeWorkerLost)
    assert lost.reason == "episode-worker-0 gave no answer to its heartbeat for 60 s"
    assert lost.time <= 9.0 + ASK_AGAIN_S + 60.0 + LOOK_S


def test_where_no_other_episode_worker_can_be_started_the_last_one_ends_the_run() -> None:
    run = Scenario("async_partial", episode_workers=2, episode_worker_start_s=None, beside=at(3.0, both_die)).run()
    assert isinstance(run.error, WorkerDied)
    assert str(run.error) == (
        "episode-worker-1 was killed. It was the last episode worker, without which no group is made, and no episode "
        "worker can be started in its place"
    )
    assert len(run.assert_clean().of(EpisodeWorkerLost)) == 2


def both_die(run: Run) -> None:
    for worker in run.episode_workers[:2]:
        worker.die()


def test_episode_workers_are_started_as_often_as_replicas_may_be() -> None:
    async def beside(run: Run) -> None:
        while True:
            await asyncio.sleep(4.0)
            run.episode_workers[-1].die()

    sections = {"cluster": {"max_replica_restarts": 2}}
    run = Scenario("async_partial", sections=sections, beside=beside).run()
    assert isinstance(run.error, WorkerDied)
    assert "It was the last episode worker" in str(run.error) and "max_replica_restarts is used up" in str(run.error)
    run.assert_clean()
    assert [worker.name for worker in run.episode_workers] == [
        "episode-worker-0",
        "episode-worker-0+1",
        "episode-worker-0+1+1",
    ]
    assert sum("takes its place, and makes its groups again" in note.text for note in run.of(Note)) == 2


def test_the_restarts_of_replicas_are_not_those_of_episode_workers() -> None:
    async def beside(run: Run) -> None:
        await asyncio.sleep(3.0)
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))
        await asyncio.sleep(8.0)
        run.episode_workers[0].die()

    sections = {"cluster": {"max_replica_restarts": 1}}
    scenario = Scenario("async_partial", sections=sections, replica_start_s=1.0, supervised=True, beside=beside)
    run = scenario.run().assert_completed()
    assert [replica.name for replica in run.rollouts] == ["rollout-0", "rollout-0+1"]
    assert [worker.name for worker in run.episode_workers] == ["episode-worker-0", "episode-worker-0+1"]


class Started:
    """Episode workers without a pipeline."""

    def __init__(self, *episode_workers: FakeEpisodeWorker) -> None:
        self.events: list[Event] = []
        state = cast(RunState, SimpleNamespace(emit=self.events.append))
        self.episode_workers = EpisodeWorkers(episode_workers, state, timeout_s=5.0)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def replica_failed(replica: str, error: HeadwayError) -> None:
            raise error

        async def all_of_it(tasks: Tasks) -> None:
            self.episode_workers.start(tasks, replica_failed)
            await main()
            self.episode_workers.stop()
            await self.episode_workers.close()

        async def on_the_clock() -> None:
            await failing_as_one(all_of_it)

        run_virtual(on_the_clock())


def test_an_episode_worker_that_joins_while_groups_are_held_back_starts_none_before_they_go_on() -> None:
    """One that dies is waited for no more: what it had begun is held back with the rest."""
    old, new = FakeEpisodeWorker({}), FakeEpisodeWorker({}, "episode-worker-0+1")
    started = Started(old)
    episode_workers = started.episode_workers

    async def main() -> None:
        request = Group(0, prompt(0, 0), 1, SamplingParams(4))
        (share,) = episode_workers.assign([request])
        making = asyncio.ensure_future(anext(episode_workers.generate(share)))
        await asyncio.sleep(1.0)
        holding = asyncio.ensure_future(episode_workers.hold())
        await asyncio.sleep(1.0)
        assert not holding.done(), "a group was started"
        old.die()
        await asyncio.sleep(1.0)
        assert holding.done() and not making.done()
        episode_workers.join(new)
        await asyncio.sleep(1.0)
        assert (new.asked != [], new._groups) == (True, {}), "it has the group, and has not started it"
        episode_workers.go_on()
        await asyncio.sleep(0.1)
        assert len(new._groups) == 1
        making.cancel()
        await asyncio.wait([making])
        await old.bury()

    started.run(main)
    assert [event.kind for event in started.events] == ["episode_worker.lost"]
