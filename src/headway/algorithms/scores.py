"""Scores of episodes: one number for each, from its own reward and those of its turns. NumPy only.

The pipeline compares a group's episodes by them: it has their metadata, and neither tokens nor torch. An estimator's
`AdvantageInputs.scores` sum rewards of tokens, which may contain a KL penalty (``use_kl_in_reward``) that the pipeline
does not know. Without one they are the same numbers.

`has_variance` filters groups; `soft_overlong_penalty` takes reward from answers near the length limit.
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
    """Return the score Σ_t δ^t·r_t of each episode, δ = ``turn_discount``. Its own reward counts to its last turn.

    Args:
        rewards: [n], each episode's own reward.
        turn_rewards: rewards of each episode's turns, by number; empty where it has none.
        turns: number of turns of each episode.
    """
    # An episode that failed has no turn: at least 1, or its reward would be divided by the discount.
    scores = np.asarray(rewards, np.float64) * turn_discount ** (np.maximum(turns, 1) - 1.0)
    for k, of_turns in enumerate(turn_rewards):
        scores[k] += np.dot(turn_discount ** np.arange(len(of_turns)), of_turns)
    return scores


def has_variance(rewards: NDArray[np.floating]) -> bool:
    """Tell whether a group's rewards [n] differ. Otherwise every advantage is 0 and the group has no gradient.

    The same comparison as `advantages.grpo`, so that a group that passes has a signal. A single answer has none.

    Source: dynamic sampling, DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    return bool(rewards.size > 1 and rewards.max() > rewards.min())


def soft_overlong_penalty(
    lengths: NDArray[np.int64], *, max_length: int, buffer: int, factor: float = 1.0
) -> NDArray[np.float32]:
    """The penalty that is added to each reward [n]: 0 up to max_length − buffer tokens, −factor at max_length, linear
    in between.

    With L = max_length and c = buffer, −factor·clip((|y| − (L − c))/c, 0, 1).

    Args:
        lengths: [n], response tokens, end-of-sequence included.
        max_length: where answers are cut off (``data.max_response_length``).
        buffer: tokens before that in which the penalty grows, in [1, max_length].
        factor: its size at the end, in the rewards' unit.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13, for which factor is 1. verl's ``overlong_buffer`` goes
    on beyond the limit; no answer gets there.
    """
    excess = (lengths - (max_length - buffer)) / buffer
    penalty: NDArray[np.float32] = (-factor * np.clip(excess, 0.0, 1.0)).astype(np.float32)
    return penalty
