"""Whole models on packed lines against their own code on single rows, and models that are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headway.data.packing import Tree, grow
from headway.models.attention.packable import use_packed_attention
from headway.models.attention.packed_attention import NAME
from headway.models.attention.packed_layout import PackedLayout
from headway.models.pretrained import attention
from tests.tiers import mostly_slow

CPU = torch.device("cpu")
VOCABULARY, WINDOW = 41, 7
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {**ALTERNATING, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "mistral, a window": ("mistral", {"sliding_window": WINDOW}),
    "gemma2, windows and soft caps": (
        "gemma2",
        {**ALTERNATING, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    ),
    "gemma3_text, windows": ("gemma3_text", {**ALTERNATING, "query_pre_attn_scalar": 8}),
    "gpt_oss, windows and sinks": ("gpt_oss", {**ALTERNATING, **EXPERTS}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", GPT2),
    "granite": ("granite", {"attention_multiplier": 0.2}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", ALTERNATING),
    "olmo2": ("olmo2", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "smollm3, a layer without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "deepseek_v3, values of another size": ("deepseek_v3", {**EXPERTS, **LATENT}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
LONG = {"rope_theta": 10_000.0, "original_max_position_embeddings": 40}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "attention is its own"),
    "falcon": ("falcon", {"head_dim": None}, "attention is its own"),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}, "attention is its own"),
    "stablelm, which says nothing of layouts": (
        "stablelm",
        {},
        "does not hand on to its attention which tokens of a line belong together",
    ),
    "mamba": ("mamba", {"state_size": 4}, "recurrent"),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"attention_window_size": WINDOW, "lru_width": 32, "num_hidden_layers": 3},
        "recurrent",
    ),
    "qwen3_next, linear attention": (
        "qwen3_next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
        "recurrent",
    ),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "(conv)"),
    "phimoe, a window by a mask": ("phimoe", {**EXPERTS, "sliding_window": 30}, "not those of single rows"),
    "llama, dynamic positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
        "depends on the longest",
    ),
    "phi3, long positions": (
        "phi3",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, **LONG},
        },
        "depends on the longest",
    ),
}


def made(family: str, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model with the attention that Headway would choose, and weights so large that attention matters."""
    config = CONFIG_MAPPING[family](**{name: v for name, v in {**BASE, **values}.items() if v is not None})
    torch.manual_seed(1)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention(config)).eval()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            large = 1.0 if parameter.ndim > 1 and "emb" in name else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * (large if parameter.ndim > 1 else 0.2))
    return lm.to(dtype)


def some_rows() -> tuple[list[NDArray[np.int32]], list[Tree]]:
    """A group with a fork, and rows by themselves; longer than the windows, and than what models are tried with."""
    rng = np.random.default_rng(3)

    def tokens(n: int) -> NDArray[np.int32]:
        return rng.integers(3, VOCABULARY, n).astype(np.int32)

    prompt = tokens(15)
    group = [np.concatenate([prompt, tokens(n)]) for n in (1, 24, 9, 16)]
    group.append(np.concatenate([group[1][:29], tokens(8)]))
    lone = tokens(45)
    trees = [grow(group, len(prompt)), grow([lone], 5), grow([prompt[:2]], 1)]
    assert len(trees[0].segments.starts) == 7
    return [*group, lone, prompt[:2]], trees


def next_logprobs(lm: PreTrainedModel, hidden: Tensor, row: NDArray[np.int32]) -> Tensor:
    logits = lm.get_output_embeddings()(hidden[:-1]).log_softmax(-1)
    return logits.gather(1, torch.from_numpy(row[1:]).long()[:, None])[:, 0]


def of_single_rows(lm: PreTrainedModel, rows: Sequence[NDArray[np.int32]]) -> list[Tensor]:
    each = [lm.base_model(torch.from_numpy(row).long()[None], use_cache=False).last_hidden_state[0] for row in rows]
    return [next_logprobs(lm, hidden, row) for hidden, row in zip(each, rows, strict=True)]


def of_a_line(lm: PreTrainedModel, rows: Sequence[NDArray[np.int32]], trees: Sequence[Tree]) -> list[Tensor]:
    layout = PackedLayout.of(trees)
    ids = torch.from_numpy(np.concatenate([tree.ids for tree in trees])).long()[None]
    positions = torch.from_numpy(layout.positions)[None]
    hidden = lm.base_model(ids, position_ids=positions, layout=layout, use_cache=False).last_hidden_state[0]
    places, before = [], 0
    for tree in trees:
        places += [torch.from_numpy(of + before) for of in tree.places]
        before += len(tree.ids)
    return [next_logprobs(lm, hidden[of], row) for of, row in zip(places, rows, strict=True)]


