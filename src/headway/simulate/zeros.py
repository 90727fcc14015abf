"""Arrays that have a length and no contents: what stands for tokens and advantages where nobody computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Column, ColumnName, Outcomes, Sample

_FOUR_BYTES = bytes(4)


def zero_ids(length: int) -> NDArray[np.int32]:
    """[length] zeros: one element, seen ``length`` times. Cannot be written to, and takes no memory of its own."""
    return np.ndarray((length,), np.int32, _FOUR_BYTES, 0, (0,))


async def zero_advantages(samples: Sequence[Sample], outcomes: Outcomes) -> dict[str, list[Column]]:
    """An `AdvantageFn`. Its columns lead nowhere: who computes nothing never looks at them."""
    return {ColumnName.ADVANTAGES: [Column(None, index) for index in range(len(samples))]}
