"""Decoding steps that are recorded once and replayed: on a GPU one launch, where the step is some hundred.

A kernel of a small model takes less time than its launch from Python, so that the GPU waits. A CUDA graph holds a
step's kernels with all their addresses: it fits one number of rows, one span of attention and one division of the KV
cache. Steps are therefore filled up to a few numbers of rows, their spans rounded up, and each such shape is recorded
when it comes for the first time. Steps in which prompts start are not recorded: their shapes hardly ever come again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.engines.rollout.native.cache import SlotCache
from headway.engines.rollout.native.forward import Decoding, PolicyForward, RowBlock
from headway.errors import RunError

Compute = Callable[[], torch.Tensor]
Recorder = Callable[[Compute], Compute]
"""Runs a function of fixed memory, and gives back one that does the same again and puts its result into the same
memory."""

SPAN_STEP = 256
"""Spans of recorded steps are rounded up to a multiple of this."""


def recorded_rows(rows: int) -> int:
    """Rows of the recorded step that ``rows`` rows take part in: 1, 2, 4 and the multiples of 8."""
    return next((few for few in (1, 2, 4) if rows <= few), -(-rows // 8) * 8)


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: they are replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            self._warm_up(compute)
            graph = torch.cuda.CUDAGraph()
            # Another thread may copy weights to this device meanwhile: only this thread's calls are held to the rules.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _warm_up(self, compute: Compute) -> None:
        """Let libraries take their workspaces, which they may not while they are recorded, and not on this stream."""
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            compute()
        current.wait_stream(aside)


@dataclass(frozen=True, slots=True)
class _Recorded:
    tokens: torch.Tensor
    lengths: torch.Tensor
    replay: Compute


class DecodeGraphs:
    """Runs decoding steps in one cache by recording and replaying them."""

    def __init__(
        self, forward: PolicyForward, cache: SlotCache, recorder: Recorder, window: int | None, dtype: torch.dtype
    ) -> None:
        """``window``: of the model's sliding attention, if it has any."""
        self._forward, self._cache, self._recorder = forward, cache, recorder
        self._window, self._dtype = window, dtype
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}

    def __len__(self) -> int:
        """Shapes that are recorded."""
        return len(self._recorded)

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, positions: int, least_rows: int) -> torch.Tensor:
        """One token for each row: ``tokens`` [A] at ``lengths`` [A], all below ``positions``; logits [A, V].

        The result is memory of its own. Raises `RunError` where a step cannot be recorded.
        """
        wanted = len(tokens)
        rows = min(max(recorded_rows(wanted), least_rows), self._cache.rows)
        span = min(-(-positions // SPAN_STEP) * SPAN_STEP, self._cache.room)
        shape = (rows, span, self._cache.room)
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._recorded[shape] = self._record(_filled(tokens, rows), _filled(lengths, rows), span)
        else:
            recorded.tokens[:] = _filled(tokens, rows)
            recorded.lengths[:] = _filled(lengths, rows)
        return recorded.replay()[:wanted].clone()

    def clear(self) -> None:
        """The cache's memory or the weights' is about to be another: forget what was recorded."""
        self._recorded.clear()

    def _record(self, tokens: torch.Tensor, lengths: torch.Tensor, span: int) -> _Recorded:
        def compute() -> torch.Tensor:
            block = RowBlock.of(range(len(tokens)), span, lengths, self._window, self._dtype)
            return self._forward.step(Decoding(tokens, lengths, self._cache, [block]), (), 1)[0]

        try:
            return _Recorded(tokens, lengths, self._recorder(compute))
        except RuntimeError as cause:
            raise RunError(
                f"a decoding step of {len(tokens)} rows and {span} positions could not be recorded as a CUDA graph: "
                f"{cause}; decode without graphs: rollout.enforce_eager=true"
            ) from cause


def _filled(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows]: rows that nobody uses have the token 0, at position 0."""
    return F.pad(values, (0, rows - len(values)))
