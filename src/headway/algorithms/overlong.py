"""DAPO's soft overlong penalty: an answer near the length limit loses reward before it is cut off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
