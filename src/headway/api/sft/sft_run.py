"""``headway sft``: supervised fine-tuning of a model on conversations, from settings to an exported model.

    data ─▶ Conversations ─▶ [ batch ─▶ optimizer step ─▶ row of metrics ]* ─▶ checkpoint, model
                                  └── every sft.val_freq steps: loss on held-out conversations

A step's number determines its conversations, so that a run can resume from any checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.api.interrupts import Interrupts
from headway.api.sft.sft_data import Example, SftExamples
from headway.api.sft.warmup import SftSteps, trainer_of
from headway.cluster.worker_group import while_ranks_move
from headway.config.doctor import check_releases
from headway.config.loading import LoadedConfig
from headway.config.schema import Config
from headway.config.sizing.timeouts import file_stall_s
from headway.data.mixing import Mixture, SourceShare
from headway.data.rows import TRAIN_SPLIT, VAL_SPLIT, digests, rows_of, split
from headway.engines.train.state_file import read_state
from headway.errors import EXIT_INTERRUPTED, ConfigError, DataError, RunError, UserError
from headway.models.model_folder import check_folder
from headway.pipeline.off_policy_guard import MOST_SKIPPED
from headway.pipeline.recovery.liveness import WorkerAnswers
from headway.pipeline.run import Status
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.events_file import JsonLines
from headway.reports.record.file_access import replace_file
from headway.reports.run_directory import RunDirectory, RunLock, in_free_directory
from headway.reports.terminal import stdout_console
from headway.reports.trackers.tracker_set import Trackers, check_trackers, open_trackers
from headway.reports.trackers.tracker_thread import TrackerMessages
from headway.runtime.logs import DriverLog
from headway.runtime.task_groups import end, failing_as_one

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")
LINE_EVERY_S = 2.0
"""Seconds between two lines of progress."""


def check(config: Config) -> SftData:
    """Return the run's conversations, with the first batch tokenised.

    Raises:
        ConfigError: torch or transformers is too old here.
        DataError: the data cannot be read, or the first batch has no usable conversation.
        ModelError: the model's folder is incomplete.
    """
    assert config.model.path is not None
    check_releases()
    check_folder(config.model.path)
    check_trackers(config)
    from headway.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    data = SftData(config, tokenizer)
    if not data.batch(0):
        raise data.train.left_out.error("all conversations of the first batch")
    return data


class SftData:
    """Training and held-out conversations of one run, and their assignment to steps."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        chats = None
        if tokenizer.chat_template:
            renderer = ChatRenderer(tokenizer, config.data.chat_template_kwargs)
            chats = Chats(renderer, config.agent.tool_parser)
        data, sft = config.data, config.sft
        train = [row for source in data.train_sources for row in rows_of(source, TRAIN_SPLIT)]
        val = [row for source in data.held_out_sources for row in rows_of(source, VAL_SPLIT)]
        if train and not data.held_out_sources and data.val_size:
            if data.val_size >= len(train):
                raise DataError(
                    f"{data.label}: data.val_size={data.val_size} held-out rows leave nothing of {len(train)} rows to "
                    "learn from; make data.val_size smaller (0: no held-out loss), or give data.val"
                )
            learned, held_out = split(len(train), data.val_size, config.run.seed)
            train, val = [train[number] for number in learned], [train[number] for number in held_out]
        self.accepts_changes = data.accept_changes
        self.digests = [*digests([row for _, row in train])]
        """Digests of the training rows, in order."""
        self.order = f"sft.batch_size={sft.batch_size}, run.seed={config.run.seed}, data.shuffle={data.shuffle}"
        """Settings that determine the rows of each step."""
        self.train = SftExamples(train, config, tokenizer, chats)
        self.val = SftExamples(val, config, tokenizer, chats) if val else None
        self._size = sft.batch_size
        self._places = len(self.train) * (data.epochs or 1)
        if sft.max_steps is not None:
            asked = sft.max_steps * sft.batch_size
            self._places = asked if data.epochs is None else min(asked, self._places)
        self.steps = math.ceil(self._places / sft.batch_size)
        """Number of optimizer steps of the run."""
        self.notes = list(self._notes(config, templated=chats is not None))
        """Notes on what the user may not expect."""
        mixture = Mixture([SourceShare("", len(self.train))], seed=config.run.seed, shuffle=data.shuffle)
        self._epoch = lru_cache(1)(mixture.epoch)  # all steps of an epoch ask for the same order
        self._reading = Lock()
        """Held while rows are read: training and held-out rows use one tokenizer, which is not thread-safe."""

    def _notes(self, config: Config, *, templated: bool) -> Iterator[str]:
        warmup = config.sft.optim.lr_warmup_steps
        if warmup >= self.steps:
            yield (
                f"sft.optim.lr_warmup_steps={warmup}: the run has {self.steps} steps and ends before the learning "
                "rate is at its full value"
            )
        if templated and config.data.chat_template != "always" and self.train.has_text:
            yield (
                "prompts that are text are learned as they are; the tokenizer has a chat template: "
                "set data.chat_template=always to write them as a user's message"
            )

    def batch(self, step: int) -> list[Example]:
        """Return the examples of a step. Rows that cannot be used are left out."""
        places = range(step * self._size, min((step + 1) * self._size, self._places))
        with self._reading:
            return self.train.examples(self._row(place) for place in places)

    def held_out(self) -> Iterator[list[Example]]:
        """Yield the held-out examples in batches."""
        for first in range(0, 0 if self.val is None else len(self.val), self._size):
            assert self.val is not None
            with self._reading:
                batch = self.val.examples(range(first, min(first + self._size, len(self.val))))
            if batch:
                yield batch

    def _row(self, place: int) -> int:
        epoch, at = divmod(place, len(self.train))
        return int(self._epoch(epoch).indices[at])


