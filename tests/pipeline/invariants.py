"""Everything that must hold for every run, however it was configured, whatever happened to it, however it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import strategies as st

from headway.errors import NothingToTrain, UpdateFailed, WorkerDied
from headway.events import BatchTaken, OptimizerStepped, ReplicaActivity, RunFinished, TrainerBusy
from tests.pipeline.books import Books
from tests.pipeline.cases import Case, for_each
from tests.pipeline.figures import check_figures
from tests.pipeline.machines import (
    check_activity,
    check_halts,
    check_loads,
    check_machines,
    check_superseding,
    check_tokens,
    check_validations,
    is_gone,
    overlap,
)
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import enough


def check_everything(run: Run) -> Run:
    run.assert_clean()
    Books(run).check()
    check_machines(run)
    check_figures(run)
    return run


def run_and_check(case: Case) -> Run:
    """Runs ``case``. It may fail only for what it was given: rewards that leave nothing, or no replica alive."""
    return check_however_it_ended(case.scenario().run(), Books, check_everything)


def check_however_it_ended(run: Run, books: type[Books], check: Callable[[Run], Run]) -> Run:
    """``check``, of a run that may have failed for what it was given."""
    match run.error:
        case None:
            pass
        case NothingToTrain():
            assert books(run).check().in_a_row == 10 * run.pipeline.config.groups_per_version
        case WorkerDied() | UpdateFailed():
            assert all(is_gone(run, replica) for replica in run.rollouts if replica.submitted), run.error
        case error:
            raise error
    return check(run)


class BatchesAhead(Books):
    """Books of a run in which fetches are taken while the trainer is busy with earlier ones."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.fetches: list[list[int]] = []
        self.trains = -1
        """The batch of the last optimizer step."""

    def _taken(self, event: BatchTaken) -> None:
        trained = self.fetch, self._steps_of_batch
        super()._taken(event)
        assert event.fetch == len(self.fetches)
        self.fetches.append(event.numbers)
        self.fetch, self._steps_of_batch = trained

    def _stepped(self, event: OptimizerStepped) -> None:
        if event.fetch != self.trains:
            assert event.fetch == self.trains + 1, "fetches are trained in the order in which they were taken"
            self.trains, self.fetch, self._steps_of_batch = event.fetch, self.fetches[event.fetch], 0
        super()._stepped(event)


def check_everything_ahead(run: Run) -> Run:
    """`check_everything`, where a stage with ranks of its own stands between the queue and the trainer."""
    run.assert_clean()
    BatchesAhead(run).check()
    for replica in run.rollouts:
        check_tokens(run, replica)
        check_loads(run, replica)
        check_halts(run, replica)
        check_activity(run, replica)
    check_superseding(run)
    check_validations(run)
    if run.scenario.config.cluster.placement == "shared":
        decodes = [span for event in run.of(ReplicaActivity) for span in event.busy]
        assert not any(overlap(busy.span, span) for busy in run.of(TrainerBusy) for span in decodes)
    return run


def cancelled_after(scenario: Scenario, *events: int) -> Run:
    """Cancelled when so many events were emitted, and perhaps a second time."""

    def script(run: Run) -> None:
        def count(_: object) -> None:
            if len(run.events) in events:
                asyncio.get_running_loop().call_soon(run.cancel)

        run.recorder.on = count

    scenario.script = script
    return scenario.run()


def check_cancelled_at_any_moment(
    cases: st.SearchStrategy[Case],
    schedules: int,
    share: float,
    scenario: Callable[[Case], Scenario],
    check: Callable[[Run], object],
) -> None:
    """A ``share`` of runs that end at once when cancelled, at random moments; ``check`` looks at those that were."""
    left_at_once = 0

    def check_one(drawn: tuple[Case, int]) -> None:
        nonlocal left_at_once
        case, k = drawn
        run = cancelled_after(scenario(case), k)
        if run.cancelled_at is None:
            return
        left_at_once += 1
        assert run.ended == run.cancelled_at, "it did not end at once"
        assert run.of(RunFinished)[0].reason == "left at once"
        BatchesAhead(run.assert_clean()).check()
        check(run)

    for_each(st.tuples(cases, st.integers(1, 600)), share * schedules, check_one)
    assert left_at_once >= enough(schedules / 2, share)
