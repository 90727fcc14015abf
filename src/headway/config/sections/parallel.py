"""The mesh that a model is trained on: ``actor.parallel``. Arithmetic alone, so that the doctor and ``--dry-run`` ask.

    ranks of a role = replicate × shard × cp × tp         shard is what is left
    experts         = replicate × (shard · cp · tp / ep) × ep

Ranks are numbered with tp fastest, then cp: the cp · tp ranks that compute the same rows, an *inner mesh*, are
neighbours, and a group of devices of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from math import lcm
from typing import Any

from headway.config.sections.section import Positive, Section

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_attention_heads_per_layer")
"""Names of a layer's number of attention heads, in the ``config.json`` of one family or another."""
KV_HEADS = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
    "num_key_value_heads_per_layer",
)
"""Names of a layer's number of heads of keys and values."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of a layer's number of experts, of which a token goes to some."""
DIVIDES = (5, 23)
"""First release of transformers that divides matrices and experts as is asked of it here."""


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
    def least_ranks(self) -> int:
        """Fewest ranks that make such a mesh; every number of ranks that does is a multiple."""
        return self.replicate * lcm(self.inner, self.ep)

    @property
    def is_plain(self) -> bool:
        """True where all ranks shard, and each has different rows."""
        return self == ParallelConfig()

    def problems(self, nnodes: int, per_node: int, whose: str) -> Iterator[str]:
        """Yield problems of this mesh on ``nnodes`` × ``per_node`` devices of ``whose``."""
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


def model_problems(parallel: ParallelConfig, model: Mapping[str, object]) -> Iterator[str]:
    """Yield what does not fit a model, by its ``config.json`` (or its text part)."""
    heads, experts = _numbers(model, HEADS), _numbers(model, EXPERTS)
    kv_heads = _numbers(model, KV_HEADS) or heads
    if (odd := _not_divided(heads, parallel.inner)) is not None:
        yield (
            f"actor.parallel: cp={parallel.cp} × tp={parallel.tp} is {parallel.inner}, which does not divide the "
            f"model's {odd} attention heads; expected a divisor of {odd}"
        )
    elif (odd := _not_divided(kv_heads, parallel.tp)) is not None:
        yield (
            f"actor.parallel.tp={parallel.tp} does not divide the model's {odd} heads of keys and values; "
            f"expected a divisor of {odd}"
        )
    if parallel.ep > 1 and not experts:
        yield f"actor.parallel.ep={parallel.ep}: the model has no experts to divide; set ep=1"
    elif (odd := _not_divided(experts, parallel.ep)) is not None:
        yield f"actor.parallel.ep={parallel.ep} does not divide the model's {odd} experts; expected a divisor of {odd}"


def replica_problems(size: int, model: Mapping[str, object]) -> Iterator[str]:
    """Yield what keeps vLLM from dividing a model over ``size`` devices, by its ``config.json``.

    With fewer heads of keys and values than devices, several devices hold each.
    """
    heads = _numbers(model, HEADS)
    kv_heads = _numbers(model, KV_HEADS) or heads
    setting = f"rollout.tensor_model_parallel_size={size}"
    if (odd := _not_divided(heads, size)) is not None:
        yield f"{setting} does not divide the model's {odd} attention heads; expected a divisor of {odd}"
    elif (odd := next((count for count in kv_heads if count % size and size % count), None)) is not None:
        yield (
            f"{setting} neither divides the model's {odd} heads of keys and values nor is a multiple; expected a "
            f"divisor of {odd}, or a multiple"
        )


def expert_problems(parallel: ParallelConfig, model: Mapping[str, object], ranks: Mapping[str, int]) -> Iterator[str]:
    """Yield a problem for each role whose mesh leaves a rank without experts.

    ``ranks``: number of the ranks of each role that has devices of its own, on any of which the mesh fits.
    """
    experts = min(_numbers(model, EXPERTS), default=0)
    for role, count in ranks.items():
        if not experts or _each_holds(parallel, count, experts):
            continue
        copies = [number for number in range(1, count + 1) if count % (number * parallel.inner) == 0]
        others = (
            parallel.model_copy(update={"replicate": replicate, "ep": ep})
            for ep, replicate in product(sorted({parallel.ep, *range(1, experts + 1)}), copies)
        )
        able = [mesh for mesh in others if _fits(mesh, count, experts) and _each_holds(mesh, count, experts)]
        nearest = min(
            able, key=lambda mesh: (mesh.replicate != parallel.replicate, mesh.replicate, mesh.ep), default=None
        )
        way_out = "give another number of ranks"
        if nearest is not None:
            way_out = f"set actor.parallel.replicate={nearest.replicate} and actor.parallel.ep={nearest.ep}"
        yield (
            f"actor.parallel: with replicate={parallel.replicate} and ep={parallel.ep}, some of the {count} ranks of "
            f"{role} would hold none of a layer's {experts} experts; {way_out}"
        )


def _fits(parallel: ParallelConfig, ranks: int, experts: int) -> bool:
    of_copy = ranks // parallel.replicate
    return of_copy % parallel.ep == experts % parallel.ep == 0 and (parallel.ep == 1 or parallel.ep % parallel.tp == 0)


def _each_holds(parallel: ParallelConfig, ranks: int, experts: int) -> bool:
    """Tell whether each rank holds an expert: FSDP2 gives the first ranks equal parts of a group's, rounded up."""
    sharding = ranks // parallel.replicate // (parallel.ep if parallel.ep > 1 else parallel.tp)
    local = experts // parallel.ep
    return -(-local // sharding) * (sharding - 1) < local


def plan_problems(parallel: ParallelConfig, model: Any) -> Iterator[str]:
    """Yield what `transformers` has no plan for. ``model``: configuration of the text part, or its class."""
    release = version("transformers")
    if (parallel.tp > 1 or parallel.ep > 1) and tuple(map(int, release.split(".")[:2])) < DIVIDES:
        yield (
            f"actor.parallel.tp={parallel.tp} and ep={parallel.ep}: transformers {release} cannot divide models so. "
            f"Install {'.'.join(map(str, DIVIDES))} or later (vLLM may ask for an older one), or set both to 1"
        )
        return
    for name in ("tp", "ep"):
        size = getattr(parallel, name)
        # A model's own plan also has its output layer, which alone would divide next to nothing.
        if size > 1 and not getattr(model, f"base_model_{name}_plan", None):
            yield (
                f"actor.parallel.{name}={size}, and transformers has no plan for dividing a {model.model_type!r} model "
                f"so; set actor.parallel.{name}=1"
            )


def _numbers(model: Mapping[str, object], names: Sequence[str]) -> list[int]:
    """Numbers above 0 under any of ``names``: one for the model, or a list of them for its layers."""
    values = [model.get(name) for name in names]
    each = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [one for one in each if isinstance(one, int) and one > 0]


def _not_divided(numbers: Sequence[int], by: int) -> int | None:
    return next((number for number in numbers if number % by), None)
