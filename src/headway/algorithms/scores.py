"""Scores of episodes: one number for each, from its own reward and the rewards of its turns. NumPy only.

The pipeline, which has metadata but no tokens and no torch, compares a group's episodes by their scores. An estimator's
`AdvantageInputs.scores` are the same numbers, except with a KL penalty in the rewards of tokens (``use_kl_in_reward``),
which the pipeline does not know.

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
    """Return the score Σ_t δ^t·r_t of each episode, δ = ``turn_discount``. An episode's own reward is at its last turn.

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
    """Tell whether a group's rewards [n] differ. If not, every advantage is 0 and the group has no gradient.

    `advantages.grpo` compares in the same way, so a group that passes has a gradient. False for a single answer.

    Source: dynamic sampling, DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    return bool(rewards.size > 1 and rewards.max() > rewards.min())


def soft_overlong_penalty(
    lengths: NDArray[np.int64], *, max_length: int, buffer: int, factor: float = 1.0
) -> NDArray[np.float32]:
    """Return the penalty [n] to add to rewards: 0 up to max_length − buffer tokens, linear to −factor at max_length.

    With L = max_length and c = buffer, it is −factor·clip((|y| − (L − c))/c, 0, 1).

    Args:
        lengths: [n], number of response tokens, including end-of-sequence.
        max_length: number of tokens at which answers are cut off (``data.max_response_length``).
        buffer: number of tokens before max_length over which the penalty grows, in [1, max_length].
        factor: size of the penalty at max_length, in the rewards' unit.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13, for which factor is 1. verl's ``overlong_buffer`` goes
    on beyond the limit; no answer gets there.
    """
    excess = (lengths - (max_length - buffer)) / buffer
    penalty: NDArray[np.float32] = (-factor * np.clip(excess, 0.0, 1.0)).astype(np.float32)
    return penalty
