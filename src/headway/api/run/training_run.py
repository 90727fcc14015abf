"""A training run: wires data, reward, workers and pipeline together, and exports the trained model.

`headway.api.interrupts` takes the signals of a run; outside of its event loop `headway.runtime.signals` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from headway.agents.episodes.program_workers import variables
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardSpec
from headway.api.interrupts import Interrupts
from headway.api.profile_window import ProfileWindow
from headway.api.storage.uploader import StorageUploader
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic
from headway.config.sizing.timeouts import WARM_LEFT_S
from headway.data.sources import Rows, build_sources
from headway.data.tokenize import LeftOutRows
from headway.engines.train.state_file import write_start
from headway.errors import HeadwayError, RunError, StallError, boundary, said_by
from headway.events import Note, Observer, PromptsLeftOut, WorkerDescribed
from headway.pipeline.admission.run_journal import RunJournal
from headway.pipeline.admission.sample_collector import SampleOutlet
from headway.pipeline.recovery.checkpoint_manager import DriverState
from headway.pipeline.run import Pipeline, Status
from headway.pipeline.wiring import Parts
from headway.reports.checkpoint_folders import CheckpointRetention, Checkpoints, version_of, write_version
from headway.reports.report_manager import Reports
from headway.reports.run_directory import RunDirectory
from headway.runtime.task_groups import end, failure_ignored, in_daemon_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.cluster.workers import Cluster, Workers


def note(reports: Reports, text: str, level: str = "info") -> None:
    reports.emit(Note(time=time.monotonic(), level=level, text=text))


STARTING = "starting workers"
"""Phase that the run's view shows while workers start."""
WARMING = f"warming the model up, {STARTING}"
"""Phase that the run's view shows while the model is warmed up and workers start."""


@dataclass(frozen=True, slots=True)
class StartingModel:
    """Model that a run starts from."""

    path: str
    """Folder of the model, or its name on the hub."""
    warm_up: Callable[[Callable[[], None]], None] | None = None
    """Function that warms up the model in its folder; None without a warm-up. It calls its argument after each step and
    each answer; that call raises once the run is left."""


@asynccontextmanager
async def _warming_up(
    model: StartingModel, stall_s: float, reports: Reports
) -> AsyncIterator[asyncio.Future[None] | None]:
    """Warm up ``model`` while the block runs. Yields a future of the warm-up's end; None without a warm-up."""
    if model.warm_up is None:
        yield None
        return
    warm = asyncio.create_task(_warmed(model.warm_up, stall_s, reports))
    try:
        yield failure_ignored(warm)
    finally:
        await end([warm])


async def _warmed(warm_up: Callable[[Callable[[], None]], None], stall_s: float, reports: Reports) -> None:
    """Warm up a model in a thread. After a cancellation the thread has a few seconds to end; then it is abandoned.

    Raises:
        StallError: for ``stall_s`` seconds there was neither a step nor an answer.
    """
    moved, left = time.monotonic(), False

    def go_on() -> None:
        nonlocal moved
        moved = time.monotonic()
        if left:
            raise asyncio.InvalidStateError("the run ended while its model was warmed up")

    # Its own thread, as user code may hang: the process's end would wait for a thread of the loop's executor.
    warming = in_daemon_thread("headway-warm-up", partial(warm_up, go_on))
    ended = failure_ignored(asyncio.wrap_future(warming))
    try:
        while not ended.done():
            if (patience := moved + stall_s - time.monotonic()) <= 0:
                raise StallError(
                    f"the warm-up made no step and had no answer for {stall_s:g} s (cluster.stall_timeout_s): the "
                    "workers wait for its model. Where nothing hangs in the task, raise the limit"
                )
            await asyncio.wait([ended], timeout=patience)
        ended.result()
    finally:
        # Read by the thread at its next step or answer, which then raises.
        left = True
        if not (await asyncio.wait([ended], timeout=WARM_LEFT_S))[0]:
            ended.cancel()  # the thread reports nothing to the loop any more
            text = f"the warm-up did not end within {WARM_LEFT_S:g} s, and was left: its task, or a step, takes longer"
            note(reports, text, "warning")


