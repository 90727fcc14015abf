"""One run: the stages wired up, started, watched and ended in order. The main loop of Headway is `Pipeline.run`.

             ┌──────── ground truth, extra fields ───────┐
PromptLoader ─▶ Generate ────────────────────────────▶ Rollout ─▶ Reward ─▶ [RefLogProb] ─▶ MessageQueue
     ▲             ▲        ids and tokens only    (joins groups)  (may filter)                 │
 admission      weights                                                                         ▼  a fetch
     │             │                                   [CriticTrain] ◀─ ActorTrain ◀─ [Values] ◀─ [LogProb]
     └── Staleness ◀──── ParamUpdate: gather ▶ send ▶ recv ▶ register ▶ load ◀─┘
                             └─▶ Validate

Stages in brackets are there when the algorithm asks for them and they have ranks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from headway.config.algorithm import GROUP_RELATIVE
from headway.config.schema import Config
from headway.data.types import Group
from headway.errors import RunError, UpdateFailed, WorkerDied, boundary
from headway.events import CheckpointSaved, Emit, Note, Observer, RunFinished, RunStarted, VersionReached, fan_out
from headway.interfaces import (
    FinishedGroup,
    OnUpdate,
    RolloutEngine,
    SamplingParams,
)
from headway.pipeline.channel import Channel
from headway.pipeline.concurrently import Tasks, concurrently, failing_as_one
from headway.pipeline.critic import Critic
from headway.pipeline.equal_rewards import VERSIONS, EqualRewards
from headway.pipeline.fetches import Fetch, Fetches, FetchSource
from headway.pipeline.fleet import Fleet
from headway.pipeline.guard import Guard, GuardSettings
from headway.pipeline.lease import OwnDevices, SharedDevices
from headway.pipeline.ledger import Ledger
from headway.pipeline.message_queue import MessageQueue
from headway.pipeline.monitor import Monitor
from headway.pipeline.on_update import Halts
from headway.pipeline.parts import Parts
from headway.pipeline.preparation import Preparation
from headway.pipeline.prompts import Prompts
from headway.pipeline.receiver import Gone, Replica
from headway.pipeline.resume import DriverState, Taken
from headway.pipeline.router import Router
from headway.pipeline.scoring import Scoring
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import ActorTrain, TrainSettings, Update
from headway.pipeline.stages.critic_train import CriticTrain
from headway.pipeline.stages.generate import Generate
from headway.pipeline.stages.logprob import LogProb
from headway.pipeline.stages.param_update import ParamUpdate
from headway.pipeline.stages.prompt_loader import PromptLoader, Wave
from headway.pipeline.stages.ref_logprob import RefLogProb
from headway.pipeline.stages.reward import Reward
from headway.pipeline.stages.rollout import Rollout
from headway.pipeline.stages.validate import Validate, Validation
from headway.pipeline.stages.values import Values
from headway.pipeline.staleness import Staleness
from headway.pipeline.state import RunState, now
from headway.pipeline.supervision import Replacing, Supervision


class Status(StrEnum):
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Pipeline:
    """Built once, run once."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        observers: Sequence[Observer],
        checkpoints: Path,
        resume_from: Taken | None = None,
    ) -> None:
        """``resume_from``: the driver's state of the checkpoint that the trainer, and the critic, have loaded."""
        self.config = config
        self._resume_from = resume_from
        self._parts = parts
        self._checkpoints = checkpoints
        self._emit: Emit
        self._monitor = Monitor(
            lambda: self._fleet,
            lambda: self.stages,
            lambda event: self._emit(event),  # noqa: PLW0108 - bound below: the monitor observes, too
            stall_timeout_s=config.cluster.stall_timeout_s,
            interval_s=config.reports.activity_interval_s,
        )
        self._emit = fan_out([*observers, self._monitor])
        settings = config.async_training
        staleness = Staleness(
            eta=settings.staleness_threshold,
            groups_per_version=config.groups_per_version,
            window=config.window,
            total=config.rollout.total_rollout_steps,
            loaded={replica.name: 0 for replica in parts.rollouts},
            max_lag=settings.max_lag,
            drops_overdue=settings.on_overdue == "drop",
        )
        self._state = RunState(staleness, Ledger(), MessageQueue(staleness), self._emit)
        self._router = Router(split_groups=config.rollout.split_groups)
        self._fleet = Fleet(
            parts.rollouts, parts.receivers, self._state, self._router, timeout_s=config.param_update.timeout_s
        )
        self._supervision = Supervision(self._fleet, parts.watch_replica)
        if parts.replace_replica is not None:
            replacing = Replacing(self._state, parts.replace_replica, self.join, config.cluster.max_replica_restarts)
            self._supervision.replacing = replacing
            self._fleet.on_lost = self._supervision.replace
        self._stopping = False
        self.stop_reason: str | None = None
        """Why the run stopped itself; None where it did not."""
        self._saved_version: int | None = None
        self._critic = self._make_critic()
        self._prompts = Prompts(parts.source)
        self._scoring = Scoring(parts.reward)
        guard = config.offpolicy.guard
        self._guard = Guard(GuardSettings(guard.min_ess, guard.action), self._state, self.request_stop)
        self._fetches = Fetches(self._state, config.groups_per_fetch, fill_first=settings.fill_queue)
        self._boundary: Taken
        """The driver's state at the last version boundary."""
        self._wire()

    @property
    def stages(self) -> list[Stage[Any, Any]]:
        return [*self._upstream, *self._downstream]

    async def run(self) -> Status:
        """Train until the run's groups are consumed, a stop was asked for, or something failed (which is raised).

        Whatever happens, the last event is `RunFinished` with the ledger's balance.
        """
        self._emit_started()
        try:
            self._begin()
            await self._run_stages()
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._emit_finished(Status.INTERRUPTED, "left at once")
            raise
        except BaseException as failure:
            self._emit_finished(Status.FAILED, f"{type(failure).__name__}: {failure}")
            raise
        status = Status.INTERRUPTED if self._stopping and not self._trained_all() else Status.COMPLETED
        self._emit_finished(status, self.stop_reason or self._why_unfinished())
        return status

    def _trained_all(self) -> bool:
        """Asked when nothing runs any more: where the data are the run's length, it asks them for one more prompt."""
        total, state = self.config.rollout.total_rollout_steps, self._state
        if total is not None:
            return state.consumed >= total
        return not state.ledger.open_numbers and not state.waiting_again and self._prompts.next() is None

    def join(self, replica: RolloutEngine) -> None:
        """A late replica: it receives the next version with the others, and serves from then on.

        Raises `ValueError` when a replica of that name was there before, or devices are shared: those are all taken.
        """
        if self.config.placement.kind == "shared":
            raise ValueError("placement.kind=shared: every device is in use, a replica cannot join")
        self._supervision.add(self._fleet.join(replica))

    def request_stop(self, reason: str | None = None) -> None:
        """Finish the current version, save, and return from `run`. ``reason``: why the run stops itself."""
        self._stopping = True
        self.stop_reason = self.stop_reason or reason
        self._state.request_stop()
        self._scoring.stop()

    @property
    def unfinished(self) -> bool:
        """The run was stopped within a version, because the scores that the rest of it needs did not come."""
        return self._state.unfinished

    # ------------------------------------------------------------------------------------------ wiring

    def _wire(self) -> None:
        config, parts, state, n = self.config, self._parts, self._state, self.config.rollout.n
        waves: Channel[Wave] = Channel("waves")
        finished: Channel[FinishedGroup] = Channel("finished")
        unrewarded: Channel[Group] = Channel("unrewarded")
        updates: Channel[Update] = Channel("updates")
        self._validations: Channel[Validation] = Channel("validations")
        reference_stage = parts.reference is not None and not parts.reference_inside_fetch
        rewarded: Channel[Group] | MessageQueue = Channel("rewarded") if reference_stage else state.queue

        self._loader = PromptLoader(
            state,
            self._prompts,
            waves,
            admission=config.async_training.admission,
            n=n,
            sampling=self._training_sampling(),
            with_greedy=parts.greedy_baseline,
        )
        fleet, halts = self._fleet, Halts(state, self._fleet, OnUpdate(config.async_training.on_update))
        generate = Generate(state, waves, finished, fleet, halts, self._router)
        fleet.on_change, halts.gate = halts.fleet_changed, generate.gate
        equal = None
        if parts.group_filter is None:
            within_groups = config.algorithm.adv_estimator in GROUP_RELATIVE
            equal = EqualRewards(VERSIONS * config.groups_per_version, within_groups=within_groups)
        self._upstream: list[Stage[Any, Any]] = [
            self._loader,
            generate,
            Rollout(state, finished, unrewarded, n=n, baselines=parts.greedy_baseline),
            Reward(state, unrewarded, rewarded, self._scoring, parts.group_filter, parts.shaping, n=n, equal=equal),
        ]
        if parts.reference is not None and isinstance(rewarded, Channel):
            self._upstream.append(RefLogProb(state, rewarded, state.queue, parts.reference))
        *before_actor, actor = self._training(updates, halts)
        update = ParamUpdate(
            state,
            updates,
            self._validations,
            parts.trainer,
            fleet,
            halts,
            overlapped=config.param_update.schedule == "overlapped",
            test_freq=config.rollout.test_freq if parts.validation else -1,
            timeout_s=config.param_update.timeout_s,
            probe_tolerance=parts.probe_tolerance,
        )
        self._driver = DriverState(
            state,
            self._prompts,
            self._fetches,
            actor,
            self._guard,
            lowers_eta=config.offpolicy.guard.action == "lower_eta",
            update=update,
            critic=self._critic,
        )
        self._downstream: list[Stage[Any, Any]] = [
            *before_actor,
            actor,
            update,
            Validate(
                state,
                self._validations,
                fleet,
                parts.validation,
                self._scoring,
                n=config.rollout.val_n,
                sampling=self._sampling(config.rollout.val_temperature),
            ),
        ]

    def _training(self, updates: Channel[Update], halts: Halts) -> tuple[*tuple[Stage[Any, Any], ...], ActorTrain]:
        """What stands between the queue and ActorTrain, or beside it, with ranks of its own; and ActorTrain."""
        config, parts, state, fleet = self.config, self._parts, self._state, self._fleet
        settings = self._train_settings()
        source: FetchSource = self._fetches
        follows = "groups from the message queue"
        stages: list[Stage[Any, Any]] = []
        if parts.proximal is not None and not parts.proximal_inside_fetch:
            stages.append(LogProb(state, source, proximal := Channel[Fetch]("proximal"), parts.proximal, fleet))
            source, follows = proximal, "LogProb"
        critic, to_critic = self._critic, None
        if critic is not None and not parts.critic_inside_fetch:
            stages.append(Values(state.emit, source, valued := Channel[Fetch]("valued"), critic, follows=follows))
            source, follows, to_critic = valued, "Values", Channel[Fetch]("fetches for the critic")
            stages.append(CriticTrain(state.emit, to_critic, critic))
        preparation = Preparation(
            parts.advantages,
            reference=parts.reference if parts.reference_inside_fetch else None,
            proximal=parts.proximal if parts.proximal_inside_fetch else None,
            critic=critic if parts.critic_inside_fetch else None,
        )
        shared = config.placement.kind == "shared"
        actor = ActorTrain(
            state,
            source,
            updates,
            parts.trainer,
            preparation,
            settings,
            lease=SharedDevices(state, fleet, halts) if shared else OwnDevices(),
            fleet=fleet,
            guard=self._guard,
            reached=self._reached,
            checkpoint=self._checkpoint,
            critic=critic,
            to_critic=to_critic,
            follows=follows,
        )
        return (*stages, actor)

    def _make_critic(self) -> Critic | None:
        if self._parts.critic is None:
            return None
        return Critic(
            self._parts.critic,
            self._emit,
            mini_batch_size=self.config.actor.ppo_mini_batch_size,
            epochs=self.config.critic.ppo_epochs,
            max_nonfinite_steps=self.config.trainer.max_nonfinite_steps,
            mask_cut_off=self.config.algorithm.overlong_filtering,
        )

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=temperature,
            stop_token_ids=self._parts.stop_token_ids,
            stop=self.config.rollout.stop,
        )

    def _training_sampling(self) -> SamplingParams:
        rollout = self.config.rollout
        return replace(
            self._sampling(rollout.temperature),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            logit_bias=tuple(rollout.logit_bias.items()),
            min_tokens=rollout.min_tokens,
        )

    def _train_settings(self) -> TrainSettings:
        config = self.config
        size, epochs = config.actor.ppo_mini_batch_size, config.actor.ppo_epochs
        return TrainSettings(
            mini_batch_size=size,
            mini_batches_per_fetch=config.async_training.require_batches,
            ppo_epochs=epochs,
            steps_per_version=config.groups_per_version // size * epochs,
            mask_cut_off=config.algorithm.overlong_filtering,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            save_freq=config.trainer.save_freq,
        )

    # ------------------------------------------------------------------------------------------ running

    def _begin(self) -> None:
        """At version 0's boundary, or at the checkpoint's: that is told already, and saved as it was."""
        if self._resume_from is None:
            self._reached(0)
        else:
            self._driver.restore(self._resume_from)
            self._saved_version = self._state.version

    async def _run_stages(self) -> None:
        if self._state.version == 0:  # later ones are validated when replicas have them
            await self._validate_first_version()
        await failing_as_one(self._run_to_the_end)

    async def _run_to_the_end(self, tasks: Tasks) -> None:
        """Downstream decides when a run is over; then admission stops and upstream runs dry, or is interrupted."""
        watchers = [tasks.start(watch()) for watch in (self._monitor.run, self._parts.watch) if watch]
        watchers.append(tasks.start(self._scoring.watch(self._scores_given_up)))
        self._supervision.start(tasks)
        upstream = [tasks.start(stage.run(), name=stage.name) for stage in self._upstream]
        await concurrently(stage.run() for stage in self._downstream)
        self._loader.end()
        self._supervision.stop()
        if self._state.ledger.open_numbers:
            await concurrently(self._interrupt(replica) for replica in self._fleet.serving)
            for task in upstream:
                task.cancel()
        await asyncio.wait(upstream)
        with suppress(WorkerDied, UpdateFailed):  # nothing more is needed from replicas
            await self._monitor.report()
        if not self.unfinished:
            await self._checkpoint(self._state.version)
        for watcher in watchers:
            watcher.cancel()

    def _scores_given_up(self, count: int) -> None:
        """A stop waits no longer for ``count`` scores; other groups take their places unless scoring is closed."""
        text = f"the stop does not wait for {count} scores that did not come within {self._scoring.patience_s:.0f} s"
        self._emit(Note(time=now(), level="warning", text=text))
        if self._scoring.closed:
            self._loader.end()
            self._state.give_up_version()

    def _why_unfinished(self) -> str | None:
        if not self.unfinished:
            return None
        version = self._state.version
        return f"version {version + 1} was begun and not finished: the scores of its other groups did not come"

    async def _interrupt(self, replica: Replica) -> None:
        try:
            await replica.pause(OnUpdate.INTERRUPT)
        except Gone as gone:
            with suppress(WorkerDied, UpdateFailed):  # the last one, too, is not needed any more
                await self._fleet.lose(gone)

    async def _validate_first_version(self) -> None:
        """Marked before anything is admitted, like every other validation."""
        if self._parts.validation:
            replica = self._fleet.validator
            self._state.validation(replica.name, running=True)
            await self._validations.send(Validation(self._state.version, replica))

    def _reached(self, version: int) -> None:
        """A version boundary. What a checkpoint of ``version`` will hold of the driver is what holds now."""
        self._state.check_balance()
        self._boundary = self._driver.take()
        self._emit(VersionReached(time=now(), version=version, groups=self._state.ledger.counts()))

    async def _checkpoint(self, version: int) -> None:
        """Save all that a resumed run needs: the last boundary, and models that were not trained since."""
        self._state.check_balance()
        if self._saved_version == version:
            return
        path = self._checkpoints / f"version_{version}"
        started, taken = now(), self._boundary
        with boundary(f"could not write the checkpoint {path}", RunError):
            if self._critic is not None:  # first: a checkpoint whose own folder is there is complete
                await self._critic.save(self._checkpoints / "critic" / path.name)
            await self._parts.trainer.save(path, self._driver.with_critic(taken))
        self._saved_version = version
        self._emit(CheckpointSaved(time=now(), version=version, path=str(path), span=(started, now())))

    def _emit_finished(self, status: Status, reason: str | None) -> None:
        self._state.leave_open_in_flight()
        counts, version = self._state.ledger.counts(), self._state.version
        self._emit(RunFinished(time=now(), status=status.value, reason=reason, version=version, groups=counts))

    def _emit_started(self) -> None:
        config, staleness = self.config, self._state.staleness
        self._emit(
            RunStarted(
                time=now(),
                mode=config.mode,
                seed=config.run.seed,
                groups_per_version=staleness.groups_per_version,
                total_groups=staleness.total,
                lag_bound=staleness.bound,
                order=config.async_training.order.value,
                on_update=config.async_training.on_update,
                slots={replica.name: replica.slots for replica in self._parts.rollouts},
            )
        )
