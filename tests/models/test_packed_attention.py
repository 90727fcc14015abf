"""Attention over packed lines against its definition: a dense mask of what each token sees in its row, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.data.packing import Tree, grow
from headway.models.attention import packed_layout as layouts
from headway.models.attention.packed_attention import packed_attention
from headway.models.attention.packed_layout import AttentionKind, PackedLayout
from tests.data.trees import rows_and_prompt, seen_by_rows
from tests.pipeline.cases import for_each
from tests.tiers import a_share_and_all, mostly_slow

CPU = torch.device("cpu")
SCALE = 0.3
COSTS: dict[str, dict[str, int]] = {
    "as they come": {},
    "rows": {"CALL": 10**9, "COPY": 0, "BLOCK": -(10**6), "MERGE": 10**6},
    "views": {"CALL": 10**9, "COPY": 0, "BLOCK": 10**6, "MERGE": 10**6},
    "segments": {"CALL": 0, "COPY": 10**6, "BLOCK": 0, "MERGE": 0},
    "pieces": {"PIECE": 4},
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.03}
"""Largest error, as a part of the largest value. In bfloat16 a rounding is 0.004, and there are some."""


@dataclass(frozen=True)
class Case:
    """One attention layer: heads of queries and of keys, sizes of keys and of values, and what it does to scores."""

    heads: int = 4
    key_heads: int = 4
    size: int = 8
    value_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "plain": Case(),
    "grouped queries": Case(key_heads=2),
    "one head of keys": Case(key_heads=1, size=16, value_size=16),
    "values of another size": Case(key_heads=2, value_size=12),
    "a window of one": Case(window=1),
    "a window": Case(key_heads=2, window=5),
    "a long window": Case(window=14),
    "a window beyond all rows": Case(window=1000),
    "soft caps": Case(key_heads=2, softcap=1.5),
    "soft caps and a window": Case(softcap=1.5, window=6),
    "sinks": Case(key_heads=2, sinks=True),
    "sinks and a window": Case(sinks=True, window=6),
}


@contextmanager
def costs(which: str) -> Iterator[None]:
    """Context in which parts cost so much that those of one kind are chosen."""
    before = {name: getattr(layouts, name) for name in COSTS[which]}
    for name, value in COSTS[which].items():
        setattr(layouts, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(layouts, name, value)


def seen_in(trees: Sequence[Tree], window: int | None) -> NDArray[np.bool_]:
    """Mask [L, L] of a line of trees."""
    tokens = sum(len(tree.ids) for tree in trees)
    seen, at = np.zeros((tokens, tokens), np.bool_), 0
    for tree in trees:
        n = len(tree.ids)
        seen[at : at + n, at : at + n] = seen_by_rows(tree.places, n)
        if window is not None:
            seen[at : at + n, at : at + n] &= tree.positions[:, None] - tree.positions[None] < window
        at += n
    return seen


def inputs(case: Case, tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as a model's projections leave them (and sinks), and a gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = ((case.heads, case.size), (case.key_heads, case.size), (case.key_heads, case.value_size))
    leaves = [normal(1, tokens, *shape).transpose(1, 2).requires_grad_() for shape in shapes]
    if case.sinks:
        leaves.append(normal(case.heads).requires_grad_())
    return leaves, normal(1, tokens, case.heads, case.value_size)


def by_definition(case: Case, leaves: Sequence[Tensor], seen: NDArray[np.bool_]) -> Tensor:
    """Attention in float64, [1, L, H, E]."""
    q, k, v, *sinks = leaves
    repeats = case.heads // case.key_heads
    scores = SCALE * q @ k.repeat_interleave(repeats, 1).transpose(-1, -2)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    weights = scores.masked_fill(~torch.from_numpy(seen), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks:
        total = total + sinks[0].exp().view(1, -1, 1, 1)
    return (weights / total @ v.repeat_interleave(repeats, 1)).transpose(1, 2)


def assert_as_defined(trees: Sequence[Tree], case: Case, dtype: torch.dtype) -> PackedLayout:
    """Compare output and gradients with `by_definition`; returns the layout that was made."""
    layout = PackedLayout.of(trees)
    leaves, grad = inputs(case, len(layout.positions), dtype)
    out, _ = packed_attention(
        nn.Module(),
        leaves[0],
        leaves[1],
        leaves[2],
        None,
        layout=layout,
        scaling=SCALE,
        sliding_window=case.window,
        softcap=case.softcap,
        s_aux=leaves[3] if case.sinks else None,
    )
    assert out.dtype == dtype
    actual = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    defined = by_definition(case, exact, seen_in(trees, case.window))
    expected = [defined, *torch.autograd.grad(defined, exact, grad.double())]
    for name, value, right in zip(("output", "query", "key", "value", "sinks"), actual, expected, strict=False):
        error = float((value.double() - right).detach().abs().max() / right.detach().abs().max().clamp(min=0.1))
        assert error < TOLERANCE[dtype], f"{name}: {error}"
    return layout


lines = st.lists(rows_and_prompt().map(lambda drawn: grow(*drawn)), min_size=1, max_size=3)


def long_trees() -> list[Tree]:
    """A group with a fork, a row by itself, a row of one token, and one that is the prompt of another."""
    rng = np.random.default_rng(0)

    def some(tokens: int) -> NDArray[np.int32]:
        return rng.integers(2, 60, tokens).astype(np.int32)

    prompt = some(30)
    rows = [np.concatenate([prompt, some(n)]) for n in (1, 40, 3, 17)]
    rows += [np.concatenate([rows[1][:50], some(n)]) for n in (5, 20)]
    rows += [np.concatenate([rows[4], some(9)]), rows[3]]
    return [grow(rows, 30), grow([some(25)]), grow([some(1)]), grow([rows[0][:3], rows[0][:12]], 3)]


@pytest.mark.parametrize("which", COSTS)
@a_share_and_all
def test_any_line_is_attended_as_its_rows_are(which: str, share: float) -> None:
    drawn = st.tuples(lines, st.sampled_from(list(CASES.values())), st.sampled_from([torch.float64, torch.float32]))
    with costs(which):
        for_each(drawn, share * 40, lambda one: assert_as_defined(*one))


@mostly_slow(
    ("case", "dtype"),
    product(CASES, ["float64", "float32", "bfloat16"]),
    quick=[
        ("grouped queries", "float32"),
        ("values of another size", "float64"),
        ("a window of one", "float32"),
        ("soft caps and a window", "float64"),
        ("sinks and a window", "bfloat16"),
    ],
)
def test_rows_of_very_different_lengths_are_attended_as_by_themselves(case: str, dtype: str) -> None:
    for which in COSTS:
        with costs(which):
            assert_as_defined(long_trees(), CASES[case], getattr(torch, dtype))


def test_each_kind_of_part_is_chosen_where_it_is_cheap() -> None:
    def kinds(which: str, window: int | None = None) -> set[AttentionKind]:
        with costs(which):
            return {
                part.kind for part in assert_as_defined(long_trees(), Case(window=window), torch.float32).parts(window)
            }

    assert kinds("rows") == {AttentionKind.CAUSAL}
    assert AttentionKind.VIEW in kinds("views")
    assert kinds("segments") == {AttentionKind.CAUSAL, AttentionKind.SUBTREE}
    assert AttentionKind.VIEW in kinds("segments", window=5), "windows are cut out of views alone"


def test_a_deep_tree_is_attended_as_its_rows_are() -> None:
    """Turn after turn: each row begins with the one before, and two end each turn otherwise."""
    rng = np.random.default_rng(1)
    rows, so_far = [], rng.integers(2, 60, 6).astype(np.int32)
    for _ in range(7):
        ends = [rng.integers(2, 60, int(n)).astype(np.int32) for n in rng.integers(5, 9, 3)]
        rows += [np.concatenate([so_far, end]) for end in ends]
        so_far = rows[-1]
    tree = grow(rows, 6)
    depth = np.zeros(len(tree.segments.parents), int)
    for segment, parent in enumerate(tree.segments.parents):
        depth[segment] = 0 if parent < 0 else depth[parent] + 1
    assert depth.max() == 7
    for which in COSTS:
        for case in (CASES["grouped queries"], CASES["a long window"], CASES["soft caps"]):
            with costs(which):
                assert_as_defined([tree], case, torch.float32)


def test_many_rows_with_a_long_prompt_are_attended_as_by_themselves_at_what_they_cost() -> None:
    rng = np.random.default_rng(2)
    prompt = rng.integers(2, 60, 150)
    rows = [np.concatenate([prompt, rng.integers(2, 60, int(n))]).astype(np.int32) for n in rng.integers(1, 40, 24)]
    layout = assert_as_defined([grow(rows, 150)], Case(key_heads=2), torch.float32)
    assert {part.kind for part in layout.parts(None)} == {AttentionKind.CAUSAL, AttentionKind.SUBTREE}
    assert_as_defined([grow(rows, 150)], Case(window=20, key_heads=2), torch.float32)


@mostly_slow("dtype", TOLERANCE, quick=[torch.float32], ids=str)
def test_groups_whose_prompts_are_of_different_lengths_are_attended_together(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    trees = []
    for length in (90, 80, 84):
        prompt = rng.integers(2, 60, length)
        rows = [np.concatenate([prompt, rng.integers(2, 60, 12)]).astype(np.int32) for _ in range(10)]
        trees.append(grow(rows, length))
    with costs("segments"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "CALL", 10_000)  # such a call costs more than their padding
        layout = assert_as_defined(trees, Case(key_heads=2), dtype)
        assert_as_defined(trees, Case(softcap=1.5), dtype)
    (subtrees,) = [part for part in layout.parts(None) if part.kind is AttentionKind.SUBTREE]
    assert subtrees.items == 3
    assert subtrees.mask is not None


def test_a_layout_makes_its_parts_once_for_each_window_that_matters() -> None:
    layout = PackedLayout.of(long_trees())
    longest = int(layout.positions.max())
    assert layout.parts(None) is layout.parts(longest + 1) is layout.parts(None)
    assert layout.parts(longest) is not layout.parts(None)
    assert layout.parts(longest) is layout.parts(longest)


def test_nothing_but_one_line_without_a_mask_is_taken() -> None:
    layout = PackedLayout.of([grow([np.arange(4, dtype=np.int32)])])
    line = torch.zeros(1, 2, 4, 8)
    mask = torch.zeros(1, 1, 4, 4)
    arguments: list[Any] = [(line, mask), (line.expand(2, -1, -1, -1), None)]
    for tensor, given_mask in arguments:
        with pytest.raises(ValueError, match="one line of tokens"):
            packed_attention(nn.Module(), tensor, tensor, tensor, given_mask, layout=layout)


def test_the_scale_is_that_of_the_head_size_unless_another_is_given() -> None:
    layout = PackedLayout.of(long_trees())
    leaves, _ = inputs(Case(), len(layout.positions), torch.float64)
    q, k, v = leaves
    default, _ = packed_attention(nn.Module(), q, k, v, None, layout=layout)
    given_one, _ = packed_attention(nn.Module(), q, k, v, None, layout=layout, scaling=8**-0.5)
    assert torch.equal(default, given_one)
