"""Scores of episodes: one number for each, from its own reward and those of its turns. NumPy only.

The pipeline compares a group's episodes by them: it has their metadata, and neither tokens nor torch. An estimator's
`AdvantageInputs.scores` sum rewards of tokens, which may contain a KL penalty (``use_kl_in_reward``) that the pipeline
does not know. Without one they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def episode_scores(
    rewards: NDArray[np.floating],
    turn_rewards: Sequence[Sequence[float]],
    turns: Sequence[int],
    *,
    turn_discount: float = 1.0,
) -> NDArray[np.float64]:
    """The score Σ_t δ^t·r_t of each episode, δ = ``turn_discount``; its own reward is its last turn's.

    Args:
        rewards: [n], each episode's own reward.
        turn_rewards: rewards of each episode's turns, by number; empty where it has none.
        turns: number of turns of each episode.
    """
    scores = np.asarray(rewards, np.float64) * turn_discount ** (np.maximum(turns, 1) - 1.0)
    for k, of_turns in enumerate(turn_rewards):
        scores[k] += np.dot(turn_discount ** np.arange(len(of_turns)), of_turns)
    return scores
