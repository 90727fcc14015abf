"""The rewards that episodes have from their programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.data.types import Trajectory
from headway.errors import ScoringFailed
from headway.interfaces import Scores


def own_scores(episodes: Sequence[Trajectory]) -> Scores:
    """Scores of episodes, none of which failed: the reward that the program gave each, and those of its turns.

    An episode that a limit ended before its program gave any has 0. Raises `ScoringFailed` for another one without any.
    """
    return Scores(np.array([_own_reward(episode) for episode in episodes], np.float32))


def _own_reward(episode: Trajectory) -> float:
    if episode.reward is None and not episode.turn_rewards and episode.limit is None:
        raise ScoringFailed(
            "the program gave no reward; return one from it, or name a reward.function that scores the last answer"
        )
    return (episode.reward or 0.0) + sum(episode.turn_rewards)
