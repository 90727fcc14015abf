"""What transitions cost, for every small pair of layouts: brute-force set differences, and the paper's closed forms."""

from __future__ import annotations

import contextlib
import doctest
import io
from fractions import Fraction
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.weights.regroup import (
    WAYS,
    Layout,
    Transition,
    consecutive,
    gather_everything,
    gather_regrouped,
    gather_usual,
    regrouped,
    table,
)
from tests.weights.layouts import PAIRS, Cells, cells, held

DOCUMENT = Path(__file__).parents[2] / "docs" / "regrouping.md"


def trained(way: str, training: Layout) -> list[Cells]:
    """What each rank trains, element by element: its part of the layout, or 1/N of the columns."""
    if way == "everything":
        flat = Layout(pp=1, tp=training.world, dp=1)
        return [cells(flat, 0, rank) for rank in range(training.world)]
    return held(consecutive(training))


def assert_costs_are_set_differences(transition: Transition, before: list[Cells]) -> None:
    whole = transition.after.layout.world**2
    after = held(transition.after)
    for rank, cost in enumerate(transition.costs):
        others = [before[member] for member in cost.gathers_from if member != rank]
        received = frozenset().union(*others)
        assert len(others) == len(cost.gathers_from) - 1
        assert after[rank] <= received | before[rank]
        assert cost.received == Fraction(len(received - before[rank]), whole)
        assert cost.received == Fraction(sum(map(len, others)), whole)
        assert cost.peak == Fraction(len(received | before[rank]), whole)
        assert cost.missing == Fraction(len(after[rank] - before[rank]), whole)
        assert cost.redundant == Fraction(len(before[rank] - after[rank]), whole)


@pytest.mark.parametrize("way", WAYS)
def test_costs_are_what_brute_force_set_differences_give(way: str) -> None:
    for training, generation in PAIRS:
        assert_costs_are_set_differences(WAYS[way](training, generation), trained(way, training))


@pytest.mark.parametrize("way", WAYS)
def test_gather_groups_partition_the_ranks(way: str) -> None:
    for training, generation in PAIRS:
        gathers = WAYS[way](training, generation).gathers
        assert sorted(rank for group in gathers for rank in group) == list(range(training.world))


def test_regrouped_costs_are_the_papers_closed_form() -> None:
    for training, generation in PAIRS:
        t, g = training.tp * training.pp, generation.tp * generation.pp
        for cost in gather_regrouped(training, generation).costs:
            assert cost.received == cost.missing == Fraction(t - g, g * t)
            assert cost.peak == Fraction(1, g)
            assert cost.redundant == 0


def test_the_usual_ways_costs_are_the_papers_closed_form() -> None:
    for training, generation in PAIRS:
        t = training.tp * training.pp
        for cost in gather_usual(training, generation).costs:
            assert cost.received == Fraction(t - 1, t)
            assert cost.peak == 1
            assert cost.redundant <= Fraction(1, t)


def test_without_pipelines_the_usual_way_keeps_a_whole_second_copy_just_when_shards_are_joined_to_several() -> None:
    for training, generation in PAIRS:
        if training.pp == 1:
            most = max(cost.redundant for cost in gather_usual(training, generation).costs)
            joined = 1 < generation.tp < training.tp
            assert most == (Fraction(1, training.tp) if joined else 0)


def test_gathering_everything_costs_the_papers_closed_form() -> None:
    for training, generation in PAIRS:
        n = training.world
        costs = gather_everything(training, generation).costs
        for cost in costs:
            assert cost.gathers_from == tuple(range(n))
            assert cost.received == Fraction(n - 1, n)
            assert cost.peak == 1
        most = max(cost.redundant for cost in costs)
        if generation.tp == n:
            assert most == 0
        elif generation.tp > 1:
            assert most == Fraction(1, n)
        else:
            assert most == Fraction(generation.pp - 1, n * generation.pp)


def test_joining_stages_alone_the_usual_groups_are_the_regrouped_ones_and_keep_nothing() -> None:
    for training, generation in PAIRS:
        if training.tp == generation.tp:
            ours, theirs = regrouped(training, generation), consecutive(generation)
            assert [ours.part(rank) for rank in range(training.world)] == [
                theirs.part(rank) for rank in range(training.world)
            ]
            assert set(ours.model_groups) == set(theirs.model_groups)
            assert all(cost.redundant == 0 for cost in gather_usual(training, generation).costs)


def test_no_rank_receives_more_regrouped_than_it_lacks_in_the_usual_way() -> None:
    for training, generation in PAIRS:
        ours, usual = gather_regrouped(training, generation).costs, gather_usual(training, generation).costs
        for mine, theirs in zip(ours, usual, strict=True):
            assert mine.received <= theirs.missing <= theirs.received
            assert mine.peak <= theirs.peak
            assert mine.redundant <= theirs.redundant


def test_nothing_is_moved_when_the_layout_stays() -> None:
    for training, generation in PAIRS:
        if training == generation:
            for rank, cost in enumerate(gather_regrouped(training, generation).costs):
                assert cost.gathers_from == (rank,)
                assert cost.received == 0


def test_a_whole_model_per_rank_is_gathered_from_the_training_replica() -> None:
    training, generation = Layout(pp=2, tp=2, dp=2), Layout(pp=1, tp=1, dp=8)
    assert gather_regrouped(training, generation).gathers == consecutive(training).model_groups


@pytest.mark.parametrize("way", WAYS)
def test_every_way_refuses_layouts_that_cannot_be_regrouped(way: str) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        WAYS[way](Layout(pp=1, tp=2, dp=2), Layout(pp=1, tp=4, dp=1))


def test_the_table_in_the_document_is_what_its_program_prints() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    program = text.split("```python\n")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(DOCUMENT), "exec"), {})
    rows = [line for line in text.splitlines() if line.startswith(("| training", "| ---", "| pp="))]
    assert rows == printed.getvalue().splitlines()


def test_the_examples_in_the_document_are_true() -> None:
    results = doctest.testfile(str(DOCUMENT), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


def test_the_table_has_three_rows_for_each_transition_and_a_column_for_each_model() -> None:
    pairs = [(Layout(1, 4, 2), Layout(1, 2, 4)), (Layout(2, 2, 1), Layout(1, 2, 2))]
    header, rule, *rows = table(pairs, {"tiny": 10**9}).splitlines()
    assert header.endswith("| tiny: received, redundant |")
    assert header.count("|") == rule.count("|")
    assert [row.split(" | ")[1] for row in rows] == ["everything", "usual", "regrouped"] * 2
    assert rows[1] == "| pp=1 tp=4 dp=2 → pp=1 tp=2 dp=4 | usual | 4 | 1/2 | 3/4 | 1 | 1/4 | 0.75, 0.25 GB |"
