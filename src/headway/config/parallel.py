"""The mesh that a model is trained on: ``actor.parallel``. Arithmetic alone, so that the doctor and ``--dry-run`` ask.

    ranks of a role = replicate × shard × cp × tp         shard is what is left
    experts         = replicate × (shard · cp · tp / ep) × ep

Ranks are numbered with tp fastest, then cp: the cp · tp ranks that compute the same rows, an *inner mesh*, are
neighbours, and a group of devices of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.section import Positive, Section


class ParallelConfig(Section):
    """Dimensions of the mesh that policy, critic, reference and ``logp`` are computed on. Devices that are left shard
    the weights (FSDP2)."""

    replicate: Positive = 1
    """Number of copies of the sharded model (HSDP): each is sharded over its own ranks, and gradients are added up over
    the copies. With one copy in each machine, weights travel within machines alone."""
    tp: Positive = 1
    """Tensor parallelism: number of ranks that divide each layer's matrices, by the plan that ``transformers`` has for
    the model. Divides its heads, and its heads of keys and values."""
    cp: Positive = 1
    """Context (sequence) parallelism by Ulysses: number of ranks that divide each line of tokens, and for attention the
    heads. A micro-batch has ``cp`` times as many tokens."""
    ep: Positive = 1
    """Expert parallelism: number of ranks that divide the experts of a mixture-of-experts model. A multiple of ``tp``;
    divides the ranks of one copy, and the number of experts."""

    @property
    def inner(self) -> int:
        """Number of ranks that compute the same rows: those of an inner mesh."""
        return self.tp * self.cp

    @property
    def is_plain(self) -> bool:
        """True where all ranks shard, and each has rows of its own."""
        return self == ParallelConfig()

    def problems(self, nnodes: int, per_node: int, whose: str) -> Iterator[str]:
        """What is wrong with this mesh on ``nnodes`` × ``per_node`` devices, the setting ``whose``."""
        ranks = nnodes * per_node
        copies = self.replicate * self.inner
        if ranks % copies:
            yield (
                f"actor.parallel: replicate={self.replicate} × cp={self.cp} × tp={self.tp} is {copies} ranks, which do "
                f"not divide the {ranks} of {whose}; give a multiple of {copies}, or lower one of them"
            )
            return
        if self.inner > per_node or per_node % self.inner:
            yield (
                f"actor.parallel: cp={self.cp} × tp={self.tp} is {self.inner} ranks, which have to be on one machine, "
                f"and {whose} has {per_node} on each; expected a divisor of {per_node}"
            )
        of_copy = ranks // self.replicate
        if self.ep > 1 and self.ep % self.tp:
            yield f"actor.parallel: ep={self.ep} is no multiple of tp={self.tp}; give one, or set ep=1"
        elif of_copy % self.ep:
            yield (
                f"actor.parallel: ep={self.ep} does not divide the {of_copy} ranks of one copy of the model on "
                f"{whose}; expected a divisor of {of_copy}"
            )


def model_problems(parallel: ParallelConfig, model: dict[str, object]) -> Iterator[str]:
    """What of the mesh does not fit a model, by its ``config.json`` (or the part of it that is about text)."""

    def number(*names: str) -> int | None:
        found = (model.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads") or heads
    experts = number("num_experts", "num_local_experts", "n_routed_experts")
    if heads is not None and heads % parallel.inner:
        yield (
            f"actor.parallel: cp={parallel.cp} × tp={parallel.tp} is {parallel.inner}, which does not divide the "
            f"model's {heads} attention heads; expected a divisor of {heads}"
        )
    elif kv_heads is not None and kv_heads % parallel.tp:
        yield (
            f"actor.parallel.tp={parallel.tp} does not divide the model's {kv_heads} heads of keys and values; "
            f"expected a divisor of {kv_heads}"
        )
    if parallel.ep > 1 and experts is None:
        yield f"actor.parallel.ep={parallel.ep}: the model has no experts to divide; set ep=1"
    elif parallel.ep > 1 and experts is not None and experts % parallel.ep:
        yield f"actor.parallel.ep={parallel.ep} does not divide the model's {experts} experts; expected a divisor of it"
