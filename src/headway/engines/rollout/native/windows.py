"""Layers that attend to the last tokens only: sliding windows, as Mistral and some Qwen2 models have them.

A windowed layer's keys and values are kept as far as all others' are; what lies before the window is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from headway.errors import ModelError

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
        config = config.get_text_config()
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or [FULL if size is None else SLIDING] * config.num_hidden_layers
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise ModelError(
                f"some of the model's layers have {unknown[0]}; the native rollout engine knows {FULL} and "
                f"{SLIDING} (set rollout.name=vllm, if vLLM serves this model)"
            )
        layers = tuple(kind == SLIDING for kind in kinds)
        if size is None or size >= max_context or not any(layers):
            return cls(None, (False,) * len(layers))
        return cls(int(size), layers)

    @property
    def mixed(self) -> bool:
        """Some layers are windowed and some are not."""
        return len(set(self.layers)) > 1

    def causal(self, length: int, dtype: torch.dtype, device: torch.device, *, windowed: bool) -> torch.Tensor:
        """[length, length]: 0 where a query (row) attends, else -inf."""
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if windowed and self.size is not None:
            allowed &= torch.ones_like(allowed).triu(1 - self.size)
        return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
