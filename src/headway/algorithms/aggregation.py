"""Aggregation of per-token losses to one number, by weights: the loss is Σ weight · loss over all micro-batches and
ranks.

The totals are those of the whole mini-batch, over all ranks, so the loss and its gradient do not depend on how the
mini-batch was split. Answers are counted as episodes: where one has several rows, `token_weights` gets its length.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.registry import Registry
from headway.errors import ConfigError


class Aggregation(Protocol):
    """Function that gives the weights [N, T] of a micro-batch's tokens, exactly 0 where masked.

    ``length_N1`` counts the valid tokens of each row's whole episode. ``loss_scale_factor`` is passed only where one is
    set.
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
    """Weigh every token the same, so long answers count more: 1/total_tokens. DAPO, arXiv:2503.14476, section 3.3."""
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
    """Weigh every answer the same: 1/(total_sequences · |y_i|). GRPO, arXiv:2402.03300, equation 3."""
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
    """Weights of the mean over answers of their summed losses, the policy gradient's own: 1/total_sequences.

    Of the size of an answer's length: the learning rate and ``grad_clip`` mean something else than with a mean.
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
    """Weights of a sequence mean over a constant length: 1/(total_sequences · loss_scale_factor) for each token.

    Dr. GRPO, arXiv:2503.20783, section 3. The constant is the user's (the longest response, say). verl takes the padded
    width where none is set; that differs between micro-batches, so here it must be set.

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
    """Weights of a micro-batch's tokens under ``mode``; an empty micro-batch or sequence weighs 0.

    Args:
        mask: True at valid tokens.
        mode: name in `AGGREGATIONS`.
        total_tokens: valid tokens of the whole mini-batch, over all ranks.
        total_sequences: episodes with at least one valid token of the whole mini-batch, over all ranks.
        loss_scale_factor: constant length, for ``seq-mean-token-sum-norm``.
        lengths: valid tokens of each row's whole episode; None: each row is one.

    Raises:
        ConfigError: unknown ``mode``, or one that lacks its constant.
    """
    constant = {} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor}
    length_N1 = mask.sum(dim=1, keepdim=True) if lengths is None else lengths[:, None]
    weights_NT = AGGREGATIONS.get(mode)(
        mask, length_N1, total_tokens=total_tokens, total_sequences=total_sequences, **constant
    )
    # A user's own aggregation may leave NaN at masked tokens: a product with 0 would keep it.
    return torch.where(mask, weights_NT, 0.0)
