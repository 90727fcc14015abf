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

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headway.data.packing import CollatedRow, Pack, Packing, Tree, grow
from headway.data.types import ColumnName
from headway.engines.host_copies import to_device
from headway.engines.train.fsdp.device_mesh import reduce_numbers
from headway.models.attention.packed_layout import PackedLayout
from headway.models.attention.sequence_ranks import SequenceRanks


def micro_batches(
    rows: Sequence[CollatedRow], packing: Packing, device: torch.device, *, whole_episodes: bool = False
) -> list[tuple[list[CollatedRow], Pack]]:
    """Split this rank's ``rows`` into micro-batches, as many on every rank: the rows of each. Collective.

    A rank that has fewer of its own ends with empty packs, each of which stands for one `filler_row`.
    ``whole_episodes``: see `Packing`.
    """
    packs = packing(rows, whole_episodes=whole_episodes)
    # FSDP gathers a layer with all ranks: one that is done earlier would leave the others waiting for ever.
    (most,) = reduce_numbers([len(packs)], dist.ReduceOp.MAX, device)
    if len(packs) < most:
        (filler,) = packing([filler_row()])
        packs += [Pack((), filler.trees)] * (int(most) - len(packs))
    return [([rows[i] for i in pack.rows] or [filler_row()], pack) for pack in packs]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors that one forward pass reads."""

    input_ids: Int[Tensor, "N l"]
    """This rank's part of the line of packed tokens, [1, l], all of it where no ranks divide it; or padded rows."""
    predictors: Int[Tensor, " u"]
    """Index in the flattened ``input_ids`` of the predecessor of each response token that this rank computes. Its
    hidden state predicts the token."""
    targets: Int[Tensor, " U"]
    """Ids of the response tokens."""
    places: Int[Tensor, " u"] | None = None
    """Index of the ``predictors`` among those of all ranks that divide the line; None where this one has all U."""
    which: Int[Tensor, " M"] | None = None
    """Index of each row's response tokens among the U; None if they are the U tokens in order."""
    layout: PackedLayout | None = None
    """Layout of the line; None for padded rows."""
    positions: Int[Tensor, " L"] | None = None
    """Position of each token of the line in its rows; None for padded rows."""
    ends: Int[Tensor, " L"] | None = None
    """End of the subtree that may see each token of the line (`PackedLayout.ends_L`); None for padded rows."""
    part: slice | None = None
    """Places of this rank's tokens in the line, where it is divided over ranks; None where the rank has all."""

    def spread(self, values: Float[Tensor, " U"]) -> Float[Tensor, " M"]:
        """Copy values that were computed once for several rows to each of these rows. Differentiable."""
        return values if self.which is None else values.index_select(0, self.which)

    def decoder_inputs(self) -> dict[str, Any]:
        """Arguments of the decoder's forward pass."""
        if self.layout is None or self.positions is None or self.ends is None:
            return {"input_ids": self.input_ids}
        positions = self.positions if self.part is None else self.positions[self.part]
        layout = self.layout.at(self.positions, self.ends)
        return {"input_ids": self.input_ids, "position_ids": positions[None], "layout": layout}


def collate(rows: Sequence[CollatedRow], trees: Sequence[Tree] = (), ranks: SequenceRanks | None = None) -> MicroBatch:
    """Collate ``rows`` into the tensors of one forward pass: packed as ``trees`` say, or padded without any.

    They are in host memory; see `on_device`. ``ranks`` divide the line, which has tokens that count for nothing at its
    end, so that its length divides.

    Raises:
        ValueError: a prompt without tokens: nothing would predict the response's first one.
    """
    if any(row.prompt_length < 1 for row in rows):
        raise ValueError("a row has an empty prompt, so nothing predicts the first token of its response")
    arrays, part = _packed(rows, trees) if trees else _padded(rows), None
    if trees and ranks is not None:
        ids, predictors = arrays["input_ids"], arrays["predictors"]
        if missing := -ids.shape[1] % ranks.size:
            trees = [*trees, grow([np.zeros(missing, dtype=np.int32)])]  # a line of its own: no other token sees it
            ids = np.pad(ids, ((0, 0), (0, missing)))
        part = ranks.part(ids.shape[1])
        places = np.flatnonzero((predictors >= part.start) & (predictors < part.stop))
        arrays |= {"input_ids": ids[:, part], "predictors": predictors[places] - part.start, "places": places}
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if not trees:
        return MicroBatch(**tensors)
    layout = PackedLayout.of(trees, ranks)
    return MicroBatch(**tensors, layout=layout, positions=layout.positions_L, ends=layout.ends_L, part=part)


def on_device(device: torch.device, *parts: Any) -> list[Any]:
    """Return dataclasses of a micro-batch with their tensors, which are in host memory, on ``device``.

    In one copy, which is made while the device computes what it was given before; on a CPU without any.
    """
    found = [(part, field.name) for part in parts for field in fields(part)]
    found = [(part, name) for part, name in found if isinstance(getattr(part, name), Tensor)]
    # All of them at once: one by one they were 14 copies and 20 waits for the device in each micro-batch.
    tensors = to_device([getattr(part, name).numpy() for part, name in found], device, beside=True)
    return [
        replace(part, **{name: there for (of, name), there in zip(found, tensors, strict=True) if of is part})
        for part in parts
    ]


Arrays = dict[str, NDArray[np.int64]]
"""Fields of a `MicroBatch`, by name."""


def _padded(rows: Sequence[CollatedRow]) -> Arrays:
    longest = max(len(row.input_ids) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    predictors: list[NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = row.input_ids
        first = i * longest + row.prompt_length - 1
        predictors.append(np.arange(first, first + len(row.loss_mask)))
    targets = [row.input_ids[row.prompt_length :].astype(np.int64) for row in rows]
    return {"input_ids": ids, "predictors": np.concatenate(predictors), "targets": np.concatenate(targets)}


def _packed(rows: Sequence[CollatedRow], trees: Sequence[Tree]) -> Arrays:
    ids = np.concatenate([tree.ids for tree in trees]).astype(np.int64)
    predictors, tokens = [], []
    left, before = iter(rows), 0
    for tree in trees:
        for places in tree.places:
            prompt = next(left).prompt_length
            # The place before in the row: in a line with shared prefixes it may lie far from the token's own.
            predictors.append(places[prompt - 1 : -1] + before)
            tokens.append(places[prompt:] + before)
        before += len(tree.ids)
    of_rows, ahead = np.concatenate(tokens), np.concatenate(predictors)
    # By place, not by token: the same token of two prefixes is predicted twice.
    once, first, which = np.unique(of_rows, return_index=True, return_inverse=True)
    if len(once) == len(of_rows):
        return {"input_ids": ids[None], "predictors": ahead, "targets": ids[of_rows]}
    return {"input_ids": ids[None], "predictors": ahead[first], "targets": ids[once], "which": which}


def filler_row() -> CollatedRow:
    """A row of weight zero, for a rank with fewer micro-batches than another: FSDP's collectives need every rank."""
    nothing = np.zeros(1, dtype=np.float32)
    return CollatedRow(
        input_ids=np.zeros(2, dtype=np.int32),  # a token, and one in front that predicts it
        prompt_length=1,
        logprobs=nothing,
        versions=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        columns=dict.fromkeys(ColumnName, nothing),
    )
