"""Bringing a Hugging Face model into the state in which the engine serves it."""

from __future__ import annotations

from transformers import PreTrainedModel

from headway.engines.served.memory import own_storages
from headway.errors import ModelError


def prepare_model(model: PreTrainedModel, max_context: int) -> None:
    """Bring ``model`` into the state in which it is served: evaluation mode, tied weights tied, maskable attention.

    Raises `ModelError` when a context of ``max_context`` tokens is more than the model was made for.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_context > positions:
        raise ModelError(
            f"prompt and response may take {max_context} tokens together, but the model was made for {positions} "
            "(lower data.max_prompt_length or data.max_response_length, or raise the model's max_position_embeddings)"
        )
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding and window is not None and max_context > window:
        raise ModelError(
            f"prompt and response may take {max_context} tokens together, but some of the model's layers attend only "
            f"to the last {window}, which the native rollout engine does not support"
        )
    model.eval()
    model.tie_weights()
    own_storages(model)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
