"""The composition root: turns a configuration into a run. Wiring happens here and nowhere else.

preflight ─▶ reports ─▶ model (the user's, or made and warmed up) ─▶ data, reward, workers ─▶ Pipeline ─▶ export
                └──────────────── closed last, after pipeline, workers and reward, whatever happened ◀──────┘

A run that is resumed finds its reports and its model, and loads a checkpoint between workers and Pipeline.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.hardware import available_cores
from headway.cluster.process import math_environment
from headway.config.loading import LoadedConfig
from headway.config.placement import CRITIC, LOGP, REF, needs_critic, needs_greedy_baseline
from headway.config.resuming import check_changes
from headway.config.schema import Config
from headway.data.sources import Rows, build_sources
from headway.errors import ConfigError, DataError, RunError, StoppedByGuard, UserError, boundary
from headway.events import Note, PromptsLeftOut, RunFinished, WorkerDescribed
from headway.pipeline.parts import Parts
from headway.pipeline.resume import Taken, balance
from headway.pipeline.run import Pipeline, Status
from headway.pipeline.stages.reward import GroupFilter, Shaping
from headway.preflight import check_inputs, check_model
from headway.reports.bundle import Reports, open_reports, reopen_reports
from headway.reports.checkpoints import Checkpoints, Retention
from headway.reports.events_file import Record, look_through
from headway.reports.run_directory import RunDirectory, RunLock
from headway.rewards.pool import RewardPool
from headway.rewards.request import RewardSpec

if TYPE_CHECKING:
    from headway.cluster.backend import Workers

EXIT_INTERRUPTED = 130
"""As shells have it for a program that Ctrl-C ended."""


def train(loaded: LoadedConfig) -> int:
    """Run ``headway train``: returns the exit code, raises the errors of `headway.errors`."""
    config = loaded.config
    _set_math_environment(config)
    rows = check_inputs(config)  # this and the next before the run's directory: what is wrong here leaves no trace
    check_model(config, rows)
    run_dir = config.run.dir or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _carry_out(loaded, rows, open_reports(config, run_dir), start=None)


def resume(path: Path, before: Config, loaded: LoadedConfig) -> int:
    """Run ``headway train --resume``: go on with the run in the directory ``path`` from its newest checkpoint.

    ``before`` is its configuration so far, ``loaded`` the one that holds from now on. Returns the exit code.

    Raises:
        UserError: there is no run, no checkpoint of it, or nothing left to do; another process trains it.
        ConfigError: a setting is changed that the checkpoint rules out.
        DataError: the data are not those of the checkpoint.
    """
    config = loaded.config
    _set_math_environment(config)
    directory = RunDirectory.existing(path)
    lock = RunLock(directory.lock)
    lock.take()
    try:
        checkpoints = Checkpoints(directory.checkpoints)
        record = look_through(directory.events)
        version = _newest(directory, checkpoints, record, before)
        changes = check_changes(before, config, version)
        longer = _is_longer(before, config, version)
        if record.ended == Status.COMPLETED and directory.model.is_dir() and not longer:
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
    _note(reports, f"resuming from the checkpoint of version {version}")
    for key, (then, now) in changes.items():
        _note(reports, f"changed: {key}={now!r}, was {then!r}")
    return _carry_out(loaded, rows, reports, _From(version, longer))


@dataclass(frozen=True, slots=True)
class _From:
    """Where a resumed run goes on."""

    version: int
    """Of the checkpoint."""
    longer: bool
    """There is more to train than until then."""


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
        f"{path}: there is no complete checkpoint to resume from; {_when_saved(config)}. Start over "
        f"with: headway train {directory.config} run.dir=ANOTHER trainer.save_freq=1"
    )


def _when_saved(config: Config) -> str:
    freq = config.trainer.save_freq
    every = "every version" if freq == 1 else f"every {freq} versions"
    return f"trainer.save_freq={freq} saves {'only' if freq < 0 else f'{every}, and'} at a run's end"


def _is_longer(before: Config, config: Config, version: int) -> bool:
    total = config.rollout.total_rollout_steps
    if total is not None:
        return total > version * config.groups_per_version
    return (config.data.epochs or 0) > (before.data.epochs or 0)


def _carry_out(loaded: LoadedConfig, rows: Rows, reports: Reports, start: _From | None) -> int:
    """``start``: None for a run that begins."""
    config, directory = loaded.config, reports.directory
    try:
        for text in loaded.notes:
            _note(reports, text)
        with _terminations_as_interrupts():
            if start is None:
                model_path = _prepare_model(config, rows, directory, reports)
            else:
                model_path = config.model.path or str(directory.initial_model)
            run = _Run(config, rows, model_path, reports, start)
            status = asyncio.run(run.run())
        reports.report_end(directory.model, resumable=status is Status.INTERRUPTED)
        if run.stop_reason is not None:
            raise StoppedByGuard(
                f"{run.stop_reason}. The run ended after that version: its model and a checkpoint are in "
                f"{directory.path}. Lower async_training.staleness_threshold or actor.optim.lr, add a correction "
                "(docs/algorithms/corrections.md), or set offpolicy.guard.action to what goes on"
            )
    except (KeyboardInterrupt, asyncio.CancelledError):
        if reports.summary()["status"] == Status.COMPLETED and directory.model.is_dir():
            _note(reports, f"left at once; the run was complete, and its model is in {directory.model}")
        else:
            _note(reports, f"left at once; nothing more was saved. {_how_to_go_on(reports, config)}".rstrip())
        _end(reports, Status.INTERRUPTED, "left at once")
        return EXIT_INTERRUPTED
    except Exception as failure:
        _end(reports, Status.FAILED, f"{type(failure).__name__}: {failure}")
        if how := _how_to_go_on(reports, config):
            failure.add_note(how)
        raise
    finally:
        reports.close()
    return 0 if status is Status.COMPLETED else EXIT_INTERRUPTED


def _how_to_go_on(reports: Reports, config: Config) -> str:
    """For a run that ended early: the command that goes on with it. Empty where nothing was trained."""
    directory = reports.directory
    try:
        told = look_through(directory.events).boundaries
    except (DataError, OSError):
        return ""
    complete = Checkpoints(directory.checkpoints).complete(with_critic=needs_critic(config))
    if saved := [version for version in complete if version in told]:
        command = f"headway train --resume {shlex.quote(str(directory.path))}"
        return f"The newest checkpoint is that of version {saved[-1]}; go on from it with: {command}"
    if not reports.version:
        return ""
    return f"There is no checkpoint to go on from; {_when_saved(config)}"


def _set_math_environment(config: Config) -> None:
    """Must come before torch is imported: the math libraries read these once."""
    inline = config.cluster.backend == "inline"
    threads = config.trainer.threads if inline and config.trainer.threads else available_cores()
    for variable, value in math_environment(threads).items():
        os.environ.setdefault(variable, value)


def _note(reports: Reports, text: str) -> None:
    reports.emit(Note(time=time.monotonic(), level="info", text=text))


def _end(reports: Reports, status: Status, reason: str) -> None:
    """Say how the run ended where the pipeline did not: it had not started, or had finished already."""
    if not reports.ended:
        version, groups = reports.version, reports.groups
        finished = RunFinished(
            time=time.monotonic(), status=status.value, reason=reason, version=version, groups=groups
        )
        reports.emit(finished)


# ---------------------------------------------------------------------------------------------- model


def _prepare_model(config: Config, rows: Rows, directory: RunDirectory, reports: Reports) -> str:
    """The folder of the model to start from: the user's, or one made (and warmed up) in the run's directory."""
    if config.model.path is not None:
        return config.model.path
    if config.model.make is None:
        raise AssertionError("unreachable: the doctor asks for one of model.path and model.make")
    from headway.models.make import make_model

    path = directory.initial_model
    reports.phase("making the model")
    make_model(config.model.make, config.run.seed, path)
    if config.model.warmup is not None:
        _warm_up(config, rows, path, reports)
    return str(path)


def _warm_up(config: Config, rows: Rows, path: Path, reports: Reports) -> None:
    import torch

    from headway.models.loading import load_model, load_tokenizer, without_progress_bars
    from headway.warmup import warm_up

    if config.model.warmup is None or config.data.task is None:
        raise AssertionError("unreachable: the doctor asks for a task where there is a warm-up")
    tokenizer = load_tokenizer(str(path))
    model = load_model(str(path), dtype=torch.float32)
    reports.phase("warming the model up")
    warm_up(
        model,
        tokenizer,
        config.data.task,
        config.model.warmup,
        build_sources(config, tokenizer, rows).val,
        seed=config.run.seed,
        max_response_length=config.data.max_response_length,
        report=lambda detail: reports.phase("warming the model up", detail),
    )
    with without_progress_bars():
        model.save_pretrained(path)


# ---------------------------------------------------------------------------------------------- run


class _Run:
    """From a model to a better one. Opens what the pipeline needs, and closes it in the reverse order."""

    def __init__(
        self, config: Config, rows: Rows, model_path: str, reports: Reports, start: _From | None = None
    ) -> None:
        """``start``: None for a run that begins."""
        self._config = config
        self._rows = rows
        self._model_path = model_path
        self._reports = reports
        self._start = start
        self.stop_reason: str | None = None
        """Why the run stopped itself."""

    async def run(self) -> Status:
        with _Interrupts(self._reports) as interrupts:
            async with AsyncExitStack() as stack:
                try:
                    return await self._open_and_run(stack, interrupts)
                finally:
                    interrupts.leave_undisturbed()

    async def _open_and_run(self, stack: AsyncExitStack, interrupts: _Interrupts) -> Status:
        """What has to be closed is left on ``stack``."""
        from headway.cluster.backend import start_backend
        from headway.models.loading import load_tokenizer, stop_token_ids

        config, reports = self._config, self._reports
        reports.phase("starting workers")
        tokenizer = load_tokenizer(self._model_path, trust_remote_code=config.model.trust_remote_code)
        data = build_sources(config, tokenizer, self._rows)
        self._report_left_out("held-out", data.left_out_by_source["val"])
        reward = RewardPool(
            RewardSpec.of(config),
            workers=config.reward.workers,
            retries=config.reward.retries,
            log_path=reports.directory.logs / "reward.log",
        )
        stack.push_async_callback(reward.close)
        await reward.start()
        workers = await start_backend(
            config,
            model_path=self._model_path,
            run_dir=reports.directory.path,
            total_optimizer_steps=_optimizer_steps(config, data.rows),
        )
        stack.push_async_callback(workers.close)
        for name, hardware in workers.hardware.items():
            reports.emit(WorkerDescribed(time=time.monotonic(), worker=name, **asdict(hardware)))
        parts = Parts(
            source=data.train,
            validation=data.val,
            rollouts=workers.rollouts,
            trainer=workers.train,
            reward=reward,
            advantages=workers.train.advantages,
            group_filter=_group_filter(config),
            shaping=_shaping(config),
            greedy_baseline=needs_greedy_baseline(config),
            reference=workers.ref,
            reference_inside_fetch=REF in workers.inside_fetch,
            proximal=workers.proximal,
            proximal_inside_fetch=LOGP in workers.inside_fetch,
            critic=workers.critic,
            critic_inside_fetch=CRITIC in workers.inside_fetch,
            receivers=workers.receivers,
            stop_token_ids=stop_token_ids(self._model_path, tokenizer),
            watch=workers.watch,
            watch_replica=workers.watch_replica,
            replace_replica=workers.replace_replica if workers.replaces else None,
            probe_tolerance=workers.probe_tolerance,
        )
        taken = None if self._start is None else await self._load(workers, self._start)
        checkpoints = Checkpoints(reports.directory.checkpoints)
        retention = Retention(checkpoints, keep=config.trainer.max_actor_ckpt_to_keep)
        pipeline = Pipeline(config, parts, [reports, retention], reports.directory.checkpoints, taken)
        with interrupts.asking(pipeline):
            status = await pipeline.run()
        self.stop_reason = pipeline.stop_reason
        self._report_left_out("training", data.left_out_by_source["train"])  # only now are they met
        reports.phase("exporting the model")
        with boundary(f"could not export the model to {reports.directory.model}", RunError):
            await workers.train.export(reports.directory.model)
        return status

    def _report_left_out(self, part: str, by_source: Mapping[str, int]) -> None:
        limit = self._config.data.max_prompt_length
        for source, count in sorted(by_source.items()):
            self._reports.emit(
                PromptsLeftOut(time=time.monotonic(), part=part, source=source, count=count, max_tokens=limit)
            )

    async def _load(self, workers: Workers, start: _From) -> Taken:
        """The checkpoint into trainer and critic; returns the driver's part of it."""
        self._reports.phase("loading the checkpoint", f"version {start.version}")
        checkpoints = Checkpoints(self._reports.directory.checkpoints)
        taken = await workers.train.load(checkpoints.actor(start.version))
        if workers.critic is not None:
            await workers.critic.load(checkpoints.critic(start.version))
        if (told := self._reports.groups) != (saved := balance(taken)):
            raise UserError(
                f"{checkpoints.actor(start.version)} is not the checkpoint of which "
                f"{self._reports.directory.events.name} tells: it holds the groups {saved}, the record has {told}. "
                "Remove it, to resume from the one before"
            )
        if taken["data_ended"] and start.longer:
            raise ConfigError(
                f"data.epochs: the run ended where its data did, within version {start.version}: it has trained "
                f"{taken['consumed']} groups, which is no multiple of {self._config.groups_per_version} per version. "
                "It cannot be made longer; start another one with model.path set to its model folder"
            )
        return taken


