"""Composition root: builds and connects every part of one run. `headway.pipeline.run` runs them.

    observers ◀── emit ◀── state ◀── pool, checkpoints ◀── stages ◀── monitor

Parts are built from left to right, and get what they need in their constructors. `Wiring.wire` lists the stages, with
the input and output of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, needs_greedy_baseline
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol, Group, PromptSource, RewardFn
from headway.data.interfaces.rollout import RolloutEngine
from headway.data.interfaces.training import AdvantageFn, CriticEngine, LogProbEngine, ProximalEngine, TrainEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.data.mixing import share_of
from headway.data.types import Prompt
from headway.events import Emit, Event, Observer
from headway.pipeline.actor_critic import Actor, Critic
from headway.pipeline.admission.ledger import Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.run_journal import RunJournal
from headway.pipeline.admission.sample_collector import SampleOutlet, Samples
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.admission.train_batches import TrainBatch, TrainBatches
from headway.pipeline.episode_workers import EpisodeWorkers, Share
from headway.pipeline.off_policy_guard import Guard
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager, DriverState, SnapshotStore
from headway.pipeline.recovery.rank_restarts import (
    RankRestarts,
    RestartableRanks,
    redo_actor,
    redo_critic,
)
from headway.pipeline.recovery.run_monitor import RunMonitor
from headway.pipeline.recovery.supervision import Replace, Restarts, Supervision, Watch
from headway.pipeline.stage import Channel, Stage
from headway.pipeline.stages.actor_train import ActorTrain, PendingUpdate, TrainerLease
from headway.pipeline.stages.generate import Generate
from headway.pipeline.stages.own_ranks import CriticTrain, LogProb, RefLogProb, Values
from headway.pipeline.stages.param_update import ParamUpdate
from headway.pipeline.stages.prompt_loader import PromptLoader
from headway.pipeline.stages.reward import Reward, Scoring
from headway.pipeline.stages.validate import Validate, Validation, Validators
from headway.pipeline.update.pause_controller import PauseController
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.progress import Living

AnyStage = Stage[Any, Any]


@dataclass(slots=True, kw_only=True)
class Machinery:
    """Engines and workers of a run. Each is behind a protocol, so that any of them can be simulated."""

    trainer: TrainEngine
    rollouts: Sequence[RolloutEngine]
    episode_workers: Sequence[EpisodeWorkerProtocol]
    """Episode workers, which make groups with calls to ``rollouts``. At least one."""
    reference: LogProbEngine | None = None
    """Engine of the reference policy; None if the algorithm needs none."""
    proximal: ProximalEngine | None = None
    """Engine that recomputes log π_prox; None if the rollout engine's log-probs, or an approximation, are used instead.
    On ranks of its own it consists of all ``receivers``."""
    critic: CriticEngine | None = None
    """Engine of the critic; None if the algorithm needs none."""
    on_trainer_ranks: Collection[str] = (REF, LOGP, CRITIC)
    """Roles that share the trainer's ranks: any of ``ref`` (the reference), ``logp`` (``proximal``) and ``critic``."""
    receivers: Sequence[PolicyReceiver] = ()
    """Receivers that hold the policy and generate nothing. They load each version before its update ends."""
    replace_replica: Replace | None = None
    """Coroutine function that replaces the replica of a given name; None if that is impossible."""
    replace_episode_worker: Replace | None = None
    """Coroutine function that replaces the episode worker of a given name; None if that is impossible."""
    restartable: Mapping[str, RestartableRanks] = field(default_factory=dict)
    """Role (``actor``, ``ref``, ``logp``, ``critic``) -> its ranks, if they can be restarted. The loss of other ranks
    ends the run."""
    snapshots: SnapshotStore | None = None
    """Store of snapshots of the trainer's ranks; None if no snapshots are made."""
    timeouts: Timeouts | None = None
    """Time limits, derived from the model's size and from measurements at the start. None: limits for a
    model of unknown size."""
    probe_tolerance: Callable[[str], float] = lambda name: 1e-3
    """Receiver's name -> largest difference of its log-probs from the trainer's that counts as rounding, in nats."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Engines, data and services of a run: all inputs of the pipeline except the configuration."""

    source: PromptSource
    validation: Sequence[Prompt]
    machinery: Machinery
    reward: RewardFn | None
    """Reward function; None if the agent programs give the rewards."""
    advantages: AdvantageFn
    stop_token_ids: tuple[int, ...] = ()
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Coroutine function that runs until cancelled, and raises `WorkerDied` when a worker that the run needs ends."""
    watch_replaceable: Watch | None = None
    """Coroutine function that runs until cancelled, and raises `WorkerDied` when the process of the given replica or
    episode worker ends."""
    workers: Callable[[], Sequence[Living]] = tuple
    """Function that returns the workers whose heartbeats are requested when no event came for long."""
    journal: RunJournal | None = None
    """Journal of finished work; None if the run keeps none."""
    validated: int | None = None
    """Version at which the run is resumed, if the result of its validation is known already; None otherwise."""
    keep_start: Callable[[DriverState], bool] | None = None
    """Function that writes the checkpoint of version 0, and returns whether it is there."""
    samples: SampleOutlet | None = None
    """Outlet of samples; None if the run takes none."""


class Wiring:
    """All parts of one run, connected. Its attributes are started, stopped or queried from outside the stages."""

    def __init__(self, config: Config, parts: Parts, observers: Sequence[Observer], checkpoints: Path) -> None:
        """Build the run. Raises `TypeError` when the trainer cannot follow ``param_update.schedule``."""
        told = [*observers]  # a copy: the monitor is added below
        emit = _fan_out(told)
        machinery = parts.machinery
        critic = None
        timeouts = machinery.timeouts or Timeouts.of(config)
        self.state = state = _state(config, parts, emit)
        self.scoring = Scoring(parts.reward)
        self.episode_workers = EpisodeWorkers(machinery.episode_workers, state, timeout_s=timeouts.update_timeout_s)
        self.pool = ReplicaPool(
            state,
            machinery.rollouts,
            machinery.receivers,
            PauseController(config, state, self.episode_workers),
            timeouts,
            # Within one process the only replica cannot end without the run.
            replaceable=machinery.replace_replica is not None and config.cluster.backend == "ray",
            probe_tolerance=machinery.probe_tolerance,
        )
        if machinery.critic is not None:
            critic = Critic(config, machinery.critic, emit, own_ranks=CRITIC not in machinery.on_trainer_ranks)
        self.actor = Actor(
            config,
            state,
            machinery.trainer,
            parts.advantages,
            Guard(config.algorithm.guard, state, self.stop),
            reference=machinery.reference if REF in machinery.on_trainer_ranks else None,
            proximal=machinery.proximal if LOGP in machinery.on_trainer_ranks else None,
            critic=critic,
        )
        self.batches = TrainBatches(state, config.groups_per_batch, fill_first=config.async_training.fill_queue)
        self.checkpoints = CheckpointManager(
            state,
            parts.source,
            self.batches,
            self.actor,
            checkpoints,
            timeouts,
            config.trainer,
            machinery.snapshots,
        )
        self.checkpoints.keep_start = parts.keep_start
        self.actor.keeps_batches = ACTOR in machinery.restartable
        left, pool = Restarts(config.trainer.max_restarts, timeouts), self.pool

        def restarts(role: str, **how: Any) -> RankRestarts:
            return RankRestarts(state, role, machinery.restartable.get(role), left, **how)

        self.restarts = {
            ACTOR: restarts(ACTOR, on_lost=pool.left_with_ranks, bring_back=self._redo),
            CRITIC: restarts(CRITIC, bring_back=partial(redo_critic, self.actor, self.checkpoints)),
            LOGP: restarts(LOGP, on_lost=pool.others_left, bring_back=pool.others_back),
            REF: restarts(REF),
        }
        shared = config.cluster.placement == "shared"
        self.lease = TrainerLease(state, pool, self.restarts[ACTOR], shared=shared)
        if LOGP in machinery.restartable:
            pool.lose_others = self.restarts[LOGP].give_up
        trainer = machinery.restartable.get(ACTOR)
        self._replicas_of_ranks = None if trainer is None else trainer.replicas
        if self._replicas_of_ranks is not None:
            pool.lose_ranks = self.restarts[ACTOR].give_up
        if critic is not None and critic.own_ranks:
            critic.surviving = self.restarts[CRITIC].surviving
        self.validators = Validators(config, state, self.pool, parts.validation)
        self.wire(config, parts)
        starts = [Restarts(config.cluster.max_replica_restarts, timeouts) for _ in range(2)]
        watch = parts.watch_replaceable
        self.replica_supervision = Supervision(state, pool, watch, machinery.replace_replica, starts[0])
        self.supervisions: Sequence[Supervision] = [
            self.replica_supervision,
            Supervision(state, self.episode_workers, watch, machinery.replace_episode_worker, starts[1]),
        ]
        self.monitor = RunMonitor(
            self.pool,
            [*self.upstream, *self.downstream],
            [left, *starts],
            emit,
            workers=parts.workers,
            interval_s=config.reports.activity_interval_s,
        )
        told.append(self.monitor)  # it watches all parts, which emit nothing before they run

    def stop(self, reason: str) -> None:
        """End the run after the current version, for a ``reason`` found by the run itself."""
        self.state.request_stop(reason)
        self.scoring.stop()

    async def save(self, version: int) -> None:
        """Save the run's last checkpoint, that of ``version``, even if ranks are lost meanwhile."""
        actor, critic = self.restarts[ACTOR], self.restarts[CRITIC]
        await critic.surviving(lambda: actor.surviving(lambda: self.checkpoints.save(version)))

    async def _redo(self) -> int:
        redo = partial(redo_actor, self.state, self.actor, self.checkpoints, self.param_update.restored)
        if self._replicas_of_ranks is None:
            return await redo()
        # Before the lease, which puts all replicas to sleep, including replicas that join.
        for engine in self._replicas_of_ranks():
            self.replica_supervision.join(engine)
        async with self.lease.of_new_ranks():
            redone = await redo()
        for replica in self.pool.replicas:
            if replica.why is not None:  # its process is gone, so the ranks must be restarted once more
                raise replica.why
        return redone

    def wire(self, config: Config, parts: Parts) -> None:
        """Build the stages and connect their inputs and outputs. A channel has the name of its producer."""
        state, emit, queue, pool, lease = self.state, self.state.emit, self.state.queue, self.pool, self.lease
        scoring, validators, tokens, restarts = self.scoring, self.validators, parts.stop_token_ids, self.restarts
        machinery, shared = parts.machinery, parts.machinery.on_trainer_ranks
        reference = None if REF in shared else machinery.reference
        proximal = None if LOGP in shared else machinery.proximal
        critic = None if CRITIC in shared else self.actor.critic

        shares = Channel[Share]("PromptLoader")
        made = Channel[Group]("Generate")
        rewarded = Channel[Group]("Reward")
        with_logprobs = Channel[TrainBatch]("LogProb")
        with_values = Channel[TrainBatch]("Values")
        to_critic = Channel[TrainBatch]("ActorTrain")
        updates = Channel[PendingUpdate]("ActorTrain")
        validations = self.validations = Channel[Validation]("ParamUpdate")
        to_ref = rewarded if reference else queue
        to_values = with_logprobs if proximal else self.batches
        to_train = with_values if critic else to_values
        beside = to_critic if critic else None

        self.prompt_loader = PromptLoader(emit, None, shares, config, state, parts.source, pool.episode_workers, tokens)
        self.actor_train = ActorTrain(emit, to_train, updates, state, beside, self.actor, lease, self.checkpoints)
        self.param_update = ParamUpdate(emit, updates, validations, config, state, validators, lease, self.actor)
        self.upstream: list[AnyStage] = [
            self.prompt_loader,
            Generate(emit, shares, made, config, state, pool),
            Reward(emit, made, to_ref, config, state, scoring),
            *([RefLogProb(emit, rewarded, queue, reference, restarts[REF])] if reference else []),
        ]
        self.downstream: list[AnyStage] = [
            *([LogProb(emit, self.batches, with_logprobs, state, proximal, pool, restarts[LOGP])] if proximal else []),
            *([Values(emit, to_values, with_values, critic)] if critic else []),
            self.actor_train,
            *([CriticTrain(emit, to_critic, None, critic)] if critic else []),
            self.param_update,
            Validate(emit, validations, None, config, state, validators, scoring, tokens),
        ]


def _fan_out(observers: Sequence[Observer]) -> Emit:
    """Return one function that hands an event to every observer, in the order given."""

    def emit(event: Event) -> None:
        for observer in observers:
            observer.on_event(event)

    return emit


def _state(config: Config, parts: Parts, emit: Emit) -> RunState:
    settings, reports = config.async_training, config.reports
    staleness = Staleness(
        eta=settings.staleness_threshold,
        groups_per_version=config.groups_per_version,
        window=config.window,
        total=config.rollout.total_rollout_steps,
        loaded={replica.name: 0 for replica in parts.machinery.rollouts},
        max_lag=settings.max_lag,
        drops_overdue=settings.on_overdue == "drop",
    )
    samples = None
    if parts.samples is not None and reports.samples:
        share = share_of(reports.samples, config.groups_per_version)
        samples = Samples(parts.samples, seed=config.run.seed, share=share, problems=reports.samples)
    ledger = Ledger(config.rollout.n + needs_greedy_baseline(config))
    return RunState(staleness, ledger, MessageQueue(staleness), emit, samples=samples, journal=parts.journal)
