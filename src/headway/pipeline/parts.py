"""The parts that a run is made of: everything behind a protocol, so that any of it can be simulated."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from headway.data.types import Prompt
from headway.interfaces import (
    AdvantageFn,
    CriticEngine,
    LogProbEngine,
    PolicyReceiver,
    PromptSource,
    ProximalEngine,
    RewardFn,
    RolloutEngine,
    TrainEngine,
)
from headway.pipeline.stages.reward import GroupFilter, Shaping
from headway.pipeline.supervision import Watch
from headway.progress import Living


@dataclass(frozen=True, slots=True)
class Parts:
    source: PromptSource
    validation: Sequence[Prompt]
    rollouts: Sequence[RolloutEngine]
    trainer: TrainEngine
    reward: RewardFn
    advantages: AdvantageFn
    group_filter: GroupFilter | None = None
    shaping: Shaping | None = None
    greedy_baseline: bool = False
    """Each group gets a greedy answer beside its own, whose reward is their baseline."""
    reference: LogProbEngine | None = None
    reference_inside_fetch: bool = True
    """The reference shares the trainer's ranks."""
    proximal: ProximalEngine | None = None
    """The engine that recomputes log π_prox; None where the engine's log-probs, or an approximation, are taken for
    it."""
    proximal_inside_fetch: bool = True
    """``proximal`` shares the trainer's ranks. Else it is made of ``receivers``, all of them."""
    critic: CriticEngine | None = None
    critic_inside_fetch: bool = True
    """The critic shares the trainer's ranks."""
    stop_token_ids: tuple[int, ...] = ()
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs until cancelled; raises `WorkerDied` as soon as a worker ends that the run cannot go on without."""
    watch_replica: Watch | None = None
    """Runs until cancelled; raises `WorkerDied` as soon as this replica's process ends. Others may go on."""
    replace_replica: Callable[[str], Coroutine[Any, Any, RolloutEngine]] | None = None
    """Starts a replica in the place of the one of this name; None where that cannot be."""
    receivers: Sequence[PolicyReceiver] = ()
    """Roles that hold a copy of the policy and generate nothing. They serve each version before its update is over."""
    workers: Callable[[], Sequence[Living]] = tuple
    """The workers that are asked for a heartbeat when no event came for long."""
    probe_tolerance: Callable[[str], float] = lambda name: 1e-3
    """Nats by which the log-probs of the receiver of this name may differ from the trainer's, for rounding."""
