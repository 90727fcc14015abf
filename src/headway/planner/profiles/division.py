"""Division of the trainer's work over data ranks, as a real worker group makes it: the rank that has most decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.data.assignment import Cost, assign, split
from headway.data.types import Sample, TrajectoryId


class Division:
    """Work of a fetch over ``ranks`` data ranks, in tokens."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._owners: Mapping[TrajectoryId, int] | None = None

    def begin(self, mini_batches: Sequence[Sequence[Sample]]) -> None:
        """Assign a fetch. Without one, samples are assigned by themselves."""
        if self._ranks > 1:
            self._owners = self._assigned(mini_batches)

    def end(self) -> None:
        """Forget the fetch."""
        self._owners = None

    def tokens(self, samples: Sequence[Sample]) -> int:
        """Number of ranks times the tokens, prompts and answers, of the one that has most: how many it would take to
        keep all ranks at work for as long. Without uneven loads, the tokens of ``samples``.
        """
        if self._ranks == 1:
            return _tokens(samples)
        owners = self._owners if self._owners is not None else self._assigned([samples])
        return self._ranks * max(_tokens([samples[i] for i in share]) for share in split(samples, owners, self._ranks))

    def _assigned(self, mini_batches: Sequence[Sequence[Sample]]) -> Mapping[TrajectoryId, int]:
        return assign(mini_batches, self._ranks, Cost())


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.total_length for sample in samples)
