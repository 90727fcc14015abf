"""``headway compare``: the table against runs that were computed by hand, settings that differ, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli import cli
from headway.errors import ConfigError
from headway.reports.comparison import (
    Comparison,
    RunRead,
    at_equal,
    compared,
    names,
    overlaid,
    page,
    print_comparison,
    read_runs,
)
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.run_directory import RunLock
from headway.reports.terminal import UNBOUNDED
from headway.reports.timeline.run_history import ACCURACY, CurveLog, CurvePoint
from tests.reports.stories import story, written
from tests.reports.test_curves import log_of, row


def read(name: str, *rows: dict[str, Any], settings: dict[str, Any] | None = None) -> RunRead:
    return RunRead(name, settings or {}, log_of(*rows), summary(RunMetrics()), "completed")


def cells(found: Comparison, name: str) -> tuple[str, ...]:
    (wanted,) = [tuple(row) for of, *row in found.results if of == name]
    return wanted


def printed(found: Comparison, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_runs_of_different_lengths_are_compared_where_both_have_been() -> None:
    """By hand: a version is 10 s, 4 groups and 50 tokens for the first run, twice the tokens for the second.

    The second one's last accuracy is that of version 2, which it began with 8 groups, 20 s and 200 tokens. The first
    one had 8 groups and 20 s with version 2, and 200 tokens with version 4.
    """
    slow = {"throughput/trained_tokens_per_s": 10.0}
    first = read("a", *(row(v, **{ACCURACY: 0.1 * v}) for v in range(6)))
    second = read("b", *(row(v, **{ACCURACY: 0.2 * v} | slow) for v in range(3)))
    found = compared([first, second])
    assert cells(found, "validation reward at 8 groups") == ("0.200 v2", "0.400 v2")
    assert cells(found, "validation reward at 20 seconds") == ("0.200 v2", "0.400 v2")
    assert cells(found, "validation reward at 200 tokens") == ("0.400 v4", "0.400 v2")
    assert cells(found, "validation reward, best") == ("0.500", "0.400")


def test_a_run_without_a_value_has_dashes_and_does_not_shorten_the_others() -> None:
    place = CurvePoint(1, 10.0, 4, 50.0)
    rows = at_equal("validation reward", [[(place, 0.5)], []])
    assert [(name, tuple(cells)) for name, *cells in rows][:1] == [("validation reward at 4 groups", ("0.500", "-"))]
    assert at_equal("validation reward", [[], []]) == []


def test_the_training_reward_is_compared_as_a_mean_over_versions() -> None:
    rewards = [0.0, 1.0, 0.5]
    found = compared(
        [
            read("a", *(row(v, **{"reward/mean": r}) for v, r in enumerate(rewards))),
            read("b", row(0, **{"reward/mean": 0.25})),
        ]
    )
    assert cells(found, "training reward at 4 groups") == ("0.000", "0.250")
    assert cells(found, "training reward, best") == ("0.500", "0.250")


def test_only_the_settings_that_differ_are_shown() -> None:
    a = read("a", settings={"mode": "on_policy", "run.dir": "a", "rollout.n": 8, "trainer.seed": None})
    b = read(
        "b", settings={"mode": "async_partial", "run.dir": "b", "rollout.n": 8, "actor.lr": 0.1, "trainer.seed": None}
    )
    assert [(name, tuple(cells)) for name, *cells in compared([a, b]).settings] == [
        ("mode", ("on_policy", "async_partial")),
        ("actor.lr", ("-", "0.1")),
    ]
    assert "The settings are the same" in printed(compared([a, a]))


def test_settings_and_names_are_shown_as_they_are_whatever_brackets_or_escapes_they_hold() -> None:
    a = read("runs[a]", settings={"data.train": "data/[a-z]*.jsonl", "rollout.stop": ["[/INST]"]})
    b = read("b\x1b[2J", settings={"data.train": "\x9b31m", "rollout.stop": None})
    text = printed(compared([a, b]))
    for shown in ("runs[a]", "data/[a-z]*.jsonl", "['[/INST]']", "b<0x1B>[2J", "<0x9B>31m"):
        assert shown in text
    assert "\x1b" not in text and "\x9b" not in text


def test_two_runs_fit_into_80_columns_and_five_are_all_there(tmp_path: Path) -> None:
    run = written(
        tmp_path / "a-directory-with-a-long-name",
        story(versions=3),
        config={"algorithm": {"policy_loss": {"loss_mode": "x" * 40}}},
    )
    other = written(tmp_path / "b", story(versions=2))
    text = printed(compared(read_runs([run, other])))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    many = [written(tmp_path / f"run{i}", story(versions=2)) for i in range(5)]
    assert all(f"run{i}" in printed(compared(read_runs(many)), 120) for i in range(5))


def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path: Path) -> None:
    whole = story(versions=4)
    runs = [
        written(tmp_path / name, events)
        for name, events in (("goes", whole[:-30]), ("killed", whole[:-30]), ("over", whole))
    ]
    lock = RunLock(runs[0] / "run.lock")
    lock.take()
    assert cells(compared(read_runs(runs)), "status") == ("running", "killed", "completed")
    lock.release()


def test_names_are_as_long_as_needed_to_differ() -> None:
    assert names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]


def test_a_pipe_has_names_as_a_whole(tmp_path: Path) -> None:
    long = "a-run-with-a-name-of-more-than-twenty-eight-characters"
    runs = [read(long, settings={"data.train": "/" + 60 * "x"}), read("b", settings={"data.train": "y"})]
    assert long not in printed(compared(runs))
    piped = printed(compared(runs), UNBOUNDED)
    assert sum(long in line for line in piped.splitlines()) == 2 and "/" + 60 * "x" in piped


def test_the_page_has_one_curve_of_each_run_in_each_chart(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, story(versions=versions)) for name, versions in (("first", 3), ("<second>", 5))]
    found = compared(read_runs(runs))
    data = overlaid(found)
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert [curve["name"] for curve in charts["validation"]["curves"]] == ["first", "<second>"]
    assert len(data["tables"][charts["lag"]["curves"][1]["table"]]["version"]) == 5
    text = page(found)
    assert "&lt;second&gt;" in text
    assert "<second>" not in text
    assert "default-src 'none'" in text


# ------------------------------------------------------------------------------------------------ bad input


def typed(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


def test_comparing_says_what_is_wrong_in_one_message(tmp_path: Path) -> None:
    run = written(tmp_path / "run", story(versions=2))
    assert typed(run) == (2, f"error: expected two runs or more to compare, and got {run} alone\n")
    assert typed(run, run)[1] == f"error: RUN: got {run} and {run}, which are one run; give different ones\n"
    assert "does not exist" in typed(run, tmp_path / "none")[1]
    damaged = written(tmp_path / "damaged", story(versions=2))
    with (damaged / "events.jsonl").open("a") as file:
        file.write("nonsense\n")
    code, text = typed(run, damaged)
    assert (code, text.count("\n")) == (2, 1)
    assert "is damaged: it is not one whole JSON object" in text
    (damaged / "events.jsonl").write_text("")
    assert "nothing has happened yet" in typed(run, damaged)[1]


def test_settings_that_cannot_be_read_are_one_message(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, story(versions=2)) for name in "ab"]
    (runs[1] / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"settings .*config\.yaml: not valid YAML: line 1"):
        read_runs(runs)


def test_the_page_lies_in_the_first_run_or_where_it_is_asked_to(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, story(versions=2)) for name in "ab"]
    code, text = typed(*runs)
    assert code == 0
    assert text.endswith(f"curves: {runs[0] / 'compare.html'}\n")
    assert (runs[0] / "compare.html").read_text().startswith("<!doctype html>")
    assert typed(*runs, "--html", tmp_path / "c.html")[0] == 0
    assert json.loads(Data.of((tmp_path / "c.html").read_text()))["charts"]
    assert "would overwrite" in typed(*runs, "--html", runs[1] / "events.jsonl")[1]
    (runs[0] / "compare.html").unlink()
    (runs[0] / "compare.html").mkdir()
    code, text = typed(*runs)
    assert code == 1
    assert f"error: {runs[0]}/compare.html cannot be written (Is a directory); with --html, give a file that" in text


class Data:
    """The data inside a page."""

    @staticmethod
    def of(page: str) -> str:
        return page.partition('id="data">')[2].partition("</script>")[0]


def test_curves_of_a_run_that_trained_nothing_are_none() -> None:
    assert overlaid(compared([read("a"), read("b")])) == {"tables": {}, "charts": []}
    assert isinstance(CurveLog().points(ACCURACY), list)
