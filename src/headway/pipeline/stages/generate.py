"""Generate: requests groups from episode workers, and passes them on in the order in which they finish.

consumes        an episode worker's share of a wave, from PromptLoader
waits for       an episode worker to finish a group; paused while every replica is halted
is unblocked by the episode worker, or by another where it is lost; replicas are halted behind this stage's back
produces        groups, complete and unrewarded; a group that was aborted ends here as dropped
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from headway.config.schema import Config
from headway.config.sizing.placement import min_episodes
from headway.data.interfaces.episode_groups import Group
from headway.data.types import FinishReason
from headway.events import TrajectoryFinished
from headway.pipeline.admission.group_warnings import EpisodeTroubles
from headway.pipeline.admission.ledger import EPISODE_FAILED, Fate
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.episode_workers import Share
from headway.pipeline.stage import Stage
from headway.pipeline.update.replica_pool import ReplicaPool


@dataclass(eq=False)
class Generate(Stage[Share, Group]):
    concurrency = None
    waits_for_output = None

    config: Config
    run_state: RunState
    pool: ReplicaPool

    def __post_init__(self) -> None:
        self.gate = self.pool.pauses.gate
        self._min_episodes = min_episodes(self.config)
        """Fewest episodes of a group, without its baseline, that must not fail."""
        episodes = self.config.groups_per_version * self.config.rollout.n
        self._troubles = EpisodeTroubles(episodes) if self.config.agent.has_program else None

    async def process_data(self, share: Share) -> AsyncGenerator[Group, None]:
        with self._waiting_within(", ".join(replica.name for replica in self.pool.serving)):
            async for group in self.pool.episode_workers.generate(share):
                entry = self.run_state.ledger.open[group.number]
                if not entry.made:  # otherwise it was reported before the checkpoint
                    entry.made = True
                    self._report(group)
                if (drawn := entry.drawn) is not None:
                    drawn.generated, drawn.episodes = now(), tuple(t for t in group.trajectories if t.id.k < group.n)
                if any(t.finish_reason is FinishReason.ABORTED for t in group.trajectories):
                    reason = "overdue" if self.run_state.staleness.drops_overdue else "aborted"
                    self.run_state.discard(group.number, Fate.DROPPED, reason)
                elif self._leaves_out_failed(group):
                    yield group

    def _leaves_out_failed(self, group: Group) -> bool:
        """Remove failed episodes from the group. If too few are left, or the baseline failed, discard it and return
        False.
        """
        failed = [t for t in group.trajectories if t.failure is not None]
        if not failed:
            return True
        group.trajectories = tuple(t for t in group.trajectories if t.failure is None)
        enough = sum(t.id.k < group.n for t in group.trajectories) >= self._min_episodes
        # The baseline has k = n. An estimator that subtracts it cannot compute advantages without it.
        if enough and all(t.id.k < group.n for t in failed):
            return True
        worst = next((t for t in failed if t.id.k >= group.n), failed[0])
        self.run_state.discard(group.number, Fate.FAILED, f"{EPISODE_FAILED}: {worst.failure}")
        return False

    def _report(self, group: Group) -> None:
        time = now()
        for trajectory in group.trajectories:
            self.emit(
                TrajectoryFinished(
                    time=time,
                    number=group.number,
                    k=trajectory.id.k,
                    replica=trajectory.replica,
                    prompt_tokens=trajectory.prompt_length,
                    tokens=trajectory.length,
                    finish_reason=trajectory.finish_reason.value,
                    version_spans=trajectory.version_spans,
                    started=trajectory.started,
                    finished=trajectory.finished,
                    baseline=trajectory.id.k >= group.n,
                    turns=trajectory.turns,
                    failure=trajectory.failure,
                    limit=trajectory.limit,
                    metrics=dict(trajectory.metrics),
                    steps=list(trajectory.steps),
                    waits=list(trajectory.waits),
                    notes=dict(trajectory.notes),
                )
            )
        # Also for an aborted group: an episode that failed before keeps that fate.
        if failed := sum(trajectory.failure is not None for trajectory in group.trajectories):
            self.run_state.ledger.episodes_failed(group.number, failed)
        if self._troubles is not None:
            for text in self._troubles.look(group.trajectories):
                self.run_state.note(text)
