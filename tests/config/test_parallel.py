"""A mesh is held against the numbers of a model, under whatever names its family's configuration has them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.config.sections.learning import ParallelConfig, expert_problems, model_problems
from tests.tiers import searched

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@pytest.mark.parametrize(
    ("sizes", "model", "said"),
    [
        ({"ep": 2}, {"num_experts": 4}, None),
        ({"ep": 2}, {"num_local_experts": 5}, "5 experts"),
        ({"ep": 2}, {"n_routed_experts": 7}, "7 experts"),
        ({"ep": 2}, {"moe_num_experts": 9}, "9 experts"),
        ({"ep": 2}, {"num_experts": [4, 4, 3]}, "3 experts"),
        ({"ep": 2}, {"num_experts": None, "num_local_experts": 0}, "no experts"),
        ({"cp": 2}, {"n_head": 3}, "3 attention heads"),
        ({"cp": 4}, {"num_attention_heads": 8, "num_key_value_heads": 2}, None),
        ({"tp": 4}, {"num_attention_heads": 8, "num_key_value_heads": 2}, "2 heads of keys and values"),
        ({"tp": 2}, {"num_attention_heads": 8, "num_key_value_heads": 8, "swa_num_key_value_heads": 1}, "1 heads of"),
        ({"tp": 2}, {"num_attention_heads": 8}, None),
    ],
    ids=str,
)
def test_heads_and_experts_are_found_under_every_familys_names(
    sizes: dict[str, int], model: dict[str, Any], said: str | None
) -> None:
    problems = list(model_problems(ParallelConfig.model_validate(sizes), model))
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


@given(SIZES, SIZES, SIZES, SIZES)
def test_a_mesh_that_fits_gives_each_rank_as_many_query_heads_for_each_of_its_keys(
    kv_heads: int, queries: int, tp: int, cp: int
) -> None:
    """Keys are repeated where the ranks of a line do not divide them (`headway.models.attention.packed_layout`)."""
    heads = {"num_attention_heads": kv_heads * queries, "num_key_value_heads": kv_heads}
    if not list(model_problems(ParallelConfig(tp=tp, cp=cp), heads)):
        keys = kv_heads // tp
        while keys % cp:
            keys += kv_heads // tp
        assert kv_heads * queries % (tp * cp) == 0
        assert (kv_heads * queries // tp // cp) % (keys // cp) == 0


@searched(100, st.integers(1, 24), st.integers(1, 12), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_each_rank_holds_an_expert_of_what_is_advised_or_passes(ranks: int, experts: int, tp: int, ep: int) -> None:
    """FSDP2 gives the ranks of a group what `torch.chunk` gives them."""

    def parts(parallel: ParallelConfig) -> list[int]:
        group = ranks // parallel.replicate // (parallel.ep if parallel.ep > 1 else parallel.tp)
        return [len(part) for part in torch.arange(experts // parallel.ep).chunk(group)] + [0] * group

    parallel = ParallelConfig(tp=tp, ep=ep)
    assume(ranks % tp == ranks % ep == experts % ep == 0 and (ep == 1 or ep % tp == 0))
    problems = list(expert_problems(parallel, {"num_experts": experts}, {"the trainer": ranks}))
    group = ranks // (ep if ep > 1 else tp)
    assert bool(problems) == (parts(parallel)[group - 1] == 0)
    if problems and (advised := re.search(r"replicate=(\d+) and actor.parallel.ep=(\d+)$", problems[0])):
        mesh = ParallelConfig(replicate=int(advised[1]), ep=int(advised[2]), tp=tp)
        assert not list(mesh.problems(1, ranks, "the trainer"))
        assert not list(model_problems(mesh, {"num_experts": experts}))
        assert not list(expert_problems(mesh, {"num_experts": experts}, {"the trainer": ranks}))
