"""What `make bench-train` trains on, what its arithmetic says, which sides it compares, and its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import train
from benchmarks.gpu_checks.setting import Setting, one_rank_group
from benchmarks.shapes import SIZES, Shape, Work, work
from benchmarks.train import BUDGET, LENGTHS, SIDES, Cell, Measured, cells, check, told
from benchmarks.train_sides import Plain, Side, distance, peak_bytes
from headway.data.packing import Packing

EVEN = Cell("10m", "1:1", 8)
TAILED = Cell("10m", "long-tailed", 8)
TINY = Shape("tiny", 4096, 32, 2, heads=2, kv_heads=1, intermediate=64)

# ---------------------------------------------------------------------------------------- the workload


def test_the_rows_of_a_group_share_their_prompt_and_nothing_else() -> None:
    rows = EVEN.rows()
    assert [len(row.input_ids) for row in rows] == [128] * 32
    prompts = {tuple(row.input_ids[:64].tolist()) for row in rows}
    answers = {tuple(row.input_ids[64:].tolist()) for row in rows}
    assert (len(prompts), len(answers)) == (4, 32)
    assert [row.episode.k for row in rows if row.episode is not None] == [*range(8)] * 4


def test_long_tailed_rows_are_few_long_ones_and_many_short_ones_and_the_same_each_time() -> None:
    lengths = [len(row.logprobs) for row in TAILED.rows()]
    assert max(lengths) == train.LONGEST_ANSWER
    assert np.median(lengths) < max(lengths) / 6
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(TAILED.rows(), TAILED.rows(), strict=True))


def test_arithmetic_of_rows_that_are_equally_long_by_hand() -> None:
    rows = Cell("100m", "1:1", 8).rows()  # two groups
    seen = 128 * 129 // 2
    assert work("padded", rows, BUDGET) == work("packed", rows, BUDGET) == Work(16 * 128, 16 * 64, 16 * seen)
    of_group = 64 * 65 // 2 + 8 * (64 * 64 + 64 * 65 // 2)
    assert work("shared", rows, BUDGET) == Work(2 * (64 + 8 * 64), 16 * 64, 2 * of_group)
    # Without attention and head it is a ratio of tokens: 1.78 at 1:1 and eight answers.
    ratio = work("padded", rows, BUDGET).tokens / work("shared", rows, BUDGET).tokens
    assert ratio == pytest.approx(16 / 9)


def test_operations_are_two_for_each_weight_and_token_three_times() -> None:
    size = SIZES["10m"]
    layers = 7 * (320 * 320 * 2 + 2 * 320 * 160 + 3 * 320 * 1024)
    assert Work(10, 0, 0).flops(size) == 6 * layers * 10
    assert Work(0, 10, 0).flops(size) == 6 * 320 * 4096 * 10
    assert Work(0, 0, 10).flops(size) == 3 * 4 * 320 * 7 * 10


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_arithmetic_counts_the_tokens_that_the_engine_packs(lengths: str) -> None:
    rows = Cell("10m", lengths, 8).rows()
    for layout, shared in (("packed", False), ("shared", True)):
        packs = Packing(BUDGET, packed=True, shared=shared)(rows)
        assert sum(pack.tokens for pack in packs) == work(layout, rows, BUDGET).tokens


def test_padding_counts_in_padded_rows_alone() -> None:
    rows = TAILED.rows()
    assert work("padded", rows, BUDGET).tokens > 1.15 * work("packed", rows, BUDGET).tokens
    assert work("plain", rows, BUDGET) == work("padded", rows, BUDGET)


def test_every_combination_is_a_cell_and_long_tailed_lengths_are_measured_once() -> None:
    made = cells(["1m", "10m"], LENGTHS, [8, 16])
    assert len(made) == 2 * (3 * 2 + 1)
    assert [cell.n for cell in made if cell.lengths == "long-tailed"] == [8, 8]


@pytest.mark.parametrize("flags", [("--models", "9m"), ("--lengths", "2:3")])
def test_an_unknown_name_is_told_with_those_that_are_known(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(flags)
    assert f"unknown {flags[1]}; known: " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- the sides


def test_all_sides_compute_one_gradient_and_a_wrong_one_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computes four steps of a tiny model, and one more."""
    folder, rows = tmp_path / "model", TAILED.rows()[:16]
    TINY.make(folder)
    with one_rank_group(Setting("cpu", tmp_path)):
        sides = {"plain": Plain(folder, 1024), **{name: Side(folder, 1024, name) for name in SIDES[1:]}}
        gradients = {name: side.gradient(rows) for name, side in sides.items()}
    check(TAILED, gradients)
    right = Plain._loss
    monkeypatch.setattr(Plain, "_loss", lambda self, rows, total: right(self, rows, total + 1))
    wrong = Plain(folder, 1024).gradient(rows)
    assert distance(wrong, gradients["plain"]) > 0
    with pytest.raises(SystemExit, match="shared rows is off"):
        check(TAILED, {**gradients, "shared": wrong})


@pytest.mark.slow
def test_peak_memory_is_what_was_held_at_once_beyond_what_was_there() -> None:
    class Holds(Plain):
        def __init__(self) -> None:
            self.before = torch.zeros(1_000_000)

        def step(self, rows: object) -> None:
            for _ in range(2):
                first = torch.zeros(1_000_000)
                second = torch.zeros(500_000)
                del first, second

    assert peak_bytes(Holds(), []) == pytest.approx(6_000_000, rel=0.01)


# ---------------------------------------------------------------------------------------- the table


def measured(cell: Cell, **seconds: float) -> Measured:
    found = Measured(
        cell, cell.rows(), {side: [slower * s for slower in (1.0, 1.1, 9.0)] for side, s in seconds.items()}
    )
    found.bytes = dict.fromkeys(SIDES, 2_000_000)
    return found


def test_ratios_are_of_medians_and_stand_beside_what_arithmetic_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    even = measured(EVEN, plain=4.0, padded=4.0, packed=4.0, shared=2.5)
    tailed = measured(TAILED, plain=4.0, padded=4.0, packed=3.6, shared=3.6)
    assert even.ratio("shared") == pytest.approx(1.6)
    assert 1.6 < even.allowed("shared") < 16 / 9
    text = told([even, tailed], {"10m": 10_000_000}, 2, show=False)
    assert Path("build/bench/train.md").read_text(encoding="utf-8") == text
    assert f"| 1.60× | {even.allowed('shared'):.2f}× | {1.6 / even.allowed('shared'):.1%} |" in text
