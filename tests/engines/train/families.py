"""Tiny models of several families, whose norms and biases are no constants, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headway.models.made_model import character_tokenizer

VOCABULARY = "0123456789abcdef"
SIZES: dict[str, Any] = {
    "vocab_size": 18,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 8}
EXPERTS = {**HEAD, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, **HEAD),
    "llama-odd": lambda: LlamaConfig(**{**SIZES, "vocab_size": 19, "intermediate_size": 47}, **HEAD),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEAD),
    "qwen3-tied": lambda: Qwen3Config(**{**SIZES, **HEAD, "tie_word_embeddings": True}),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3-moe-odd": lambda: Qwen3MoeConfig(**SIZES, **{**EXPERTS, "moe_intermediate_size": 10}),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SIZES,
        **HEAD,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, **HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "mistral": lambda: MistralConfig(**SIZES, **HEAD, sliding_window=7),
    "bloom": lambda: BloomConfig(
        vocab_size=18, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1, pad_token_id=0
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=18, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=1
    ),
    "gemma": lambda: GemmaConfig(**{**SIZES, **HEAD, "tie_word_embeddings": True}),
    "gemma2": lambda: Gemma2Config(**{**SIZES, **HEAD, "tie_word_embeddings": True}, sliding_window=7),
    "phi": lambda: PhiConfig(**SIZES),
    "phi3": lambda: Phi3Config(**SIZES),
}


def make_family(name: str, folder: Path) -> str:
    """Write a model of a family to ``folder``, unless it is there; returns its path."""
    if not folder.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    else:
                        parameter.normal_(0, 0.08)
                for name, buffer in model.named_buffers():
                    if name.endswith("_bias"):
                        buffer.add_(0.1 * torch.rand_like(buffer))
        model.save_pretrained(folder)
        character_tokenizer(VOCABULARY, 128).save_pretrained(folder)
    return str(folder)
