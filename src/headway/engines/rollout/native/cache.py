"""The KV cache: one fixed row per decoding slot, keys and values side by side.

    [layers, slots, 2·kv_heads, context, head_dim]        heads 0..kv_heads-1 are keys, the rest are values

Rows 0..active-1 are in use, so that what attention reads is a view and finished rows cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from headway.errors import ModelError


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The sizes of a decoder's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KvGeometry:
        """Read the sizes off a Hugging Face config; raises `ModelError` where it does not state them."""
        try:
            heads = int(config.num_attention_heads)
            kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
            return cls(int(config.num_hidden_layers), kv_heads, head_dim)
        except AttributeError as missing:
            raise ModelError(
                f"the native rollout engine needs a decoder whose config states its attention heads; "
                f"{type(config).__name__} does not: {missing}"
            ) from missing


class SlotCache:
    """Owns the cache's memory and knows how rows are written, filled and moved."""

    def __init__(
        self, geometry: KvGeometry, *, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.slots = slots
        self.context = context
        self._dtype, self._device = dtype, device
        self._heads = 2 * geometry.kv_heads
        self._first_rows = torch.arange(slots, device=device).unsqueeze(1) * self._heads
        self._first_rows = (self._first_rows + torch.arange(self._heads, device=device)) * context
        self.allocate()

    def allocate(self) -> None:
        # Zeros, not garbage: attention reads masked positions too, and 0 · NaN would not be 0.
        g = self.geometry
        shape = (g.layers, self.slots, self._heads, self.context, g.head_dim)
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._layers = list(self._kv.unbind(0))
        self._flat = [layer.view(-1, g.head_dim) for layer in self._layers]

    def release(self) -> None:
        """Give the memory back; every row is lost. `allocate` brings it back."""
        del self._kv, self._layers, self._flat

    def scratch(self, slots: int, context: int) -> SlotCache:
        """Another cache of the same geometry, for a few short rows beside those that decode."""
        return SlotCache(self.geometry, slots=slots, context=context, dtype=self._dtype, device=self._device)

    def addresses(self, lengths: torch.Tensor) -> torch.Tensor:
        """[A, 2·kv_heads] where rows 0..A-1 store their next token, given ``lengths`` [A]; for `append`."""
        return self._first_rows[: len(lengths)] + lengths.unsqueeze(1)

    def append(self, layer: int, addresses: torch.Tensor, kv: torch.Tensor) -> None:
        """Store one token's keys and values [A, 2·kv_heads, head_dim] in rows 0..A-1."""
        self._flat[layer][addresses] = kv

    def view(self, layer: int, start: int, stop: int, span: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [stop - start, kv_heads, span, head_dim] of rows start..stop-1: views."""
        rows = self._layers[layer][start:stop, :, :span]
        return rows[:, : self.geometry.kv_heads], rows[:, self.geometry.kv_heads :]

    def fill(self, rows: range, kv: torch.Tensor) -> None:
        """Copy one context's keys and values [layers, 2·kv_heads, T, head_dim] to the start of each of ``rows``."""
        self._kv[:, rows.start : rows.stop, :, : kv.shape[2]] = kv.unsqueeze(1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` to row ``target``."""
        self._kv[:, target, :, :length] = self._kv[:, source, :, :length]
