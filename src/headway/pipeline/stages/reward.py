"""Reward: scores each group. Groups without a gradient are filtered; groups that cannot be scored fail.

consumes        groups from Generate
waits for       the reward's processes; after a stop only as long as scores come
is unblocked by an answer of theirs, or the end of its time (``reward.timeout_s``, each retry anew)
produces        rewarded groups

Also here: `Scoring`, which limits how long a stop waits for scores.

    Reward, Validate ──▶ Scoring ──▶ the run's reward
                            │
                            └ after a stop, whenever nothing was scored for `patience_s`: what is awaited is given up;
                              at the second time in a row, or where no score ever came, all scoring is

The current version is finished with the scores that come. User code that hangs ends only at its timeout, which may be
minutes away, and the group that replaces its group may hang as well: a stop waits for neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.scores import episode_scores, has_variance, soft_overlong_penalty
from headway.config.schema import Config
from headway.config.sizing.placement import GROUP_RELATIVE
from headway.data.interfaces.episode_groups import Group, RewardFn, Scores
from headway.data.types import Prompt, Trajectory
from headway.errors import ScoringFailed
from headway.events import GroupRewarded
from headway.pipeline.admission.group_warnings import EqualRewards
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.stage import Signal, Stage

LEAST_PATIENCE_S, MOST_PATIENCE_S = 5.0, 30.0
"""Bounds of the time that a stop waits for scores of user code, in seconds."""
MOST_MISSES = 2
"""Number of waits in a row without a score, during a stop, after which scoring is given up."""
INTERRUPTED = "interrupted"
"""Reason given for groups whose scores were given up."""


class ScoringAbandoned(ScoringFailed):
    """Error for a score that is no longer awaited: the run is stopping, and scores do not come."""


class Scoring:
    """Reward of a run, as the stages call it. A stop can give up scores that do not come."""

    def __init__(self, reward: RewardFn | None) -> None:
        """Create the scoring. ``reward``: None if the agent programs give the rewards."""
        self._reward = reward
        self._awaited: dict[asyncio.Task[Scores], None] = {}
        """Tasks of the awaited scores, in the order of their requests."""
        self._given_up: set[asyncio.Task[Scores]] = set()
        self._longest_s: float | None = None
        """Seconds that the slowest score took so far; None before the first one."""
        self._moved = 0.0
        """Time of the last score, or of the start of a stop or wait if that is later."""
        self._misses = 0
        self._stopping = False
        self._changed = Signal()
        self.closed = False
        """True once scoring is given up: scores are no longer awaited."""

    @property
    def patience_s(self) -> float:
        """Seconds that a stop waits without any score: longer than the slowest score took so far, within bounds."""
        return min(MOST_PATIENCE_S, LEAST_PATIENCE_S + (self._longest_s or 0.0))

    async def score(self, prompt: Prompt, episodes: Sequence[Trajectory]) -> Scores:
        """Return the scores of ``episodes``, none of which may have failed: from their programs or from the reward.

        Raises `ScoringFailed`, or `ScoringAbandoned` if the run stops before the scores come.
        """
        if self._reward is None:
            return await scores_of(None, prompt, episodes)
        # Not awaited at all: the watch has ended, and would never give this score up.
        if self.closed:
            raise ScoringAbandoned(INTERRUPTED)
        started = now()
        # A stop's patience counts from here: no score could come before.
        if not self._awaited:
            self._moved = started
        task = asyncio.get_running_loop().create_task(scores_of(self._reward, prompt, episodes))
        self._awaited[task] = None
        self._changed.changed()
        try:
            scores = await task
        except asyncio.CancelledError:
            # A cancellation of the caller itself stays one.
            caller = asyncio.current_task()
            if task in self._given_up and not (caller is not None and caller.cancelling()):
                raise ScoringAbandoned(INTERRUPTED) from None
            raise
        finally:
            del self._awaited[task]
            self._given_up.discard(task)
        self._moved, self._misses = now(), 0
        self._longest_s = max(self._longest_s or 0.0, self._moved - started)
        return scores

    def stop(self) -> None:
        """Begin a stop: open scores are given up once no score has come for `patience_s`."""
        if not self._stopping:
            self._stopping, self._moved = True, now()
            self._changed.changed()

    async def watch(self, on_given_up: Callable[[int], object]) -> None:
        """Give up scores that do not come after a `stop`. Returns when scoring is closed.

        ``on_given_up`` is called with the number of scores given up, each time.
        """
        await self._changed.until(lambda: self._stopping)
        while not self.closed:
            await self._changed.until(lambda: bool(self._awaited))
            if (left := self._moved + self.patience_s - now()) > 0:
                await asyncio.sleep(left)
                continue
            self._misses += 1
            # A reward that has never scored gets no second wait: there is no sign that it works.
            self.closed = self._misses >= MOST_MISSES or self._longest_s is None
            # Before the tasks are cancelled: by it `score` tells a score given up from a cancelled stage.
            self._given_up.update(self._awaited)
            for task in self._awaited:
                task.cancel()
            self._moved = now()
            on_given_up(len(self._awaited))


async def scores_of(reward: RewardFn | None, prompt: Prompt, episodes: Sequence[Trajectory]) -> Scores:
    """Return the scores of ``episodes``, none of which may have failed, by ``reward``.

    ``reward`` None: each score is the sum of the rewards that the program gave to the episode and its turns. An episode
    has 0 if a limit ended it before its program gave a reward; other episodes without a reward count as failed.
    """
    if reward is None:
        return Scores(np.array([(one.reward or 0.0) + sum(one.turn_rewards) for one in episodes], np.float32))
    conversations = [one.conversation for one in episodes if one.conversation is not None]
    whole = bool(conversations) and len(conversations) == len(episodes)  # otherwise they are single answers
    return await reward.score(prompt, [one.text for one in episodes], conversations if whole else None)


@dataclass(eq=False)
class Reward(Stage[Group, Group]):
    concurrency = None
    waits_for_output = None

    config: Config
    run_state: RunState
    scoring: Scoring

    def __post_init__(self) -> None:
        algorithm = self.config.algorithm
        self._filters = algorithm.filter_groups.enable
        self._equal = EqualRewards(
            self.config.groups_per_version,
            within_groups=algorithm.adv_estimator in GROUP_RELATIVE,
            filters=self._filters,
        )

    async def process_data(self, group: Group) -> AsyncGenerator[Group, None]:
        journal, score = self.run_state.journal, partial(self.scoring.score, group.prompt, group.trajectories)
        try:
            scores = await (score() if journal is None else journal.scores(group, score))
        except ScoringAbandoned as given_up:
            self.run_state.drop_unscored(group.number, str(given_up))
            return
        except ScoringFailed as failure:
            self.run_state.discard(group.number, Fate.FAILED, str(failure))
            return
        rewards = shaped = scores.rewards
        overlong = self.config.reward.overlong_buffer
        if overlong.enable:
            limit = self.config.data.max_response_length
            lengths = np.array([t.length for t in group.trajectories])
            shaped = rewards + soft_overlong_penalty(
                lengths, max_length=limit, buffer=overlong.len, factor=overlong.penalty_factor
            )
        own, compared, shaped = self._compared(group.trajectories, rewards, shaped)
        n = sum(t.id.k < group.n for t in group.trajectories)  # a baseline's score comes last, after these
        if len(rewards) > n:
            group.baseline = float(shaped[n])
            rewards, own, compared = rewards[:n], own[:n], compared[:n]
        parts = {name: values[:n] for name, values in scores.parts.items()} if len(scores.parts) > 1 else {}
        entry = self.run_state.ledger.open[group.number]
        if not entry.scored:  # else it was reported before the checkpoint
            entry.scored = True
            self.emit(GroupRewarded(time=now(), number=group.number, rewards=rewards.tolist(), parts=parts))
        if (drawn := entry.drawn) is not None:
            drawn.rewarded, drawn.baseline, drawn.scores = now(), group.baseline, scores
        reason = f"all rewards are {compared[0]:g}" if self._filters and not has_variance(compared) else None
        if (warning := self._equal.look(shaped, reason)) is not None:
            self.run_state.note(warning)
        if reason is not None:
            self.run_state.discard(group.number, Fate.FILTERED, reason)
            return
        group.rewards = own
        group.trajectories = group.trajectories[:n]
        if not group.shown:  # frees the texts: a group may wait in the queue for long
            for trajectory in group.trajectories:
                trajectory.text, trajectory.conversation = "", None
        yield group
        self.run_state.rewarded(group.number)  # it has been sent

    def _compared(
        self, episodes: Sequence[Trajectory], rewards: NDArray[np.float32], shaped: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return three arrays [n]: each episode's shaped reward without the rewards of its turns; and the scores by
        which episodes are compared, without and with shaping, in which the rewards of turns are discounted.
        """
        of_turns = [episode.turn_rewards for episode in episodes]
        if self.config.algorithm.turn_discount == 1.0 and not any(of_turns):
            return shaped, rewards, shaped
        sums = np.array([sum(one) for one in of_turns], np.float32)
        turns = [episode.turns for episode in episodes]

        def scores(of: NDArray[np.float32]) -> NDArray[np.float32]:
            compared = episode_scores(of - sums, of_turns, turns, turn_discount=self.config.algorithm.turn_discount)
            return compared.astype(np.float32)

        return shaped - sums, scores(rewards), scores(shaped)