def sft(loaded: LoadedConfig, resume: Path | None = None, console: Console | None = None) -> int:
    """Run ``headway sft``, or resume the run in ``resume``. Returns the exit code."""
    config = loaded.config
    data = check(config)
    if resume is None:
        name = f"{config.run.name}-sft"
        directory = in_free_directory(config.run.dir, name, lambda path: RunDirectory.create(path, config))
    else:
        directory = RunDirectory(resume)
    lock = RunLock(directory.lock)
    lock.take()
    try:
        step = 0
        if resume is not None:
            step = _resumed(directory, data)
            directory.write_config(config)
        reports = SftReports(config, directory, console or stdout_console(), step)
        for note in loaded.notes:
            reports.note(note)
        try:
            status = asyncio.run(_SftRun(config, data, directory, reports, step).run())
        except asyncio.CancelledError:  # a second signal: nothing more is saved
            reports.close(Status.INTERRUPTED)
            return EXIT_INTERRUPTED
        except BaseException:
            logger.exception("the run failed")
            reports.close(Status.FAILED)
            raise
    finally:
        lock.release()
    return 0 if status is Status.COMPLETED else EXIT_INTERRUPTED


def _resumed(directory: RunDirectory, data: SftData) -> int:
    """Return the number of steps in the newest checkpoint, and remove what came after it."""
    checkpoints = Checkpoints(directory.checkpoints)
    checkpoints.check_readable()
    if not (steps := checkpoints.complete(with_critic=False)):
        raise UserError(f"--resume {directory.path}: there is no checkpoint; begin again with another run.dir")
    state: dict[str, Any] = read_state(checkpoints.actor(steps[-1]))["extra"]
    if state["data"] != data.digests and not data.accepts_changes:
        raise DataError(
            f"--resume {directory.path}: the training rows are not those of the checkpoint. Resume with the same data, "
            "or go on with these: data.accept_changes=true"
        )
    if state["order"] != data.order:
        raise ConfigError(
            f"--resume {directory.path}: got {data.order}, and the checkpoint has {state['order']}, by which its steps "
            "learned from their rows; drop what differs, or begin again with another run.dir"
        )
    if steps[-1] >= data.steps and directory.model.is_dir():
        raise UserError(f"--resume {directory.path}: the run is complete, at step {steps[-1]} of {data.steps}")
    # A later checkpoint, whose steps are undone now, would be the newest one at the next resume
    checkpoints.forget_above(steps[-1])
    return steps[-1]


