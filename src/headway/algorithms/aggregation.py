"""Aggregation of per-token losses: the loss is Σ weight · loss over the tokens of all micro-batches and ranks.

The weights use totals of the whole mini-batch, over all ranks, so the loss and its gradient do not depend on how the
mini-batch was split. An answer is an episode: if it has several rows, `token_weights` needs its total length.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.registry import Registry
from headway.errors import ConfigError


class Aggregation(Protocol):
    """Function that returns the weights [N, T] of a micro-batch's tokens, exactly 0 where masked.

    ``length_N1``: number of valid tokens of each row's whole episode. ``loss_scale_factor`` is passed only if set.
    """

    def __call__(
        self,
        mask: Bool[Tensor, "N T"],
        length_N1: Int[Tensor, "N 1"],
        *,
        total_tokens: float,
        total_sequences: float,
        loss_scale_factor: float = ...,
    ) -> Tensor: ...


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", "actor.loss_agg_mode")


@AGGREGATIONS.register("token-mean")
def token_mean(
    mask: Bool[Tensor, "N T"],
    length_N1: Int[Tensor, "N 1"],
    *,
    total_tokens: float,
    total_sequences: float,
    loss_scale_factor: float | None = None,
) -> Float[Tensor, "N T"]:
    """Weigh every token the same, 1/total_tokens: long answers count more. DAPO, arXiv:2503.14476, section 3.3."""
    return mask.float() / max(total_tokens, 1.0)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(
    mask: Bool[Tensor, "N T"],
    length_N1: Int[Tensor, "N 1"],
    *,
    total_tokens: float,
    total_sequences: float,
    loss_scale_factor: float | None = None,
) -> Float[Tensor, "N T"]:
    """Weigh every answer the same: 1/(total_sequences · |y_i|) per token. GRPO, arXiv:2402.03300, equation 3."""
    return mask.float() / (length_N1.clamp(min=1) * max(total_sequences, 1.0))


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(
    mask: Bool[Tensor, "N T"],
    length_N1: Int[Tensor, "N 1"],
    *,
    total_tokens: float,
    total_sequences: float,
    loss_scale_factor: float | None = None,
) -> Float[Tensor, "N T"]:
    """Sum the losses of each answer and average over answers, as the plain policy gradient: weight 1/total_sequences.

    The loss grows with the answers' length, so learning rate and ``grad_clip`` need other values than for a mean.
    """
    return mask.float() / max(total_sequences, 1.0)


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(
    mask: Bool[Tensor, "N T"],
    length_N1: Int[Tensor, "N 1"],
    *,
    total_tokens: float,
    total_sequences: float,
    loss_scale_factor: float | None = None,
) -> Float[Tensor, "N T"]:
    """Divide each answer's summed loss by a constant length: weight 1/(total_sequences · loss_scale_factor) per token.

    Dr. GRPO, arXiv:2503.20783, section 3. The user sets the constant (say, the longest response). verl uses the padded
    width by default; that differs between micro-batches, so here there is no default.

    Raises:
        ConfigError: ``loss_scale_factor`` is not a positive number.
    """
    if loss_scale_factor is None or not loss_scale_factor > 0:
        raise ConfigError(
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by a constant length: set actor.loss_scale_factor to "
            f"a positive number, such as data.max_response_length (got {loss_scale_factor})"
        )
    # At least 1: without any sequence 0/0 would be NaN.
    return mask.float() / (max(total_sequences, 1.0) * loss_scale_factor)


def token_weights(
    mask: Bool[Tensor, "N T"],
    mode: str,
    *,
    total_tokens: float,
    total_sequences: float,
    loss_scale_factor: float | None = None,
    lengths: Int[Tensor, " N"] | None = None,
) -> Float[Tensor, "N T"]:
    """Return the weights of a micro-batch's tokens under ``mode``; an empty micro-batch or sequence weighs 0.

    Args:
        mask: True at valid tokens.
        mode: name in `AGGREGATIONS`.
        total_tokens: number of valid tokens in the whole mini-batch, over all ranks.
        total_sequences: number of episodes with a valid token in the whole mini-batch, over all ranks.
        loss_scale_factor: constant length, for ``seq-mean-token-sum-norm``.
        lengths: number of valid tokens of each row's whole episode; None: each row is an episode.

    Raises:
        ConfigError: unknown ``mode``, or its constant is missing.
    """
    constant = {} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor}
    length_N1 = mask.sum(dim=1, keepdim=True) if lengths is None else lengths[:, None]
    weights_NT = AGGREGATIONS.get(mode)(
        mask, length_N1, total_tokens=total_tokens, total_sequences=total_sequences, **constant
    )
    # A user's aggregation may leave NaN at masked tokens, which a product with 0 would keep.
    return torch.where(mask, weights_NT, 0.0)