class _Interrupts:
    """Ctrl-C and SIGTERM, as long as there is anything to close.

    While the pipeline runs the first one asks it to finish its version; any other leaves at once. What is open is then
    closed, which takes a few seconds; nothing disturbs that, so that no process is left behind.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._pipeline: Pipeline | None = None
        self._task: asyncio.Task[Any] | None = None
        """None once it leaves."""

    def __enter__(self) -> _Interrupts:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    @contextmanager
    def asking(self, pipeline: Pipeline) -> Iterator[None]:
        """The first interrupt within is ``pipeline``'s."""
        self._pipeline = pipeline
        try:
            yield
        finally:
            self._pipeline = None

    def leave_undisturbed(self) -> None:
        self._task = None

    def _on_signal(self) -> None:
        if self._task is None:
            _note(self._reports, "ending the workers, which takes a few seconds")
        elif self._pipeline is not None:
            _note(self._reports, "stopping after this version; press Ctrl-C again to leave at once")
            self._pipeline.request_stop()
            self._pipeline = None
        else:
            self._task.cancel()
            self._task = None


@contextmanager
def _terminations_as_interrupts() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does, where no event loop handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _optimizer_steps(config: Config, rows: int) -> int:
    """Length of the learning-rate schedule."""
    groups = config.rollout.total_rollout_steps or rows * (config.data.epochs or 1)
    return ceil(groups / config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs


def _group_filter(config: Config) -> GroupFilter | None:
    from headway.algorithms.filters import has_variance

    if not config.algorithm.filter_groups.enable:
        return None

    def no_variance(rewards: NDArray[np.float32]) -> str | None:
        return None if has_variance(rewards) else f"all rewards are {rewards[0]:g}"

    return no_variance


def _shaping(config: Config) -> Shaping | None:
    from headway.algorithms.overlong import soft_overlong_penalty

    overlong, limit = config.reward.overlong_buffer, config.data.max_response_length
    if not overlong.enable:
        return None

    def shaped(rewards: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        penalty = soft_overlong_penalty(lengths, max_length=limit, buffer=overlong.len, factor=overlong.penalty_factor)
        return rewards + penalty

    return shaped
