"""Configs of models whose operations are counted."""

from __future__ import annotations

from transformers import MistralConfig, Qwen2Config


def qwen(layers: int = 24) -> Qwen2Config:
    """The shape of Qwen2 with 0.5 B parameters."""
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def mistral(layers: int = 4) -> MistralConfig:
    """A small model whose layers have windows, and heads of size 128."""
    return MistralConfig(
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        max_position_embeddings=4096,
        sliding_window=256,
    )
