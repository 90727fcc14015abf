"""A model's treatment of its logits after its output layer, by its config alone: no torch, so that the doctor can ask.

    hidden states ─▶ output layer ─▶ × scale ─▶ cap · tanh(· / cap) ─▶ logits

Names of config keys differ between families, and one name means a factor in one and a divisor in another: so the rules
go by ``model_type``. `headway.models.output_layer` holds them against the model's own code before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Rule of a model's logits: ``cap · tanh(scale · x / cap)``, with x what its output layer gives."""

    scale: float = 1.0
    """Factor of the output layer's result."""
    cap: float | None = None
    """Soft cap, positive: logits lie between -cap and cap. None: there is none."""


PLAIN = LogitRule()
"""Rule of a model whose logits are the output layer's result as it is."""


def logit_rule(model_config: Any) -> LogitRule:
    """The rule of a model with this Hugging Face config; `PLAIN` for families that are not listed here."""
    rule = _RULES.get(model_config.model_type)
    return PLAIN if rule is None else rule(model_config)


def is_known(model_type: str) -> bool:
    """Tell whether tests compare this family's rule with its code, so that no trial is needed before a run."""
    return model_type in _RULES or model_type in _PLAIN_FAMILIES


def _value(model_config: Any, key: str) -> float | None:
    """A number of the config, or of its text part's where the model reads more than text."""
    text = model_config.get_text_config()
    value = getattr(text, key, None)
    return None if value is None else float(value)


def _capped(key: str, model_config: Any) -> LogitRule:
    return LogitRule(cap=_value(model_config, key))


def _multiplied(key: str, model_config: Any) -> LogitRule:
    factor = _value(model_config, key)
    return LogitRule(scale=1.0 if factor is None else factor)


def _divided(key: str, model_config: Any) -> LogitRule:
    divisor = _value(model_config, key)
    return LogitRule(scale=1.0 if divisor is None else 1.0 / divisor)


_CAPPED = (
    "beam",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "inkling2_text",
    "nanochat",
    "vaultgemma",
)
_DIVIDED = (
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "minicpm3",  # MiniCPM3 divides what its output layer reads, which has no bias: the same
)
_MULTIPLIED = ("cohere", "cohere2", "cohere2_moe", "cohere_compass_text")

_RULES: Mapping[str, Callable[[Any], LogitRule]] = {
    **dict.fromkeys(_CAPPED, partial(_capped, "final_logit_softcapping")),
    **dict.fromkeys(_DIVIDED, partial(_divided, "logits_scaling")),
    **dict.fromkeys(_MULTIPLIED, partial(_multiplied, "logit_scale")),
    "falcon_h1": partial(_multiplied, "lm_head_multiplier"),
    "hyperclovax": partial(_multiplied, "logits_scaling"),
    "inkling_text": partial(_divided, "logits_mup_width_multiplier"),
    "recurrent_gemma": partial(_capped, "logits_soft_cap"),
    "xlstm": partial(_capped, "output_logit_soft_cap"),
}

_PLAIN_FAMILIES = frozenset({"gemma", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})
