"""Parts that a run is made of: everything behind a protocol, so that any of it can be simulated."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol, PromptSource, RewardFn
from headway.data.interfaces.rollout import RolloutEngine
from headway.data.interfaces.training import AdvantageFn, CriticEngine, LogProbEngine, ProximalEngine, TrainEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.data.types import Prompt
from headway.pipeline.admission.sample_collector import SampleOutlet
from headway.pipeline.recovery.supervision import Replace, Watch
from headway.pipeline.stages.reward import GroupFilter, Shaping
from headway.runtime.progress import Living


@dataclass(frozen=True, slots=True)
class Parts:
    source: PromptSource
    validation: Sequence[Prompt]
    rollouts: Sequence[RolloutEngine]
    episode_workers: Sequence[EpisodeWorkerProtocol]
    """The episode workers, which make groups with calls to ``rollouts``. One at least."""
    trainer: TrainEngine
    reward: RewardFn | None
    """The reward of answers; None where episodes have the rewards that their programs give."""
    advantages: AdvantageFn
    group_filter: GroupFilter | None = None
    shaping: Shaping | None = None
    greedy_baseline: bool = False
    """True where each group gets a greedy answer beside its sampled ones; its reward is the group's baseline."""
    reference: LogProbEngine | None = None
    reference_inside_fetch: bool = True
    """True where the reference policy shares the trainer's ranks."""
    proximal: ProximalEngine | None = None
    """Engine that recomputes log π_prox; None where the rollout engine's log-probs, or an approximation, take its
    place."""
    proximal_inside_fetch: bool = True
    """True where ``proximal`` shares the trainer's ranks. Otherwise it consists of all ``receivers``."""
    critic: CriticEngine | None = None
    critic_inside_fetch: bool = True
    """True where the critic shares the trainer's ranks."""
    stop_token_ids: tuple[int, ...] = ()
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Coroutine function that runs until cancelled and raises `WorkerDied` when a worker ends that the run needs."""
    watch_replica: Watch[RolloutEngine] | None = None
    """Coroutine function that runs until cancelled and raises `WorkerDied` when the given replica's process ends."""
    replace_replica: Replace[RolloutEngine] | None = None
    """Coroutine function that starts a replica in the place of the one named; None where that is impossible."""
    watch_episode_worker: Watch[EpisodeWorkerProtocol] | None = None
    """Coroutine function that runs until cancelled, and raises `WorkerDied` when the worker's process ends."""
    replace_episode_worker: Replace[EpisodeWorkerProtocol] | None = None
    """Coroutine function that starts an episode worker in the place of the one named; None where that is impossible."""
    receivers: Sequence[PolicyReceiver] = ()
    """Receivers that hold the policy and generate nothing. They serve each version before its update is over."""
    timeouts: Timeouts | None = None
    """Time limits for the model's size and for what was measured at the start; None: those of a model without size."""
    workers: Callable[[], Sequence[Living]] = tuple
    """Function that returns the workers to ask for a heartbeat when no event came for long."""
    samples: SampleOutlet | None = None
    """Outlet of samples of what was said; None where there are none."""
    probe_tolerance: Callable[[str], float] = lambda name: 1e-3
    """Function from a receiver's name to the nats by which its log-probs may differ from the trainer's by rounding."""
