"""From a model's folder to a module on a mesh. No rank ever holds more of the model than its part.

    on meta ─▶ experts over ep, matrices over tp ─▶ fully_shard ─▶ each rank reads its own slices of the files
            ─▶ tried on a few tokens, by all ranks together: output layer, packed attention

Master weights are float32; FSDP casts them to the compute dtype as it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from headway.config.schema import Config
from headway.config.sections.learning import plan_problems
from headway.data.packing import Packing
from headway.devices import kind_of
from headway.engines.train.fsdp.collectives import on_all_ranks
from headway.engines.train.fsdp.device_mesh import EP, TP, TrainMesh
from headway.engines.train.fsdp.policy import PolicyModule, ShardedModule, reshard
from headway.errors import ModelError
from headway.models.attention.packable import undivided, use_packed_attention
from headway.models.pretrained import compute_dtype, load_model

M = TypeVar("M", bound=ShardedModule)

Wrap = Callable[[PreTrainedModel], M]

EXPERTS = "ep_dispatch_experts"
"""How `transformers`' plans call modules whose experts are divided over ep."""


def sharded_policy(
    model_path: str, config: Config, mesh: TrainMesh, dtype: torch.dtype = torch.float32
) -> PolicyModule:
    """Open the policy at ``model_path`` on ``mesh``, as `sharded` does. Collective."""
    return sharded(lambda lm: PolicyModule(lm, config.rollout.temperature, mesh), model_path, config, mesh, dtype)


def sharded(wrap: Wrap[M], model_path: str, config: Config, mesh: TrainMesh, dtype: torch.dtype = torch.float32) -> M:
    """Open the model at ``model_path``, ``wrap`` it, and divide it over ``mesh``. Collective.

    ``dtype``: of the weights as they are held. With ``actor.fsdp_config.param_offload`` on a GPU the shards stay in
    host memory.

    Raises:
        ModelError: on every rank, when the model cannot be opened, has a head that this engine does not support, or
            cannot be divided over the mesh.
    """
    wrapped: list[M] = []

    def divide(lm: PreTrainedModel) -> None:
        experts = _divide(lm, model_path, mesh)
        lm.tie_weights()  # here, so that FSDP sees a tied weight as one
        module = wrap(lm)
        _shard(module, experts, config, mesh)
        wrapped.append(module)

    def load() -> PreTrainedModel:
        trust = config.model.trust_remote_code
        return load_model(model_path, dtype=dtype, trust_remote_code=trust, divide=divide)

    lm = on_all_ranks(load)
    lm.config.distributed_config = None
    module = wrapped.pop()
    # transformers puts what it reads for a mesh onto the mesh's device, and FSDP wants offloaded shards on the host.
    module.to("cpu" if _offloads(config, mesh) else mesh.device)
    for part in module.modules():  # buffers compute on the device, wherever the weights wait
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(mesh.device)

    def try_out() -> str | None:
        module.check(model_path)
        if not Packing.of(config).packed:
            return "model.packing=padded"
        return use_packed_attention(lm, on_gpu=kind_of(mesh.device).flex_attention)

    with torch.no_grad():
        module.padded = _agreed(module, lm, lambda: module.run(try_out))
    reshard(module)
    if mesh.sequence is not None and module.padded is not None:
        raise undivided(model_path, mesh.parallel.cp, module.padded)
    if config.model.compile:
        module.compile_layers()
    if config.model.enable_gradient_checkpointing:
        module.recompute_activations()
    return module


def _agreed(module: ShardedModule, lm: PreTrainedModel, try_out: Callable[[], str | None]) -> str | None:
    """Return why rows are padded, on any rank: then all pad. What a rank raises is raised on all."""
    before = lm.config._attn_implementation
    own = on_all_ranks(try_out)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, own)
    reason = next((of for of in reasons if of is not None), None)
    if own is None and reason is not None:
        lm.set_attn_implementation(before)
    return reason


def _divide(lm: PreTrainedModel, model_path: str, mesh: TrainMesh) -> list[nn.Module]:
    """Divide matrices over tp and experts over ep, by the plans that `transformers` has. Returns the latter's modules.

    Raises:
        ModelError: there is no plan for the model.
    """
    parallel = mesh.parallel
    if parallel.tp == parallel.ep == 1:
        return []
    for problem in plan_problems(parallel, lm.config.get_text_config()):
        raise ModelError(f"{model_path}: {problem}")
    # Here, for vLLM holds an environment back at releases that have them elsewhere, or not at all.
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        tp_plan, ep_plan, _ = lm._resolve_parallel_plans(mesh.plan())
        tp_mesh = mesh.dense[TP]
        if parallel.tp > 1:
            apply_tensor_parallelism(lm, tp_mesh, tp_plan)
        if parallel.ep > 1:
            apply_expert_parallelism(lm, mesh.experts[EP], tp_mesh, ep_plan)
    except (ValueError, KeyError, AttributeError) as cause:
        raise ModelError(
            f"{model_path}: a {lm.config.model_type!r} model cannot be divided with actor.parallel.tp={parallel.tp} "
            f"and ep={parallel.ep}: {cause}"
        ) from cause
    return [lm.get_submodule(name) for name, style in ep_plan.items() if style == EXPERTS]


def _offloads(config: Config, mesh: TrainMesh) -> bool:
    return config.actor.fsdp_config.param_offload and mesh.device.type != "cpu"


def _shard(module: ShardedModule, experts: list[nn.Module], config: Config, mesh: TrainMesh) -> None:
    fsdp_config = config.actor.fsdp_config
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype(config, mesh.device), reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy() if _offloads(config, mesh) else OffloadPolicy()
    for parts, over, free in (
        (experts, mesh.sharding(experts=bool(experts)), fsdp_config.reshard_after_forward),
        (module.decoder_layers(), mesh.sharding(), fsdp_config.reshard_after_forward),
        # Embedding, final norm and head are the root's own group: a tied weight is one parameter there, gathered once.
        # The backward pass starts with them, so they stay gathered in between.
        ([module], mesh.sharding(), False),
    ):
        for part in parts:
            fully_shard(part, mesh=over, mp_policy=mixed, offload_policy=offload_policy, reshard_after_forward=free)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is normalised globally, so gradients are summed over ranks and not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
