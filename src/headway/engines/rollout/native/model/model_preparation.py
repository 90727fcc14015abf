"""Bringing a Hugging Face model into the state in which the engine serves it."""

from __future__ import annotations

from transformers import PreTrainedModel

from headway.engines.weights.served.served_memory import own_storages
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
    own_storages(model)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
