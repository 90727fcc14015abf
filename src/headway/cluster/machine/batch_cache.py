"""Cache of a rank's rows while its role works on a batch: each row is fetched once for all calls.

rows of a `BatchShare`: each row and column is fetched when it is first asked for ─▶ rows of another batch's share: all
rows of the batch before are forgotten

The cache holds the rank's own rows of one batch. Rows of other samples are forgotten when the call ends.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.machine.token_files import TokenFile, TokenPart
from headway.data.packing import CollatedRow
from headway.data.types import Column, Handle, RowTokens, TrainSample

Fetch = Callable[[Sequence[Handle[Any]]], list[Any]]
"""Function that returns the objects of handles, side by side."""


class BatchShare(list[TrainSample]):
    """A rank's samples of one call about ``batch``. A new number also tells the rank that another batch has begun: a
    separate call would cost the driver a millisecond.
    """

    def __init__(self, samples: Iterable[TrainSample], batch: int) -> None:
        super().__init__(samples)
        self.batch = batch

    def __reduce__(self) -> tuple[Callable[..., BatchShare], tuple[Any, int]]:
        """Pickle all samples at once if they contain no references of Ray: Ray's pickler is slow per sample."""
        samples = list(self)
        columns = [column for one in samples for column in one.columns.values()]
        if all(isinstance(one.tokens, TokenFile) for one in samples) and all(isinstance(one, float) for one in columns):
            return _unpickled, (pickle.dumps(samples, pickle.HIGHEST_PROTOCOL), self.batch)
        return BatchShare, (samples, self.batch)


def _unpickled(samples: bytes, batch: int) -> BatchShare:
    return BatchShare(pickle.loads(samples), batch)


class BatchCache:
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._batch: int | None = None
        """Number of the batch whose rows are held; None before the first."""
        # Each value is stored with its handle: some keys are the handle's address, which must not be reused.
        self._rows: dict[tuple[Hashable, int], tuple[Handle[Any], CollatedRow]] = {}
        self._columns: dict[Hashable, tuple[Handle[Any], Any]] = {}
        """Key of a handle -> the handle and its list of columns."""
        self._borrowed: dict[Hashable, Handle[Any]] = {}
        """Handles of all columns requested in the batch, even if only once: sometimes Ray never delivered an object
        whose reference had been returned and borrowed again."""

    def rows(self, samples: Sequence[TrainSample], *, once: bool = False) -> list[CollatedRow]:
        """Return the samples with their arrays. Missing rows are fetched side by side, and cached unless ``once``."""
        batch = samples.batch if isinstance(samples, BatchShare) else None
        if batch is not None and batch != self._batch:
            self._batch, self._rows, self._columns, self._borrowed = batch, {}, {}, {}
        rows, columns = self._rows, self._columns
        if once or batch is None:
            rows, columns = dict(rows), dict(columns)  # copies: rows fetched for this call are not cached
        tokens: dict[Hashable, tuple[Handle[Any], dict[int, TrainSample]]] = {}
        handles: dict[Hashable, Handle[Any]] = {}
        for sample in samples:
            key = _key(sample.tokens)
            if (key, sample.index) not in rows:
                tokens.setdefault(key, (sample.tokens, {}))[1][sample.index] = sample
            for column in sample.columns.values():
                if not isinstance(column, float) and _key(column.handle) not in columns:
                    handles[_key(column.handle)] = column.handle
        if batch is not None:
            self._borrowed |= handles
        wanted = [_part(handle, tuple(missing)) for handle, missing in tokens.values()]
        fetched: Iterator[Any] = iter(self._fetch([*wanted, *handles.values()]) if wanted or handles else ())
        # `fetched` stands second: when its first iterable is used up, `zip` draws nothing more of the second one,
        # and the columns come next.
        for (key, (handle, missing)), group in zip(tokens.items(), fetched, strict=False):
            rows.update(((key, i), (handle, _row_of(sample, group[i]))) for i, sample in missing.items())
        columns.update((key, (handle, next(fetched))) for key, handle in handles.items())
        return [
            _with_columns(
                rows[_key(sample.tokens), sample.index][1],
                sample,
                lambda column: columns[_key(column.handle)][1][column.index],
            )
            for sample in samples
        ]


def _row_of(sample: TrainSample, tokens: RowTokens) -> CollatedRow:
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


def _with_columns(row: CollatedRow, sample: TrainSample, get: Callable[[Column], NDArray[np.float32]]) -> CollatedRow:
    """Return ``row`` with the columns of ``sample``. A masked sample is left out of the loss."""
    columns = {
        name: get(column) if isinstance(column, Column) else spread(column, row.loss_mask)
        for name, column in sample.columns.items()
    }
    mask = np.zeros_like(row.loss_mask) if sample.masked else row.loss_mask
    return replace(row, loss_mask=mask, columns=columns)


def spread(number: float, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return a column [T] with ``number`` where ``mask`` [T] is true, and exact zeros in its holes.

    Do not write to it: without holes it is a view of one number.
    """
    if mask.all():
        return np.broadcast_to(np.float32(number), mask.shape)
    return np.where(mask, np.float32(number), np.float32(0))


def _part(handle: Handle[Any], rows: tuple[int, ...]) -> Handle[Any]:
    """Return a handle of only these rows, if the kind of handle allows it."""
    return TokenPart(handle, rows) if isinstance(handle, TokenFile) else handle


def _key(handle: Handle[Any]) -> Hashable:
    """Return the handle itself as the key, or its address if it is the object (within one process)."""
    try:
        hash(handle)
    except TypeError:
        return id(handle)
    return handle
