"""The batch: the calls that decode, each in a row, and the steps over them.

    waiting calls ─StepAdmission─▶ run: one pass over rows and contexts ─▶ sample ─▶ ended ─▶ take_out
                                        ▲                                                        │
                            KeptContexts┘◀───────────── contexts that go on later ───────────────┘

A step is launched, and then its tokens are read: at once on a CPU, after the launch of the next step on a device that
works asynchronously (`DeviceKind.runs_ahead`). The next step needs the tokens only on the device, and rows know how
many tokens they will have. The end of a row is then noticed one step late: tokens sampled beyond its end are dropped.

The batch decides nothing: the core decides which calls start or are parked, and what becomes of calls that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.types import FinishReason, SampledTokens
from headway.engines.host_copies import to_device, to_host
from headway.engines.rollout.engine_activity import DecodeStep
from headway.engines.rollout.native.model_runner import BLOCK_ROWS, ModelRunner
from headway.engines.rollout.native.sampler import BatchSampling, SeenTokens, completed, sample, window
from headway.engines.rollout.native.step_admission import KeptContexts, StepAdmission
from headway.engines.rollout.native.step_attention import PrefillContext, SharedPrompts
from headway.engines.rollout.scheduler import RequestState, not_finite, uniforms

ALIKE = 32
"""Difference in length below which rows count as equal: attending to so few positions is cheaper than moving a row."""


class DecodeRows:
    """Decoding rows as a struct of arrays over the slots, so that a step runs Python once per batch.

    Rows 0..active-1 decode. New rows are added at the end, and all rows grow at the same pace. The last row takes the
    place of a finished one. If the rows are ``ordered``, a few of the rows after it move up instead, so that long rows
    stay in front and neighbours, which attend together (see `blocks_of`), have similar lengths.
    """

    def __init__(self, slots: int, max_context: int, *, ordered: bool = False) -> None:
        self.slots = slots
        self._ordered = ordered
        self.runs: list[RequestState] = []
        self.tokens = np.zeros(slots, np.int64)
        """Last token read of each row; -2, which stops nothing, if none was read since the row was added."""
        self.lengths = np.zeros(slots, np.int64)
        """Number of tokens of each row in the KV cache once all launched steps are done."""
        self.sampled = np.zeros(slots, np.int64)
        """Number of sampled tokens of each row's call, including those launched and not yet read."""
        self.changed = False
        """True if rows were added, removed or moved since the last step was launched."""
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
        """Number of tokens of all rows in the KV cache."""
        return int(self.lengths[: self.active].sum())

    def add(self, run: RequestState) -> None:
        """Occupy the next row. Its context is, or is about to be, in the cache's row of the same number."""
        row, written = self.active, len(run.written.ids)
        self.runs.append(run)
        self.changed = True
        self.tokens[row] = -2  # not -1, which fills the unused places of `_stops`
        self.lengths[row] = len(run.request.input_ids) + written
        self._written[row] = self.sampled[row] = written
        self._limits[row] = run.limit
        self._keys[row] = run.key
        self._set_stops(row, run.request.sampling.stop_token_ids)
        self._ids[row, :written] = run.written.ids
        self._logprobs[row, :written] = run.written.logprobs
        self._versions[row, :written] = run.written.versions

    @property
    def complete(self) -> bool:
        """True if the last token of every row was launched."""
        return bool((self.sampled[: self.active] >= self._limits[: self.active]).all())

    def written(self, row: int) -> int:
        """Return the number of tokens of ``row``'s call that were read."""
        return int(self._written[row])

    def context(self, row: int) -> NDArray[np.int64]:
        """Return the tokens [T] of ``row`` in the KV cache: all but the last one that was read."""
        given = self.runs[row].request.input_ids
        return np.concatenate([given, self._ids[row, : self._written[row] - 1]], dtype=np.int64)

    def tail(self, row: int, count: int) -> NDArray[np.int32]:
        """Return the last tokens that a row's call has sampled, at most ``count``."""
        end = int(self._written[row])
        return self._ids[row, max(0, end - count) : end]

    def uniforms(self, steps: int) -> NDArray[np.float64]:
        """Return uniforms [steps, A], one for each of the rows' next tokens."""
        return uniforms(self._keys[: self.active], self.sampled[: self.active] + np.arange(steps)[:, None])

    def launched(self, decoding: int) -> None:
        """Note that a step was launched: a token per row, and the last one of the first ``decoding`` is cached."""
        self.changed = False
        self.lengths[:decoding] += 1
        self.sampled[: self.active] += 1

    def places(self, runs: Sequence[RequestState]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose calls are among the ``runs`` of a step, and their indices in ``runs``."""
        where = {run: place for place, run in enumerate(runs)}
        found = [(row, where[run]) for row, run in enumerate(self.runs) if run in where]
        rows, places = np.array(found, np.int64).reshape(-1, 2).T.copy()
        return rows, places

    def record(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Append a sampled token [R] to each of ``rows`` [R]."""
        at = self._written[rows]
        self._ids[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = version
        self.tokens[rows] = tokens
        self._written[rows] = at + 1

    def ended(self) -> list[tuple[int, FinishReason]]:
        """Return the rows that just got their last token, and why it is the last; last row first, as `remove` needs."""
        a = self.active
        stopped = (self._stops[:a] == self.tokens[:a, None]).any(1)
        over = stopped | (self._written[:a] >= self._limits[:a])
        return [
            (int(row), FinishReason.STOP if stopped[row] else FinishReason.LENGTH) for row in np.flatnonzero(over)[::-1]
        ]

    def remove(self, row: int) -> tuple[RequestState, list[tuple[int, int]]]:
        """Free ``row``, into which later rows move.

        Returns the call, its ``written`` up to date, and the rows that moved, as (from, to), in this order.
        """
        run = self.runs[row]
        end = int(self._written[row])
        # Copies: the next call's tokens are written over the row.
        run.written = SampledTokens(
            self._ids[row, :end].copy(), self._logprobs[row, :end].copy(), self._versions[row, :end].copy()
        )
        moves = []
        while row < self.active - 1:
            source = self._next(row)
            self._move(source, row)
            moves.append((source, row))
            row = source
        self.runs.pop()
        self.changed = True
        return run, moves

    def _next(self, free: int) -> int:
        """Return the row to move into the ``free`` one: the last that is about as long as the longest row after it.

        If the last row of all is in the same block of `BLOCK_ROWS`, which attend together in any order, it is that one.
        """
        last = self.active - 1
        if not self._ordered or free // BLOCK_ROWS == last // BLOCK_ROWS:
            return last
        behind = self.lengths[free + 1 : self.active]
        longest = int(behind.max())
        # In order of length, blocks of neighbours read 1.09 times the rows' positions; in another order 1.89 times.
        return free + 1 + int(np.flatnonzero(behind >= longest - max(longest // 10, ALIKE))[-1])

    def _move(self, source: int, target: int) -> None:
        self.runs[target] = self.runs[source]
        state: NDArray[Any]
        for state in (self.tokens, self.lengths, self.sampled, self._written, self._limits, self._keys, self._stops):
            state[target] = state[source]
        end = int(self._written[source])
        for state in (self._ids, self._logprobs, self._versions):
            state[target, :end] = state[source, :end]

    def _set_stops(self, row: int, stops: Sequence[int]) -> None:
        if len(stops) > self._stops.shape[1]:
            missing = np.full((self.slots, len(stops) - self._stops.shape[1]), -1, np.int64)
            self._stops = np.concatenate([self._stops, missing], axis=1)
        self._stops[row] = -1  # no token: an unused place stops nothing
        self._stops[row, : len(stops)] = stops


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A launched step whose tokens the host has not read."""

    version: int
    """Version of the weights that sampled the tokens."""
    runs: list[RequestState]
    """Calls that get a token, by row."""
    starting: Sequence[RequestState]
    """Calls that get their first token, or their first token since they were parked."""
    record: DecodeStep
    read: Callable[[], list[NDArray[Any]]]
    """Function that waits for the step, and returns its tokens [A] and their log-probs [A]."""


UNIFORMS_AHEAD = 16
"""Number of steps whose uniforms are computed and copied to the device at once; discarded when the batch changes."""
KEPT_SHARE = 8
"""Kept prefills may take 1/KEPT_SHARE of the KV cache's size, in additional memory."""


class DecodeBatch:
    """The rows and their state: keys and values, tokens seen, and contexts kept for other calls."""

    def __init__(
        self, name: str, runner: ModelRunner, max_batched_tokens: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Set up. ``name``: name of the replica in messages. For the other arguments see `EngineCore`."""
        slots, max_context = runner.slots, runner.max_context
        self.rows = DecodeRows(slots, max_context, ordered=runner.device.type == "cpu")
        self.contexts = KeptContexts(runner.cache.tree, max(max_context, runner.cache.tokens // KEPT_SHARE))
        self._prompts = SharedPrompts(slots)
        self._name, self._runner = name, runner
        self._max_batched_tokens = max_batched_tokens
        self._decode_text = decode
        self._seen = SeenTokens(slots, runner.vocabulary, runner.device)
        self._looks_for_text = False
        """True once a call with stop strings has started."""
        self._unread: deque[LaunchedStep] = deque()
        """Launched steps whose tokens have not been read, oldest first."""
        self._last: Sequence[RequestState] = ()
        """Calls that get a token in the last launched step."""
        # The steps' inputs on the device, for the rows as they were at the last launch.
        self._tokens = torch.empty(0, dtype=torch.int64, device=runner.device)
        self._lengths = self._penalised = self._tokens
        self._uniforms = deque[torch.Tensor]()
        self._sampling = BatchSampling()
        self._bars = False
        """True if a row has its stop tokens barred: it may not stop yet."""

    @property
    def active(self) -> int:
        """Number of rows that decode."""
        return self.rows.active

    # ------------------------------------------------------------------------------------- memory

    @property
    def fits(self) -> bool:
        """True if there is memory for every row's next token."""
        return self._runner.cache.fits(self.active, self._longest + 1)

    def make_room(self) -> None:
        """Make room for every row's next token. Requires `fits`."""
        self._runner.cache.reserve(self.active, self._longest + 1, self.rows.lengths[: self.active])

    def renew(self, *, in_place: bool) -> None:
        """Clear the caches for new weights. ``in_place``: open episodes keep their keys and values."""
        self._prompts.renew()
        self.contexts.clear(in_place=in_place)

    @property
    def _longest(self) -> int:
        """Number of positions of the longest row."""
        return int(self.rows.lengths[: self.active].max(initial=0))

    # ------------------------------------------------------------------------------------- a step

    def admission(self) -> StepAdmission:
        """Return the admission to the next step, given the current rows."""
        return StepAdmission(
            rows=self.active,
            positions=self._longest + 1,
            budget=self._max_batched_tokens,
            fits=self._runner.cache.fits,
            contexts=self.contexts,
        )

    def launch(self, admission: StepAdmission, version: int, record: DecodeStep) -> None:
        """Launch one forward pass over all rows and the contexts of starting calls, which get the next rows.

        A token of ``version`` is sampled for every row; rows that start come last. Nothing waits for the device.
        """
        decoding = self.active
        starting = admission.starting
        missing = [share for share in admission.shares.values() if share.missing]
        for run in starting:
            self.rows.add(run)
        ids = self._bring(decoding, [share.ids[share.found.length :] for share in missing])
        contexts = [
            PrefillContext(of, self._runner.cache.gather(share.found)) for of, share in zip(ids, missing, strict=True)
        ]
        tokens, positions, lengths = self._tokens, self._lengths, self.rows.lengths[:decoding]
        if starting:
            positions = positions[:decoding]  # a view: additions below also change `self._lengths`
        prompts = self._prompts.of(decoding) if self._runner.shares else ()
        decoded, prefilled = self._runner.step(tokens, positions, lengths, contexts, prompts)
        # After the step, which stores each row's token at the length from before it.
        positions += 1
        self.rows.launched(decoding)
        logits = [decoded] if decoding else []
        if starting:
            # After the contexts were gathered: making room may evict the blocks in which they were found.
            self._runner.cache.reserve(self.active, admission.positions, self.rows.lengths[:decoding])
            for share, result in zip(missing, prefilled, strict=True):
                share.prefilled = result
            logits.append(self._start(admission, decoding, record))
        record.cached = self.rows.cached
        self._sampling.seen = seen = self._seen.of(self.active)
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        self._tokens, logprobs = sample(joined, self._sampling, self._uniforms.popleft())
        if seen is not None:
            self._seen.record(self._penalised, self._tokens)
        self._last = [*self.rows.runs]  # a copy: rows may move before the step is read
        read = to_host([self._tokens, logprobs])
        self._unread.append(LaunchedStep(version, self._last, starting, record, read))

    @property
    def unread(self) -> int:
        """Number of launched steps whose tokens were not read."""
        return len(self._unread)

    def _bring(self, decoding: int, contexts: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        """Copy the rows' changed numbers and the tokens of ``contexts`` to the device, in one copy.

        The first ``decoding`` rows were in the last step: its tokens are on the device, and are put in the rows' order.
        """
        rows, arrays = self.rows, dict[str, NDArray[Any]]()
        if changed := self._bars or rows.changed:
            params = [run.request.sampling for run in rows.runs]
            arrays["places"] = rows.places(self._last)[1][:decoding]
            arrays["lengths"] = rows.lengths[: rows.active].copy()  # a CPU's tensor would be the array itself
            arrays["penalised"] = np.array([row for row, p in enumerate(params) if p.repetition_penalty != 1], np.int64)
            arrays |= BatchSampling.numbers(params, self._runner.vocabulary, rows.sampled)
        elif self._uniforms:
            return []  # calls that start change the rows
        # For many steps at once: computed in each step, they cost more Python than the rest of a step on a CPU.
        arrays["uniforms"] = rows.uniforms(UNIFORMS_AHEAD)
        brought = to_device([*arrays.values(), *contexts], self._runner.device)
        numbers = dict(zip(arrays, brought, strict=False))
        self._uniforms = deque(numbers.pop("uniforms"))
        if changed:
            # Rows that start are not in it: their first token is sampled from their prefill.
            self._tokens = self._tokens.index_select(0, numbers.pop("places"))
            self._lengths, self._penalised = numbers.pop("lengths"), numbers.pop("penalised")
            self._sampling = BatchSampling(**numbers)
            self._bars = any(p.min_tokens > of for p, of in zip(params, rows.sampled.tolist(), strict=False))
        return brought[len(arrays) :]

    def read(self, clock: Callable[[], float]) -> tuple[DecodeStep, float, list[tuple[RequestState, FinishReason]]]:
        """Read the tokens of the oldest unread step, waiting for it, and record those of rows that are still active.

        Returns the step's record, the time of reading by ``clock``, and the calls that have ended, whose rows are free.
        Raises `NonFinite` for log-probs that are not finite.
        """
        step = self._unread[0]
        tokens, logprobs = step.read()
        if step.runs == self.rows.runs:  # no row has moved since
            rows = at = np.arange(self.active)
        else:
            rows, at = self.rows.places(step.runs)
        if not np.isfinite(logprobs[at]).all():  # the step stays unread: reading it again raises again
            raise not_finite(self._name, step.version)
        self._unread.popleft()
        self.rows.record(rows, tokens[at], logprobs[at], step.version)
        now = clock()
        for run in step.starting:
            if run.started is None:
                run.started, run.oldest_version = now, step.version
        step.record.active = len(rows)
        # `_ended` has the last row first: later rows move up when one is removed, and must not end after that.
        return step.record, now, [(self.remove(row, keep=True), reason) for row, reason in self._ended()]

    def _ended(self) -> list[tuple[int, FinishReason]]:
        """Return the rows that just got their last token, and why it is the last; last row first."""
        ended = dict(self.rows.ended())
        for row, run in enumerate(self.rows.runs) if self._looks_for_text else ():
            sampling = run.request.sampling
            if not sampling.stop or self.rows.written(row) <= sampling.min_tokens:
                continue
            tail = self.rows.tail(row, window(sampling.stop)).tolist()
            if completed(tail, sampling.stop, self._decode_text):
                ended[row] = FinishReason.STOP
        return sorted(ended.items(), reverse=True)

    def remove(self, row: int, *, keep: bool = False) -> RequestState:
        """Free a row; later rows move up, also in the cache. ``keep`` its context if its episode may call again."""
        cache, shared = self._runner.cache, self.contexts.end(self.rows.runs[row])
        kept = None
        if keep and shared is not None:
            # Read before the row is freed: another row is copied into its place, over the keys and values.
            ids = self.rows.context(row)
            kept = ids, shared, cache.read(row, len(ids))
        run, moves = self.rows.remove(row)
        for source, target in moves:
            self._prompts.move(source, target)
            cache.move(source, target, int(self.rows.lengths[target]))
            self._seen.move(source, target)
        if kept is not None:
            cache.store(run.request.trajectory, *kept, rows=self.active)
        return run

    def _start(self, admission: StepAdmission, first: int, step: DecodeStep) -> torch.Tensor:
        """Write the contexts of the rows from ``first`` on into the cache. Returns next-token logits [S, V]."""
        logits: list[torch.Tensor] = []
        for share in admission.shares.values():
            assert share.prefilled is not None
            step.prefilled += share.missing
            step.found += len(share.ids) * len(share.runs) - share.missing
            self.contexts.start(share)
            rows = range(first + len(logits), first + len(logits) + len(share.runs))
            for row, run in zip(rows, share.runs, strict=True):
                self._prompts.add(row, run.request.input_ids, run.request.together)
                if run.request.sampling.repetition_penalty != 1:
                    self._seen.add(row, share.ids)
                self._looks_for_text = self._looks_for_text or bool(run.request.sampling.stop)
            self._runner.cache.fill(rows, share.prefilled.kv)
            logits += [share.prefilled.logits] * len(rows)
        return torch.stack(logits)
