"""What a notebook's cell shows."""

from __future__ import annotations

import re
from html import unescape

import pytest
from rich.text import Text

from headway.reports.live.live_view import Cell, curve, html
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


def test_the_curve_goes_from_the_first_reward_to_the_last_within_its_frame() -> None:
    assert curve([0.5]) == ""
    points = re.search('points="([^"]*)"', curve([0.25, 0.25, 0.75]))
    assert points is not None
    assert points[1] == "48.0,122.0 320.0,122.0 592.0,18.0"
    assert {"0.250", "0.750"} <= set(re.findall(r">([\d.]+)</text>", curve([0.25, 0.75])))
    assert "592.0,122.0" in curve([1.0, 1.0])


def test_the_curve_of_a_long_run_has_few_points_and_its_ends_and_extremes() -> None:
    progress = RunProgress(RunMetrics())
    for reward in [0.5] + [0.0] * 3000 + [1.0] + [0.0] * 3000 + [0.25]:
        progress.on_row({"reward/mean": reward})
    drawn = re.search('points="([^"]*)"', curve(progress.rewards))
    assert drawn is not None
    points = drawn[1].split()
    assert len(points) <= MOST_POINTS
    assert (points[0], points[-1]) == ("48.0,70.0", "592.0,96.0")
    assert any(point.endswith(",18.0") for point in points)


@pytest.mark.parametrize("rewards", [[0.0, 1e-9], [-5.0, 5.0, 0.0]])
def test_every_point_of_a_curve_is_drawn_within_it(rewards: list[float]) -> None:
    drawn = re.search('points="([^"]*)"', curve(rewards))
    assert drawn is not None
    places = [tuple(map(float, point.split(","))) for point in drawn[1].split()]
    assert len(places) == len(rewards)
    assert all(48 <= x <= 592 and 18 <= y <= 122 for x, y in places)
