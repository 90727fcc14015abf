"""From per-token losses to one number, as weights: the loss is Σ weight · loss over all micro-batches and ranks.

The totals are those of the whole mini-batch, over all ranks, so the loss and its gradient do not depend on how the
mini-batch was split.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.registry import Registry


class Aggregation(Protocol):
    """Weights [N, T] of a micro-batch's tokens, exactly 0 where masked."""

    def __call__(self, mask: Bool[Tensor, "N T"], *, total_tokens: float, total_sequences: float) -> Tensor: ...


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", "actor.loss_agg_mode")


@AGGREGATIONS.register("token-mean")
def token_mean(mask: Bool[Tensor, "N T"], *, total_tokens: float, total_sequences: float) -> Float[Tensor, "N T"]:
    """Every token counts the same, so long answers count more: 1/total_tokens. DAPO, arXiv:2503.14476, section 3.3."""
    return mask.float() / max(total_tokens, 1.0)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(
    mask: Bool[Tensor, "N T"], *, total_tokens: float, total_sequences: float
) -> Float[Tensor, "N T"]:
    """Every answer counts the same: 1/(total_sequences · |y_i|). GRPO, arXiv:2402.03300, equation 3."""
    length_N1 = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask.float() / (length_N1 * max(total_sequences, 1.0))


def token_weights(
    mask: Bool[Tensor, "N T"], mode: str, *, total_tokens: float, total_sequences: float
) -> Float[Tensor, "N T"]:
    """Weights of a micro-batch's tokens under ``mode``; an empty micro-batch or sequence weighs 0.

    Args:
        mask: True at valid tokens.
        mode: name in `AGGREGATIONS`.
        total_tokens: valid tokens of the whole mini-batch, over all ranks.
        total_sequences: sequences with at least one valid token of the whole mini-batch, over all ranks.

    Raises:
        ConfigError: unknown ``mode``.
    """
    weights_NT = AGGREGATIONS.get(mode)(mask, total_tokens=total_tokens, total_sequences=total_sequences)
    return torch.where(mask, weights_NT, 0.0)
