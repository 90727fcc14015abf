"""Collation: from samples to rows, and from rows to the micro-batches that an engine runs.

samples ─▶ assign ─▶ one list per data rank                            (driver: metadata only; see `assignment`)
samples ─▶ row_of, with_columns ─▶ rows ─▶ packing ─▶ micro-batches    (worker: arrays; see `packing`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Column, RowTokens, Sample, TrajectoryId, TurnSpan


@dataclass(frozen=True, slots=True)
class CollatedRow:
    """One sample with its arrays at hand: P prompt tokens, T response tokens."""

    input_ids: NDArray[np.int32]
    """Token ids of prompt and response, [P + T]."""
    prompt_length: int
    logprobs: NDArray[np.float32]
    """Log-probs of the response under the behaviour policy, [T]; 0 in holes."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each response token, [T]; -1 in holes."""
    loss_mask: NDArray[np.bool_]
    """True for response tokens that the row trains, [T]."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers for each response token, by name, [T] each. See `headway.data.types.Sample`."""
    finished: bool = True
    """False where the episode was cut off."""
    episode: TrajectoryId | None = None
    """The episode that the row is of; None for a row that is a whole one."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns that are trained in the row, in order; empty for one turn, which is the whole response."""


def row_of(sample: Sample, tokens: RowTokens) -> CollatedRow:
    """Make the row of ``sample`` from its tokens, as they were sampled: without columns, and not masked."""
    return CollatedRow(
        input_ids=np.concatenate([tokens.prompt_ids, tokens.ids]),
        prompt_length=len(tokens.prompt_ids),
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        loss_mask=tokens.loss_mask,
        finished=sample.finished,
        episode=sample.episode,
        turns=tokens.turns,
    )


def with_columns(row: CollatedRow, sample: Sample, get: Callable[[Column], NDArray[np.float32]]) -> CollatedRow:
    """Return ``row`` with the columns of ``sample``, and in no loss where the sample is masked."""
    columns = {
        name: get(column) if isinstance(column, Column) else spread(column, row.loss_mask)
        for name, column in sample.columns.items()
    }
    mask = np.zeros_like(row.loss_mask) if sample.masked else row.loss_mask
    return replace(row, loss_mask=mask, columns=columns)


def spread(number: float, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return a column [T] with ``number`` where ``mask`` [T] is true, and exact zeros in its holes.

    Not to be written to: without holes it is a view of one number.
    """
    if mask.all():
        return np.broadcast_to(np.float32(number), mask.shape)
    return np.where(mask, np.float32(number), np.float32(0))


def by_episode(rows: Sequence[CollatedRow]) -> list[list[int]]:
    """Indices of the rows of each episode, in the order of their first ones. See `CollatedRow.episode`."""
    episodes: dict[TrajectoryId | int, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(index if row.episode is None else row.episode, []).append(index)
    return list(episodes.values())


def exceeds(unit: Sequence[int], lengths: Sequence[int], budget: int) -> bool:
    """Tell whether the padded rows of ``unit`` are more than ``budget`` tokens together; one row never is."""
    return len(unit) > 1 and len(unit) * max(lengths[i] for i in unit) > budget


def token_budget_batches(
    lengths: Sequence[int], budget: int, together: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Partition indices into batches whose padded size (rows × longest) is at most ``budget``, longest first.

    A row longer than the budget is a batch of its own. ``together`` partitions the indices into units that share a
    batch, except for those that exceed the budget by themselves: these are split freely. None: there are no units.
    """
    units: list[list[int]] = []
    for unit in together if together is not None else ():
        longest_first = sorted(unit, key=lambda i: (-lengths[i], i))
        units += [[i] for i in unit] if exceeds(unit, lengths, budget) else [longest_first]
    if together is None:
        units = [[i] for i in range(len(lengths))]
    batches: list[list[int]] = []
    for unit in sorted(units, key=lambda unit: (-lengths[unit[0]], unit[0])):
        if not batches or (len(batches[-1]) + len(unit)) * lengths[batches[-1][0]] > budget:
            batches.append(unit)
        else:
            batches[-1] += unit
    return batches
