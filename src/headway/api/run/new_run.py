"""``headway train``: a new run, or one resumed from its newest checkpoint, up to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.agents.adapters.program_loader import load_toolbox
from headway.agents.episodes.program_workers import chats_of, program_spec
from headway.api.checks.preflight import check_inputs, check_model, go_offline_without_a_hub
from headway.api.run.training_run import WARMING, StartingModel, TrainingRun, is_of_the_end, note
from headway.api.run_handle import LEFT_AT_ONCE
from headway.api.storage.stored_run import check_storage, store_of
from headway.api.storage.uploader import StorageUploader
from headway.cluster.backend import begun_cluster
from headway.cluster.machine.worker_setup import available_cores, importing, math_environment
from headway.config.loading import LoadedConfig, check_changes
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic
from headway.data.sources import DataBundle, Rows, build_sources, prompt_tokenizer
from headway.engines.train.state_file import read_state
from headway.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    DataError,
    HeadwayError,
    NonFinite,
    NothingToTrain,
    StoppedByGuard,
    UserError,
)
from headway.events import RunFinished
from headway.pipeline.admission.run_journal import changed_since
from headway.pipeline.recovery.checkpoint_manager import DriverState, balance
from headway.pipeline.run import Status
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.events_file import SurvivingRecord, look_through
from headway.reports.report_manager import Reports, open_reports, reopen_reports
from headway.reports.run_directory import RunDirectory, RunLock, in_free_directory
from headway.reports.trackers.tracker_set import check_trackers
from headway.runtime.signals import terminations_as_interrupts

if TYPE_CHECKING:
    from rich.console import Console

    from headway.cluster.workers import Cluster

logger = logging.getLogger(__name__)


def train(loaded: LoadedConfig, console: Console | None = None) -> int:
    """Run ``headway train`` for a new run. ``console``: where it is shown; None: where this process prints.

    Returns the exit code. Raises the errors of `headway.errors`.
    """
    config = loaded.config
    set_math_environment(config)  # before torch is imported
    if config.run.dir is not None:
        RunDirectory(config.run.dir).check_free()  # as in `create`, which comes only after slow steps
    check_storage(config, config.run.dir)
    check_trackers(config)  # all checks come before the run's directory: an error leaves no trace
    with importing():
        rows = check_inputs(config)
        data = check_model(config, rows)
    reports = in_free_directory(config.run.dir, config.run.name, lambda path: open_reports(config, path, console))
    for text in data.notes if data is not None else ():
        note(reports, text)
    try:
        return carry_out(loaded, rows, reports, lambda: _starting_model(config, rows, reports))
    except UserError:
        if reports.metrics.started is None:  # left as it is, the directory would refuse the corrected command
            with suppress(OSError):
                reports.directory.discard()
        raise


def _starting_model(config: Config, rows: Rows, reports: Reports) -> StartingModel:
    """Return the model to start from: the user's, or one made in the run's directory."""
    if config.model.path is not None:
        return StartingModel(config.model.path)
    assert config.model.make is not None, "the doctor asks for one of model.path and model.make"
    from headway.models.made_model import make_model

    path = reports.directory.initial_model
    reports.phase("making the model")
    make_model(config.model.make, config.run.seed, path)
    warm_up = None if config.model.warmup is None else partial(_warm_up, config, rows, path, reports)
    return StartingModel(str(path), warm_up)


def _warm_up(config: Config, rows: Rows, path: Path, reports: Reports, go_on: Callable[[], None]) -> None:
    """Warm up the model at ``path``. ``go_on`` is called after each step and each answer, and may raise."""
    from headway.api.sft.sft_data import demonstrations, solutions
    from headway.api.sft.warmup import WarmupEvaluation, warm_up
    from headway.models.tokenizer import load_tokenizer

    warmup, task, seed = config.model.warmup, config.data.task, config.run.seed
    assert warmup is not None, "called where there is a warm-up"
    tokenizer = load_tokenizer(str(path))
    val = build_sources(config, tokenizer, rows).val
    held_out = {prompt.text for prompt in val}
    evaluate: WarmupEvaluation | None = None
    if warmup.demonstrations is not None:
        examples = demonstrations(
            chats_of(config, tokenizer),
            warmup.demonstrations,
            load_toolbox(program_spec(config)).schemas,
            held_out,
            seed=seed,
            conversations=warmup.conversations,
            longest=tokenizer.model_max_length,
        )
    else:
        assert task is not None, "the doctor asks for a task where there are no demonstrations"
        examples = solutions(tokenizer, prompt_tokenizer(config, tokenizer), task, warmup, held_out, seed)
        evaluate = WarmupEvaluation(tokenizer, task, val, seed, config.data.max_response_length, go_on)
    asyncio.run(warm_up(path, config, warmup, examples, evaluate, partial(reports.phase, WARMING), go_on=go_on))


def resume(path: Path, before: Config, loaded: LoadedConfig, console: Console | None = None) -> int:
    """Run ``headway train --resume``: resume the run in the directory ``path`` from its newest checkpoint.

    All checks that need no workers come before any change to the run: `reopen_reports` comes last. ``before`` is the
    old configuration, ``loaded`` the new one. ``console``: where the run is shown; None: where this process prints.
    Returns the exit code.

    Raises:
        UserError: there is no run, no checkpoint, or nothing left to do; another process trains the run; or the record
            does not mention the checkpoint.
        ModelError: the checkpoint is damaged.
        ConfigError: the checkpoint rules out a changed setting.
        DataError: the data are not those of the checkpoint, or the record is damaged.
    """
    config = loaded.config
    set_math_environment(config)  # before torch is imported
    directory = RunDirectory.existing(path)
    lock = RunLock(directory.lock)
    # Before anything is read: another process may be training, and removing checkpoints
    lock.take()
    left = ExitStack()
    try:
        checkpoints = Checkpoints(directory.checkpoints)
        record = look_through(directory.events)
        version = _newest(directory, checkpoints, record, before)
        driver_state: DriverState = read_state(checkpoints.actor(version))["extra"]
        cursor = driver_state["source"]
        changes = check_changes(before, config, version, epochs_begun=cursor["epoch"] + (cursor["position"] > 0))
        _check_incomplete(directory, record, version, before, config)
        if driver_state["data_ended"] and _is_longer(before, config, version):
            raise ConfigError(
                f"data.epochs: the run ended where its data did, within version {version}: it has trained "
                f"{driver_state['consumed']} groups, which is no multiple of {config.groups_per_version} per version. "
                "It cannot be made longer; start another one with model.path set to its model folder"
            )
        if needs_critic(config):
            read_state(checkpoints.critic(version))
        check_storage(config, path, resumed=True)
        check_trackers(config)
        model = config.model.path or str(directory.initial_model)
        with _relative_paths_explained():
            go_offline_without_a_hub(config)  # before Ray's processes, which take the environment as it is then
            # Ray starts now, beside the checks below, which take about as long.
            cluster = left.enter_context(begun_cluster(config, path, model))
            rows = check_inputs(config)
            data = check_model(config, rows) or _data(config, rows, directory.initial_model)
        # Before the record is cut: data that differ are refused with the run as it was
        data.train.restore(cursor)
        if config.data.accept_changes and not data.train.changes:
            raise ConfigError("data.accept_changes: the data are those of the checkpoint; drop it")
        # This version is not validated again if reward, data and validation settings are unchanged.
        keeps_validation = (
            changed_since(directory.journal, config) == []
            and not data.train.changes
            and not any(key.startswith("rollout.val_") for key in changes)
        )
        # From here on the reports have the lock, and release it.
        reports = reopen_reports(
            config, directory, lock, version, balance(driver_state), console, keeps_validation=keeps_validation
        )
    except BaseException:
        try:
            left.close()
        except HeadwayError:  # must not hide the first error
            logger.exception("what was begun of the cluster could not be ended")
        finally:
            lock.release()
        raise
    with left:
        note(reports, f"resuming from the checkpoint of version {version}")
        for text in data.notes:
            note(reports, text)
        for key, (then, now) in changes.items():
            note(reports, f"changed: {key}={now!r}, was {then!r}")
        for change in data.train.changes:
            note(reports, f"data changed: {change}")
        return carry_out(loaded, rows, reports, lambda: StartingModel(model), version, cluster)


def _newest(directory: RunDirectory, checkpoints: Checkpoints, record: SurvivingRecord, config: Config) -> int:
    """Return the version to resume from: the newest complete checkpoint that the record mentions."""
    checkpoints.check_readable()
    newest = checkpoints.newest(record.boundaries, with_critic=needs_critic(config))
    if newest is not None:
        return newest
    path = directory.path
    # The record may not mention version 0 yet, if the run was killed then.
    if found := [version for version in checkpoints.complete(with_critic=needs_critic(config)) if version > 0]:
        raise UserError(
            f"{path}: {directory.events.name} does not tell of any checkpoint that is there ({found}); a run cannot be "
            "resumed without its record"
        )
    oftener = "" if config.trainer.save_freq == 1 else " trainer.save_freq=1"
    raise UserError(
        f"{path}: there is no complete checkpoint to resume from; {when_saved(config)}. Start over "
        f"with: headway train {directory.config} run.dir=ANOTHER{oftener}"
    )


def check_incomplete(path: Path, before: Config, config: Config) -> None:
    """Check, for ``--dry-run``, that the run in the directory ``path`` has something left to train. Reads only.

    Raises:
        UserError: the run is complete, and ``config`` does not make it longer than ``before``.
        DataError: the record is damaged.
    """
    directory = RunDirectory(path)
    record = look_through(directory.events)
    if record.ended == Status.COMPLETED:
        version = _newest(directory, Checkpoints(directory.checkpoints), record, before)
        _check_incomplete(directory, record, version, before, config)


def _check_incomplete(
    directory: RunDirectory, record: SurvivingRecord, version: int, before: Config, config: Config
) -> None:
    complete = record.ended == Status.COMPLETED and is_of_the_end(directory, [version])
    if complete and not _is_longer(before, config, version):
        total, epochs = config.rollout.total_rollout_steps, config.data.epochs or 1
        length = f"rollout.total_rollout_steps={2 * total}" if total is not None else f"data.epochs={2 * epochs}"
        raise UserError(
            f"{directory.path}: this run is complete, at version {version}; there is nothing to resume. To train it "
            f"longer give a new length, like {length}"
        )


def _data(config: Config, rows: Rows, model: Path) -> DataBundle:
    """Load the data of a run whose model was made in its directory."""
    from headway.models.tokenizer import load_tokenizer

    if not model.is_dir():
        raise UserError(f"{model}: the model that this run was begun with is not there any more")
    return build_sources(config, load_tokenizer(str(model)), rows)


@contextmanager
def _relative_paths_explained() -> Iterator[None]:
    """Add to an error about a missing file that relative paths are those of the directory where the run was begun."""
    try:
        yield
    except UserError as error:
        if "no such" in str(error) or "there is no" in str(error):
            error.add_note(
                "Relative paths are those of the directory where the run was begun: give the command in that directory"
            )
        raise


def _is_longer(before: Config, config: Config, version: int) -> bool:
    total = config.rollout.total_rollout_steps
    if total is not None:
        return total > version * config.groups_per_version
    return (config.data.epochs or 0) > (before.data.epochs or 0)


def carry_out(
    loaded: LoadedConfig,
    rows: Rows,
    reports: Reports,
    prepare: Callable[[], StartingModel],
    start: int | None = None,
    cluster: Cluster | None = None,
) -> int:
    """Train, and close the reports at the end. Returns the exit code. Raises the errors of `headway.errors`.

    ``prepare`` gives the model to start from; ``start`` is the version to resume from, None for a new run.
    ``cluster``: a cluster that was begun already; None: the run makes it.
    """
    config, directory = loaded.config, reports.directory
    store = store_of(config, directory.path)
    uploader = None if store is None else StorageUploader(store, reports, config, start)
    try:
        for text in loaded.notes:
            note(reports, text)
        with terminations_as_interrupts():
            run = TrainingRun(config, rows, prepare(), reports, start, uploader, cluster)
            status = asyncio.run(run.run())
            if uploader is not None:
                reports.phase("waiting for run.storage")
                uploader.finish()
            if run.stop_reason is not None:  # raised before the reports close, so that they show a failed run
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
        if _has_model(reports, config):
            note(reports, f"left at once; the run was complete, and its model is in {directory.model}")
        else:
            note(reports, f"left at once; nothing more was saved. {how_to_go_on(reports, config)}".rstrip())
            if _ended(reports) not in (Status.INTERRUPTED, Status.FAILED):
                _say_end(reports, Status.INTERRUPTED, LEFT_AT_ONCE)
        return EXIT_INTERRUPTED
    except Exception as failure:
        logger.exception("the run failed")
        # Before the uploader sends the record, which then says how the run ended.
        _fail(reports, failure)
        if uploader is not None:
            uploader.finish()
        changed = isinstance(failure, NothingToTrain | StoppedByGuard | NonFinite)
        refused = start if isinstance(failure, UserError) else None
        if _has_model(reports, config):
            failure.add_note(f"The run is complete, and its model is in {directory.model}")
        elif how := how_to_go_on(reports, config, changed=changed, refused=refused):
            complete = _ended(reports) is Status.COMPLETED
            trained = "Training is complete, and what is missing is made by going on. " if complete else ""
            failure.add_note(f"{trained}{how}")
        raise
    finally:
        # Before the uploader's last pass: closing writes the summary
        reports.close()
        if uploader is not None:
            uploader.finish_record()
    return 0 if status is Status.COMPLETED else EXIT_INTERRUPTED


def _has_model(reports: Reports, config: Config) -> bool:
    """Tell whether the run is complete and its final model is exported."""
    newest = _saved(reports.directory, config)[-1:]
    return _ended(reports) is Status.COMPLETED and is_of_the_end(reports.directory, newest)


def _saved(directory: RunDirectory, config: Config) -> list[int]:
    """Return the versions of the complete checkpoints, the newest last."""
    return Checkpoints(directory.checkpoints).complete(with_critic=needs_critic(config))


def how_to_go_on(reports: Reports, config: Config, *, changed: bool = False, refused: int | None = None) -> str:
    """Return advice on how to resume a run that ended early; empty if nothing was trained.

    ``changed``: a setting must change, or the run would end in the same way again. ``refused``: version that could not
    be resumed with these settings. If it is the newest one, the advice is empty: the command has just failed.
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
    if not reports.metrics.version:
        return ""
    return f"There is no checkpoint to go on from; {when_saved(config)}"


