"""Collation: from samples to rows, and from rows to the micro-batches that an engine runs.

samples ─▶ split_by_tokens ─▶ one list per data-parallel rank      (driver: metadata only)
samples ─▶ resolve ─▶ rows ─▶ token_budget_batches ─▶ collate      (worker: arrays)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Handle, Sample, TrajectoryId, TurnSpan


@dataclass(frozen=True, slots=True)
class Row:
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


def resolve(samples: Sequence[Sample], get: Callable[[Handle[Any]], Any]) -> list[Row]:
    """Fetch what the samples' handles point to. ``get`` is the backend's (identity when inline)."""
    behind: dict[int, Any] = {}

    def fetch(handle: Handle[Any]) -> Any:
        if id(handle) not in behind:
            behind[id(handle)] = get(handle)
        return behind[id(handle)]

    rows = []
    for sample in samples:
        group = fetch(sample.tokens)
        tokens = group.rows[sample.index]
        rows.append(
            Row(
                input_ids=np.concatenate([tokens.prompt_ids, tokens.ids]),
                prompt_length=len(tokens.prompt_ids),
                logprobs=tokens.logprobs,
                versions=tokens.versions,
                loss_mask=np.zeros_like(tokens.loss_mask) if sample.masked else tokens.loss_mask,
                columns={name: fetch(c.handle)[c.index] for name, c in sample.columns.items()},
                finished=sample.finished,
                episode=sample.episode,
                turns=tokens.turns,
            )
        )
    return rows


def split_by_tokens(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Indices of ``samples`` for each rank, token counts balanced (longest first to the lightest rank)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(samples)), key=lambda i: (-samples[i].total_length, i)):
        lightest = min(range(ranks), key=lambda r: (loads[r], r))
        shares[lightest].append(index)
        loads[lightest] += samples[index].total_length
    return [sorted(share) for share in shares]


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partition indices into batches whose padded size (rows × longest) is at most ``budget``, sorted by length.

    A row longer than the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
