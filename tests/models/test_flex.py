"""FlexAttention over packed lines, by torch's definition of it: GPUs run the same masks, compiled."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headway.data.packing import Tree, grow
from headway.models.attention.flex_attention import block_mask, flex
from headway.models.attention.packed_attention import packed_attention
from headway.models.attention.packed_layout import PackedLayout
from tests.tiers import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")


def trees(prompt: int, answers: list[int]) -> list[Tree]:
    """A group behind a prompt, with a fork and equal rows, and a row by itself."""
    rng = np.random.default_rng(prompt)
    ids = rng.integers(2, 60, prompt).astype(np.int32)
    rows = [np.concatenate([ids, rng.integers(2, 60, n).astype(np.int32)]) for n in answers]
    rows += [rows[0], np.concatenate([rows[-1][: prompt + 5], rng.integers(2, 60, 9).astype(np.int32)])]
    return [grow(rows, prompt), grow([ids[:7]])]


def heads(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    length = len(layout.positions)
    query, key, value = (torch.randn(1, count, length, 24, generator=noise) for count in (4, 2, 2))
    return query, key, value


@mostly_slow(
    ("window", "softcap", "with_sinks"),
    product([None, 3, 150], [None, 2.0], [False, True]),
    quick=[(None, 2.0, False), (3, None, True), (150, 2.0, True)],
)
def test_flex_attends_as_the_parts_do(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.linspace(-1, 1, 4) if with_sinks else None
    layout = PackedLayout.of(trees(131, [20, 6, 70]))
    query, key, value = heads(layout)
    expected, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        layout=layout,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    actual = flex(query, key, value, layout, scale=0.3, window=window, softcap=softcap, sinks=sinks, compiled=False)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_is_compiled_once_for_all_windows() -> None:
    """Torch compiles few variants of a function and then computes all scores: a number in a mask makes a variant."""
    layout = PackedLayout.of(trees(131, [20, 6]))
    masks = [block_mask(layout, window, compiled=False).mask_mod for window in (None, 3, 150)]
    assert len({mask.__code__ for mask in masks}) == 1
    for mask in masks:
        assert mask.__closure__ is not None
        assert all(isinstance(cell.cell_contents, Tensor) for cell in mask.__closure__)
