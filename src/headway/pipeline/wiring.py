"""Construction: every part of one run, connected. `headway.pipeline.run` runs what is built here.

    observers ◀── emit ◀── state ◀── fleet, halts, boundaries ◀── stages ◀── monitor

Built from left to right, each part with what it needs in its constructor; nothing is attached to anything afterwards. A
part that changes something gets those that must be told of the change: `ReplicaPoolListener`, `Channel`, `Gate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.config.algorithm_checks import GROUP_RELATIVE, min_episodes
from headway.config.schema import Config
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol, Group, PromptSource
from headway.data.interfaces.rollout import OnUpdate, RolloutEngine, SamplingParams
from headway.data.mixing import share_of
from headway.events import WAITS_FOR_GROUPS, Emit, Observer, fan_out
from headway.pipeline.admission.fetches import Fetch, Fetches, FetchSource
from headway.pipeline.admission.ledger import Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.sample_collector import Samples
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.channel import Channel
from headway.pipeline.critic_turns import Critic
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.observing.episode_troubles import EpisodeTroubles
from headway.pipeline.observing.equal_rewards import EqualRewards
from headway.pipeline.observing.off_policy_guard import Guard, GuardSettings
from headway.pipeline.parts import Parts
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager, DriverState
from headway.pipeline.recovery.run_monitor import Movement, RunMonitor
from headway.pipeline.recovery.supervision import Supervision
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import ActorTrain, PendingUpdate, Preparation, TrainSettings
from headway.pipeline.stages.critic_train import CriticTrain
from headway.pipeline.stages.generate import Generate
from headway.pipeline.stages.logprob import LogProb
from headway.pipeline.stages.param_update import ParamUpdate
from headway.pipeline.stages.prompt_loader import PromptLoader, Wave
from headway.pipeline.stages.ref_logprob import RefLogProb
from headway.pipeline.stages.reward import Reward, Scoring
from headway.pipeline.stages.validate import Validate, Validation, Validators
from headway.pipeline.stages.values import Values
from headway.pipeline.update.pause_controller import OwnDevices, PauseController, SharedDevices
from headway.pipeline.update.replica_pool import ReplicaPool

AnyStage = Stage[Any, Any]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Parts of one run that are started, stopped or queried from outside the stages."""

    state: RunState
    fleet: ReplicaPool
    episode_workers: EpisodeWorkers
    halts: PauseController
    source: PromptSource
    scoring: Scoring
    supervision: Supervision[RolloutEngine]
    supervision_of_episode_workers: Supervision[EpisodeWorkerProtocol]
    monitor: RunMonitor
    boundaries: CheckpointManager
    loader: PromptLoader
    actor: ActorTrain
    update: ParamUpdate
    validations: Channel[Validation]
    validators: Validators
    upstream: Sequence[AnyStage]
    """Stages from the prompts to the message queue, in the order in which data flows."""
    downstream: Sequence[AnyStage]
    """Stages behind the message queue, in the order in which data flows."""


