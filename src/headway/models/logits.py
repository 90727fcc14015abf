"""Scale and soft cap that a model applies to its output layer's result, by its config. Imports no torch.

    hidden states ─▶ output layer ─▶ × scale ─▶ cap · tanh(· / cap) ─▶ logits

Config keys differ between families: the same name is a factor in one family and a divisor in another. So the rules go
by ``model_type``. `headway.models.output_layer` compares them with the model's own code before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Rule of a model's logits: ``cap · tanh(scale · x / cap)``, where x is the output layer's result."""

    scale: float = 1.0
    """Factor of the output layer's result."""
    cap: float | None = None
    """Soft cap, positive: logits lie between -cap and cap. None: there is none."""

    def at(self, temperature: float) -> LogitRule:
        """Return the rule of the logits divided by ``temperature``."""
        return LogitRule(self.scale / temperature, None if self.cap is None else self.cap / temperature)


PLAIN = LogitRule()
"""Rule of a model whose logits are the output layer's result as it is."""


def logit_rule(model_config: Any) -> LogitRule:
    """Return the rule of a model with this Hugging Face config; `PLAIN` for families that are not listed here."""
    make, key = _RULES.get(model_config.model_type, (None, ""))
    # The config of the text part, if a model reads more than text.
    value = getattr(model_config.get_text_config(), key, None) if make else None
    return PLAIN if make is None or value is None else make(float(value))


def is_known(model_type: str) -> bool:
    """Tell whether tests compare this family's rule with its code, so that no trial is needed before a run."""
    return model_type in _RULES or model_type in _PLAIN_FAMILIES


def _capped(value: float) -> LogitRule:
    return LogitRule(cap=value)


def _divided(value: float) -> LogitRule:
    return LogitRule(scale=1.0 / value)


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

_RULES: Mapping[str, tuple[Callable[[float], LogitRule], str]] = {
    **dict.fromkeys(_CAPPED, (_capped, "final_logit_softcapping")),
    **dict.fromkeys(_DIVIDED, (_divided, "logits_scaling")),
    **dict.fromkeys(_MULTIPLIED, (LogitRule, "logit_scale")),
    "falcon_h1": (LogitRule, "lm_head_multiplier"),
    "hyperclovax": (LogitRule, "logits_scaling"),
    "inkling_text": (_divided, "logits_mup_width_multiplier"),
    "recurrent_gemma": (_capped, "logits_soft_cap"),
    "xlstm": (_capped, "output_logit_soft_cap"),
}
"""Type of the model -> function from a number in the config to the rule, and the number's key."""

_PLAIN_FAMILIES = frozenset({"gemma", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})
