"""The layout of a step: rows that decode, contexts to prefill, shared prompts, attention windows and masks.

Shape suffixes: A decoding rows, C contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.prefix_cache import BLOCK
from headway.engines.rollout.native.supported_models import not_served
from headway.engines.rollout.scheduler import CallRun

LEAST_TOKENS = 128
"""Tokens of the shortest prompt that is attended to apart: below, another call costs more than is saved."""
LEAST_CALLS = 4
"""Calls of the smallest group whose prompt is attended to apart."""
TOGETHER = 8
"""Rows of one attention call to a prompt."""


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Some of the rows that have one prompt."""

    rows: NDArray[np.int64]
    """[1 … TOGETHER]"""
    length: int
    """Tokens of the prompt."""


class SharedPrompts:
    """The prompt of each row, where several rows have it in common: its keys are read once for all of them.

    Each row keeps a copy of its prompt's keys and values, and any of the copies is as good as the others. A call of a
    group attends to its prompt and to its own tokens apart, and the two are merged by their log-sum-exp. Whether it
    does depends on the call alone, never on who decodes beside it, and the prompt's part is always computed for
    `TOGETHER` rows, some of which nobody uses. What is sampled is then the same with the whole group and alone.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = np.zeros(slots, np.int64)
        """[slots] tokens of the row's prompt that are attended to apart; 0: none."""
        self._ids = np.zeros(slots, np.int64)
        self._keys: list[tuple[int, bytes] | None] = [None] * slots
        self._known: dict[tuple[int, bytes], int] = {}
        self._rows: Counter[tuple[int, bytes]] = Counter()
        self._generation = 0
        self._next = 0

    def add(self, row: int, run: CallRun) -> None:
        """``run`` has got ``row``, in whose cache its prompt was prefilled under the weights that are served."""
        prompt = len(run.call.input_ids)
        if run.call.together < LEAST_CALLS or prompt < LEAST_TOKENS:
            self.lengths[row], self._keys[row] = 0, None
            return
        key = (self._generation, run.call.input_ids.tobytes())
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        self._rows[key] += 1
        self.lengths[row], self._ids[row], self._keys[row] = prompt, self._known[key], key

    def remove(self, row: int, last: int) -> None:
        """The call in ``row`` has left; that in ``last`` takes its place."""
        key = self._keys[row]
        if key is not None:
            self._rows[key] -= 1
            if not self._rows[key]:
                del self._rows[key], self._known[key]
        self.lengths[row], self._ids[row], self._keys[row] = self.lengths[last], self._ids[last], self._keys[last]

    def renew(self) -> None:
        """New weights are served: what starts from now on has other keys and values of the same prompt."""
        self._generation += 1

    def of(self, active: int) -> list[SharedPrompt]:
        """The prompts of rows 0..active-1 that are attended to apart, each once for every `TOGETHER` rows."""
        rows = np.flatnonzero(self.lengths[:active])
        if not len(rows):
            return []
        ids = self._ids[rows]
        order = np.argsort(ids, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(ids[order])) + 1)
        return [
            SharedPrompt(group[start : start + TOGETHER], int(self.lengths[group[0]]))
            for group in groups
            for start in range(0, len(group), TOGETHER)
        ]


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """The attention windows of a model, for contexts of some length: Mistral and some Qwen2 models have them.

    A windowed layer's keys and values are kept as far as all others' are; what lies before the window is masked.
    """

    size: int | None
    """Tokens that a windowed layer attends to, the newest included; None: no layer's window is ever full."""
    layers: tuple[bool, ...]
    """Flags of the layers that are windowed."""

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context: int) -> Windows:
        """Read them off a Hugging Face config. Raises `ModelError` for kinds of attention that are neither."""
        whole, config = config, config.get_text_config()
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or [FULL if size is None else SLIDING] * config.num_hidden_layers
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise not_served(whole, f"some of its layers have {unknown[0]}, and the engine knows {FULL} and {SLIDING}")
        layers = tuple(kind == SLIDING for kind in kinds)
        if size is None or size >= max_context or not any(layers):
            return cls(None, (False,) * len(layers))
        return cls(int(size), layers)

    @property
    def mixed(self) -> bool:
        """Some layers are windowed and some are not."""
        return len(set(self.layers)) > 1

    def causal(
        self, queries: range, keys: int, dtype: torch.dtype, device: torch.device, *, windowed: bool
    ) -> torch.Tensor:
        """[Q, keys]: 0 where a query, at one of the positions ``queries``, attends, else -inf."""
        ahead = torch.arange(keys, device=device) - torch.arange(queries.start, queries.stop, device=device)[:, None]
        hidden = ahead > 0
        if windowed and self.size is not None:
            hidden |= ahead <= -self.size
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class BlockMasks:
    """The masks of blocks of queries at fixed places, each over all keys up to its own end: views of a single one.

    A mask depends only on how far a key is before a query, so that of an early block is the end of that of a late one.
    """

    def __init__(self, windows: Windows, positions: int, block: int, dtype: torch.dtype, device: torch.device) -> None:
        """``positions``: the most, a multiple of ``block``."""
        last = range(positions - block, positions)
        self._block, self._positions = block, positions
        full = windows.causal(last, positions, dtype, device, windowed=False)
        windowed = None if windows.size is None else windows.causal(last, positions, dtype, device, windowed=True)
        self._masks = (full, full if windowed is None else windowed)
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Full and windowed mask [block, (index + 1) · block]: 0 where the ``index``-th block's queries attend."""
        masks = self._of.get(index)
        if masks is None:
            start = self._positions - (index + 1) * self._block
            full, windowed = self._masks
            masks = self._of[index] = (full[:, start:], windowed[:, start:])
        return masks


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive decoding rows that attend together: rows start..stop-1, over ``span`` positions from ``first`` on."""

    start: int
    stop: int
    span: int
    mask: torch.Tensor
    """[stop - start, 1, 1, span], 0 where a row has a token (the new one included), else -inf."""
    windowed: torch.Tensor
    """Mask like ``mask`` for layers with a sliding window: 0 only for the last tokens of each row."""
    first: int = 0
    """Tokens of each row that come before: those of its prompt, which are attended to apart."""

    @classmethod
    def of(
        cls, rows: range, span: int, lengths: torch.Tensor, window: int | None, dtype: torch.dtype, first: int = 0
    ) -> RowBlock:
        """Select ``rows`` of those whose new token is at ``lengths`` [A]."""
        newest = lengths[rows.start : rows.stop, None]
        positions = torch.arange(first, first + span, device=lengths.device)
        zeros = torch.zeros(len(rows), span, dtype=dtype, device=lengths.device)
        mask = zeros.masked_fill_(positions > newest, -torch.inf)
        windowed = mask if window is None else mask.masked_fill(positions <= newest - window, -torch.inf)
        return cls(rows.start, rows.stop, span, mask[:, None, None], windowed[:, None, None], first)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows 0..A-1 of a cache, which run one token each."""

    tokens: torch.Tensor
    """[A]"""
    lengths: torch.Tensor
    """[A] positions of the tokens."""
    cache: SlotCache
    """Cache that stores the rows' keys and values."""
    blocks: list[RowBlock]
    """Blocks that together have each row once."""
    prompts: Sequence[SharedPrompt] = ()
    """Prompts that rows attend to apart, where the forward pass `shares` them."""


@dataclass(frozen=True, slots=True)
class PrefillContext:
    """A context to prefill, or the rest of one."""

    tokens: torch.Tensor
    """[T], at least one."""
    past: torch.Tensor | None = None
    """[layers, 2·kv_heads, P, head_dim] keys and values of the P tokens before; None: there are none."""

    @property
    def start(self) -> int:
        """P, the position of the first token."""
        return 0 if self.past is None else self.past.shape[2]


def alike(contexts: Sequence[PrefillContext], block: int | None) -> list[list[int]]:
    """Indices of contexts that begin at the same place and end in the same block, together; None: at the same place."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, context in enumerate(contexts):
        stop = context.start + len(context.tokens)
        groups.setdefault((context.start, stop if block is None else -(-stop // block)), []).append(index)
    return list(groups.values())


def block_masks(windows: Windows, max_context: int, dtype: torch.dtype, device: torch.device) -> BlockMasks | None:
    """The masks of a prefill that is cut into blocks; None where it is not."""
    if device.type != "cpu":
        return None
    return BlockMasks(windows, -(-max_context // BLOCK) * BLOCK, BLOCK, dtype, device)
