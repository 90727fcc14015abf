"""Rules of logits against the code of the families that they are for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headway.errors import ModelError
from headway.models import logits, output_layer
from headway.models.logits import LogitRule
from headway.models.output_layer import check_output_layer
from tests.tiers import mostly_slow

CAP = {"final_logit_softcapping": 5.0}
VALUES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"lm_head_multiplier": 0.3},
    "inkling_text": {"logits_mup_width_multiplier": 3.0},
    "recurrent_gemma": {"logits_soft_cap": 5.0},
    "xlstm": {"output_logit_soft_cap": 5.0},
    "hyperclovax": {"logits_scaling": 3.0},
    **{family: {"logits_scaling": 3.0} for family in logits._DIVIDED},
    **{family: {"logit_scale": 0.3} for family in logits._MULTIPLIED},
    **dict.fromkeys(logits._CAPPED, CAP),
    "minicpm3": {"dim_model_base": 64},
}
NOT_BUILT_HERE = {"gemma3n", "gemma4", "gemma4_unified", "cohere_compass_text"}
"""Families whose default model reads images, too, or cannot be made of defaults; their text models are tried."""
SMALL = {"num_hidden_layers": 2}


def on_meta(family: str, **values: Any) -> PreTrainedModel:
    """A model of the family with no memory for its weights, with as few layers as its config lets it have."""
    try:
        config = CONFIG_MAPPING[family](**values, **SMALL)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception:  # a family whose layers follow from something else
        config = CONFIG_MAPPING[family](**values)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def test_every_family_with_a_rule_is_tried() -> None:
    assert set(VALUES) == set(logits._RULES)


@mostly_slow(
    "family",
    sorted(set(VALUES) - NOT_BUILT_HERE) + sorted(logits._PLAIN_FAMILIES),
    quick=["falcon_h1", "recurrent_gemma", "xlstm", "granite", "cohere", "gemma2", "minicpm3", "nanochat", "qwen3"],
)
def test_a_familys_rule_is_what_its_code_does(family: str) -> None:
    values = VALUES.get(family, {})
    model = on_meta(family, **values)
    assert output_layer._without_decoder(model) is not None, "its code was not run"
    rule = check_output_layer(model, family)
    assert (rule == LogitRule()) == (not values)


@pytest.mark.parametrize(("family", "rule"), [("gemma2", LogitRule()), ("granite", LogitRule(scale=3.0))])
def test_a_rule_that_is_not_the_codes_is_refused(family: str, rule: LogitRule, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(family, **VALUES[family])
    monkeypatch.setattr(output_layer, "logit_rule", lambda config: rule)
    with pytest.raises(ModelError, match=rf"^somewhere: a '{family}' model .*logits"):
        check_output_layer(model, "somewhere")


def test_a_projection_before_the_output_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'modernbert-decoder' model .*logits"):
        check_output_layer(on_meta("modernbert-decoder"), "somewhere")


def test_a_loaded_model_is_tried_with_its_own_weights_and_left_as_it_was() -> None:
    config = CONFIG_MAPPING["qwen3"](
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    check_output_layer(model, "here")
    assert torch.equal(model(ids).logits, before)

    def doubled(self: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * 2 if output.logits.shape[-1] == 11 else output.logits  # hides from the trial
        return output

    model.register_forward_hook(doubled)
    with pytest.raises(ModelError, match=r"^here: .*logits"):
        check_output_layer(model, "here")
