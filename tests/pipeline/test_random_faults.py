"""Random runs in which replicas die, join, hang, or a stop is asked for, at random moments: nothing else may break.

What must hold is what test_random_runs.py asks of undisturbed runs.
"""

from __future__ import annotations

from collections import Counter

import pytest

from headway.errors import NothingToTrain, StallError, UpdateFailed, WorkerDied
from headway.events import EpisodeWorkerLost, ReplicaJoined, ReplicaLost, UpdateRetried
from headway.pipeline.run import Status
from tests.pipeline.cases import SCHEDULES, Case, faulty, for_each
from tests.pipeline.invariants import check_everything, run_and_check
from tests.tiers import a_twentieth_and_all, enough

pytestmark = pytest.mark.timeout(600)
"""Quick as they are: a case that fails is run many times more, until it is as small as can be."""


@a_twentieth_and_all
def test_a_stop_at_any_moment_ends_a_run_with_its_books_balanced(share: float):
    """Hundreds of whole runs, as stops come between any two events."""
    ends: Counter[Status | None] = Counter()

    def check(case: Case) -> None:
        ends[run_and_check(case).status] += 1

    for_each(faulty("stop"), share * SCHEDULES["stopped"], check)
    assert ends[Status.INTERRUPTED] > sum(ends.values()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_replicas_may_die_at_any_moment(share: float):
    """Hundreds of whole runs, as deaths come between any two events."""
    happened: Counter[str] = Counter()

    def check(case: Case) -> None:
        run = run_and_check(case)
        happened["lost"] += len(run.of(ReplicaLost))
        happened["went on"] += bool(run.of(ReplicaLost)) and run.status is Status.COMPLETED
        happened["ended by it"] += isinstance(run.error, WorkerDied)

    for_each(faulty("dies"), share * SCHEDULES["deaths"], check)
    assert min(happened["went on"], happened["ended by it"]) > enough(50, share), happened


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_replicas_may_join_at_any_moment(share: float):
    """Hundreds of whole runs, as replicas join between any two events."""
    joined = 0

    def check(case: Case) -> None:
        nonlocal joined
        run = run_and_check(case)
        joined += len(run.of(ReplicaJoined))

    for_each(faulty("joins"), share * SCHEDULES["joins"], check)
    assert joined > enough(100, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_episode_workers_may_die_at_any_moment_and_no_run_ends_by_it(share: float):
    """Hundreds of whole runs, as deaths come between any two events. Replicas die, too."""
    happened: Counter[str] = Counter()

    def check(case: Case) -> None:
        run = run_and_check(case)
        lost = run.of(EpisodeWorkerLost)
        happened["lost"] += len(lost)
        happened["last"] += (
            any(worker.name.endswith("+1") for worker in run.episode_workers) and case.episode_workers == 1
        )
        happened["went on"] += bool(lost) and run.status is Status.COMPLETED
        happened["with groups"] += any(run.remade(event.worker) for event in lost)

    for_each(faulty("episode worker dies", "episode worker dies", "dies"), share * SCHEDULES["episode_workers"], check)
    assert min(happened["went on"], happened["last"], happened["with groups"]) > enough(30, share), happened


@a_twentieth_and_all
def test_all_of_it_may_happen_in_one_run(share: float):
    """Hundreds of whole runs, as faults meet each other rarely."""
    for_each(
        faulty("dies", "episode worker dies", "joins", "stop", most=6), share * SCHEDULES["everything"], run_and_check
    )


SILENT = ["never_receives", "silent on activate", "silent on resume", "silent on pause", "silent on stats"]


@a_twentieth_and_all
def test_replicas_may_stop_answering_or_receive_corrupted_weights_at_any_moment(share: float):
    """Whoever stops answering is fenced off; everything else holds as before."""
    happened: Counter[str] = Counter()

    def check(case: Case) -> None:
        run = run_and_check(case)
        happened["lost"] += len(run.of(ReplicaLost))
        happened["tried again"] += len(run.of(UpdateRetried))
        happened["went on"] += bool(run.of(ReplicaLost)) and run.status is Status.COMPLETED
        happened["ended by it"] += isinstance(run.error, UpdateFailed)

    silent = faulty(
        *SILENT,
        "receives corrupted",
        "dies",
        "joins",
        on_update="interrupt",
        update_timeout_s=16.0,
        stall_timeout_s=1e6,
    )
    for_each(silent, share * SCHEDULES["silence"], check)
    assert min(happened["went on"], happened["tried again"]) > enough(30, share), happened
    assert happened["ended by it"] > enough(10, share), happened


@a_twentieth_and_all
def test_a_replica_that_hangs_is_named_in_bounded_time_and_never_deadlocks_a_run(share: float):
    """Each wait has an end. Whoever hangs without being asked for anything does no harm."""
    stalls = 0

    def check(case: Case) -> None:
        nonlocal stalls
        run = case.scenario().run()
        if isinstance(run.error, StallError):
            stalls += 1
            victims = {run.rollouts[fault.replica % len(run.rollouts)].name for fault in case.faults}
            assert any(name in str(run.error) for name in victims), run.error
            moved = [event.time for event in run.events if event.kind != "replica.activity" and event.time < run.ended]
            assert run.ended - moved[-1] <= run.pipeline.config.cluster.stall_timeout_s + 20
            run.assert_clean()
        elif run.error is None:
            check_everything(run)
        elif not isinstance(run.error, NothingToTrain):
            raise run.error

    for_each(faulty("hangs", "never_receives", "hangs_on_drain", most=2), share * SCHEDULES["hangs"], check)
    assert stalls > enough(SCHEDULES["hangs"] / 3, share)
