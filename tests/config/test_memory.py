"""The arithmetic of memory against the models of transformers, what autograd saves, and runs that are configured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headway.config.schema import Config
from headway.config.sections.learning import ParallelConfig
from headway.config.sections.model_section import MakeModelConfig
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.process_memory import Mesh, ProcessMemory, TrainingStep, activations, critic, trainer
from headway.config.sizing.run_memory import made, processes
from headway.data.packing import CollatedRow, Packing
from headway.engines.train.fsdp.micro_batches import collate
from headway.engines.train.fsdp.sharded_module import PolicyModule
from headway.models.attention.packed_attention import NAME
from tests.tiers import mostly_slow

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
TIED = {**SIZES, "tie_word_embeddings": True}
HEAD = {"head_dim": 16}
EXPERTS = {"moe_intermediate_size": 56, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, **HEAD),
    "llama, biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**SIZES, **HEAD),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, tied": lambda: Qwen2Config(**TIED),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEAD),
    "gemma": lambda: GemmaConfig(**TIED, **HEAD),
    "phi": lambda: PhiConfig(**SIZES),
    "phi3": lambda: Phi3Config(**SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **HEAD, **EXPERTS),
    "mixtral": lambda: MixtralConfig(**SIZES, **HEAD, num_local_experts=4, num_experts_per_tok=2),
}
TOKENS = 64


def shape_of(config: PreTrainedConfig) -> ModelShape:
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    return shape


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_of_parameters_is_that_of_transformers(family: str) -> None:
    config = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@mostly_slow(
    ("family", "dtype"),
    product(FAMILIES, [torch.float32, torch.bfloat16]),
    quick=[*zip(FAMILIES, cycle([torch.float32, torch.bfloat16]), strict=False)],
)
def test_what_a_forward_pass_saves_is_what_is_expected(family: str, dtype: torch.dtype) -> None:
    config = FAMILIES[family]()
    step = TrainingStep(Mesh(1, ParallelConfig()), TOKENS, dtype.itemsize)
    expected = activations(shape_of(config), step)
    assert saved_by_a_forward_pass(config, dtype) == pytest.approx(expected, rel=0.02)


def saved_by_a_forward_pass(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all storages that autograd keeps for one row of `TOKENS`, without the parameters."""
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    lm.set_attn_implementation(NAME)
    module = PolicyModule(lm, temperature=1.0)
    answer = TOKENS - 1
    row = CollatedRow(
        input_ids=(np.arange(TOKENS) % 48 + 2).astype(np.int32),
        prompt_length=1,
        logprobs=np.zeros(answer, dtype=np.float32),
        versions=np.zeros(answer, dtype=np.int32),
        loss_mask=np.ones(answer, dtype=np.bool_),
    )
    (pack,) = Packing(token_budget=TOKENS)([row])
    batch = collate([row], pack.trees)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in parameters:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_a_made_model_has_the_size_that_is_said() -> None:
    from headway.models.made_model import _architecture, make_tokenizer

    make = MakeModelConfig(architecture="llama", special_tokens=("<|user|>",), tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_architecture(make, make_tokenizer(make)))
    shape = ModelShape.of(made(make))
    assert shape is not None
    assert shape.parameters == model.num_parameters()


def test_a_model_of_another_family_has_no_numbers() -> None:
    assert ModelShape.of({"model_type": "mamba", "hidden_size": 8}) is None
    assert ModelShape.of({"model_type": "llama"}) is None
    mixed = {**FAMILIES["qwen3-moe"]().to_dict(), "mlp_only_layers": [0]}
    assert ModelShape.of(mixed) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen2, tied", "qwen3-moe"])
