"""The modules that FSDP shards, and their way from a model's folder onto a mesh.

A causal LM, whose forward pass ends in log-probs, or in values, instead of logits:

    input_ids ─▶ backbone ─▶ hidden states of the predicting positions ─▶ chunked head ─▶ log-prob and entropy per token

All of it lies in one forward call, because FSDP2 gathers parameters in hooks around the calls of the modules that it
wraps: a head that was called on its own, after the root's forward, would find its weight sharded.

`forward_sharded` runs passes without a gradient, one number per token, for trainer, critic and reference policy.

`sharded` opens a model. No rank ever holds more of it than its part:

    on meta ─▶ experts over ep, matrices over tp ─▶ fully_shard ─▶ each rank reads its own slices of the files
            ─▶ tried on a few tokens, by all ranks together: output layer, packed attention

Master weights are float32; FSDP casts them to the compute dtype as it gathers them.

Shape suffixes: N rows, L padded length (packed: one row of L tokens), M response tokens, U those of them that are
computed, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import unwrap
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.config.schema import Config
from headway.config.sections.learning import plan_problems
from headway.data.packing import CollatedRow, Packing
from headway.devices import kind_of
from headway.engines.train.fsdp.device_mesh import EP, TP, TrainMesh, on_all_ranks
from headway.engines.train.fsdp.micro_batches import MicroBatch, collate, micro_batches, on_device
from headway.errors import ModelError
from headway.models.attention.packable import undivided, use_packed_attention
from headway.models.cpu_linear import use_quickest
from headway.models.dtypes import compute_dtype
from headway.models.logits import logit_rule
from headway.models.logprobs import VocabularyPart, chunked_logprobs, default_chunk_tokens, probe_rows, probe_vector
from headway.models.output_layer import check_output_layer
from headway.models.pretrained import load_model
from headway.runtime.progress import Progress, advance, progress_here

WRAPPING = GradientCheckpointingLayer.__module__
"""The module whose functions `transformers` wraps forward passes of layers in, to recompute them."""


class ShardedModule(nn.Module):
    """The module that FSDP shards: a Hugging Face decoder under a forward pass that ends in numbers per token."""

    def __init__(self, decoder: nn.Module, mesh: TrainMesh | None) -> None:
        """Find the layers of ``decoder``: the LM without its head, wherever in this module it lies.

        ``mesh``: what it is divided over; None where this process has all of it.
        """
        super().__init__()
        self.mesh = mesh
        self.ranks = None if mesh is None else mesh.sequence
        """Ranks that divide lines of tokens."""
        self.decoder_layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        """The layers that are sharded, and recomputed, one by one: those that transformers marks."""
        self.packing: Packing
        """How rows are put together for this model; `sharded` sets it."""
        self.padded: str | None = None
        """Reason why the model's rows have to be padded; None where they can be packed. Set before the first pass."""
        self.compiled = False
        """True where layers are compiled, and log-probs."""
        _count_layers(self.decoder_layers, progress_here())

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Compute one number per response token: what a forward pass without gradient is run for."""
        result: Tensor = self(batch)
        return result

    def forward(self, work: MicroBatch | Callable[[], Any]) -> Any:
        """Compute what `compute` does, or run a trial of the module's parts: FSDP gathers weights for nothing else."""
        return self.compute(work) if isinstance(work, MicroBatch) else work()

    def compute(self, batch: MicroBatch) -> Any:
        """Compute the forward pass that the module ends in."""
        raise NotImplementedError

    def check(self, whose: str) -> None:
        """Test the computation after the decoder, in `forward`. Raises `ModelError`, which begins with ``whose``."""

    def _predicting(self, decoder: nn.Module, batch: MicroBatch) -> Float[Tensor, "u H"]:
        """Hidden states of this rank's positions that predict a response token.

        The response positions alone go through the head: prompts and padding never cost a row of logits.
        """
        hidden_NLH = decoder(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        predicting_uH: Tensor = hidden_NLH.flatten(0, 1).index_select(0, batch.predictors)
        return predicting_uH

    def _of_all(self, values: Float[Tensor, " u"], batch: MicroBatch) -> Float[Tensor, " M"]:
        """Return the numbers of all response tokens of the rows, given those that this rank has computed."""
        if batch.places is not None and self.ranks is not None:
            values = self.ranks.joined(values, batch.places, len(batch.targets))
        return batch.spread(values)

    def recompute_activations(self) -> None:
        """Keep only each layer's input in the forward pass, and run the layer again in the backward pass.

        Wraps ``forward`` and not the call, so that FSDP's hooks stay outside and gather once. The model stays in
        evaluation mode (transformers' own switch needs training mode): dropout would make the ratio π_θ/π_behav noise.
        """
        for layer in self.decoder_layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def compile_parts(self) -> None:
        """Compile the layers' forward passes, for lines of any length, and the computation after them if `compute` uses
        it. One layer's kernels serve all layers.

        Like `recompute_activations`, which has to follow, it works inside FSDP's hooks.
        """
        self.compiled = True
        for layer in self.decoder_layers:
            # Without the functions that transformers wraps it in, one for each class: FSDP's is one more.
            own = unwrap(type(layer).forward, stop=lambda f: f.__globals__["__name__"] != WRAPPING)
            layer.forward = torch.compile(MethodType(own, layer), dynamic=True)


class PolicyModule(ShardedModule):
    """A Hugging Face causal LM, ``lm``, that returns log-probs of given tokens under ``temperature``."""

    def __init__(self, lm: PreTrainedModel, temperature: float, mesh: TrainMesh | None = None) -> None:
        super().__init__(lm.base_model, mesh)
        self.lm = lm
        self._temperature = temperature
        self._rule = logit_rule(lm.config)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Log-probs (nats) of the response tokens."""
        logprobs: Tensor = self(batch)[0]
        return logprobs

    def check(self, whose: str) -> None:
        check_output_layer(self.lm, whose)

    def compute(self, batch: MicroBatch) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Log-probs (nats) of the response tokens and entropies, [M] float32."""
        hidden_UH = self._predicting(self.lm.base_model, batch)
        targets_U = batch.targets if batch.places is None else batch.targets.index_select(0, batch.places)
        head = self.lm.get_output_embeddings()
        weight, bias, part = _own(head.weight), None if head.bias is None else _own(head.bias), _part(head.weight)
        chunk = None
        if part is not None:  # the same on all ranks, which meet in each chunk: their parts may differ in length
            chunk = default_chunk_tokens(-(-len(head.weight) // part.group.size()), weight.device)
        logprobs_U, entropy_U = chunked_logprobs(
            hidden_UH, weight, bias, targets_U, self._temperature, chunk, self._rule, compiled=self.compiled, part=part
        )
        return self._of_all(logprobs_U, batch), self._of_all(entropy_U, batch)


class ValueModule(ShardedModule):
    """The decoder of a Hugging Face causal LM with a head of one number: V(s_t), before each response token.

    An output layer of the LM's own is left out, so that no file is read for it; a tied one is the embedding. The new
    head begins at zero, and so do all values.
    """

    def __init__(self, lm: PreTrainedModel, mesh: TrainMesh | None = None) -> None:
        super().__init__(lm.base_model, mesh)
        self.decoder = lm.base_model
        head = lm.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not lm.get_input_embeddings().weight:
            lm.set_output_embeddings(nn.Identity())  # else every rank would read all of it, for nothing
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def compute(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Values of the states before the response tokens, [M] float32."""
        hidden_UH = self._predicting(self.decoder, batch)
        # In float32 whatever the decoder computes in: values are compared with returns, and differences are small.
        values_U = torch.mv(hidden_UH.float(), self.value_head.weight.float().squeeze(0))
        return self._of_all(values_U, batch)


def _own(parameter: Tensor) -> Tensor:
    """This rank's part of a gathered parameter that is divided over tp. Differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(weight: Tensor) -> VocabularyPart | None:
    """Return the part of the vocabulary in this rank's rows of the head's ``weight``; None if it has all rows."""
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
        return None
    mesh = weight.device_mesh
    _, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    return VocabularyPart(mesh.get_group(), first)


def _count_layers(layers: Sequence[nn.Module], progress: Progress) -> None:
    """Count each layer that is passed, forward and backward, as progress: one micro-batch may take many minutes.

    On a GPU a layer counts when it is queued, and the queue is short. Autograd calls hooks of the backward pass on
    threads of its own there, so ``progress`` is given to them and not looked up.
    """

    def backward(_: Tensor) -> None:
        progress.advance()

    def forward(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        progress.advance()
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(backward)

    for layer in layers:
        layer.register_forward_hook(forward)


@torch.no_grad()
def forward_sharded(module: ShardedModule, rows: Sequence[CollatedRow]) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of this rank's ``rows``, by ``module.per_token``. Collective."""
    assert module.mesh is not None
    results = [np.zeros(0, dtype=np.float32)] * len(rows)
    computed: list[Tensor] = []  # read at the end: reading would wait for the device in each micro-batch
    try:
        packs = micro_batches(rows, module.packing, module.mesh.device)
        for done, (own, pack) in enumerate(packs, 1):
            (batch,) = on_device(module.mesh.device, collate(own, pack.trees, module.ranks))
            computed.append(module.per_token(batch).float())
            advance(f"{done} of {len(packs)} micro-batches done")
        of_rows = [i for _, pack in packs for i in pack.rows]
        ends = np.cumsum([len(rows[i].logprobs) for i in of_rows])
        values = torch.cat(computed).cpu().numpy() if computed else np.zeros(0, dtype=np.float32)
        for i, part in zip(of_rows, np.split(values, ends), strict=False):  # behind them are those of filler rows
            results[i] = part
        return results
    finally:
        # The root's parameters stay gathered after a forward pass, waiting for a backward pass that does not come here:
        # the next forward pass would take them as they are, even after the weights have changed.
        reshard(module)


def probe(policy: PolicyModule) -> NDArray[np.float32]:
    """Compute the log-probs [8] of the probe's sequences. Collective."""
    vocabulary = int(policy.lm.get_input_embeddings().weight.shape[0])
    return probe_vector(forward_sharded(policy, probe_rows(vocabulary)))


def reshard(module: ShardedModule) -> None:
    """Free what a forward pass gathered for a backward pass that will not come."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


M = TypeVar("M", bound=ShardedModule)

Wrap = Callable[[PreTrainedModel], M]

EXPERTS = "ep_dispatch_experts"
"""How `transformers`' plans call modules whose experts are divided over ep."""


def sharded_policy(
    model_path: str, config: Config, mesh: TrainMesh, dtype: torch.dtype = torch.float32
) -> PolicyModule:
    """Open the policy at ``model_path`` on ``mesh``, as `sharded` does. Collective."""
    return sharded(lambda lm: PolicyModule(lm, config.rollout.temperature, mesh), model_path, config, mesh, dtype)


def frozen_policy(model_path: str, config: Config, mesh: TrainMesh) -> PolicyModule:
    """Open the policy at ``model_path`` as `sharded_policy` does, in the dtype that it computes in, without gradients:
    the reference, or a copy that gets the weights of others. Collective.
    """
    policy = sharded_policy(model_path, config, mesh, getattr(torch, compute_dtype(config, mesh.device)))
    return policy.requires_grad_(False)


def sharded(wrap: Wrap[M], model_path: str, config: Config, mesh: TrainMesh, dtype: torch.dtype = torch.float32) -> M:
    """Open the model at ``model_path``, ``wrap`` it, and divide it over ``mesh``. Collective.

    ``dtype``: of the weights as they are held. With ``actor.fsdp_config.param_offload`` on a GPU the shards stay in
    host memory.

    Raises:
        ModelError: on every rank, when the model cannot be opened, has a head that this engine does not support, or
            cannot be divided over the mesh.
    """
    # Filled by `divide`, in the middle of loading: `from_pretrained` returns the model without what wraps it.
    opened: list[tuple[PreTrainedModel, M]] = []

    def divide(lm: PreTrainedModel) -> None:
        experts = _divide(lm, model_path, mesh)
        lm.tie_weights()  # here, so that FSDP sees a tied weight as one
        module = wrap(lm)
        if not module.decoder_layers:
            raise ModelError(f"{model_path}: {type(lm).__name__} has no layers that transformers marks as a decoder's")
        _shard(module, experts, config, mesh)
        opened.append((lm, module))

    def load() -> None:
        load_model(model_path, dtype=dtype, trust_remote_code=config.model.trust_remote_code, divide=divide)

    on_all_ranks(load)
    [(lm, module)] = opened
    lm.config.distributed_config = None
    # transformers puts what it reads for a mesh onto the mesh's device, and FSDP wants offloaded shards on the host.
    module.to("cpu" if _offloads(config, mesh) else mesh.device)
    for part in module.modules():  # buffers compute on the device, wherever the weights wait
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(mesh.device)

    if mesh.device.type == "cpu" and mesh.parallel.tp == 1 and not config.model.compile:
        use_quickest(lm)
    packing = Packing.of(config)

    def try_out() -> str | None:
        module.check(model_path)
        if not packing.packed:
            return "model.packing=padded"
        return use_packed_attention(lm, on_gpu=kind_of(mesh.device).flex_attention)

    with torch.no_grad():
        module.padded = _agreed(lm, lambda: module(try_out))
    reshard(module)
    module.packing = replace(packing, packed=packing.packed and module.padded is None)
    if mesh.sequence is not None and module.padded is not None:
        raise undivided(model_path, mesh.parallel.cp, module.padded)
    # In this order: what recomputes a layer wraps its compiled forward pass.
    if config.model.compile:
        module.compile_parts()
    if config.model.enable_gradient_checkpointing:
        module.recompute_activations()
    return module


def _agreed(lm: PreTrainedModel, try_out: Callable[[], str | None]) -> str | None:
    """Return the reason of any rank to pad rows: then all ranks pad. An exception of a rank is raised on all."""
    before = lm.config._attn_implementation
    reasons = on_all_ranks(try_out)
    # One answer for all: ranks that packed the same rows differently would meet in collectives of different sizes.
    reason = next((of for of in reasons if of is not None), None)
    if reasons[dist.get_rank()] is None and reason is not None:  # this rank could pack rows, and another one cannot
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
    dtype = getattr(torch, compute_dtype(config, mesh.device))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy() if _offloads(config, mesh) else OffloadPolicy()
    # Innermost first: FSDP2 gives a module the parameters that no module inside it has been given yet.
    for parts, over, free in (
        (experts, mesh.sharding(experts=bool(experts)), fsdp_config.reshard_after_forward),
        (module.decoder_layers, mesh.sharding(), fsdp_config.reshard_after_forward),
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
