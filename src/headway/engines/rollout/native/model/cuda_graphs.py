"""Decoding steps that are recorded once and replayed: on a GPU one launch, where the step is some hundred.

A kernel of a small model takes less time than its launch from Python, so that the GPU waits. A CUDA graph holds a
step's kernels with all their addresses: it fits one number of rows, one span of attention and one division of the KV
cache, and reads the weights, the cache and the step's own inputs where they lay when it was recorded. Steps are
therefore filled up to a few numbers of rows, their spans rounded up, and each such shape is recorded when it comes for
the first time. Steps in which prompts start are not recorded: their shapes hardly ever come again.

Where a step cannot be recorded, or what is replayed is not what was computed, all steps run as they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.devices import Compute, GraphRecorder
from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.model.policy_forward import PolicyForward
from headway.engines.rollout.native.model.step_layout import Decoding, RowBlock
from headway.errors import said_by

logger = logging.getLogger(__name__)

SPAN_STEP = 256
"""Spans of recorded steps are rounded up to a multiple of this."""
MOST = 64
"""Recorded shapes that are kept, the ones used last."""
TOLERANCE = 1e-2
"""The difference of a replay's logits that is allowed, relative to the largest: the same kernels in the same order."""


def recorded_rows(rows: int) -> int:
    """Rows of the recorded step that ``rows`` rows take part in: 1, 2, 4, 8 and the multiples of 16."""
    return next((few for few in (1, 2, 4, 8) if rows <= few), -(-rows // 16) * 16)


@dataclass(frozen=True, slots=True)
class _RecordedGraph:
    tokens: torch.Tensor
    lengths: torch.Tensor
    replay: Compute


class DecodeGraphs:
    """Runs decoding steps in one cache by recording and replaying them."""

    def __init__(
        self, forward: PolicyForward, cache: SlotCache, recorder: GraphRecorder, window: int | None, dtype: torch.dtype
    ) -> None:
        """``window``: of the model's sliding attention, if it has any."""
        self._forward, self._cache, self._recorder = forward, cache, recorder
        self._window, self._dtype = window, dtype
        self._recorded: OrderedDict[tuple[int, int, int], _RecordedGraph] = OrderedDict()
        self._logits: torch.Tensor | None = None
        """[slots, V] which every recorded step writes."""
        self.works = True
        """True as long as no recording has failed."""

    def __len__(self) -> int:
        """Shapes that are recorded."""
        return len(self._recorded)

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, positions: int, least_rows: int) -> torch.Tensor | None:
        """One token for each row: ``tokens`` [A] at ``lengths`` [A], all below ``positions``; logits [A, V].

        The result is memory of its own. None where steps cannot be recorded.
        """
        if not self.works:
            return None
        wanted = len(tokens)
        rows = min(max(recorded_rows(wanted), least_rows), self._cache.rows)
        span = min(-(-positions // SPAN_STEP) * SPAN_STEP, self._cache.room)
        shape = (rows, span, self._cache.room)
        tokens, lengths = _filled(tokens, rows), _filled(lengths, rows)
        recorded = self._recorded.get(shape)
        if recorded is None:
            return self._record(shape, tokens, lengths)[:wanted]
        self._recorded.move_to_end(shape)
        # Into the tensors that the graph has recorded: it reads their addresses, whatever Python calls them.
        recorded.tokens[:] = tokens
        recorded.lengths[:] = lengths
        recorded.replay()
        assert self._logits is not None
        return self._logits[:wanted].clone()

    def clear(self) -> None:
        """The cache's memory or the weights' is about to be another: forget what was recorded."""
        self._recorded.clear()
        self._logits = None
        self._recorder.reset()

    def _record(self, shape: tuple[int, int, int], tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Record the step and compare a replay with it; its logits [A, V]."""
        rows, span, _ = shape

        def forward() -> torch.Tensor:
            block = RowBlock.of(range(rows), span, lengths, self._window, self._dtype)
            return self._forward.step(Decoding(tokens, lengths, self._cache, [block]), (), 1)[0]

        expected = forward()
        if self._logits is None:
            self._logits = expected.new_zeros(self._cache.slots, expected.shape[1])
        written = self._logits[:rows]

        def compute() -> None:
            written.copy_(forward())

        try:
            replay = self._recorder.record(compute)
            written.zero_()  # so that a replay that computes nothing does not pass with what recording left there
            replay()
        except RuntimeError as cause:
            self._give_up(f"a step of {rows} rows could not be recorded: {said_by(cause.__context__ or cause)}")
            return expected
        difference = float((written - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= TOLERANCE:
            self._give_up(f"a replayed step of {rows} rows differs from the step by {difference:.2g}, relative")
            return expected
        self._recorded[shape] = _RecordedGraph(tokens, lengths, replay)
        if len(self._recorded) > MOST:
            self._recorded.popitem(last=False)
        return expected

    def _give_up(self, why: str) -> None:
        logger.warning(
            "%s; decoding without CUDA graphs from here on (rollout.enforce_eager=true does so at once)", why
        )
        self.clear()
        self.works = False


def _filled(values: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of ``values``, zero-padded to [rows]: an unused row decodes token 0 at position 0."""
    return F.pad(values, (0, rows - len(values))) if len(values) < rows else values.clone()