def gradient(lm: PreTrainedModel, logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    flat = torch.cat(list(logprobs))
    (flat * torch.randn(len(flat), generator=generator, dtype=torch.float64).to(flat.dtype)).sum().backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@mostly_slow(
    ("which", "dtype", "tolerance"),
    [
        *((which, torch.float32, 1e-5) for which in PACKED),
        *((which, torch.float64, 1e-11) for which in ("gpt2", "gpt_neox")),  # others normalise in float32 in any case
    ],
    quick=[
        ("gpt2", torch.float64, 1e-11),
        ("mistral, a window", torch.float32, 1e-5),
        ("gemma2, windows and soft caps", torch.float32, 1e-5),
        ("gpt_oss, windows and sinks", torch.float32, 1e-5),
        ("deepseek_v3, values of another size", torch.float32, 1e-5),
        ("smollm3, a layer without positions", torch.float32, 1e-5),
        ("llama, yarn", torch.float32, 1e-5),
    ],
    ids=str,
)
def test_a_packed_line_has_the_log_probs_and_the_gradient_of_its_rows_one_by_one(
    which: str, dtype: torch.dtype, tolerance: float
) -> None:
    rows, trees = some_rows()
    lm = made(*PACKED[which], dtype)
    single = copy.deepcopy(lm)
    assert use_packed_attention(lm) is None
    expected, actual = of_single_rows(single, rows), of_a_line(lm, rows, trees)
    largest = max(float(values.detach().abs().max()) for values in expected)
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).detach().abs().max()) < tolerance * largest
    found, right = gradient(lm, actual), gradient(single, expected)
    norm = float(torch.stack([grad.norm() for grad in right.values()]).norm())
    assert found.keys() == right.keys()
    for name, grad in right.items():
        assert float((found[name] - grad).norm()) < tolerance * max(float(grad.norm()), 0.01 * norm), name


@mostly_slow(
    "which",
    REFUSED,
    quick=[
        "bloom",
        "stablelm, which says nothing of layouts",
        "mamba",
        "lfm2, convolutions",
        "phimoe, a window by a mask",
        "llama, dynamic positions",
    ],
)
def test_a_model_that_cannot_be_packed_is_refused_with_the_reason_and_stays_as_it_was(which: str) -> None:
    family, values, reason = REFUSED[which]
    lm, (rows, _) = made(family, values), some_rows()
    weights = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    config, chosen = lm.config.to_dict(), lm.config._attn_implementation
    with torch.no_grad():
        before = of_single_rows(lm, rows)
        assert reason in (use_packed_attention(lm) or "it was taken")
        after = of_single_rows(lm, rows)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert lm.config.to_dict() == config
    assert lm.config._attn_implementation == chosen != NAME
    assert all(torch.equal(tensor, weights[name]) for name, tensor in lm.state_dict().items())


def test_layers_that_no_trial_could_tell_from_attention_are_refused_by_their_type() -> None:
    """In half precision small weights leave next to nothing of what a convolution makes of the tokens before."""
    family, values, reason = REFUSED["lfm2, convolutions"]
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**BASE, **values}), dtype=torch.bfloat16).eval()
    assert reason in (use_packed_attention(lm) or "it was taken")


def test_a_model_that_is_packed_keeps_its_weights_and_its_windows() -> None:
    lm = made(*PACKED["gemma2, windows and soft caps"])
    weights = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    config = lm.config.to_dict()
    assert use_packed_attention(lm) is None
    assert lm.config._attn_implementation == NAME
    assert lm.config.to_dict() == config
    assert {m.sliding_window for m in lm.modules() if hasattr(m, "sliding_window")} == {WINDOW, None}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in lm.state_dict().items())


def test_half_precision_is_packed_too() -> None:
    lm = made(*PACKED["qwen3"], torch.bfloat16)
    rows, trees = some_rows()
    with torch.no_grad():
        expected = of_single_rows(lm, rows)
        assert use_packed_attention(lm) is None
        for one, other in zip(of_a_line(lm, rows, trees), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.25)