def wire(config: Config, parts: Parts, observers: Sequence[Observer], checkpoints: Path) -> Wiring:
    """Build all parts of a run. Raises `TypeError` when the trainer cannot follow ``param_update.schedule``."""
    movement = Movement()
    emit = fan_out([*observers, movement])
    state = _state(config, parts, emit)
    timeouts = parts.timeouts or Timeouts.of(config)
    episode_workers = EpisodeWorkers(parts.episode_workers, state, timeout_s=timeouts.update_timeout_s)
    by_episodes = config.agent.has_program and config.async_training.drain == "episode"
    halts = PauseController(state, OnUpdate(config.async_training.on_update), episode_workers, by_episodes=by_episodes)
    fleet = ReplicaPool(
        parts.rollouts,
        parts.receivers,
        state,
        listeners=[episode_workers, halts],
        timeouts=timeouts,
        # Within one process the only replica ends with the run: what killed it has killed all.
        replaceable=parts.replace_replica is not None and config.cluster.backend == "ray",
    )
    fetches = Fetches(state, config.groups_per_fetch, fill_first=config.async_training.fill_queue)
    scoring = Scoring(parts.reward)

    def stop(reason: str) -> None:
        state.request_stop(reason)
        scoring.stop()

    guard_settings = config.algorithm.guard
    guard = Guard(GuardSettings(guard_settings.min_ess, guard_settings.action), state, stop)
    critic = _critic(config, parts, emit)
    lowers_eta = guard_settings.action == "lower_eta"
    driver = DriverState(state, parts.source, fetches, guard, lowers_eta=lowers_eta, critic=critic)
    boundaries = CheckpointManager(driver, parts.trainer, checkpoints, timeouts)

    waves: Channel[Wave] = Channel("waves")
    unrewarded: Channel[Group] = Channel("unrewarded")
    updates: Channel[PendingUpdate] = Channel("updates")
    validations: Channel[Validation] = Channel("validations")
    loader = PromptLoader(
        state,
        parts.source,
        waves,
        admission=config.async_training.admission,
        n=config.rollout.n,
        sampling=training_sampling(config, parts.stop_token_ids),
        with_greedy=parts.greedy_baseline,
    )
    upstream: list[AnyStage] = [
        loader,
        Generate(
            state,
            waves,
            unrewarded,
            episode_workers,
            halts,
            min_episodes=min_episodes(config),
            troubles=_troubles(config),
        ),
        *_rewarding(config, parts, state, scoring, unrewarded),
    ]
    columns, source, follows = _columns(parts, state, fleet, fetches, critic)
    to_critic = None if critic is None or parts.critic_inside_fetch else Channel[Fetch]("fetches for the critic")
    shared = config.cluster.placement == "shared"
    turn = asyncio.Lock()
    actor = ActorTrain(
        state,
        source,
        updates,
        parts.trainer,
        _preparation(parts, critic),
        _train_settings(config),
        lease=SharedDevices(state, fleet, halts) if shared else OwnDevices(),
        fleet=fleet,
        episode_workers=episode_workers,
        guard=guard,
        boundaries=boundaries,
        turn=turn,
        critic=critic,
        to_critic=to_critic,
        follows=follows,
    )
    validators = Validators(state, fleet, everywhere=config.agent.has_program)
    update = ParamUpdate(
        state,
        updates,
        validations,
        parts.trainer,
        fleet,
        halts,
        validators,
        turn,
        overlapped=config.param_update.schedule == "overlapped",
        test_freq=config.rollout.test_freq if parts.validation else -1,
        timeouts=timeouts,
        probe_tolerance=parts.probe_tolerance,
    )
    validate = Validate(
        state,
        validations,
        validators,
        episode_workers,
        parts.validation,
        scoring,
        n=config.rollout.val_n,
        sampling=_sampling(config, parts.stop_token_ids, config.rollout.val_temperature),
    )
    beside = [] if critic is None or to_critic is None else [CriticTrain(emit, to_critic, critic)]
    downstream: list[AnyStage] = [*columns, actor, *beside, update, validate]
    supervision = Supervision(
        state,
        fleet,
        parts.watch_replica,
        parts.replace_replica,
        config.cluster.max_replica_restarts,
        timeouts=timeouts,
        kind="replica",
        then="serves from the next version on, or at once where no other one does",
    )
    supervision_of_episode_workers = Supervision(
        state,
        episode_workers,
        parts.watch_episode_worker,
        parts.replace_episode_worker,
        config.cluster.max_replica_restarts,
        timeouts=timeouts,
        kind="episode worker",
        then="makes its groups again",
    )
    return Wiring(
        state=state,
        fleet=fleet,
        episode_workers=episode_workers,
        halts=halts,
        source=parts.source,
        scoring=scoring,
        supervision=supervision,
        supervision_of_episode_workers=supervision_of_episode_workers,
        monitor=RunMonitor(
            fleet,
            episode_workers,
            [*upstream, *downstream],
            movement,
            emit,
            workers=parts.workers,
            starts_until=lambda: max(supervision.starts_until, supervision_of_episode_workers.starts_until),
            timeouts=timeouts,
            interval_s=config.reports.activity_interval_s,
            stands=halts.stands,
        ),
        boundaries=boundaries,
        loader=loader,
        actor=actor,
        update=update,
        validations=validations,
        validators=validators,
        upstream=upstream,
        downstream=downstream,
    )


def _state(config: Config, parts: Parts, emit: Emit) -> RunState:
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
    ledger = Ledger(config.rollout.n + parts.greedy_baseline)
    return RunState(staleness, ledger, MessageQueue(staleness), emit, samples=_samples(config, parts))


