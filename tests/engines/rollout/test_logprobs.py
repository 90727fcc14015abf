"""What the engine reports is what a plain Hugging Face forward computes."""

from __future__ import annotations

import copy
import logging
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    PreTrainedModel,
)

from headway.data.interfaces.rollout import OnUpdate
from headway.data.types import FinishReason
from headway.engines.rollout.native import fused_forward
from headway.engines.rollout.native.fused_forward import FusedForward, Projection, best_forward
from headway.engines.rollout.native.policy_forward import ModuleForward
from headway.engines.rollout.native.step_attention import PrefillContext
from headway.engines.rollout.native.supported_models import Windows
from headway.errors import ModelError
from tests.engines.rollout.support import (
    CONTEXT,
    FAMILIES,
    MIXTURES,
    TOLERANCE,
    VOCABULARY,
    activate,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    reference_logprobs,
    steps,
)
from tests.tiers import mostly_slow

EVERY_FAMILY_AND_HEAD = list(product([*FAMILIES, *MIXTURES], [True, False]))


def updated(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """The same architecture after a large update."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return other


@mostly_slow(
    ("family", "tied"),
    EVERY_FAMILY_AND_HEAD,
    quick=[("qwen3", True), ("mistral", True), ("llama", False), ("qwen3_moe", True)],
)
def test_log_probs_equal_a_plain_forward_before_and_after_an_update(family: str, tied: bool) -> None:
    old = make_model(family, tied=tied)
    new = updated(old)
    core = make_core(old)
    core.ask([make_request(i) for i in range(5)], "owner")
    assert_logprobs(finish(core), {0: old})
    activate(core, 1, new)
    core.ask([make_request(i, attempt=1) for i in range(5)], "owner")
    groups = finish(core)
    assert {span for g in groups for t in g.trajectories for span in map(tuple, t.version_spans)} == {(0, 1)}
    assert_logprobs(groups, {1: new})


@mostly_slow(("family", "tied"), EVERY_FAMILY_AND_HEAD, quick=[("mistral", True), ("mixtral", False)])
def test_log_probs_are_exact_across_an_interrupt(family: str, tied: bool) -> None:
    old = make_model(family, tied=tied)
    new = updated(old)
    core = make_core(old)
    core.ask([make_request(i, stop_token_ids=()) for i in range(4)], "owner")
    done = steps(core, 5)
    assert core.pause(OnUpdate.INTERRUPT).interrupted == 8
    activate(core, 1, new)
    core.resume()
    done += finish(core)

    spans = {g.number: [t.version_spans for t in g.trajectories] for g in done}
    assert spans[0] == spans[1] == [[[0, 0], [5, 1]]] * 4
    assert spans[2] == spans[3] == [[[0, 1]]] * 4
    assert_logprobs(done, {0: old, 1: new})


def test_keep_goes_on_with_the_old_keys_and_values_under_the_new_weights() -> None:
    old = make_model()
    new = updated(old)
    core = make_core(old)
    core.ask([make_request(0, stop_token_ids=(), length=6)], "owner")
    steps(core, 4)
    assert core.pause(OnUpdate.KEEP).interrupted == 0
    activate(core, 1, new)
    core.resume()
    (group,) = finish(core)
    for response in group.tokens:
        assert response.versions.tolist() == [0] * 4 + [1] * 12
        ids = torch.from_numpy(np.concatenate([group.tokens[0].prompt_ids, response.ids]).astype(np.int64))[None]
        cached = 6 + 4 - 1  # the last sampled token is not in the cache yet
        with torch.no_grad():
            cache = DynamicCache(config=old.config)
            before = old(ids[:, :cached], past_key_values=cache, use_cache=True).logits[0]
            after = new(ids[:, cached:-1], past_key_values=cache, use_cache=True).logits[0]
        logprobs = torch.log_softmax(torch.cat([before, after])[5:], -1)
        expected = logprobs.gather(1, ids[0, 6:, None]).squeeze(1).numpy()
        np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_an_update_without_a_pause_happens_between_two_tokens() -> None:
    old = make_model()
    core = make_core(old)
    core.ask([make_request(0, stop_token_ids=())], "owner")
    steps(core, 3)
    activate(core, 1, updated(old))
    steps(core, 2)
    activate(core, 5, updated(old, seed=2))
    (group,) = finish(core)
    assert all(r.versions.tolist() == [0] * 3 + [1] * 2 + [5] * 11 for r in group.tokens)
    assert group.trajectories[0].version_spans == [[0, 0], [3, 1], [5, 5]]


def test_a_version_without_a_sampled_token_is_not_counted() -> None:
    model = make_model()
    core = make_core(model)
    core.ask([make_request(0, stop_token_ids=())], "owner")
    steps(core, 3)
    for version in (1, 2):
        core.pause(OnUpdate.INTERRUPT)
        activate(core, version, model)
    core.resume()
    (group,) = finish(core)
    assert {tuple(map(tuple, t.version_spans)) for t in group.trajectories} == {((0, 0), (3, 2))}


def test_trajectories_that_start_after_an_update_do_not_see_the_old_prompt() -> None:
    old = make_model()
    new = updated(old)
    core = make_core(old, slots=2)
    core.ask([make_request(0, n=6)], "owner")
    steps(core, 1)  # the prompt's prefill is kept for four more
    activate(core, 1, new)
    (group,) = finish(core)
    for k in range(2, 6):
        response = group.tokens[k]
        assert (response.versions == 1).all()
        np.testing.assert_allclose(response.logprobs, reference_logprobs(new, group, k), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_forward_is_used_and_equals_the_module(family: str) -> None:
    model = make_model(family)
    windows = Windows.of(model.config, CONTEXT)
    module = ModuleForward(copy.deepcopy(model), CONTEXT, windows)
    forward = best_forward(model, CONTEXT)
    assert isinstance(forward, FusedForward)
    contexts = [PrefillContext(torch.randint(0, VOCABULARY, (length,))) for length in (20, 7, 1, 7)]
    for least_rows in (1, 50):
        with torch.inference_mode():
            logits, kv = forward.step(None, contexts, least_rows)
            expected, expected_kv = module.step(None, contexts, least_rows)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(kv, expected_kv, atol=1e-5, rtol=0)
        assert [part.shape[2] for part in kv] == [20, 7, 1, 7]


def test_packing_leaves_the_module_as_it_was_and_shares_the_joined_ones() -> None:
    model = make_model("llama")
    before = copy.deepcopy(model.state_dict())
    FusedForward(model, CONTEXT, Windows.of(model.config, CONTEXT))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    attention = model.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1


def test_a_fused_forward_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    monkeypatch.setattr(Projection, "__call__", lambda self, x: torch.zeros(len(x), len(self._weight)))
    with caplog.at_level(logging.WARNING, logger=fused_forward.__name__):
        assert isinstance(best_forward(model, CONTEXT), ModuleForward)
    assert "differs from the module" in caplog.text


@mostly_slow("attention", ["sdpa", "eager"], quick=["sdpa"])
def test_other_decoders_run_as_the_modules_that_they_are(attention: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    mistral = MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=CONTEXT,
        sliding_window=None,
        attn_implementation=attention,
        **sizes,
    )
    gpt2 = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        attn_implementation=attention,
        **sizes,
    )
    for model in (MistralForCausalLM(mistral).eval(), GPT2LMHeadModel(gpt2).eval()):
        core = make_core(model)
        core.ask([make_request(i, stop_token_ids=()) for i in range(4)], "owner")
        groups = steps(core, 5)
        core.pause(OnUpdate.INTERRUPT)
        core.resume()
        assert_logprobs(groups + finish(core), {0: model})


def test_temperature_scales_the_reported_log_probs() -> None:
    model = make_model()
    core = make_core(model)
    core.ask([make_request(0, temperature=0.5)], "owner")
    (group,) = finish(core)
    sharper = copy.deepcopy(model)
    head = sharper.lm_head
    sharper.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    sharper.lm_head.weight.data = head.weight.data * 2
    for k, response in enumerate(group.tokens):
        np.testing.assert_allclose(response.logprobs, reference_logprobs(sharper, group, k), atol=TOLERANCE, rtol=0)


def test_greedy_decoding_equals_generate() -> None:
    model = make_model()
    core = make_core(model)
    core.ask([make_request(i, n=1, temperature=0.0, stop_token_ids=()) for i in range(4)], "owner")
    for group in finish(core):
        prompt = torch.from_numpy(group.tokens[0].prompt_ids.astype(np.int64))[None]
        expected = model.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :]
        assert group.tokens[0].ids.tolist() == expected.tolist()
        assert group.trajectories[0].finish_reason is FinishReason.LENGTH


def test_bfloat16_is_served_with_float32_log_probs() -> None:
    model = make_model().to(torch.bfloat16)
    core = make_core(model)
    core.ask([make_request(i) for i in range(3)], "owner")
    for group in finish(core):
        for k, response in enumerate(group.tokens):
            assert response.logprobs.dtype == np.float32
            np.testing.assert_allclose(response.logprobs, reference_logprobs(model, group, k), atol=0.2, rtol=0)


@mostly_slow("family", FAMILIES, quick=["qwen3"])
def test_a_bfloat16_model_of_large_logits_takes_the_fused_forward(family: str) -> None:
    """A bfloat16 of 16 or more is 0.125 from the next one: no absolute limit tells rounding from a mistake."""
    model = make_model(family, tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
        largest = model(input_ids=torch.arange(8)[None]).logits.abs().max()
    assert largest > 16
    core = make_core(model.to(torch.bfloat16))
    assert isinstance(core._runner._forward, FusedForward)


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="made for 64"):
        make_core(make_model(), max_context=65)


@mostly_slow(
    ("windowed_from", "forward"),
    product([0, 1, 2], [FusedForward, ModuleForward]),
    quick=[(0, FusedForward), (1, FusedForward), (1, ModuleForward)],
)
def test_a_sliding_window_hides_what_lies_before_it(
    forward: type, windowed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward is ModuleForward:
        monkeypatch.setattr("headway.engines.rollout.native.fused_forward.FAMILY", frozenset())
    model = make_model("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=windowed_from, seed=1)
    core = make_core(model)
    assert isinstance(core._runner._forward, forward)
    requests = [make_request(i, length=3 + 5 * i, max_tokens=20, stop_token_ids=()) for i in range(4)]
    core.ask(requests, "owner")
    groups = steps(core, 8)
    core.pause(OnUpdate.INTERRUPT)  # what was written is prefilled again, through the window
    core.resume()
    assert_logprobs(groups + finish(core), {0: model})


def test_queries_may_share_one_head_of_keys_that_the_config_does_not_count() -> None:
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    core = make_core(model)
    core.ask([make_request(0, length=9, max_tokens=5, stop_token_ids=())], "owner")
    assert_logprobs(finish(core), {0: model})


def test_a_model_whose_code_does_not_take_the_cache_is_refused_in_one_sentence() -> None:
    config = OpenAIGPTConfig(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4)
    config._name_or_path = "models/first"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    refused = r"model\.path=models/first: .*model_type openai-gpt\): its code does not .*; set rollout\.name=vllm"
    with pytest.raises(ModelError, match=refused):
        make_core(model)


def test_an_unknown_kind_of_attention_is_refused() -> None:
    model = make_model("qwen2")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match=r"chunked_attention.*rollout\.name=vllm"):
        make_core(model)


@mostly_slow("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"], quick=["dynamic", "yarn"])
def test_every_scaling_of_rotary_positions_is_the_modules(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    if kind == "llama3":
        rope |= {"original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": CONTEXT, "short_factor": [1.5] * 4, "long_factor": [3.0] * 4}
    model = make_model("llama", rope_parameters=rope)
    core = make_core(model)
    assert isinstance(core._runner._forward, FusedForward)
    core.ask([make_request(i, max_tokens=40, stop_token_ids=()) for i in range(3)], "owner")
    assert_logprobs(finish(core), {0: model})


def test_positions_that_would_all_turn_differently_later_are_refused() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = make_model("llama", rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4})
    with pytest.raises(ModelError, match=r"from 32 on .*longrope"):
        make_core(model)
    make_core(model, max_context=32)