@dataclass(eq=False)
class TrainingRun:
    """A training run. It opens what the pipeline needs, and closes it in the reverse order."""

    config: Config
    rows: Rows
    model: StartingModel
    reports: Reports
    start: int | None = None
    """Version of the checkpoint to resume from; None for a new run."""
    uploader: StorageUploader | None = None
    """Uploader to the run's storage; None without one."""
    cluster: Cluster | None = None
    """Cluster that was begun already; None: the run makes it."""
    stop_reason: str | None = field(default=None, init=False)
    """Reason why the run stopped itself; None if it did not."""

    async def run(self) -> Status:
        with Interrupts(partial(note, self.reports)) as interrupts:
            async with AsyncExitStack() as stack:
                try:
                    return await self._open_and_run(stack, interrupts)
                finally:
                    # Before the stack closes: a signal must not interrupt the ending of workers.
                    interrupts.leave_undisturbed()

    async def _open_and_run(self, stack: AsyncExitStack, interrupts: Interrupts) -> Status:
        """Open everything and run the pipeline. ``stack`` closes what was opened."""
        from headway.cluster.backend import start_backend
        from headway.cluster.machine.worker_setup import collecting_seldom
        from headway.cluster.workers import replaceable_dies
        from headway.models.tokenizer import TokenTexts, load_tokenizer, stop_token_ids

        config, reports = self.config, self.reports
        reports.phase(STARTING if self.model.warm_up is None else WARMING)
        tokenizer = load_tokenizer(self.model.path, trust_remote_code=config.model.trust_remote_code)
        data = build_sources(config, tokenizer, self.rows)
        self._report_left_out("held-out", data.val_left_out)
        if (text := template_note(config, tokenizer)) is not None:
            note(reports, text)
        async with _warming_up(self.model, config.cluster.stall_timeout_s, reports) as warm:
            reward = None
            if not config.reward.by_program:
                reward = RewardWorkers(
                    RewardSpec.of(config),
                    workers=config.reward.workers,
                    retries=config.reward.retries,
                    log_path=reports.directory.logs / "reward.log",
                    on_timeout=self._report_timeout,
                    env=variables(config.agent.env),
                )
                # Before start(): a worker that fails to load would leave the others running
                stack.push_async_callback(reward.close)
                await reward.start()

            journal = self._journal()  # before the workers, which write to it if it exists
            if journal is not None:
                stack.callback(journal.close)

            def tell(what: str) -> None:
                reports.phase(STARTING if warm is None or warm.done() else WARMING, what)

            workers = await start_backend(
                config,
                model_path=self.model.path,
                run_dir=reports.directory.path,
                total_optimizer_steps=_optimizer_steps(config, data.train.rows),
                warm=warm,
                tell=tell,
                cluster=self.cluster,
            )
        stack.push_async_callback(workers.close)
        for name, hardware in workers.hardware.items():
            reports.emit(WorkerDescribed(time=time.monotonic(), worker=name, **asdict(hardware)))
        if workers.padded is not None and config.model.packing != "padded":
            text = f"the rows of {self.model.path} are padded in training, and prompts computed for each answer: "
            note(reports, text + workers.padded, "warning")
        parts = Parts(
            source=data.train,
            validation=data.val,
            machinery=workers,
            reward=reward,
            advantages=workers.trainer.advantages,
            stop_token_ids=stop_token_ids(self.model.path, tokenizer),
            watch=workers.watch,
            watch_replaceable=replaceable_dies,
            workers=workers.living,
            journal=journal,
            validated=reports.validated,
            keep_start=None if journal is None else self._keep_start,
            samples=SampleOutlet(reports.on_sample, TokenTexts(tokenizer)) if config.reports.samples else None,
        )
        # After the workers are up: each rank reads its own part of the checkpoint
        driver_state = None if self.start is None else await self._load(workers, self.start)
        checkpoints = Checkpoints(reports.directory.checkpoints)
        retention = CheckpointRetention(
            checkpoints,
            keep=config.trainer.max_actor_ckpt_to_keep,
            recorded_version=lambda: reports.resumable,
            in_use=lambda: None if self.uploader is None else self.uploader.sending,
        )
        # Entered after the workers, so that it is closed before them: they must still send their traces.
        window = await stack.enter_async_context(self._profile_window(workers))
        others: list[Observer | None] = [journal, self.uploader]
        # Reports come first: retention and storage read the record
        observers: list[Observer] = [reports, retention, window, *(one for one in others if one is not None)]
        pipeline = Pipeline(config, parts, observers, reports.directory.checkpoints, driver_state)
        if config.cluster.backend == "ray":  # else the trainer computes in this process
            stack.enter_context(collecting_seldom())
        try:
            with interrupts.asking(pipeline.request_stop, "this version"):
                status = await pipeline.run()
        finally:  # prompts are left out only as training reads them
            self._report_left_out("training", data.train.left_out)
        self.stop_reason = pipeline.stop_reason
        reports.phase("exporting the model")
        exporting = f"could not export the model to {reports.directory.model}"
        with boundary(exporting, RunError):
            try:
                await workers.trainer.export(reports.directory.model)
            except HeadwayError as cause:  # a worker ended, or the user's folder has changed since the start
                raise RunError(f"{exporting}: {cause}") from cause
            # Within a version the model belongs to no checkpoint, and its folder names none.
            if not pipeline.unfinished:
                for newest in checkpoints.complete(with_critic=needs_critic(config))[-1:]:
                    write_version(reports.directory.model, newest)
        return status

    def _journal(self) -> RunJournal | None:
        """Open the run's journal; None if the run keeps none, or it cannot be written."""
        if not self.config.writes_journal:
            return None
        directory = self.reports.directory.journal
        try:
            return RunJournal(directory, self.config, lambda text: note(self.reports, text, "warning"))
        except OSError as cause:
            text = f"no journal is written in {directory}, and a resumed run repeats more: {said_by(cause)}"
            note(self.reports, text, "warning")
            return None

    def _keep_start(self, driver_state: DriverState) -> bool:
        """Write the checkpoint of version 0, so that a run that ends before the next one can be resumed. Returns
        whether it was written.
        """
        checkpoints = Checkpoints(self.reports.directory.checkpoints)
        try:
            if needs_critic(self.config):  # first: the actor's folder makes a checkpoint complete
                write_start(checkpoints.critic(0), {})
            write_start(checkpoints.actor(0), driver_state)
        except OSError as cause:
            text = f"before its first checkpoint the run cannot be resumed: {checkpoints.actor(0)}: {said_by(cause)}"
            note(self.reports, text, "warning")
            return False
        return True

    def _profile_window(self, workers: Workers) -> ProfileWindow:
        engine, reports = self.config.rollout.name, self.reports
        ours = engine == "native"
        return ProfileWindow(
            lambda: workers.profiled(replicas=ours),
            reports.directory,
            reports.emit,
            reports.since_first,
            version=self.start or 0,
            remark=None if ours else f"replicas are not profiled: {engine} computes in processes of its own",
        )

    def _report_timeout(self, count: int) -> None:
        """Warn of the reward's first, tenth, hundredth … time-out."""
        if count != 10 ** (len(str(count)) - 1):
            return
        reward = self.config.reward
        names = ", ".join(one.function for one in reward.all)
        text = (
            f"the reward {names} took longer than reward.timeout_s={reward.timeout_s:g} s and was ended, "
            f"{'for the first time' if count == 1 else f'{count} times so far'}; what it printed is in logs/reward.log"
        )
        note(self.reports, text, "warning")

    def _report_left_out(self, part: str, rows: LeftOutRows) -> None:
        limit = self.config.data.max_prompt_length
        for source, reasons in sorted(rows.counts.items()):
            for reason, count in reasons.items():
                why = rows.examples.get(reason, "")
                event = PromptsLeftOut(
                    time=time.monotonic(),
                    part=part,
                    source=source,
                    count=count,
                    max_tokens=limit,
                    reason=reason,
                    why=why,
                )
                self.reports.emit(event)

    async def _load(self, workers: Workers, version: int) -> DriverState:
        """Load the checkpoint into trainer and critic. Returns its driver state."""
        self.reports.phase("loading the checkpoint", f"version {version}")
        checkpoints = Checkpoints(self.reports.directory.checkpoints)
        driver_state = await workers.trainer.load(checkpoints.actor(version))
        if workers.critic is not None:
            await workers.critic.load(checkpoints.critic(version))
        return driver_state


def is_of_the_end(directory: RunDirectory, newest: Sequence[int]) -> bool:
    """Tell whether the model's folder is there and belongs to the newest checkpoint, not to an earlier end of the run.

    ``newest``: that checkpoint's version, or empty. A folder without a version belongs to the newest end: an export
    replaces the whole folder before it writes the version.
    """
    version = version_of(directory.model)
    return directory.model.is_dir() if version is None else list(newest) == [version]


def template_note(config: Config, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a note on what the chat template changes in an agent's history; None if nothing, or without agents. Tools
    are tried only if the configuration has some; others show up only in the episodes.
    """
    from headway.agents.chat.conversations import history_note
    from headway.agents.episodes.program_workers import chats_of

    if not config.agent.has_program:
        return None
    return history_note(chats_of(config, tokenizer).renderer, tools=bool(config.agent.tools or config.agent.mcp))


def _optimizer_steps(config: Config, rows: int) -> int:
    """Return the number of optimizer steps of the learning-rate schedule."""
    groups = config.rollout.total_rollout_steps or rows * (config.data.epochs or 1)
    return ceil(groups / config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs
