"""Arrays that have a length and no contents: what stands for tokens and advantages where nobody computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Group

_FOUR_BYTES = bytes(4)


def zero_ids(length: int) -> NDArray[np.int32]:
    """[length] zeros: one element, seen ``length`` times. Cannot be written to, and takes no memory of its own."""
    return np.ndarray((length,), np.int32, _FOUR_BYTES, 0, (0,))


def zero_advantages(groups: Sequence[Group]) -> list[list[NDArray[np.float32]]]:
    """An `AdvantageFn`. The arrays are like those of `zero_ids`."""
    return [[np.ndarray((t.length,), np.float32, _FOUR_BYTES, 0, (0,)) for t in group.trajectories] for group in groups]
