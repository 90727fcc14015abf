"""A decoder's sizes, from its ``config.json``: numbers of parameters, and bytes that its layers save.

    embedding [V, H] ─▶ layer ─▶ … ─▶ layer ─▶ final norm ─▶ head [V, H], or the embedding once more (tied)
                        └ attention, MLP or experts (divided over tp, experts over ep), norms and routers (on each rank)

Only arithmetic, without torch, so that the doctor can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Differences of a ``model_type`` from Llama."""

    norm: Literal["rms", "gemma", "layer"] = "rms"
    norms: int = 2
    """Number of norms of a layer."""
    qkv_bias: bool = False
    all_biases: bool = False
    """True if all matrices have biases, the head included."""
    qk_norm: bool = False
    gated: bool = True
    """True for an MLP with a gate: three matrices instead of two."""
    fused_qkv: bool = False
    tied: bool = False
    """True if the head is the embedding by default."""
    joined: bool = False
    """True if the native engine serves it with few large operations, whose matrices have a second copy on a CPU."""


FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(joined=True),
    "mistral": ModelFamily(joined=True),
    "mixtral": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True, joined=True),
    "qwen3": ModelFamily(qk_norm=True, joined=True),
    "qwen3_moe": ModelFamily(qk_norm=True),
    "gemma": ModelFamily(norm="gemma", tied=True),
    "phi": ModelFamily(norm="layer", norms=1, all_biases=True, gated=False),
    "phi3": ModelFamily(fused_qkv=True),
}
"""Families whose memory is known."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. All numbers of parameters are for the whole model."""

    family: ModelFamily
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    tied: bool
    experts: int = 0
    """Number of experts in each layer; 0 in a dense model."""
    experts_per_token: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Read the sizes from ``config``, a ``config.json``. Returns None for a model whose memory is not known."""
        family = FAMILIES.get(str(config.get("model_type")))
        # Two kinds of layers: the sums below assume that all are equal.
        if family is None or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            return None
        experts = config.get("num_experts", config.get("num_local_experts")) or 0
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            # Not .get with a default, which would always be evaluated: a mixture may lack intermediate_size.
            width = (
                config["moe_intermediate_size"] if "moe_intermediate_size" in config else config["intermediate_size"]
            )
            return cls(
                family=family,
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate=int(width),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", family.tied)),
                experts=int(experts),
                experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
            )
        except (KeyError, TypeError, ValueError):
            return None

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def queries(self) -> int:
        """Width of a layer's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of a layer's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return 0 if self.tied else self.embedding + self.vocabulary * self.family.all_biases

    @property
    def final(self) -> int:
        """Parameters of the last norm."""
        return self.hidden * (2 if self.family.norm == "layer" else 1)

    @property
    def divided(self) -> int:
        """Parameters of a layer that tensor parallelism divides, without the experts."""
        family, attention = self.family, 2 * self.hidden * (self.queries + self.keys)
        biased = family.qkv_bias or family.all_biases or self.attention_bias
        columns = (self.queries + 2 * self.keys) * biased
        if self.experts:
            return attention + columns
        up = 2 if family.gated else 1
        columns += up * self.intermediate * (family.all_biases or self.mlp_bias)
        return attention + columns + (up + 1) * self.hidden * self.intermediate

    @property
    def of_experts(self) -> int:
        """Parameters of a layer's experts."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def kept(self) -> int:
        """Parameters of a layer that each rank of a tensor-parallel group holds whole: norms, routers, row biases."""
        family = self.family
        norms = family.norms * self.final + 2 * self.head_dim * family.qk_norm
        rows = (family.all_biases or self.attention_bias) + (family.all_biases or (self.mlp_bias and not self.experts))
        return norms + rows * self.hidden + self.experts * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        layer = self.divided + self.of_experts + self.kept
        return self.embedding + self.layers * layer + self.final + self.head

    def served(self, devices: int) -> int:
        """Number of parameters on each of ``devices`` that serve the model together."""
        divided = self.embedding + self.head + self.layers * (self.divided + self.of_experts)
        return -(-divided // devices) + self.layers * self.kept + self.final

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor in the model's files."""
        return max(self.embedding, self.hidden * self.intermediate, self.hidden * self.queries)

    # ------------------------------------------------------------------------------------------ per token

    def cache(self, itemsize: int, devices: int = 1) -> int:
        """Bytes of a token's keys and values in all layers, on each of ``devices`` that divide their heads."""
        return 2 * self.layers * -(-self.kv_heads // devices) * self.head_dim * itemsize

    def saved_by_norm(self, itemsize: int) -> int:
        """Bytes per token that a norm saves for its backward pass: its input in float32, the normalised input, and its
        output, which is a matrix's input."""
        match self.family.norm:
            case "layer":
                return 2 * itemsize * self.hidden + 2 * itemsize
            case "gemma":
                return (2 * FLOAT + itemsize) * self.hidden + FLOAT
            case _:
                return (FLOAT + 2 * itemsize) * self.hidden + FLOAT

    def saved_by_layer(self, itemsize: int, tp: int = 1) -> int:
        """Bytes per token that a layer saves for its backward pass, computed in a dtype of ``itemsize`` bytes."""
        family, heads = self.family, self.heads // tp
        queries, keys = self.queries // tp, self.keys // tp
        attention = 2 * itemsize * (queries + keys) + FLOAT * heads
        if family.fused_qkv:
            attention += itemsize * (queries + keys)
        if family.qk_norm:
            attention += (FLOAT + itemsize) * (queries + keys) + FLOAT * (self.heads + self.kv_heads) // tp
        return family.norms * self.saved_by_norm(itemsize) + attention + self._saved_by_mlp(itemsize, tp)

    def _saved_by_mlp(self, itemsize: int, tp: int) -> int:
        width = self.intermediate // tp
        if not self.experts:
            return (4 if self.family.gated else 5) * itemsize * width
        chosen = self.experts_per_token
        router = FLOAT * (self.experts + 1) + (36 + itemsize) * chosen  # scores, indices and orders
        return chosen * itemsize * (2 * self.hidden + 4 * width) + router
