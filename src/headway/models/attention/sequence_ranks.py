"""Ranks that divide a line of tokens: each has a part of the tokens, and for attention some heads of all.

    tokens 0…  all heads │                          │ all tokens, heads 0…
    tokens …   all heads │ ── all-to-all ─▶ attend  │ all tokens, heads …   ── all-to-all ─▶ tokens, all heads

That is DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Shape suffixes: L tokens of the line, l of this rank, H heads, h of this rank, D head size, U values, u of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """One rank among those that divide lines of tokens. A line's length is a multiple of their number.

    Key and value heads are repeated if their number is not a multiple of the number of ranks.
    """

    group: ProcessGroup
    rank: int
    """Index of this rank among them."""
    size: int
    """Number of ranks."""

    def part(self, tokens: int) -> slice:
        """Places of this rank's tokens in a line of ``tokens``."""
        own = tokens // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def to_heads(self, line: Float[Tensor, "1 H l D"]) -> Float[Tensor, "1 h L D"]:
        """Exchange heads for tokens: returns some heads of all tokens.

        Repeats heads if ``size`` does not divide their number.
        """
        heads = line.shape[1]
        if heads % self.size:
            line = line.repeat_interleave(self.size // gcd(heads, self.size), dim=1)
        exchanged: Tensor = _AllToAll.apply(line, 1, 2, self.group)  # type: ignore[no-untyped-call]
        return exchanged

    def to_tokens(self, line: Float[Tensor, "1 L h D"]) -> Float[Tensor, "1 l H D"]:
        """Exchange tokens for heads: returns all heads of this rank's tokens."""
        exchanged: Tensor = _AllToAll.apply(line, 1, 2, self.group)  # type: ignore[no-untyped-call]
        return exchanged

    def own_heads(self, of_heads: Float[Tensor, " H"]) -> Float[Tensor, " h"]:
        """Return the numbers of this rank's heads. Differentiable."""
        return of_heads.chunk(self.size)[self.rank]

    def joined(self, values: Float[Tensor, " u"], places: Int[Tensor, " u"], total: int) -> Float[Tensor, " U"]:
        """Return the ``total`` values of all ranks; this rank has ``values``, at ``places``.

        Every rank has to compute the same loss from them: the gradient is not summed over the ranks.
        """
        joined: Tensor = _Joined.apply(values, places, total, self.group)  # type: ignore[no-untyped-call]
        return joined


class _AllToAll(torch.autograd.Function):
    """Scatter one dimension over the ranks, and gather another from them."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, scattered: int, gathered: int, group: ProcessGroup) -> Tensor:
        ctx.args = gathered, scattered, group  # swapped: the backward pass exchanges back
        ranks = dist.get_world_size(group)
        sent = torch.stack(line.chunk(ranks, dim=scattered))  # contiguous, as the collective takes it
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grads[0], *ctx.args), None, None, None  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        joined = values.new_zeros(total).index_copy_(0, places, values)
        dist.all_reduce(joined, group=group)  # each place has the value of one rank, and zeros of the others
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not summed over the ranks: all compute the same loss from all values, and a sum would count it once for each.
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None
