"""A filter for groups that are worth training on. NumPy only: the pipeline asks, and the pipeline imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def has_variance(rewards: NDArray[np.floating]) -> bool:
    """Tell whether a group's rewards [n] differ at all: without that every advantage is 0 and the group has no
    gradient.

    The same comparison as `advantages.grpo`, so that a group that passes has a signal. A single answer has none.

    Source: dynamic sampling, DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    return bool(rewards.size > 1 and rewards.max() > rewards.min())
