"""The model as the engine serves it: what it must be able to do, and how new weights get into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from headway.errors import ModelError
from headway.interfaces import Manifest


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
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")


class ServedWeights:
    """The model's own tensors by name, tied ones under each of their names."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._device = model.device
        self._tensors: dict[str, torch.Tensor] = model.state_dict()
        self._parameters = [name for name, _ in model.named_parameters()]

    def check(self, manifest: Manifest) -> None:
        """Raise `ModelError` unless ``manifest`` covers every parameter of the model once, in its own shape."""
        covered: dict[int, str] = {}
        for slot in manifest.slots:
            tensor = self._tensors.get(slot.name)
            if tensor is None or tuple(tensor.shape) != slot.shape:
                found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise ModelError(f"updates bring {slot.name!r} of shape {slot.shape}; the rollout model has {found}")
            other = covered.setdefault(tensor.data_ptr(), slot.name)
            if other != slot.name:
                raise ModelError(f"updates bring {other!r} and {slot.name!r}, which the rollout model ties together")
        missing = [name for name in self._parameters if self._tensors[name].data_ptr() not in covered]
        if missing:
            raise ModelError(f"updates leave out {len(missing)} of the rollout model's weights, such as {missing[0]!r}")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new values in place, cast to the served dtype; returns when the device has them."""
        for name, tensor in weights:
            self._tensors[name].copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