class SftReports:
    """Files, trackers and console lines of one run."""

    def __init__(self, config: Config, directory: RunDirectory, console: Console, step: int) -> None:
        """Open files and trackers. ``step``: number of completed steps; rows of later ones are removed."""
        self._directory, self._console = directory, console
        self.step, self._loss = step, math.nan
        self._val_loss: float | None = None
        if step:
            _keep_rows(directory.metrics, step)  # before the file is opened to append
        self._lines = JsonLines(directory.metrics, self.warn)
        say = TrackerMessages(warn=self.warn, note=self.note, phase=self.note)
        self._trackers: Trackers = open_trackers(config, directory, say, undone_from=step + 1 if step else None)
        self._trackers.start()
        self._said_at = -math.inf
        self._log = DriverLog(directory.logs, directory.path.resolve().name)

    def note(self, text: str) -> None:
        logger.info(text)
        line = f"{time.strftime('%H:%M:%S')}  {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def row(self, row: dict[str, Any], total: int) -> None:
        """Write the metrics of one step, whose number is ``version``. Print them every `LINE_EVERY_S`."""
        self._lines.write(row)
        self._trackers.on_row(row)
        self.step, self._loss = row["version"], row["sft/loss"]
        self._val_loss = row.get("sft/val_loss", self._val_loss)
        if time.monotonic() - self._said_at >= LINE_EVERY_S or "sft/val_loss" in row or self.step == total:
            self._said_at = time.monotonic()
            held_out = f"  held-out loss {row['sft/val_loss']:.4f}" if "sft/val_loss" in row else ""
            self.note(
                f"step {self.step} of {total}  loss {self._loss:.4f}{held_out}  {row['perf/tokens_per_s']:.0f} tokens/s"
            )

    def close(self, status: Status) -> None:
        """Complete the files, and end the trackers."""
        summary = {
            "status": status.value,
            "version": self.step,
            "loss": self._loss if math.isfinite(self._loss) else None,
            "val_loss": self._val_loss,
        }
        self._lines.close()
        self._directory.write_summary(summary)
        self._trackers.finish(summary, self._directory.model if status is Status.COMPLETED else None)
        self._log.close()


