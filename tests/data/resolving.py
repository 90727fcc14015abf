"""Rows of samples whose tokens and columns lie behind handles, without a rank that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.data.packing import CollatedRow, row_of, with_columns
from headway.data.types import Handle, TrainSample


def resolve(samples: Sequence[TrainSample], get: Callable[[Handle[Any]], Any]) -> list[CollatedRow]:
    """Fetch what the samples' handles point to. ``get`` is the backend's (identity when inline)."""
    behind: dict[int, Any] = {}

    def fetch(handle: Handle[Any]) -> Any:
        if id(handle) not in behind:
            behind[id(handle)] = get(handle)
        return behind[id(handle)]

    rows = []
    for sample in samples:
        row = row_of(sample, fetch(sample.tokens)[sample.index])
        rows.append(with_columns(row, sample, lambda column: fetch(column.handle)[column.index]))
    return rows