def test_shares_add_up_to_the_model_on_each_mesh(family: str) -> None:
    shape = shape_of(FAMILIES[family]())
    for ranks, sizes in ((4, {}), (8, {"tp": 2}), (8, {"replicate": 2}), (8, {"cp": 2})):
        mesh = Mesh(ranks, ParallelConfig.model_validate(sizes))
        copies = mesh.parallel.replicate
        norms = (mesh.parallel.tp - 1) * (shape.layers * shape.kept + shape.final)
        assert ranks * mesh.share(shape) == pytest.approx(copies * (shape.parameters + norms), rel=0.001)
    if shape.experts:
        whole, divided = Mesh(4, ParallelConfig()), Mesh(4, ParallelConfig(ep=4))
        assert whole.share(shape) == pytest.approx(divided.share(shape), rel=0.001)
        assert whole.layer(shape) - divided.layer(shape) == shape.of_experts * 3 // 4


def test_each_way_to_save_memory_saves_what_it_says() -> None:
    shape = shape_of(FAMILIES["qwen3"]())
    mesh = Mesh(4, ParallelConfig())
    plain = trainer(shape, TrainingStep(mesh, 512, 2, device_bytes=2**30))
    recomputed = trainer(shape, TrainingStep(mesh, 512, 2, device_bytes=2**30, recompute=True))
    offloaded = trainer(shape, TrainingStep(mesh, 512, 2, device_bytes=2**30, offload=True))
    assert recomputed.device < plain.device
    assert offloaded.host == 16 * mesh.share(shape)
    assert offloaded.device == plain.device - offloaded.host
    assert plain.host == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen2, tied"])
def test_a_critic_gathers_its_embedding_and_has_a_gradient_of_it_but_neither_head_nor_logits(family: str) -> None:
    shape = shape_of(FAMILIES[family]())
    moments = critic(shape, TrainingStep(Mesh(4, ParallelConfig()), 512, 2)).moments
    lines = {name: {line.name: line.nbytes for line in lines} for name, lines in moments.items()}
    gathered = 2 * (shape.embedding + shape.final)
    assert {of["gathered embedding and head"] for of in lines.values() if "gathered embedding and head" in of} == {
        gathered
    }
    embedding = lines["backward pass of the embedding of the critic"]
    assert embedding["gradients of embedding and head"] == 2 * shape.embedding
    last = lines["sum of the last gradients over ranks of the critic"]
    assert last["the same, summed over ranks in float32"] == 2 * gathered
    assert lines["log-probs of the critic"]["logits of a chunk"] == 0
    assert lines["backward pass of a layer of the critic"]["gradient of the head"] == 0


@pytest.mark.parametrize(
    ("rollout", "on_cpu", "tokens"),
    [
        ({}, False, 9000),  # one context alone is longer than a step's budget, and native reads it in one step
        ({"max_batched_tokens": 10_000}, False, 10_000),
        ({"max_batched_tokens": 50_000, "max_concurrent": 2}, False, 18_000),
        ({"name": "vllm"}, False, 4096),
        ({"name": "vllm"}, True, 9000),
    ],
)
def test_a_replica_has_room_to_read_a_cut_answer_again_with_all_that_it_has(
    rollout: dict[str, Any], on_cpu: bool, tokens: int
) -> None:
    shape = shape_of(FAMILIES["qwen3"]())
    settings = {"data": {"max_prompt_length": 1000, "max_response_length": 8000}, "rollout": rollout}
    config = Config.model_validate(settings)
    (replica,) = (p.memory for p in processes(config, shape, on_cpu=on_cpu) if p.name == "replica")
    (read,) = replica.moments["prefill"]
    row = 2 * shape.hidden + 2 * (shape.queries + 2 * shape.keys) + 3 * shape.intermediate
    assert read.nbytes == tokens * row * (4 if on_cpu else 2)


