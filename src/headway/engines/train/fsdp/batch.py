"""Micro-batches: from rows to tensors.

Rows are padded on the right. With causal attention no real token can see padding, so there is no attention mask: the
attention kernels take their fast causal path, and what is computed at padded positions is never read.

Shape suffixes: N rows, L padded length of prompt and response, T padded length of the responses, M response tokens of
all rows, in row order. A tensor [M] is a tensor [N, T] without its padding (see `MicroBatch.unflatten`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headway.data.collate import Row, by_episode, exceeds, token_budget_batches
from headway.data.types import ColumnName


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors that one forward pass reads."""

    input_ids: Int[Tensor, "N L"]
    predictors: Int[Tensor, " M"]
    """Index in the flattened [N · L] of each response token's predecessor, whose hidden state predicts it."""
    targets: Int[Tensor, " M"]
    """Ids of the response tokens of all rows, in row order."""
    present: Bool[Tensor, "N T"]
    """Mask [N, T], True where a row has a response token."""

    def unflatten(self, values: Float[Tensor, " M"]) -> Float[Tensor, "N T"]:
        """Put values of response tokens where `present` says, 0 elsewhere. Differentiable."""
        return values.new_zeros(self.present.shape).masked_scatter(self.present, values)


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Collate ``rows`` into the tensors of one forward pass.

    Raises:
        ValueError: a prompt without tokens: nothing would predict the response's first one.
    """
    if any(row.prompt_length < 1 for row in rows):
        raise ValueError("a row has an empty prompt, so nothing predicts the first token of its response")
    longest = max(len(row.input_ids) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    predictors: list[NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = row.input_ids
        first = i * longest + row.prompt_length - 1
        predictors.append(np.arange(first, first + _response_length(row)))
    targets = [row.input_ids[row.prompt_length :].astype(np.int64) for row in rows]
    return MicroBatch(
        input_ids=torch.from_numpy(ids).to(device),
        predictors=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        present=response_aligned(rows, lambda row: np.ones(_response_length(row), dtype=np.bool_), np.bool_, device),
    )


def response_aligned(
    rows: Sequence[Row], get: Callable[[Row], NDArray[np.generic]], dtype: type[np.generic], device: torch.device
) -> Tensor:
    """Stack ``get(row)``, one value per response token, of all rows: [N, T], zero-padded on the right."""
    padded = np.zeros((len(rows), max(map(_response_length, rows))), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : _response_length(row)] = get(row)
    return torch.from_numpy(padded).to(device)


def required_column(row: Row, name: str) -> NDArray[np.float32]:
    """Column ``name`` [T] of ``row``. Raises `ValueError` for a row without it."""
    if name not in row.columns:
        raise ValueError(f"a row of {_response_length(row)} response tokens has no {name}, which this step needs")
    return row.columns[name]


def split_by_budget(rows: Sequence[Row], token_budget: int, *, whole_episodes: bool = False) -> list[list[int]]:
    """Indices of ``rows`` for each micro-batch: rows × longest is at most ``token_budget`` tokens.

    ``whole_episodes``: the rows of an episode share a micro-batch, unless they alone are more than the budget.
    """
    lengths = [len(row.input_ids) for row in rows]
    return token_budget_batches(lengths, token_budget, by_episode(rows) if whole_episodes else None)


def rows_apart(rows: Sequence[Row], token_budget: int) -> list[int]:
    """Indices of the rows of episodes that no micro-batch of ``token_budget`` tokens holds whole."""
    lengths = [len(row.input_ids) for row in rows]
    return [i for unit in by_episode(rows) if exceeds(unit, lengths, token_budget) for i in unit]


def filler_row() -> Row:
    """A row of weight zero, for a rank with fewer micro-batches than another: FSDP's collectives need every rank."""
    nothing = np.zeros(1, dtype=np.float32)
    return Row(
        input_ids=np.zeros(2, dtype=np.int32),
        prompt_length=1,
        logprobs=nothing,
        versions=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        columns=dict.fromkeys(ColumnName, nothing),
    )


def _response_length(row: Row) -> int:
    return len(row.input_ids) - row.prompt_length
