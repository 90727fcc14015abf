"""The modules that FSDP shards: a causal LM whose forward pass ends in log-probs, or in values, instead of logits.

    input_ids ─▶ backbone ─▶ hidden states of the predicting positions ─▶ chunked head ─▶ log-prob and entropy per token

All of it lies in one forward call, because FSDP2 gathers parameters in hooks around the calls of the modules that it
wraps: a head that was called on its own, after the root's forward, would find its weight sharded.

`forward_sharded` runs passes without a gradient, one number per token, for trainer, critic and reference policy.

Shape suffixes: N rows, L padded length (packed: one row of L tokens), M response tokens, U those of them that are
computed, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.config.schema import Config
from headway.data.packing import CollatedRow, Pack, Packing
from headway.engines.train.fsdp.collectives import reduce_numbers
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.micro_batches import MicroBatch, collate, filler_row
from headway.errors import ModelError
from headway.models.attention.ulysses import SequenceRanks
from headway.models.logits import logit_rule
from headway.models.logprobs import chunked_logprobs, default_chunk_tokens
from headway.models.output_layer import check_output_layer
from headway.models.vocabulary_parallel import VocabularyPart, divided_logprobs
from headway.runtime.progress import Progress, advance, progress_here

T = TypeVar("T")


class ShardedModule(nn.Module):
    """The module that FSDP shards: a Hugging Face decoder under a forward pass that ends in numbers per token."""

    def __init__(self, decoder: nn.Module, mesh: TrainMesh | None) -> None:
        """Find the layers of ``decoder``: the LM without its head, wherever in this module it lies.

        ``mesh``: what it is divided over; None where this process has all of it.
        """
        super().__init__()
        self.ranks = None if mesh is None else mesh.sequence
        """Ranks that divide lines of tokens."""
        self._layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._kind = type(decoder).__name__
        self.padded: str | None = None
        """Reason why the model's rows have to be padded; None where they can be packed. Set before the first pass."""
        _count_layers(self._layers, progress_here())

    def packing(self, config: Config) -> Packing:
        """Return how rows are put together for this model."""
        configured = Packing.of(config)
        return configured if self.padded is None else replace(configured, packed=False)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Compute one number per response token: what a forward pass without gradient is run for."""
        raise NotImplementedError

    def run(self, trial: Callable[[], T]) -> T:
        """Run ``trial``, which calls parts of the module, in a forward pass: FSDP gathers weights for nothing else."""
        result: T = self(trial)
        return result

    def forward(self, work: MicroBatch | Callable[[], Any]) -> Any:
        """Compute what `compute` does, or run what `run` was given."""
        return self.compute(work) if isinstance(work, MicroBatch) else work()

    def compute(self, batch: MicroBatch) -> Any:
        """Compute the forward pass that the module ends in."""
        raise NotImplementedError

    def check(self, whose: str) -> None:
        """Try what is computed behind the decoder, in `run`. Raises `ModelError`, which begins with ``whose``."""

    def _predicting(
        self, decoder: nn.Module, batch: MicroBatch
    ) -> tuple[Float[Tensor, "U H"], Int[Tensor, " U"] | None]:
        """Hidden states of this rank's positions that predict a response token, and their places among those of all
        ranks that divide the line; None where there are no others.

        The response positions alone go through the head: prompts and padding never cost a row of logits.
        """
        hidden_NLH = decoder(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        own = batch.own
        return hidden_NLH.flatten(0, 1).index_select(0, own.predictors), own.places

    def _of_all(
        self, values: Float[Tensor, " u"], places: Int[Tensor, " u"] | None, batch: MicroBatch
    ) -> Float[Tensor, " M"]:
        """Numbers of all response tokens of the rows, from those that this rank has computed."""
        if places is not None and self.ranks is not None:
            values = self.ranks.joined(values, places, len(batch.targets))
        return batch.spread(values)

    def decoder_layers(self) -> list[nn.Module]:
        """The layers that are sharded, and recomputed, one by one.

        Raises:
            ModelError: transformers does not mark any module as a decoder layer.
        """
        if not self._layers:
            raise ModelError(f"{self._kind} has no decoder layers that transformers marks as such")
        return list(self._layers)

    def recompute_activations(self) -> None:
        """Keep only each layer's input in the forward pass, and run the layer again in the backward pass.

        Wraps ``forward`` and not the call, so that FSDP's hooks stay outside and gather once. The model stays in
        evaluation mode (transformers' own switch needs training mode): dropout would make the ratio π_θ/π_behav noise.
        """
        for layer in self.decoder_layers():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def compile_layers(self) -> None:
        """Compile the layers' forward passes, for lines of any length: one layer's kernels serve all.

        Like `recompute_activations`, which comes after it, inside FSDP's hooks.
        """
        for layer in self.decoder_layers():
            layer.forward = torch.compile(layer.forward, dynamic=True)


class PolicyModule(ShardedModule):
    """A Hugging Face causal LM, ``lm``, that returns log-probs of given tokens under ``temperature``."""

    def __init__(self, lm: PreTrainedModel, temperature: float, mesh: TrainMesh | None = None) -> None:
        super().__init__(lm.base_model, mesh)
        self.lm = lm
        self._temperature = temperature
        self._rule = logit_rule(lm.config)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Log-probs (nats) of the response tokens."""
        logprobs, _ = self(batch)
        result: Tensor = logprobs
        return result

    def check(self, whose: str) -> None:
        check_output_layer(self.lm, whose)

    def compute(self, batch: MicroBatch) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Log-probs (nats) of the response tokens and entropies, [M] float32."""
        hidden_UH, places = self._predicting(self.lm.base_model, batch)
        targets_U = batch.targets if places is None else batch.targets.index_select(0, places)
        head = self.lm.get_output_embeddings()
        weight, bias, part = _own(head.weight), None if head.bias is None else _own(head.bias), _part(head.weight)
        if part is None:
            logprobs_U, entropy_U = chunked_logprobs(
                hidden_UH, weight, bias, targets_U, self._temperature, rule=self._rule
            )
        else:
            # The same on all ranks, which meet in each chunk: their parts may differ in length.
            chunk = default_chunk_tokens(-(-len(head.weight) // part.group.size()), weight.device)
            logprobs_U, entropy_U = divided_logprobs(
                hidden_UH, weight, bias, targets_U, self._temperature, self._rule, chunk, part
            )
        return self._of_all(logprobs_U, places, batch), self._of_all(entropy_U, places, batch)


class ValueModule(ShardedModule):
    """The decoder of a Hugging Face causal LM with a head of one number: V(s_t), before each response token.

    An output layer of the LM's own is left out, so that no file is read for it; a tied one is the embedding. The new
    head begins at zero: a critic that knows nothing expects nothing.
    """

    def __init__(self, lm: PreTrainedModel, mesh: TrainMesh | None = None) -> None:
        super().__init__(lm.base_model, mesh)
        self.decoder = lm.base_model
        head = lm.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not lm.get_input_embeddings().weight:
            lm.set_output_embeddings(nn.Identity())  # else every rank would read all of it, for nothing
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        result: Tensor = self(batch)
        return result

    def compute(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Values of the states before the response tokens, [M] float32."""
        hidden_UH, places = self._predicting(self.decoder, batch)
        # In float32 whatever the decoder computes in: values are compared with returns, and differences are small.
        values_U = torch.mv(hidden_UH.float(), self.value_head.weight.float().squeeze(0))
        return self._of_all(values_U, places, batch)


def _own(parameter: Tensor) -> Tensor:
    """This rank's part of a gathered parameter that is divided over tp. Differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(weight: Tensor) -> VocabularyPart | None:
    """The part of the vocabulary that this rank's rows of the head's ``weight`` are; None where they are all."""
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


def micro_batches(
    rows: Sequence[CollatedRow], packing: Packing, device: torch.device, *, whole_episodes: bool = False
) -> list[Pack]:
    """Split this rank's ``rows`` into micro-batches, as many on every rank. Collective.

    A rank that has fewer of its own ends with empty ones, each of which stands for one `filler_row`.
    ``whole_episodes``: see `Packing`.
    """
    packs = packing(rows, whole_episodes=whole_episodes)
    (most,) = reduce_numbers([len(packs)], dist.ReduceOp.MAX, device)
    if len(packs) < most:
        (filler,) = packing([filler_row()])
        packs += [Pack((), filler.trees)] * (int(most) - len(packs))
    return packs


def rows_of(rows: Sequence[CollatedRow], pack: Pack) -> list[CollatedRow]:
    """Return the rows of one micro-batch, or the filler row for an empty one."""
    return [rows[i] for i in pack.rows] or [filler_row()]


Compute = Callable[[MicroBatch], torch.Tensor]
"""Function that computes one number per response token [M] of a micro-batch."""


@torch.no_grad()
def forward_rows(
    rows: Sequence[CollatedRow],
    packs: Sequence[Pack],
    compute: Compute,
    device: torch.device,
    ranks: SequenceRanks | None = None,
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of ``rows``, micro-batch by micro-batch. Collective where ``compute`` is."""
    results = [np.zeros(0, dtype=np.float32)] * len(rows)
    for done, pack in enumerate(packs, 1):
        values = compute(collate(rows_of(rows, pack), device, pack.trees, ranks)).float().cpu().numpy()
        ends = np.cumsum([len(rows[i].logprobs) for i in pack.rows])[:-1]
        for i, part in zip(pack.rows, np.split(values, ends), strict=False):
            results[i] = part
        advance(f"{done} of {len(packs)} micro-batches done")
    return results


def forward_sharded(
    module: ShardedModule, rows: Sequence[CollatedRow], packing: Packing, device: torch.device
) -> list[NDArray[np.float32]]:
    """Compute [T] float32 numbers for each of this rank's ``rows``, by ``module.per_token``. Collective."""
    try:
        packs = micro_batches(rows, packing, device)
        return forward_rows(rows, packs, module.per_token, device, module.ranks)
    finally:
        # The root's parameters stay gathered after a forward pass, waiting for a backward pass that does not come here:
        # the next forward pass would take them as they are, even after the weights have changed.
        reshard(module)


def reshard(module: ShardedModule) -> None:
    """Free what a forward pass gathered for a backward pass that will not come."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