def test_processes_of_a_run_have_what_its_settings_ask_for() -> None:
    shape = shape_of(FAMILIES["qwen3"]())

    def memory(settings: dict[str, Any], name: str, *, on_cpu: bool = False) -> Any:
        config = Config.model_validate(settings)
        return next(p.memory for p in processes(config, shape, on_cpu=on_cpu) if p.name == name)

    def host(settings: dict[str, Any], name: str) -> int:
        """Bytes beside the copy for a checkpoint."""
        found = memory(settings, name)
        return int(found.host - sum(line.nbytes for line in found.held if "checkpoint" in line.name))

    overlapped = {"param_update": {"schedule": "overlapped"}}
    for through_host in (overlapped, {"param_update": {"encoding": "delta"}}):
        four = {**through_host, "rollout": {"n_gpus_per_node": 4}}
        assert memory(four, "replica").host == 0
        assert memory(four, "machine with replicas").host == 2 * shape.parameters, "once for all four"
    beside = "new weights, beside those that are served"
    held = {line.name: line for line in memory({"rollout": {"n_gpus_per_node": 4}}, "replica").held}
    assert held[beside].nbytes == held["served weights"].nbytes and not held[beside].on_host, "from GPU to GPU"
    assert host({}, "trainer rank") == 0
    in_place: dict[str, Any] = {"rollout": {"enable_dual_buffer": False}}
    assert beside not in [line.name for line in memory(in_place, "replica").held]
    assert memory(in_place, "replica").host == 0
    assert memory({**in_place, **overlapped}, "replica").host == 2 * shape.parameters, "a bucket: all of this model"
    for settings in ({}, in_place):
        with pytest.raises(StopIteration):
            memory(settings, "machine with replicas")
    assert memory({}, "replica", on_cpu=True).host == 0
    assert host(overlapped, "trainer rank") == 2 * shape.parameters
    of_ranks = {**overlapped, "trainer": {"n_gpus_per_node": 2}}
    assert host(of_ranks, "trainer rank") == shape.parameters, "each has the half that it sends"
    copies = {**of_ranks, "actor": {"parallel": {"replicate": 2}}}
    assert host(copies, "trainer rank that sends") == 2 * shape.parameters
    assert host(copies, "trainer rank that does not") == 0
    with_reference = memory({"actor": {"use_kl_loss": True}}, "trainer rank")
    assert "weights of the reference" in [line.name for line in with_reference.held]
    own = {"actor": {"use_kl_loss": True}, "ref": {"nnodes": 1, "n_gpus_per_node": 2}}
    assert memory(own, "reference rank").held[0].nbytes == pytest.approx(shape.parameters, abs=8)
    shared = memory({"cluster": {"placement": "shared"}}, "trainer rank")
    assert "generation" in shared.moments


def test_a_checkpoint_takes_the_weights_and_moments_once_more_in_host_memory() -> None:
    shape = shape_of(FAMILIES["qwen3"]())

    def rank(settings: dict[str, Any], *, on_cpu: bool) -> ProcessMemory:
        config = Config.model_validate(settings)
        return next(p.memory for p in processes(config, shape, on_cpu=on_cpu) if p.name == "trainer rank")

    at_the_end: dict[str, Any] = {"trainer": {"save_freq": -1}}
    alone = rank(at_the_end, on_cpu=False)
    assert alone.host == 12 * shape.parameters, "which is more than a bucket of an update, which there is then no more"
    assert rank({}, on_cpu=False).host == 12 * shape.parameters
    overlapped = {"param_update": {"schedule": "overlapped"}}
    assert rank(overlapped, on_cpu=False).host == (12 + 2) * shape.parameters
    assert rank({}, on_cpu=False).device == alone.device
    assert rank({}, on_cpu=True).device == rank(at_the_end, on_cpu=True).device + 12 * shape.parameters
    critic = {"algorithm": {"adv_estimator": "gae"}}
    assert rank(critic, on_cpu=False).host > 20 * shape.parameters


def test_a_replica_on_a_cpu_has_its_large_matrices_twice() -> None:
    shape = ModelShape.of({**FAMILIES["llama"]().to_dict(), "hidden_size": 512, "intermediate_size": 2048})
    assert shape is not None
    names = {
        on_cpu: [line.name for p in processes(Config(), shape, on_cpu=on_cpu) for line in p.memory.held]
        for on_cpu in (True, False)
    }
    of_machine = "new weights, for all who load them"
    assert set(names[True]) - set(names[False]) == {"the weights as a CPU's kernels read them", of_machine}
