"""The rewards that episodes have from their programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.data.interfaces.rewards import Scores
from headway.data.types import Trajectory


def own_scores(episodes: Sequence[Trajectory]) -> Scores:
    """Scores of episodes, none of which failed: the reward that the program gave each, and those of its turns.

    An episode that a limit ended before its program gave any has 0; another one without any has failed.
    """
    return Scores(np.array([(one.reward or 0.0) + sum(one.turn_rewards) for one in episodes], np.float32))
