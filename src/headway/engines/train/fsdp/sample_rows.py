"""Rows of drawn groups, as an optimizer step sees them: what a run shows of them is what it trained.

rows, groups that are drawn ─▶ Shown ◀─ log-probs and entropies of each micro-batch's forward pass
                                 └─▶ a `TrainedRow` for each of their rows

Other rows cost nothing: no copy, and on a GPU no wait for it.

Shape suffixes: M response tokens of a micro-batch's rows, T response tokens of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headway.data.assignment import GroupId
from headway.data.collate import CollatedRow
from headway.data.interfaces.steps import TrainedRow

LONGEST = 2048
"""Most response tokens of a row that is shown; longer ones lack their middle."""


class SampledRows:
    """The rows of one step, on one rank, that are shown."""

    def __init__(self, rows: Sequence[CollatedRow], groups: Collection[GroupId]) -> None:
        """Look out for those of this rank's ``rows`` that are of ``groups``."""
        self._wanted = (
            {id(row): place for place, row in enumerate(rows) if row.episode is not None and row.episode[:3] in groups}
            if groups
            else {}
        )
        """Identity of a row, as an object → its place among the step's rows."""
        self._found: dict[int, TrainedRow] = {}

    def look(self, rows: Sequence[CollatedRow], logprobs: Float[Tensor, " M"], entropy: Float[Tensor, " M"]) -> None:
        """Take what is shown of one micro-batch: its rows, and what the forward pass says of their tokens."""
        if not any(id(row) in self._wanted for row in rows):
            return
        ends = np.cumsum([len(row.loss_mask) for row in rows])[:-1]
        parts = (np.split(values.detach().float().cpu().numpy(), ends) for values in (logprobs, entropy))
        for row, logprobs_T, entropy_T in zip(rows, *parts, strict=True):
            if (place := self._wanted.get(id(row))) is not None:
                self._found[place] = _trained(row, logprobs_T, entropy_T)

    def rows(self) -> tuple[TrainedRow, ...]:
        """Return what was seen, in the order of the step's rows."""
        return tuple(row for _, row in sorted(self._found.items()))


def _trained(row: CollatedRow, logprobs_T: NDArray[np.float32], entropy_T: NDArray[np.float32]) -> TrainedRow:
    length = len(row.loss_mask)
    kept = np.arange(length)
    if length > LONGEST:
        kept = np.concatenate([kept[: LONGEST // 2], kept[-(LONGEST // 2) :]])
    assert row.episode is not None
    return TrainedRow(
        episode=row.episode,
        prompt_ids=row.input_ids[: row.prompt_length].copy(),
        ids=row.input_ids[row.prompt_length :][kept],
        mask=row.loss_mask[kept],
        versions=row.versions[kept],
        behaviour=row.logprobs[kept],
        logprobs=logprobs_T[kept],
        entropy=entropy_T[kept],
        columns={str(name): values[kept] for name, values in row.columns.items()},
        cut=length - len(kept),
    )