def _samples(config: Config, parts: Parts) -> Samples | None:
    """Return the record of what drawn groups say; None where none are drawn."""
    wanted = config.reports.samples
    if parts.samples is None or not wanted:
        return None
    share = share_of(wanted, config.groups_per_version)
    return Samples(parts.samples, seed=config.run.seed, share=share, problems=wanted)


def _critic(config: Config, parts: Parts, emit: Emit) -> Critic | None:
    if parts.critic is None:
        return None
    return Critic(
        parts.critic,
        emit,
        mini_batch_size=config.actor.ppo_mini_batch_size,
        epochs=config.critic.ppo_epochs,
        mask_cut_off=config.algorithm.overlong_filtering,
        own_ranks=not parts.critic_inside_fetch,
    )


def _rewarding(
    config: Config, parts: Parts, state: RunState, scoring: Scoring, unrewarded: Channel[Group]
) -> list[AnyStage]:
    """Return the stages from a joined group to the queue: Reward, and RefLogProb if the reference has own ranks."""
    equal = None
    if parts.group_filter is None:
        within_groups = config.algorithm.adv_estimator in GROUP_RELATIVE
        equal = EqualRewards(config.groups_per_version, within_groups=within_groups)

    def reward(output: Channel[Group] | MessageQueue) -> Reward:
        group_filter, shaping = parts.group_filter, parts.shaping
        return Reward(
            state,
            unrewarded,
            output,
            scoring,
            group_filter,
            shaping,
            turn_discount=config.algorithm.turn_discount,
            equal=equal,
        )

    if parts.reference is None or parts.reference_inside_fetch:
        return [reward(state.queue)]
    rewarded: Channel[Group] = Channel("rewarded")
    return [reward(rewarded), RefLogProb(state, rewarded, state.queue, parts.reference)]


def _troubles(config: Config) -> EpisodeTroubles | None:
    return EpisodeTroubles(config.groups_per_version * config.rollout.n) if config.agent.has_program else None


def _columns(
    parts: Parts, state: RunState, fleet: ReplicaPool, fetches: Fetches, critic: Critic | None
) -> tuple[list[AnyStage], FetchSource, str]:
    """Return the stages that add columns on their own ranks, the source of ActorTrain's fetches, and its name."""
    stages: list[AnyStage] = []
    source: FetchSource = fetches
    follows = WAITS_FOR_GROUPS
    if parts.proximal is not None and not parts.proximal_inside_fetch:
        proximal: Channel[Fetch] = Channel("proximal")
        stages.append(LogProb(state, source, proximal, parts.proximal, fleet))
        source, follows = proximal, stages[-1].name
    if critic is not None and not parts.critic_inside_fetch:
        valued: Channel[Fetch] = Channel("valued")
        stages.append(Values(state.emit, source, valued, critic, follows=follows))
        source, follows = valued, stages[-1].name
    return stages, source, follows


def _preparation(parts: Parts, critic: Critic | None) -> Preparation:
    return Preparation(
        parts.advantages,
        reference=parts.reference if parts.reference_inside_fetch else None,
        proximal=parts.proximal if parts.proximal_inside_fetch else None,
        critic=critic if parts.critic_inside_fetch else None,
    )


def _sampling(config: Config, stop_token_ids: tuple[int, ...], temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=temperature,
        stop_token_ids=stop_token_ids,
        stop=config.rollout.stop,
    )


def training_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The sampling of training episodes, whose answers end with one of ``stop_token_ids``."""
    rollout = config.rollout
    return replace(
        _sampling(config, stop_token_ids, rollout.temperature),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        logit_bias=tuple(rollout.logit_bias.items()),
        min_tokens=rollout.min_tokens,
    )


def _train_settings(config: Config) -> TrainSettings:
    size, epochs = config.actor.ppo_mini_batch_size, config.actor.ppo_epochs
    return TrainSettings(
        mini_batch_size=size,
        mini_batches_per_fetch=config.async_training.require_batches,
        ppo_epochs=epochs,
        steps_per_version=config.groups_per_version // size * epochs,
        mask_cut_off=config.algorithm.overlong_filtering,
        save_freq=config.trainer.save_freq,
    )
