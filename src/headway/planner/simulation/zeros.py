"""Arrays with a length and no contents: placeholders for tokens and advantages in simulations."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Column, ColumnName, Outcomes, Sample

_FOUR_BYTES = bytes(4)


def zero_ids(length: int) -> NDArray[np.int32]:
    """Return [length] zeros that take no memory: one element, seen ``length`` times. They cannot be written to."""
    return np.ndarray((length,), np.int32, _FOUR_BYTES, 0, (0,))


def same_ids(length: int, value: int) -> NDArray[np.int32]:
    """Return [length] ids that are all ``value``. They take no memory either, and cannot be written to."""
    return np.ndarray((length,), np.int32, value.to_bytes(4, sys.byteorder), 0, (0,)) if value else zero_ids(length)


async def zero_advantages(samples: Sequence[Sample], outcomes: Outcomes) -> dict[str, list[Column]]:
    """Return advantages without contents, for a simulated trainer, which never reads them. An `AdvantageFn`."""
    return {ColumnName.ADVANTAGES: [Column(None, index) for index in range(len(samples))]}
