"""What a notebook's cell shows."""

from __future__ import annotations

import re
from html import unescape

from rich.text import Text

from headway.reports.live.live_view import Cell, html
from headway.reports.live.panel import MOST_POINTS, RunProgress
from headway.reports.metrics.run_metrics import RunMetrics


def text_of(page: str) -> str:
    return unescape(re.sub("<[^>]*>", "", page))


def test_a_cell_has_what_was_printed_above_what_changes_and_is_sent_when_it_is_another_one() -> None:
    pages: list[str] = []
    cell = Cell(pages.append)
    cell.show(Text("1 of 2"))
    cell.print("a line & more")
    cell.show(Text("1 of 2"))
    cell.show(Text("1 of 2"))
    assert [text_of(page) for page in pages] == ["1 of 2\n", "a line & more\n1 of 2\n"]
    cell.show(Text("2 of 2", style="green"))
    cell.close()
    cell.print("Completed")
    cell.close()
    assert text_of(pages[-1]) == "a line & more\n2 of 2\nCompleted\n"
    assert "a line &amp; more" in pages[-1]
    assert len(pages) == 4
    assert text_of(html(Text("a table"))) == "a table\n"


def test_the_rewards_of_a_long_run_that_are_kept_are_few_with_its_ends_and_extremes() -> None:
    progress = RunProgress(RunMetrics())
    for reward in [0.5] + [0.0] * 3000 + [1.0] + [0.0] * 3000 + [0.25]:
        progress.on_row({"reward/mean": reward})
    rewards = progress.rewards.items
    assert len(rewards) <= MOST_POINTS
    assert (rewards[0], max(rewards), rewards[-1]) == (0.5, 1.0, 0.25)
