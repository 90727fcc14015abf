"""Trial of a model's own code: its logits must equal its output layer's result under `headway.models.logits`' rule.

    made-up hidden states ─▶ the model's forward pass, its decoder left out ─▶ logits
                     └────▶ a small output layer ─▶ the rule ──────────────▶ logits, too

The decoder is left out and the output layer replaced by a small one, so that a model without weights (on the meta
device) can be tried as well as a loaded one, in milliseconds whatever its size.

Shape suffixes: S positions, H hidden size.
"""

from __future__ import annotations

from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from headway.errors import ModelError
from headway.models.logits import LogitRule, logit_rule

_LOGITS = 8
_MAGNITUDES = (0.1, 1.0, 3.0, 10.0, 100.0)
"""Sizes of the logits that are tried: small ones show a factor, large ones a cap."""


def apply_rule(output: Tensor, rule: LogitRule) -> Tensor:
    """Compute logits from the output layer's result, of any shape, in its dtype."""
    scaled = output * rule.scale
    return scaled if rule.cap is None else torch.tanh(scaled / rule.cap) * rule.cap


@torch.no_grad()
def check_output_layer(lm: PreTrainedModel, whose: str) -> LogitRule:
    """Make sure that log-probs can be computed from hidden states, and return the rule by which.

    ``whose`` begins the message: the model's path, or the name of its owner. ``lm`` is unchanged afterwards, and may be
    on the meta device. Then only the code after the decoder is tried. If that code cannot run without the decoder, the
    model passes until it is loaded, unless there are weights after the decoder besides the output layer's.

    Raises:
        ModelError: the output layer is no linear layer, or the logits differ from the rule applied to its result.
    """
    if not isinstance(lm.get_output_embeddings(), nn.Linear):
        raise ModelError(f"{whose}: {_family(lm)} has an output layer that is not a linear layer; {_WAY_OUT}")
    rule = logit_rule(lm.config)
    tried = _without_decoder(lm)
    if _has_other_weights(lm) if tried is None else not _close(apply_rule(tried[1], rule), tried[0]):
        raise _differs(lm, whose)
    if lm.device.type != "meta" and not _close(*_as_a_whole(lm, rule)):
        raise _differs(lm, whose)
    return rule


_WAY_OUT = "its log-probs would be computed wrongly, so it cannot be trained; give another model (docs/your-own.md)"


def _differs(lm: PreTrainedModel, whose: str) -> ModelError:
    return ModelError(
        f"{whose}: {_family(lm)} makes its logits in another way than by its output layer, a factor and a soft cap "
        f"that are known for this family; {_WAY_OUT}"
    )


def _family(lm: PreTrainedModel) -> str:
    return f"a {lm.config.model_type!r} model ({type(lm).__name__})"


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether both are equal up to rounding in ``expected``'s dtype, relative to its largest value."""
    if actual.shape != expected.shape:
        return False
    exact = expected.dtype in (torch.float32, torch.float64)
    tolerance = 1e-5 if exact else 2e-2
    largest = max(1.0, float(expected.nan_to_num().abs().max()))
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _as_a_whole(lm: PreTrainedModel, rule: LogitRule) -> tuple[Tensor, Tensor]:
    """Return logits of two tokens, from the last hidden states by the rule, and by the model itself."""
    head = lm.get_output_embeddings()
    ids = torch.arange(2, device=head.weight.device).unsqueeze(0) % lm.config.get_text_config().vocab_size
    output = head(lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return apply_rule(output, rule), lm(input_ids=ids, use_cache=False).logits


def _without_decoder(lm: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """Logits by the model's own code, and the output layer's result; None where the code needs its decoder."""
    head = lm.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):  # see `made_model.make_model`
        torch.manual_seed(0)
        small = nn.Linear(head.in_features, _LOGITS, bias=head.bias is not None)
        directions = torch.randn(len(_MAGNITUDES), head.in_features)
    nn.init.orthogonal_(small.weight)
    hidden_SH = directions * torch.tensor(_MAGNITUDES).unsqueeze(1)
    decoder = Mock(return_value=_States(last_hidden_state=hidden_SH.unsqueeze(0)))
    lm.set_output_embeddings(small)
    try:
        with patch.object(lm.base_model, "forward", decoder):
            logits = lm(input_ids=torch.zeros(1, len(_MAGNITUDES), dtype=torch.int64), use_cache=False).logits
    except Exception:  # the model's own code, of any family, may want what only a decoder gives
        return None
    finally:
        lm.set_output_embeddings(head)
    if not decoder.called or not isinstance(logits, Tensor):  # the model calls a part of its decoder, as OPT does
        return None
    return logits, small(hidden_SH).unsqueeze(0)


def _has_other_weights(lm: PreTrainedModel) -> bool:
    """Tell whether a module with weights lies between the decoder and the output layer, or after it."""
    known = {id(p) for part in (lm.base_model, lm.get_output_embeddings()) for p in part.parameters()}
    return any(id(p) not in known for p in lm.parameters())


class _States(BaseModelOutputWithPast):
    """A decoder's output with hidden states alone: anything else that a family asks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # copies look for methods by such names, and must not find None
            raise AttributeError(name)
