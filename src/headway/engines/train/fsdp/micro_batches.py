"""Micro-batches: from rows to tensors.

Rows are packed: they stand behind each other in one line, behind the prefixes that they share (`headway.data.packing`),
and a layout says which tokens see which. What several rows have in common is computed once, its log-probs too.

Models whose attention cannot follow a layout get padded rows. With causal attention no real token can see padding on
the right, so there is no attention mask: the attention kernels take their fast causal path, and what is computed at
padded positions is never read.

Shape suffixes: N rows, L tokens of the line (or padded length), T response tokens of one row, M response tokens of all
rows, in row order, U response tokens of which each is computed once. What the losses read is never padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from headway.data.packing import CollatedRow, Tree, grow
from headway.data.types import ColumnName
from headway.models.attention.packed_layout import PackedLayout
from headway.models.attention.ulysses import SequenceRanks


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors that one forward pass reads."""

    input_ids: Int[Tensor, "N L"]
    """One line of packed tokens, [1, L], or padded rows."""
    predictors: Int[Tensor, " U"]
    """Index in the flattened ``input_ids`` of each response token's predecessor, whose hidden state predicts it."""
    targets: Int[Tensor, " U"]
    """Ids of the response tokens."""
    which: Int[Tensor, " M"] | None = None
    """Index of each row's response tokens among the U; None where they are those, in order."""
    layout: PackedLayout | None = None
    """Layout of the line; None for padded rows."""
    positions: Int[Tensor, "1 L"] | None = None
    """Position of each token of the line in its rows; None for padded rows."""
    part: slice | None = None
    """Places of this rank's tokens in the line, where it is divided over ranks; None where the rank has all."""

    @property
    def own(self) -> OwnTokens:
        """The predecessors that this rank computes."""
        if self.part is None:
            return OwnTokens(self.predictors, None)
        places = ((self.predictors >= self.part.start) & (self.predictors < self.part.stop)).nonzero().squeeze(1)
        return OwnTokens(self.predictors.index_select(0, places) - self.part.start, places)

    def spread(self, values: Float[Tensor, " U"]) -> Float[Tensor, " M"]:
        """Give every row what was computed once for several. Differentiable."""
        return values if self.which is None else values.index_select(0, self.which)

    def decoder_inputs(self) -> dict[str, Any]:
        """Arguments of the decoder's forward pass."""
        if self.layout is None or self.positions is None:
            return {"input_ids": self.input_ids}
        part = slice(None) if self.part is None else self.part
        ids, positions = self.input_ids[:, part], self.positions[:, part]
        return {"input_ids": ids, "position_ids": positions, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The predecessors of response tokens that one rank computes."""

    predictors: Int[Tensor, " u"]
    """Their index among the rank's tokens."""
    places: Int[Tensor, " u"] | None
    """Their index among all U; None where the rank computes all."""


def collate(
    rows: Sequence[CollatedRow], device: torch.device, trees: Sequence[Tree] = (), ranks: SequenceRanks | None = None
) -> MicroBatch:
    """Collate ``rows`` into the tensors of one forward pass: packed as ``trees`` say, or padded without any.

    ``ranks`` divide the line, which has tokens that count for nothing at its end, so that its length divides.

    Raises:
        ValueError: a prompt without tokens: nothing would predict the response's first one.
    """
    if any(row.prompt_length < 1 for row in rows):
        raise ValueError("a row has an empty prompt, so nothing predicts the first token of its response")
    batch = _packed(rows, trees) if trees else _padded(rows)
    part = None
    if ranks is not None and trees:
        ids = batch.input_ids
        if missing := -ids.shape[1] % ranks.size:
            trees = [*trees, grow([np.zeros(missing, dtype=np.int32)])]
            batch = replace(batch, input_ids=np.pad(ids, ((0, 0), (0, missing))))
        part = ranks.part(batch.input_ids.shape[1])

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    layout = PackedLayout.of(trees, device, ranks) if trees else None
    return MicroBatch(
        input_ids=tensor(batch.input_ids),
        predictors=tensor(batch.predictors),
        targets=tensor(batch.targets),
        which=None if batch.which is None else tensor(batch.which),
        layout=layout,
        positions=None if layout is None else tensor(layout.positions[None]),
        part=part,
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Fields of a `MicroBatch`, as arrays."""

    input_ids: NDArray[np.int64]
    predictors: NDArray[np.int64]
    targets: NDArray[np.int64]
    which: NDArray[np.int64] | None = None


def _padded(rows: Sequence[CollatedRow]) -> _Arrays:
    longest = max(len(row.input_ids) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    predictors: list[NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = row.input_ids
        first = i * longest + row.prompt_length - 1
        predictors.append(np.arange(first, first + _response_length(row)))
    targets = [row.input_ids[row.prompt_length :].astype(np.int64) for row in rows]
    return _Arrays(ids, np.concatenate(predictors), np.concatenate(targets))


def _packed(rows: Sequence[CollatedRow], trees: Sequence[Tree]) -> _Arrays:
    ids = np.concatenate([tree.ids for tree in trees]).astype(np.int64)
    predictors, tokens = [], []
    left, before = iter(rows), 0
    for tree in trees:
        for places in tree.places:
            prompt = next(left).prompt_length
            predictors.append(places[prompt - 1 : -1] + before)
            tokens.append(places[prompt:] + before)
        before += len(tree.ids)
    of_rows, ahead = np.concatenate(tokens), np.concatenate(predictors)
    once, first, which = np.unique(of_rows, return_index=True, return_inverse=True)
    if len(once) == len(of_rows):
        return _Arrays(ids[None], ahead, ids[of_rows])
    return _Arrays(ids[None], ahead[first], ids[once], which)


def response_aligned(
    rows: Sequence[CollatedRow],
    get: Callable[[CollatedRow], NDArray[np.generic]],
    dtype: type[np.generic],
    device: torch.device,
) -> Shaped[Tensor, "M 1"]:
    """Join ``get(row)``, one value per response token, of all rows, without padding."""
    joined = np.empty(sum(map(_response_length, rows)), dtype=dtype)
    end = 0
    for row in rows:
        start, end = end, end + _response_length(row)
        joined[start:end] = get(row)
    return torch.from_numpy(joined).to(device)[:, None]


def required_column(row: CollatedRow, name: str) -> NDArray[np.float32]:
    """Column ``name`` [T] of ``row``. Raises `ValueError` for a row without it."""
    if name not in row.columns:
        raise ValueError(f"a row of {_response_length(row)} response tokens has no {name}, which this step needs")
    return row.columns[name]


def filler_row() -> CollatedRow:
    """A row of weight zero, for a rank with fewer micro-batches than another: FSDP's collectives need every rank."""
    nothing = np.zeros(1, dtype=np.float32)
    return CollatedRow(
        input_ids=np.zeros(2, dtype=np.int32),
        prompt_length=1,
        logprobs=nothing,
        versions=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        columns=dict.fromkeys(ColumnName, nothing),
    )


def _response_length(row: CollatedRow) -> int:
    return len(row.input_ids) - row.prompt_length
