"""Execute one run, from open reports to its exit code, errors included."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable

from headway.api.run.training_run import ResumeStart, StartingModel, TrainingRun, is_of_the_end, note
from headway.api.storage.ownership import store_of
from headway.api.storage.uploader import StorageUploader
from headway.cluster.machine.worker_setup import available_cores, math_environment
from headway.config.loading import LoadedConfig
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic
from headway.data.sources import Rows
from headway.errors import EXIT_INTERRUPTED, DataError, NonFinite, NothingToTrain, StoppedByGuard, UserError
from headway.events import RunFinished
from headway.pipeline.run import Status
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.events_file import look_through
from headway.reports.report_manager import Reports
from headway.reports.run_directory import RunDirectory
from headway.runtime.signals import terminations_as_interrupts

logger = logging.getLogger(__name__)


def carry_out(
    loaded: LoadedConfig,
    rows: Rows,
    reports: Reports,
    prepare: Callable[[], StartingModel],
    start: ResumeStart | None = None,
) -> int:
    """Train, with reports that are closed at the end. Returns the exit code, raises the errors of `headway.errors`.

    ``prepare`` gives the model to start from; ``start`` is None for a run that begins.
    """
    config, directory = loaded.config, reports.directory
    store = store_of(config, directory.path)
    version = None if start is None else start.version
    uploader = None if store is None else StorageUploader(store, reports, config, version)
    try:
        for text in loaded.notes:
            note(reports, text)
        with terminations_as_interrupts():
            run = TrainingRun(config, rows, prepare(), reports, start, uploader)
            status = asyncio.run(run.run())
            if uploader is not None:
                reports.phase("waiting for run.storage")
                uploader.finish()
            if run.stop_reason is not None:  # raised before the reports close: the run is then a failed one in them
                raise StoppedByGuard(
                    f"{run.stop_reason}. The run ended after that version: its model and a checkpoint are in "
                    f"{directory.path}. Lower async_training.staleness_threshold or actor.optim.lr, add a correction "
                    "(docs/algorithms/corrections.md), or set algorithm.guard.action to what goes on"
                )
            resumable = status is Status.INTERRUPTED and bool(_saved(directory, config))
            reports.report_end(directory.model, resumable=resumable)
    except (KeyboardInterrupt, asyncio.CancelledError):
        if uploader is not None:
            uploader.leave()
        if _is_complete(reports) and _has_model(reports, config):
            note(reports, f"left at once; the run was complete, and its model is in {directory.model}")
        else:
            note(reports, f"left at once; nothing more was saved. {how_to_go_on(reports, config)}".rstrip())
            _end(reports, Status.INTERRUPTED, "left at once")
        return EXIT_INTERRUPTED
    except Exception as failure:
        logger.exception("the run failed")
        _fail(reports, failure)
        if uploader is not None:
            uploader.finish()
        changed = isinstance(failure, NothingToTrain | StoppedByGuard | NonFinite)
        refused = start.version if start is not None and isinstance(failure, UserError) else None
        if _is_complete(reports) and _has_model(reports, config):
            failure.add_note(f"The run is complete, and its model is in {directory.model}")
        elif how := how_to_go_on(reports, config, changed=changed, refused=refused):
            trained = "Training is complete, and what is missing is made by going on. " if _is_complete(reports) else ""
            failure.add_note(f"{trained}{how}")
        raise
    finally:
        reports.close()
        if uploader is not None:
            uploader.finish_record()
    return 0 if status is Status.COMPLETED else EXIT_INTERRUPTED


def _is_complete(reports: Reports) -> bool:
    return bool(reports.summary()["status"] == Status.COMPLETED)


def _has_model(reports: Reports, config: Config) -> bool:
    """Tell whether the model of the newest checkpoint was exported."""
    return is_of_the_end(reports.directory, _saved(reports.directory, config)[-1:])


def _saved(directory: RunDirectory, config: Config) -> list[int]:
    """Return the versions of the complete checkpoints, the newest last."""
    return Checkpoints(directory.checkpoints).complete(with_critic=needs_critic(config))


def how_to_go_on(reports: Reports, config: Config, *, changed: bool = False, refused: int | None = None) -> str:
    """Return advice on how to resume a run that ended early. Empty if nothing was trained.

    ``changed``: whether a setting must change, or the run would end in the same way again. ``refused``: the version
    that could not be resumed with what was given. While that is the newest, nothing is returned: the command is the one
    that just failed.
    """
    directory = reports.directory
    try:
        told = look_through(directory.events).boundaries
    except (DataError, OSError):
        return ""
    newest = Checkpoints(directory.checkpoints).newest(told, with_critic=needs_critic(config))
    if newest is not None and newest == refused:
        return ""
    if newest is not None:
        command = f"headway train --resume {shlex.quote(str(directory.path))}{' a.b=c' if changed else ''}"
        return f"The newest checkpoint is that of version {newest}; go on from it with: {command}"
    if not reports.version:
        return ""
    return f"There is no checkpoint to go on from; {when_saved(config)}"


def when_saved(config: Config) -> str:
    freq = config.trainer.save_freq
    every = "every version" if freq == 1 else f"every {freq} versions"
    return f"trainer.save_freq={freq} saves {'only' if freq < 0 else f'{every}, and'} at a run's end"


def set_math_environment(config: Config) -> None:
    """Set variables that the math libraries read once: must come before torch is imported."""
    inline = config.cluster.backend == "inline"
    threads = config.trainer.threads if inline and config.trainer.threads else available_cores()
    for variable, value in math_environment(threads).items():
        os.environ.setdefault(variable, value)


def _fail(reports: Reports, failure: Exception) -> None:
    """Report that the run failed; if its training had ended in order, only what could not be done afterwards."""
    reason = f"{type(failure).__name__}: {failure}"
    if not reports.ended or isinstance(failure, StoppedByGuard):
        _end(reports, Status.FAILED, reason)
        return
    trained = Status(reports.summary()["status"])
    if trained is not Status.FAILED:
        _say_end(reports, trained, reason)


def _end(reports: Reports, status: Status, reason: str) -> None:
    """Report how the run ended, if that was not reported yet, or something failed after it was."""
    if reports.ended and reports.summary()["status"] in (status, Status.FAILED):
        return
    _say_end(reports, status, reason)


def _say_end(reports: Reports, status: Status, reason: str) -> None:
    version, groups = reports.version, reports.groups
    reports.emit(RunFinished(time=time.monotonic(), status=status.value, reason=reason, version=version, groups=groups))
