"""Layers that attend to the last tokens only: sliding windows, as Mistral and some Qwen2 models have them.

A windowed layer's keys and values are kept as far as all others' are; what lies before the window is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from headway.engines.rollout.native.supported_models import not_served

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """The attention windows of a model, for contexts of some length."""

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
