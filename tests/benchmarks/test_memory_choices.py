"""The page on what to choose for a model against the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_choices import MODELS, PROMPT, ROOM, choose, table
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.process_memory import BF16

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_has_the_table_that_the_arithmetic_gives() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    expected = list(table())
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected, "python -m benchmarks.memory_choices prints the table"


@pytest.mark.parametrize(
    ("name", "billions"), [("1 B", 1.24), ("8 B", 8.19), ("32 B", 32.8), ("70 B", 70.6), ("30 B-A3B", 30.5)]
)
def test_the_models_have_the_sizes_that_they_are_published_with(name: str, billions: float) -> None:
    shape = ModelShape.of(MODELS[name])
    assert shape is not None
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_what_is_chosen_fits_and_what_does_not_fit_is_said() -> None:
    for config in MODELS.values():
        shape = ModelShape.of(config)
        assert shape is not None
        choice = choose(shape, 8, PROMPT + 4096)
        assert choice is not None
        assert choice.memory.device <= ROOM
        assert choice.answers, "four of eight devices generate"
        assert choice.replica == 1 or BF16 * shape.parameters > ROOM / 2, "a small model is not divided"
        assert BF16 * shape.parameters < ROOM * choice.replica
