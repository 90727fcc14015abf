"""Everything that must hold for every run, however it was configured, whatever happened to it, however it ended."""

from __future__ import annotations

from headway.errors import NothingToTrain, UpdateFailed, WorkerDied
from tests.pipeline.books import Books
from tests.pipeline.cases import Case
from tests.pipeline.figures import check_figures
from tests.pipeline.machines import check_machines, is_gone
from tests.pipeline.scenario import Run


def check_everything(run: Run) -> Run:
    run.assert_clean()
    Books(run).check()
    check_machines(run)
    check_figures(run)
    return run


def run_and_check(case: Case) -> Run:
    """Runs ``case``. It may fail only for what it was given: rewards that leave nothing, or no replica alive."""
    run = case.scenario().run()
    match run.error:
        case None:
            pass
        case NothingToTrain():
            assert Books(run).check().in_a_row == 10 * case.per_version
        case WorkerDied() | UpdateFailed():
            assert all(is_gone(run, replica) for replica in run.rollouts if replica.submitted), run.error
        case error:
            raise error
    return check_everything(run)
