"""Rows of samples whose tokens and columns lie behind handles, without a rank that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.cluster.machine.batch_cache import BatchCache
from headway.data.packing import CollatedRow
from headway.data.types import Handle, TrainSample


def resolve(samples: Sequence[TrainSample], get: Callable[[Handle[Any]], Any]) -> list[CollatedRow]:
    """Fetch what the samples' handles point to. ``get`` is the backend's (identity when inline)."""
    return BatchCache(lambda handles: [get(handle) for handle in handles]).rows(samples)
