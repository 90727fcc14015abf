"""The decoding rows: per-row state as arrays, so that a step touches Python once per batch, not once per token.

Rows 0..active-1 decode. A finished row is filled from the end: since rows start short at the end and grow at the same
pace, long ones gather at the front, which keeps neighbouring rows of similar length (see `Runner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.types import FinishReason, SampledTokens
from headway.engines.rollout.call_run import CallRun
from headway.engines.rollout.randomness import uniforms


class DecodeRows:
    """Struct of arrays over the slots."""

    def __init__(self, slots: int, max_context: int) -> None:
        self.slots = slots
        self.runs: list[CallRun] = []
        self.tokens = np.zeros(slots, np.int64)
        """Last sampled token: the input of the next step."""
        self.lengths = np.zeros(slots, np.int64)
        """Tokens of each row in the KV cache."""
        self._written = np.zeros(slots, np.int64)
        self._limits = np.zeros(slots, np.int64)
        self._keys = np.zeros(slots, np.uint64)
        self._stops = np.full((slots, 1), -1, np.int64)
        self._ids = np.zeros((slots, max_context), np.int32)
        self._logprobs = np.zeros((slots, max_context), np.float32)
        self._versions = np.zeros((slots, max_context), np.int32)

    @property
    def active(self) -> int:
        return len(self.runs)

    @property
    def cached(self) -> int:
        """Tokens in the KV cache, of all rows."""
        return int(self.lengths[: self.active].sum())

    def add(self, run: CallRun) -> None:
        """Occupy the next row; its context is (about to be) in the cache's row of the same number."""
        row, written = self.active, len(run.written.ids)
        self.runs.append(run)
        self.lengths[row] = len(run.call.input_ids) + written
        self._written[row] = written
        self._limits[row] = run.limit
        self._keys[row] = run.key
        self._set_stops(row, run.call.sampling.stop_token_ids)
        self._ids[row, :written] = run.written.ids
        self._logprobs[row, :written] = run.written.logprobs
        self._versions[row, :written] = run.written.versions

    @property
    def written(self) -> NDArray[np.int64]:
        """[A] tokens that each row's call has sampled."""
        return self._written[: self.active]

    def context(self, row: int) -> NDArray[np.int64]:
        """[T] the tokens of ``row`` that the KV cache has."""
        given, length = self.runs[row].call.input_ids, int(self.lengths[row])
        return np.concatenate([given, self._ids[row, : length - len(given)]], dtype=np.int64)

    def tail(self, row: int, count: int) -> NDArray[np.int32]:
        """The last tokens that a row's call has sampled, at most ``count``."""
        end = int(self._written[row])
        return self._ids[row, max(0, end - count) : end]

    def uniforms(self) -> NDArray[np.float64]:
        """[A] one uniform for each row's next token."""
        return uniforms(self._keys[: self.active], self._written[: self.active])

    def record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """Append one sampled token [A] to every row."""
        rows = np.arange(self.active)
        at = self._written[: self.active]
        self._ids[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = version
        self.tokens[: self.active] = tokens
        at += 1

    def ended(self) -> list[tuple[int, FinishReason]]:
        """Rows that just got their last token, and why; the last row first, as `remove` needs them."""
        a = self.active
        stopped = (self._stops[:a] == self.tokens[:a, None]).any(1)
        over = stopped | (self._written[:a] >= self._limits[:a])
        return [
            (int(row), FinishReason.STOP if stopped[row] else FinishReason.LENGTH) for row in np.flatnonzero(over)[::-1]
        ]

    def remove(self, row: int) -> tuple[CallRun, int]:
        """Free ``row``; the last row takes its place.

        Returns the call, its ``written`` up to date, and the number of the row that moved (``row`` if none did).
        """
        run, last = self.runs[row], self.active - 1
        end = int(self._written[row])
        run.written = SampledTokens(
            self._ids[row, :end].copy(), self._logprobs[row, :end].copy(), self._versions[row, :end].copy()
        )
        self.runs[row] = self.runs[last]
        self.runs.pop()
        if row != last:
            state: NDArray[Any]
            for state in (self.tokens, self.lengths, self._written, self._limits, self._keys, self._stops):
                state[row] = state[last]
            end = int(self._written[last])
            for state in (self._ids, self._logprobs, self._versions):
                state[row, :end] = state[last, :end]
        return run, last

    def _set_stops(self, row: int, stops: Sequence[int]) -> None:
        if len(stops) > self._stops.shape[1]:
            missing = np.full((self.slots, len(stops) - self._stops.shape[1]), -1, np.int64)
            self._stops = np.concatenate([self._stops, missing], axis=1)
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops
