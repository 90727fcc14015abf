"""Models that the native engine can run: checks of a config before anything starts, and the preparation of a module.

Also here: the sizes of a model's keys and values, and its attention windows, from its config.

A short trial at the engine's start finds what a config does not tell (`headway.engines.rollout.native.fused_forward`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headway.errors import ModelError, said_by


def check_kind(config: PreTrainedConfig, max_context: int) -> None:
    """Raise `ModelError` if the config shows that the engine's cache or masks do not suit the model."""
    text, why = config.get_text_config(), ""
    kind = text.model_type
    if kind == "bloom" or (kind == "falcon" and text.alibi):
        why = "it has biases of its attention (ALiBi), which its code makes from a mask of whole rows"
    elif kind == "rwkv":
        why = "it has a recurrent state in place of keys and values"
    elif getattr(text, "kv_lora_rank", None):
        why = "it has latent attention, whose keys and values have heads of other sizes than the config's head_dim"
    elif kind == "gpt_neo" and set(text.attention_layers) != {"global"} and text.window_size < max_context:
        own = f"its code makes windows of {text.window_size} tokens by itself"
        why = f"{own}, and prompt and response may take {max_context} together"
    if why:
        raise not_served(config, why)


def has_experts(config: PreTrainedConfig) -> bool:
    """Tell whether a router gives each token to some of many experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def not_served(config: PreTrainedConfig, why: str) -> ModelError:
    """Return the error for a model that only another engine might run; it names the model, its kind, and ``why``."""
    path = getattr(config, "_name_or_path", "")
    which = f"model.path={path}" if path else "the model"
    return ModelError(
        f"{which}: the native rollout engine cannot run this model (model_type {config.model_type}): {why}; set "
        "rollout.name=vllm, if vLLM serves it"
    )


def prepare_model(model: PreTrainedModel, max_context: int) -> None:
    """Prepare ``model`` for serving: evaluation mode, tied weights, and attention that takes masks.

    Raises `ModelError` if ``max_context`` is more than the model supports.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_context > positions:
        raise ModelError(
            f"prompt and response may take {max_context} tokens together, but the model was made for {positions} "
            "(lower data.max_prompt_length or data.max_response_length, or raise the model's max_position_embeddings)"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and original is not None and max_context > original:
        raise ModelError(
            f"prompt and response may take {max_context} tokens together; from {original} on this model turns all "
            "positions differently (longrope), those that are cached too, which the native rollout engine cannot do "
            f"(keep data.max_prompt_length + data.max_response_length to {original}, or set rollout.name=vllm)"
        )
    model.eval()
    model.tie_weights()
    for parameter in model.parameters():
        # Memory of a weights file that is mapped is not this process's own: an engine that sleeps could not resize it.
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.detach().clone()
    if model.config._attn_implementation not in ("sdpa", "eager"):  # others may take no mask, as rows need it
        model.set_attn_implementation("sdpa")


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Sizes of a decoder's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KvGeometry:
        """Read the sizes off a Hugging Face config; raises `ModelError` where it does not state them."""
        try:
            heads = int(config.num_attention_heads)
            kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
                kv_heads = 1  # Falcon, whose config gives no number
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
            return cls(int(config.num_hidden_layers), kv_heads, head_dim)
        except (AttributeError, RuntimeError) as missing:  # the latter, of transformers, where layers differ
            raise not_served(
                config, f"its config does not state one size of attention heads for all layers ({said_by(missing, 80)})"
            ) from missing


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding attention windows of a model, for contexts of a given length; Mistral and some Qwen2 models have them.

    A windowed layer keeps as many keys and values as other layers; those before the window are masked.
    """

    size: int | None
    """Number of tokens that a windowed layer attends to, including the newest; None: no window is ever full."""
    layers: tuple[bool, ...]
    """Flag of each layer, True if it is windowed."""

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context: int) -> Windows:
        """Read the windows from a Hugging Face config. Raises `ModelError` for other kinds of attention."""
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
        """True where some layers are windowed and some are not."""
        return len(set(self.layers)) > 1

    def causal(self, queries: range, dtype: torch.dtype, device: torch.device, *, windowed: bool) -> torch.Tensor:
        """[Q, keys up to the last query]: 0 where a query, at one of the positions ``queries``, attends, else -inf."""
        keys = torch.arange(queries.stop, device=device)
        ahead = keys - keys[queries.start :, None]
        hidden = ahead > 0
        if windowed and self.size is not None:
            hidden |= ahead <= -self.size
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