def when_saved(config: Config) -> str:
    freq = config.trainer.save_freq
    every = "every version" if freq == 1 else f"every {freq} versions"
    return f"trainer.save_freq={freq} saves {'only' if freq < 0 else f'{every}, and'} at a run's end"


def set_math_environment(config: Config) -> None:
    """Set environment variables that the math libraries read once. Call it before torch is imported."""
    inline = config.cluster.backend == "inline"
    threads = config.trainer.threads if inline and config.trainer.threads else available_cores()
    for variable, value in math_environment(threads).items():
        os.environ.setdefault(variable, value)


def _ended(reports: Reports) -> Status | None:
    """Return how the run ended, according to its reports; None before that."""
    finished = reports.metrics.finished
    return None if finished is None else Status(finished.status)


def _fail(reports: Reports, failure: Exception) -> None:
    """Report that the run failed. If training had ended in order, report only what failed afterwards."""
    if (ended := _ended(reports)) is not Status.FAILED:
        status = ended if ended is not None and not isinstance(failure, StoppedByGuard) else Status.FAILED
        _say_end(reports, status, f"{type(failure).__name__}: {failure}")


def _say_end(reports: Reports, status: Status, reason: str) -> None:
    version, groups = reports.metrics.version, reports.metrics.tally.counts()
    reports.emit(RunFinished(time=time.monotonic(), status=status.value, reason=reason, version=version, groups=groups))
