"""Sharding: from a model folder to a sharded policy; no rank but zero ever holds a full copy.

    rank 0:  load ─▶ fully_shard ─▶ scatter each parameter ─┐
    others:  same modules, memory untouched ─▶ fully_shard ─┴▶ every rank holds its shard

Master weights are float32; FSDP casts them to the compute dtype as it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.config.schema import Config
from headway.data.packing import Packing
from headway.devices import kind_of
from headway.engines.train.fsdp.collectives import from_rank_zero
from headway.engines.train.fsdp.policy import PolicyModule, ShardedModule
from headway.models.output_layer import check_output_layer
from headway.models.packable import use_packed_attention
from headway.models.packed_attention import NAME
from headway.models.pretrained import attention, compute_dtype, load_config, load_model

M = TypeVar("M", bound=ShardedModule)


Wrap = Callable[[PreTrainedModel], M]


def sharded_policy(model_path: str, config: Config, device: torch.device) -> PolicyModule:
    """Open the policy at ``model_path`` and shard it over all ranks, as `sharded` does. Collective."""
    return sharded(lambda lm: PolicyModule(lm, config.rollout.temperature), model_path, config, device)


def sharded(wrap: Wrap[M], model_path: str, config: Config, device: torch.device) -> M:
    """Open the model at ``model_path``, ``wrap`` it, and shard it over all ranks of the default group. Collective.

    With ``actor.fsdp_config.param_offload`` on a GPU the shards stay in host memory.

    Raises:
        ModelError: on every rank, when the model cannot be opened or has a head that this engine does not support.
    """
    lm, padded = _load_on_rank_zero(model_path, config, kind_of(device).flex_attention)
    module = wrap(lm)
    module.padded = padded
    ranks = dist.get_world_size()
    weights = {name: p.detach() for name, p in module.named_parameters()} if ranks > 1 and dist.get_rank() == 0 else {}
    _shard(module, config, init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp",)))
    if ranks > 1:
        _scatter(module, weights, device)
    if config.model.enable_gradient_checkpointing:
        module.recompute_activations()
    return module


def reshard(module: ShardedModule) -> None:
    """Free what a forward pass gathered for a backward pass that will not come."""
    assert isinstance(module, FSDPModule)
    module.reshard()


def _load_on_rank_zero(model_path: str, config: Config, on_gpu: bool) -> tuple[PreTrainedModel, str | None]:
    """The full model on rank zero; on the others the same modules over memory that nobody has touched yet. And the
    reason why its rows have to be padded, if they have to.
    """
    trust_remote_code = config.model.trust_remote_code
    loaded: list[PreTrainedModel] = []

    def load() -> str | None:
        model = load_model(model_path, dtype=torch.float32, trust_remote_code=trust_remote_code)
        check_output_layer(model, model_path)
        loaded.append(model)
        return use_packed_attention(model, on_gpu=on_gpu) if Packing.of(config).packed else "model.packing=padded"

    padded = from_rank_zero(load)
    if loaded:
        return loaded[0], padded
    model_config = load_config(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            model_config,
            dtype=torch.float32,
            attn_implementation=attention(model_config) if padded is not None else NAME,
            trust_remote_code=trust_remote_code,
        )
    lm.to_empty(device="cpu")  # the system hands out pages on first touch: until then it costs no memory
    lm.tie_weights()
    lm.eval()
    return lm, padded


def _shard(module: ShardedModule, config: Config, mesh: DeviceMesh) -> None:
    fsdp_config = config.actor.fsdp_config
    dtype = compute_dtype(config, torch.device(mesh.device_type))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = fsdp_config.param_offload and mesh.device_type != "cpu"
    offload_policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in module.decoder_layers():
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=mixed,
            offload_policy=offload_policy,
            reshard_after_forward=fsdp_config.reshard_after_forward,
        )
    # Embedding, final norm and head are the root's own group: a tied weight is one parameter there, gathered once. The
    # backward pass starts with them, so they stay gathered in between.
    fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offload_policy, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is normalised globally, so gradients are summed over ranks and not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _scatter(module: ShardedModule, weights: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give every rank its shard of rank zero's ``weights``, one parameter at a time, and all of its buffers."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        full = weights[name].to(device) if weights else torch.empty(parameter.shape, device=device)
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    for buffer in module.buffers():  # rotary tables and the like; `fully_shard` moved them to the device
        dist.broadcast(buffer, src=0)
