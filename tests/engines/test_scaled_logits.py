"""Models that scale or cap their logits: trainer and rollout engine against transformers' own logits in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headway.data.packing import CollatedRow
from headway.engines.rollout.native.policy_forward import ModuleForward
from headway.engines.train.fsdp.micro_batches import collate
from headway.engines.train.fsdp.sharded_module import PolicyModule
from headway.models.logits import LogitRule, logit_rule
from headway.models.logprobs import probe_rows, probe_vector
from headway.models.output_layer import check_output_layer
from headway.models.pretrained import attention
from tests.engines.rollout.support import CONTEXT, VOCABULARY, finish, make_core, make_request
from tests.tiers import mostly_slow

TEMPERATURE = 0.7
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}
FAMILIES: dict[str, tuple[dict[str, Any], LogitRule]] = {
    "gemma2": (
        {**WINDOWED, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
        LogitRule(cap=2.0),
    ),
    "gemma3_text": (
        {**WINDOWED, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
        LogitRule(cap=3.0),
    ),
    "granite": ({"logits_scaling": 3.0}, LogitRule(scale=1 / 3.0)),
    "cohere": ({"logit_scale": 0.25}, LogitRule(scale=0.25)),
    "cohere2": ({**WINDOWED, "logit_scale": 0.5}, LogitRule(scale=0.5)),
}
CAPPED_ATTENTION = ("gemma2",)


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random decoder of two layers, one of them with a window of 5 where the family has windows."""
    config = CONFIG_MAPPING[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{**FAMILIES[family][0], **changes},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention(config)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start as constants, which would hide mistakes
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model


def plain(model: PreTrainedModel, row: CollatedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T] of a row's response by the model's own logits, one row at a time."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64))
    logp = (model(ids[None], use_cache=False).logits[0, row.prompt_length - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return logp.gather(1, ids[row.prompt_length :, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def rows() -> list[CollatedRow]:
    """Three rows of different lengths, two of them longer than the window."""
    rng = np.random.default_rng(0)
    return [
        CollatedRow(
            input_ids=rng.integers(2, VOCABULARY, prompt + response).astype(np.int32),
            prompt_length=prompt,
            logprobs=np.zeros(response, np.float32),
            versions=np.zeros(response, np.int32),
            loss_mask=np.ones(response, np.bool_),
        )
        for prompt, response in ((3, 17), (2, 1), (6, 9))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropies_and_gradients_of_the_trainer_are_those_of_the_models_own_logits(family: str) -> None:
    model = make_model(family)
    rule = check_output_layer(model, family)
    assert rule == FAMILIES[family][1]
    batch = collate(rows())
    actual = PolicyModule(model, TEMPERATURE)(batch)
    expected = tuple(torch.cat(parts) for parts in zip(*(plain(model, row) for row in rows()), strict=True))
    factors = torch.linspace(-1, 1, len(expected[0]))
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = []
    for logprobs, entropy in (actual, expected):
        total = (factors * logprobs + factors.flip(0) * entropy).sum()
        gradients.append(torch.autograd.grad(total, list(weights.values())))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    for name, ours, theirs in zip(weights, *gradients, strict=True):
        largest = float(theirs.abs().max())
        assert torch.allclose(ours, theirs, atol=1e-4 * max(largest, 1e-2), rtol=1e-4), name


@mostly_slow("family", FAMILIES, quick=["gemma2", "granite"])
def test_the_engines_log_probs_are_those_of_the_models_own_logits(family: str) -> None:
    model = make_model(family)
    core = make_core(model, temperature=TEMPERATURE)
    assert isinstance(core._runner._forward, ModuleForward)
    core.ask([make_request(0, length=3), make_request(1, length=13)])
    for group in finish(core):
        for response in group.tokens:
            ids = np.concatenate([group.tokens[0].prompt_ids, response.ids])
            nothing = np.zeros(len(response.ids), np.float32)
            row = CollatedRow(ids, len(group.tokens[0].prompt_ids), nothing, nothing.astype(np.int32), nothing == 0)
            with torch.no_grad():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            expected = logits.log_softmax(-1)[row.prompt_length - 1 : -1]
            expected = expected.gather(1, torch.from_numpy(response.ids.astype(np.int64))[:, None]).squeeze(1)
            np.testing.assert_allclose(response.logprobs, expected.numpy(), atol=2e-5, rtol=0)
    with torch.inference_mode():
        probed = core.probe()
    with torch.no_grad():
        own = probe_vector([plain(model, row)[0].numpy() for row in probe_rows(VOCABULARY)])
    assert probed is not None
    np.testing.assert_allclose(probed, own, atol=2e-5, rtol=0)


def test_a_cap_inside_attention_takes_eager_attention_in_trainer_and_engine() -> None:
    for family in CAPPED_ATTENTION:
        model = make_model(family)
        assert model.config._attn_implementation == "eager"
        assert make_core(model)._runner._forward._model.config._attn_implementation == "eager"
    gemma3 = CONFIG_MAPPING["gemma3_text"](attn_logit_softcapping=30.0)
    assert attention(gemma3) == "eager"
    assert attention(CONFIG_MAPPING["gemma3_text"]()) is None


def test_the_rule_of_a_config_without_a_cap_is_plain() -> None:
    assert logit_rule(CONFIG_MAPPING["gemma2"](final_logit_softcapping=None)) == LogitRule()
    assert logit_rule(CONFIG_MAPPING["qwen3"]()) == LogitRule()