def _keep_rows(path: Path, step: int) -> None:
    """Remove the rows of steps after ``step``, and an incomplete line."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            if json.loads(line)["version"] <= step:
                kept.append(f"{line}\n")
    replace_file(path, "".join(kept))


class _SftRun:
    """The steps of one run, from start to exported model."""

    def __init__(self, config: Config, data: SftData, directory: RunDirectory, reports: SftReports, step: int) -> None:
        self._config, self._data, self._directory, self._reports = config, data, directory, reports
        self._first = step
        self._checkpoints = Checkpoints(directory.checkpoints)
        self._stop = Event()
        """Set once the run is asked to stop."""

    async def run(self) -> Status:
        config, data, reports = self._config, self._data, self._reports
        assert config.model.path is not None
        with (
            Interrupts(reports.note) as interrupts,
            interrupts.asking(self._stop.set, "this step, with a checkpoint"),
        ):
            async with trainer_of(
                config,
                config.sft.optim,
                model_path=config.model.path,
                run_dir=self._directory.path,
                total_steps=data.steps,
                tell=reports.note,
            ) as steps:
                if self._first:
                    await steps.engine.load(self._checkpoints.actor(self._first))
                    reports.note(f"resuming from the checkpoint of step {self._first}")
                held_out = 0 if data.val is None else len(data.val)
                reports.note(f"{len(data.train)} conversations, {held_out} held out, {data.steps} optimizer steps")
                for note in data.notes:
                    reports.note(note)

                async def train(tasks: Any) -> Status:
                    watching = tasks.start(steps.watch())
                    try:
                        return await self._train(steps)
                    finally:
                        watching.cancel()  # it never ends by itself, and `failing_as_one` waits for all tasks

                status = await failing_as_one(train)
        for part, rows in (("training", data.train), ("held-out", data.val)):
            if rows is not None and (left_out := rows.left_out.note(part)) is not None:
                reports.note(left_out)
        reports.close(status)
        if status is Status.COMPLETED:
            reports.note(f"completed; the model is in {self._directory.model}")
        else:
            reports.note(f"go on with: headway sft --resume {self._directory.path}")
        return status

    async def _train(self, steps: SftSteps) -> Status:
        config, data = self._config, self._data
        skipped, saved = 0, self._first
        ahead = asyncio.create_task(asyncio.to_thread(data.batch, self._first))
        try:
            for step in range(self._first, data.steps):
                batch = await ahead
                if step + 1 < data.steps:
                    ahead = asyncio.create_task(asyncio.to_thread(data.batch, step + 1))
                if batch:  # empty if all its rows are left out
                    skipped = await self._step(steps, step, batch, skipped)
                if self._stop.is_set():
                    break
                if config.sft.save_freq > 0 and (step + 1) % config.sft.save_freq == 0:
                    saved = await self._save(steps, step + 1)
        finally:
            # It uses the tokenizer in a thread: a failed run would otherwise end while the thread reads
            await end([ahead])
        done = self._reports.step
        # Before the export: a resume makes up for its failure
        if saved < done:
            await self._save(steps, done)
        if done < data.steps and self._stop.is_set():
            return Status.INTERRUPTED
        self._reports.note("exporting the model")
        await steps.engine.export(self._directory.model)
        return Status.COMPLETED

    async def _step(self, steps: SftSteps, step: int, batch: list[Example], skipped: int) -> int:
        """Take one step and report it. Returns the number of successive skipped steps."""
        config, data, began = self._config, self._data, time.monotonic()
        report = await self._moving(steps, steps.step(step, batch), f"optimizer step {step + 1}")
        tokens = sum(len(row.prompt_ids) + len(row.ids) for rows in batch for row in rows)
        learned = sum(int(row.loss_mask.sum()) for rows in batch for row in rows)
        metrics = report.metrics
        row = {
            "version": step + 1,
            "sft/loss": metrics["loss"],
            "sft/learned_tokens": learned,
            "actor/grad_norm": metrics["grad_norm"],
            "actor/lr": metrics["lr"],
            "actor/entropy": metrics["entropy"],
            "perf/tokens_per_s": tokens / (time.monotonic() - began),
        }
        if data.val is not None and ((step + 1) % config.sft.val_freq == 0 or step + 1 == data.steps):
            row["sft/val_loss"] = await self._held_out_loss(steps)
        self._reports.row(row, data.steps)
        skipped = skipped + 1 if report.skipped else 0
        if skipped > MOST_SKIPPED:
            raise RunError(
                f"{skipped} optimizer steps in a row had a loss or gradient that is not finite; lower sft.optim.lr, or "
                "look for such numbers in the model"
            )
        return skipped

    async def _held_out_loss(self, steps: SftSteps) -> float:
        """Return the mean loss of the held-out conversations, in nats per token."""
        nats, tokens = 0.0, 0
        batches, number = self._data.held_out(), 0
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            number -= 1  # optimizer steps have the numbers 0, 1, …
            work = steps.loss(number, batch)
            loss = await self._moving(steps, work, "the loss on held-out conversations")
            nats, tokens = nats + loss.nats, tokens + loss.tokens
        return nats / max(1, tokens)

    async def _save(self, steps: SftSteps, step: int) -> int:
        state = {"step": step, "data": self._data.digests, "order": self._data.order}
        await steps.engine.save(self._checkpoints.actor(step), state)
        keep = self._config.trainer.max_actor_ckpt_to_keep
        # Without a limit the slice is [:0], which is empty: all stay.
        for old in self._checkpoints.complete(with_critic=False)[: -keep if keep else 0]:
            for path in self._checkpoints.set_aside(old):
                await asyncio.to_thread(rmtree, path, ignore_errors=True)
        return step

    async def _moving(self, steps: SftSteps, work: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of ``work``. Raises `StallError` if no rank progresses for ``cluster.stall_timeout_s``."""
        limit_s = steps.timeouts.stall_s

        def stuck(answers: WorkerAnswers) -> str:
            return f"{what} did not move for {limit_s:g} s (cluster.stall_timeout_s): {answers}"

        return await while_ranks_move(work, steps.workers, limit_s, file_stall_s, stuck)
