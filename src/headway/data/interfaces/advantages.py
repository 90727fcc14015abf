"""Advantages of a fetch's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headway.data.types import AnyColumn, Outcomes, Sample


class AdvantageFn(Protocol):
    """Function that computes the advantages of one fetch, once, where the fetch's tokens are."""

    async def __call__(self, samples: Sequence[Sample], outcomes: Outcomes) -> Mapping[str, Sequence[AnyColumn]]:
        """Return ``advantages`` and, where there is a critic, ``returns``: for each sample a [T] float32 column, or the
        one number that all its tokens share.

        Raises `RunError`, naming a trajectory, for a reward or an advantage that is not finite.
        """
