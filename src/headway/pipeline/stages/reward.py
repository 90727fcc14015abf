"""Reward: scores each group; a group without a gradient is filtered, one that cannot be scored has failed.

consumes        groups from Generate
waits for       the reward's processes; after a stop only as long as scores come
is unblocked by an answer of theirs, or the end of its time (``reward.timeout_s``, each retry anew)
produces        rewarded groups
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.scores import episode_scores
from headway.data.types import Group, Trajectory
from headway.errors import ScoringFailed
from headway.events import GroupRewarded, Note
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.channel import Channel
from headway.pipeline.group_scoring import Scoring, ScoringAbandoned
from headway.pipeline.observing.equal_rewards import EqualRewards, FilteredGroups
from headway.pipeline.stage import Stage

Shaping = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""A function from a group's rewards [n] and lengths [n] to the rewards that are trained on."""

GroupFilter = Callable[[NDArray[np.float32]], str | None]
"""A function from a group's rewards [n] to why it should be filtered, or None to keep it."""


class Reward(Stage[Group, Group]):
    concurrency = None
    waits_for_input = "Generate"
    waits_for_output = None

    def __init__(
        self,
        state: RunState,
        input: Channel[Group],
        output: Channel[Group] | MessageQueue,
        reward: Scoring,
        group_filter: GroupFilter | None,
        shaping: Shaping | None = None,
        *,
        n: int,
        turn_discount: float = 1.0,
        equal: EqualRewards | None = None,
    ) -> None:
        """Build the stage. ``n``: trajectories of a group that are trained on; a further one is its baseline.
        ``equal``: warns of groups without variance where nothing filters them; else the stage warns of much filtering.
        """
        super().__init__(state.emit, input, output)
        self._state = state
        self._reward = reward
        self._filter = group_filter
        self._shaping = shaping
        self._n = n
        self._turn_discount = turn_discount
        self._equal = equal
        self._filtered = FilteredGroups(state.staleness.groups_per_version)

    async def process_data(self, group: Group) -> AsyncGenerator[Group, None]:
        try:
            scores = await self._reward.score(group.prompt, group.trajectories)
        except ScoringAbandoned as given_up:
            self._state.drop_unscored(group.number, str(given_up))
            return
        except ScoringFailed as failure:
            self._state.discard(group.number, Fate.FAILED, str(failure))
            return
        shaped = rewards = scores.rewards
        if self._shaping is not None:
            shaped = self._shaping(rewards, np.array([t.length for t in group.trajectories]))
        own, compared, shaped = self._compared(group.trajectories, rewards, shaped)
        warning = self._equal.look(shaped) if self._equal is not None and self._filter is None else None
        n = sum(t.id.k < self._n for t in group.trajectories)
        if len(rewards) > n:
            group.baseline = float(shaped[n])
            rewards, own, compared = rewards[:n], own[:n], compared[:n]
        parts = {name: values[:n] for name, values in scores.parts.items()} if len(scores.parts) > 1 else {}
        self._emit(GroupRewarded(time=now(), number=group.number, rewards=rewards.tolist(), parts=parts))
        if self._state.samples is not None:
            self._state.samples.rewarded(group, scores, now())
        reason = None
        if self._filter is not None:
            reason = self._filter(compared)
            warning = self._filtered.look(compared, reason)
        if warning is not None:
            self._emit(Note(time=now(), level="warning", text=warning))
        if reason is not None:
            self._state.discard(group.number, Fate.FILTERED, reason)
            return
        group.rewards = own
        # The driver holds no text longer than it has to: a group may wait for long before it is trained on.
        group.trajectories = tuple(replace(t, text="", conversation=None) for t in group.trajectories[:n])
        yield group

    def _compared(
        self, episodes: Sequence[Trajectory], rewards: NDArray[np.float32], shaped: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Take the rewards of turns out of ``shaped`` [n]: each episode's own reward. Also the scores by which episodes
        are compared, without shaping and with it, [n] each: turns' rewards discounted.
        """
        of_turns = [episode.turn_rewards for episode in episodes]
        if self._turn_discount == 1.0 and not any(of_turns):
            return shaped, rewards, shaped
        sums = np.array([sum(one) for one in of_turns], np.float32)
        turns = [episode.turns for episode in episodes]

        def scores(of: NDArray[np.float32]) -> NDArray[np.float32]:
            compared = episode_scores(of - sums, of_turns, turns, turn_discount=self._turn_discount)
            return compared.astype(np.float32)

        return shaped - sums, scores(rewards), scores(shaped)

    async def send_output_data(self, group: Group) -> bool:
        sent = await super().send_output_data(group)
        self._state.rewarded(group.number)
        return sent
