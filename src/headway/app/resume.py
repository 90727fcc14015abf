"""``headway train --resume``: a run that goes on from its newest checkpoint, in its own directory."""

from __future__ import annotations

from pathlib import Path

from headway.app.carry_out import carry_out, set_math_environment, when_saved
from headway.app.interrupts import note
from headway.app.run import Start, is_of_the_end
from headway.config.loading import LoadedConfig
from headway.config.placement import needs_critic
from headway.config.resuming import check_changes
from headway.config.schema import Config
from headway.errors import UserError
from headway.pipeline.run import Status
from headway.preflight import check_inputs, check_model
from headway.reports.bundle import reopen_reports
from headway.reports.checkpoints import Checkpoints
from headway.reports.events_file import Record, look_through
from headway.reports.run_directory import RunDirectory, RunLock


def resume(path: Path, before: Config, loaded: LoadedConfig) -> int:
    """Run ``headway train --resume``: go on with the run in the directory ``path`` from its newest checkpoint.

    ``before`` is its configuration so far, ``loaded`` the one that holds from now on. Returns the exit code.

    Raises:
        UserError: there is no run, no checkpoint of it, or nothing left to do; another process trains it.
        ConfigError: a setting is changed that the checkpoint rules out.
        DataError: the data are not those of the checkpoint.
    """
    config = loaded.config
    set_math_environment(config)
    directory = RunDirectory.existing(path)
    lock = RunLock(directory.lock)
    lock.take()
    try:
        checkpoints = Checkpoints(directory.checkpoints)
        record = look_through(directory.events)
        version = _newest(directory, checkpoints, record, before)
        changes = check_changes(before, config, version)
        longer = _is_longer(before, config, version)
        if record.ended == Status.COMPLETED and is_of_the_end(directory, [version]) and not longer:
            total, epochs = config.rollout.total_rollout_steps, config.data.epochs or 1
            length = f"rollout.total_rollout_steps={2 * total}" if total is not None else f"data.epochs={2 * epochs}"
            raise UserError(
                f"{path}: this run is complete, at version {version}; there is nothing to resume. To train it longer "
                f"give a new length, like {length}"
            )
        rows = check_inputs(config)
        check_model(config, rows)
        if config.model.path is None and not directory.initial_model.is_dir():
            raise UserError(f"{directory.initial_model}: the model that this run was begun with is not there any more")
        checkpoints.forget_above(version)
        reports = reopen_reports(config, directory, lock, version)
    except BaseException:
        lock.release()
        raise
    note(reports, f"resuming from the checkpoint of version {version}")
    for key, (then, now) in changes.items():
        note(reports, f"changed: {key}={now!r}, was {then!r}")
    model = config.model.path or str(directory.initial_model)
    return carry_out(loaded, rows, reports, lambda: model, Start(version, longer))


def _newest(directory: RunDirectory, checkpoints: Checkpoints, record: Record, config: Config) -> int:
    """The version to resume: the newest complete checkpoint of which the record tells."""
    found = checkpoints.complete(with_critic=needs_critic(config))
    if usable := [version for version in found if version in record.boundaries]:
        return usable[-1]
    path = directory.path
    if found:
        raise UserError(
            f"{path}: {directory.events.name} does not tell of any checkpoint that is there ({found}); a run cannot be "
            "resumed without its record"
        )
    raise UserError(
        f"{path}: there is no complete checkpoint to resume from; {when_saved(config)}. Start over "
        f"with: headway train {directory.config} run.dir=ANOTHER trainer.save_freq=1"
    )


def _is_longer(before: Config, config: Config, version: int) -> bool:
    total = config.rollout.total_rollout_steps
    if total is not None:
        return total > version * config.groups_per_version
    return (config.data.epochs or 0) > (before.data.epochs or 0)
