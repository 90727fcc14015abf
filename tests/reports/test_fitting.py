"""Tables that fit: what commands print has lines of at most the console's width, and words that are whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Column

from headway.api.eval.figures import ScoredAnswer, Solved
from headway.cli.eval_command import print_samples
from headway.data.types import Prompt
from headway.reports.comparison import compared, print_comparison, read_runs
from headway.reports.sample_printer import print_group, print_table
from headway.reports.terminal import print_fitting
from tests.reports.samples import episode, row, sample
from tests.reports.stories import story, written

TEMPLATED = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


class Printed(Console):
    """A console of 80 columns, as a pipe is one, that keeps what is printed."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=80, markup=False, highlight=False)

    @property
    def lines(self) -> list[str]:
        assert isinstance(self.file, io.StringIO)
        lines = [line for line in self.file.getvalue().splitlines() if not line.startswith("times: ")]  # a sentence
        assert max(map(len, lines)) <= 80, lines
        assert not any("…" in line for line in lines)
        return lines


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (1, [[0]]),
        (7, [[0, 1, 2, 3, 4, 5, 6]]),
        (10, [[0, 1, 2, 3, 4, 5, 6], [0, 7, 8, 9]]),
    ],
)
def test_columns_that_do_not_fit_come_in_tables_below_behind_the_first_one(
    columns: int, heads: list[list[int]]
) -> None:
    names = [f"column{i:02}" for i in range(columns)]
    console = Console(file=io.StringIO(), width=71)  # of seven columns of nine characters and their gaps
    print_fitting(console, [Column(name) for name in names], [["x"] * columns])
    assert isinstance(console.file, io.StringIO)
    tables = [block.splitlines()[0] for block in console.file.getvalue().split("\n\n")]
    shown = [head.split() for head in tables]
    assert [[int(word.removeprefix("column")) for word in head] for head in shown] == heads


def test_all_numbers_of_tokens_fit_a_narrow_terminal() -> None:
    names = ("advantages", "prox_logprobs", "ref_logprobs", "values", "returns")
    columns = {name: [-0.12345] * 4 for name in names}
    parts = {f"part {i}": 0.5 for i in range(9)}
    group = sample(3, [episode(k, [row(columns=columns)], parts=parts, turns=2) for k in range(2)])
    console = Printed()
    print_group(group, console, tokens=True)
    text = " ".join(console.lines).split()
    for heading in ("version", "engine", "trainer", "gap", "entropy", "advantage", "π_prox", "reference", "return"):
        assert heading in text
    assert text.count("-0.1235") + text.count("-0.1234") == 2 * 3 * len(names)


def test_many_runs_with_long_names_fit_a_narrow_terminal(tmp_path: Path) -> None:
    names = ["Q" * 40, "Y" * 28, "second", "third-run"]
    runs = [written(tmp_path / name, story(versions=2), config={"run": {"seed": i}}) for i, name in enumerate(names)]
    console = Printed()
    print_comparison(compared(read_runs(runs)), console)
    text = " ".join(console.lines)
    assert "training reward, best" in text
    assert (text.count("Q"), text.count("Y")) == (2 * 40, 2 * 28)


def test_prompts_in_tables_are_what_the_user_said() -> None:
    prompt = Prompt(0, 0, 0, "s", TEMPLATED, np.arange(2, dtype=np.int32), asked="2+2=")
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "3+3="},
        {"role": "x", "content": ""},
    ]
    of_messages = Prompt(0, 0, 0, "s", TEMPLATED, np.arange(2, dtype=np.int32), messages=chat)
    assert (prompt.question, of_messages.question) == ("2+2=", "3+3=")
    solved = Solved(
        0, "s", TEMPLATED, "4", (ScoredAnswer(0, "4", 1, False, "stop", 1.0, {}),), question=prompt.question
    )
    console = Printed()
    print_samples(console, [solved], 1)
    line: dict[str, Any] = {"group": 1, "version": 0, "fate": "trained", "lag": 0, "reward": 1.0, "lengths": [1, 2]}
    print_table([line | {"source": "s", "turns": 1, "prompt": TEMPLATED, "question": "2+2="}], console)
    text = "\n".join(console.lines)
    assert text.count("2+2=") == 2
    assert "im_start" not in text
