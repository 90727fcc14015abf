"""The tokens that each decoding row has already, in its prompt or its answer: what a repetition penalty is about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class SeenTokens:
    """A row of flags per slot, made when the first trajectory comes that has a penalty."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (slots, vocabulary)
        self._device = device
        self._flags: torch.Tensor | None = None

    def add(self, row: int, tokens: NDArray[np.integer]) -> None:
        """``row`` begins with these. Only for a trajectory that has a penalty."""
        if self._flags is None:
            self._flags = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._flags[row] = False
        self._flags[row, self._to_device(tokens)] = True

    def record(self, rows: Sequence[int], tokens: NDArray[np.int64]) -> None:
        """Note one new token for each of ``rows``, all of which have a penalty."""
        if self._flags is not None and rows:
            self._flags[self._to_device(np.array(rows)), self._to_device(tokens)] = True

    def move(self, source: int, target: int) -> None:
        if self._flags is not None:
            self._flags[target] = self._flags[source]

    def of(self, active: int) -> torch.Tensor | None:
        """[active, V] of rows 0..active-1; meaningless for those without a penalty."""
        return None if self._flags is None else self._flags[:active]

    def _to_device(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
