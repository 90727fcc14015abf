"""The modules that FSDP shards: a causal LM whose forward pass ends in log-probs, or in values, instead of logits.

    input_ids ─▶ backbone ─▶ hidden states of the predicting positions ─▶ chunked head ─▶ log-prob and entropy per token

All of it lies in one forward call, because FSDP2 gathers parameters in hooks around the calls of the modules that it
wraps: a head that was called on its own, after the root's forward, would find its weight sharded.

Shape suffixes: N rows, L padded length (packed: one row of L tokens), M response tokens, U those of them that are
computed, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.config.schema import Config
from headway.data.packing import Packing
from headway.engines.train.fsdp.batch import MicroBatch
from headway.errors import ModelError
from headway.models.logits import logit_rule
from headway.models.logprobs import chunked_logprobs
from headway.progress import Progress, progress_here


class ShardedModule(nn.Module):
    """The module that FSDP shards: a Hugging Face decoder under a forward pass that ends in numbers per token."""

    def __init__(self, decoder: nn.Module) -> None:
        """Find the layers of ``decoder``: the LM without its head, wherever in this module it lies."""
        super().__init__()
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


class PolicyModule(ShardedModule):
    """A Hugging Face causal LM, ``lm``, that returns log-probs of given tokens under ``temperature``."""

    def __init__(self, lm: PreTrainedModel, temperature: float) -> None:
        super().__init__(lm.base_model)
        self.lm = lm
        self._temperature = temperature
        self._rule = logit_rule(lm.config)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Log-probs (nats) of the response tokens."""
        logprobs, _ = self(batch)
        result: Tensor = logprobs
        return result

    def forward(self, batch: MicroBatch) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Log-probs (nats) of the response tokens and entropies, [M] float32."""
        hidden_NLH = self.lm.base_model(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        # The response positions alone go through the head: prompts and padding never cost a row of logits.
        hidden_UH = hidden_NLH.flatten(0, 1).index_select(0, batch.predictors)
        head = self.lm.get_output_embeddings()
        logprobs_U, entropy_U = chunked_logprobs(
            hidden_UH, head.weight, head.bias, batch.targets, self._temperature, rule=self._rule
        )
        return batch.spread(logprobs_U), batch.spread(entropy_U)


class ValueModule(ShardedModule):
    """The decoder of a Hugging Face causal LM with a head of one number: V(s_t), before each response token.

    The head begins at zero: a critic that knows nothing expects nothing.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm.base_model)
        self.decoder = lm.base_model
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def per_token(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        result: Tensor = self(batch)
        return result

    def forward(self, batch: MicroBatch) -> Float[Tensor, " M"]:
        """Values of the states before the response tokens, [M] float32."""
        hidden_NLH = self.decoder(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        hidden_UH = hidden_NLH.flatten(0, 1).index_select(0, batch.predictors)
        # In float32 whatever the decoder computes in: values are compared with returns, and differences are small.
        return batch.spread(torch.mv(hidden_UH.float(), self.value_head.weight.float().squeeze(0)))


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
