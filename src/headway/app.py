"""The composition root: turns a configuration into a run. Wiring happens here and nowhere else.

preflight ─▶ reports ─▶ model (the user's, or made and warmed up) ─▶ data, reward, workers ─▶ Pipeline ─▶ export
                └──────────────── closed last, after pipeline, workers and reward, whatever happened ◀──────┘
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.cluster.hardware import available_cores
from headway.cluster.process import math_environment
from headway.config.loading import LoadedConfig
from headway.config.placement import CRITIC, LOGP, REF, needs_greedy_baseline
from headway.config.schema import Config
from headway.data.sources import Rows, build_sources
from headway.errors import StoppedByGuard
from headway.events import Note, RunFinished, WorkerDescribed
from headway.pipeline.ledger import Ledger
from headway.pipeline.parts import Parts
from headway.pipeline.run import Pipeline, Status
from headway.pipeline.stages.reward import GroupFilter, Shaping
from headway.preflight import check_inputs, check_model
from headway.reports.bundle import Reports, open_reports
from headway.rewards.pool import RewardPool
from headway.rewards.request import RewardSpec

EXIT_INTERRUPTED = 130
"""As shells have it for a program that Ctrl-C ended."""


def train(loaded: LoadedConfig) -> int:
    """Run ``headway train``: returns the exit code, raises the errors of `headway.errors`."""
    config = loaded.config
    _set_math_environment(config)
    rows = check_inputs(config)  # this and the next before the run's directory: what is wrong here leaves no trace
    check_model(config, rows)
    run_dir = config.run.dir or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    reports = open_reports(config, run_dir)
    try:
        for text in loaded.notes:
            _note(reports, text)
        model_path = _prepare_model(config, rows, run_dir, reports)
        run = _Run(config, rows, model_path, run_dir, reports)
        status = asyncio.run(run.run())
        reports.report_end(reports.directory.model)
        if run.stop_reason is not None:
            raise StoppedByGuard(
                f"{run.stop_reason}. The run ended after that version: its model and a checkpoint are in {run_dir}. "
                "Lower async_training.staleness_threshold or actor.optim.lr, add a correction "
                "(docs/algorithms/corrections.md), or set offpolicy.guard.action to what goes on"
            )
    except (KeyboardInterrupt, asyncio.CancelledError):
        _note(reports, "left at once; nothing more was saved")
        _end(reports, Status.INTERRUPTED, "left at once")
        return EXIT_INTERRUPTED
    except Exception as failure:
        _end(reports, Status.FAILED, f"{type(failure).__name__}: {failure}")
        raise
    finally:
        reports.close()
    return 0 if status is Status.COMPLETED else EXIT_INTERRUPTED


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
        balance = Ledger().counts()
        reports.emit(RunFinished(time=time.monotonic(), status=status.value, reason=reason, version=0, groups=balance))


# ---------------------------------------------------------------------------------------------- model


def _prepare_model(config: Config, rows: Rows, run_dir: Path, reports: Reports) -> str:
    """The folder of the model to start from: the user's, or one made (and warmed up) in the run's directory."""
    if config.model.path is not None:
        return config.model.path
    if config.model.make is None:
        raise AssertionError("unreachable: the doctor asks for one of model.path and model.make")
    from headway.models.make import make_model

    path = run_dir / "initial_model"
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

    def __init__(self, config: Config, rows: Rows, model_path: str, run_dir: Path, reports: Reports) -> None:
        self._config = config
        self._rows = rows
        self._model_path = model_path
        self._run_dir = run_dir
        self._reports = reports
        self.stop_reason: str | None = None
        """Why the run stopped itself."""

    async def run(self) -> Status:
        from headway.cluster.backend import start_backend
        from headway.models.loading import load_tokenizer, stop_token_ids

        config, reports = self._config, self._reports
        reports.phase("starting workers")
        tokenizer = load_tokenizer(self._model_path, trust_remote_code=config.model.trust_remote_code)
        data = build_sources(config, tokenizer, self._rows)
        for name, count in data.left_out.items():
            if count:
                _note(reports, f"{count} {name} prompts of more than {config.data.max_prompt_length} tokens left out")
        async with AsyncExitStack() as stack:
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
                run_dir=self._run_dir,
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
            pipeline = Pipeline(config, parts, [reports], reports.directory.checkpoints)
            with _graceful_interrupts(pipeline, reports):
                status = await pipeline.run()
            self.stop_reason = pipeline.stop_reason
            reports.phase("exporting the model")
            await workers.train.export(reports.directory.model)
        return status


@contextmanager
def _graceful_interrupts(pipeline: Pipeline, reports: Reports) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks the pipeline to finish its version; the second leaves at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked and task is not None:
            task.cancel()
            return
        asked = True
        _note(reports, "stopping after this version; press Ctrl-C again to leave at once")
        pipeline.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


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
