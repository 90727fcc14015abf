"""What a user reads of a run that goes badly: filtered away, failed, or resumed into the same."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headway.events import Event, GroupAdmitted, GroupSettled, RunFinished, RunResumed, StageChanged
from headway.reports.live.console_view import report_end
from headway.reports.live.panel import RunProgress
from headway.reports.live.plain_log import PlainView
from headway.reports.metrics.group_tally import RECENT
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.run_directory import RunDirectory
from tests.reports.scripted_run import ScriptedRun


def viewed(run: list[Event]) -> tuple[PlainView, RunMetrics, io.StringIO]:
    """A plain view that has shown ``run``."""
    output = io.StringIO()
    metrics = RunMetrics()
    progress = RunProgress(metrics, lambda: 0.0)
    view = PlainView(Console(file=output, width=80), progress, lambda: 0.0)
    metrics.sinks = [view]
    for event in run:
        for observer in (metrics, progress, view):
            observer.on_event(event)
    return view, metrics, output


def figures(run: list[Event]) -> RunMetrics:
    return viewed(run)[1]


def ending(run: list[Event], status: str, *, after_s: float = 0.0, filtered: int = 0, passed: int = 0) -> list[Event]:
    """``run``, whose trainer waits for groups to the end ``after_s`` later; meanwhile some are filtered."""
    *before, finished = run
    assert isinstance(finished, RunFinished)
    start, end = finished.time, finished.time + after_s
    waits = StageChanged(
        time=start, stage="ActorTrain", state="waiting_input", waiting_for="groups from the message queue"
    )
    first = finished.groups["admitted"]
    added: list[Event] = []
    for number in range(first, first + filtered + passed):
        kept = number >= first + filtered
        added += [
            GroupAdmitted(
                time=start, number=number, epoch=0, row=0, attempt=0, version=3, admitted=number, discarded=0, limit=999
            ),
            GroupSettled(
                time=end,
                number=number,
                fate="trained" if kept else "filtered",
                reason=None if kept else "all rewards are 0",
            ),
        ]
    groups = finished.groups | {
        "admitted": first + filtered + passed,
        "filtered": finished.groups["filtered"] + filtered,
        "trained": finished.groups["trained"] + passed,
    }
    stopped = StageChanged(time=end, stage="ActorTrain", state="stopped")
    return [*before, waits, *added, stopped, replace(finished, time=end, status=status, reason="why", groups=groups)]


def test_a_version_line_counts_the_filtered_groups_where_there_are_any() -> None:
    lines = viewed(ScriptedRun(versions=3, discard_every=4).build())[2].getvalue().splitlines()
    assert [line for line in lines if "  version 2  " in line and "24/24 groups  7 filtered" in line]
    lines = viewed(ScriptedRun(versions=3, discard_every=0).build())[2].getvalue().splitlines()
    assert not [line for line in lines if "filtered" in line]


def test_why_a_run_failed_is_left_to_the_error_that_ends_the_command() -> None:
    text = viewed(ending(ScriptedRun(versions=3).build(), "failed"))[2].getvalue()
    assert text.splitlines()[-1].endswith("failed at version 3")
    assert "why" not in text


def test_an_interrupted_run_says_why_as_no_error_does() -> None:
    text = viewed(ending(ScriptedRun(versions=3).build(), "interrupted"))[2].getvalue()
    assert text.splitlines()[-1].endswith("interrupted: why")


def test_a_resumed_run_does_not_repeat_the_line_of_the_version_that_it_goes_back_to() -> None:
    view, _, output = viewed(ScriptedRun(versions=3).build()[:1])
    view.on_event(RunResumed(time=1.0, version=2, times=1))
    for version in (1, 2):
        view.on_row({"version": version, "reward/mean": 0.5})
    assert ["  version 1  " in output.getvalue(), "  version 2  " in output.getvalue()] == [False, True]


def test_large_rewards_have_short_figures() -> None:
    view, _, output = viewed(ScriptedRun(versions=3).build()[:1])
    view.on_row({"version": 0, "reward/mean": -3e38})
    assert "version 0  reward -3e38  " in output.getvalue()


# ---------------------------------------------------------------------------------------------- nearly all filtered


@pytest.mark.parametrize(("filtered", "passed"), [(0, 0), (10, 5), (300, 7), (7, 300)])
def test_the_summary_has_the_share_of_filtered_groups_over_the_run_and_lately(filtered: int, passed: int) -> None:
    run = ending(ScriptedRun(versions=3, discard_every=4).build(), "completed", filtered=filtered, passed=passed)
    fates = [e.fate == "filtered" for e in run if isinstance(e, GroupSettled)]
    recent = fates[-RECENT:]
    assert summary(figures(run))["filtered"] == {
        "share": pytest.approx(sum(fates) / len(fates)),
        "recent_share": pytest.approx(sum(recent) / len(recent)),
        "recent_groups": min(len(fates), RECENT),
    }


def test_a_run_without_a_scored_group_has_no_share() -> None:
    assert summary(RunMetrics())["filtered"] == {"share": None, "recent_share": None, "recent_groups": 0}


def test_what_was_waited_for_in_vain_after_the_last_step_belongs_to_the_bottleneck() -> None:
    """The script waits 3 × 1 s in 11.5 s; then 100 s pass in which everything is filtered."""
    run = ending(ScriptedRun(versions=3).build(), "failed", after_s=100.0, filtered=200)
    told = summary(figures(run))
    assert told["wall_s"] == pytest.approx(3 * 4.0 - 0.5)
    start, end = figures(run).window or (0.0, 0.0)
    share = (3 * 1.0 + 100.0) / (run[-1].time - start)
    assert end < run[-1].time - 100
    assert f"The filter was the bottleneck: the trainer waited for groups {share:.0%} of the time" in told["bottleneck"]
    assert "90% of those that were generated were filtered" in told["bottleneck"]  # 6 + 200 of 230


def final_block(run: list[Event]) -> str:
    output = io.StringIO()
    report_end(Console(file=output, width=200), summary(figures(run)), RunDirectory(Path("r")), None, resumable=True)
    return output.getvalue()


def test_a_run_of_which_nearly_all_is_filtered_is_not_offered_to_go_on_unchanged() -> None:
    text = final_block(ending(ScriptedRun(versions=3).build(), "interrupted", filtered=200))
    assert "Of the last 230 groups 90% were filtered" in text
    assert "with a lower actor.optim.lr" in text
    assert text.rstrip().endswith("headway train --resume r a.b=c")


@pytest.mark.parametrize(("filtered", "passed"), [(20, 0), (200, 200), (1000, 100)])
def test_a_run_that_trains_is_offered_to_go_on_as_it_is(filtered: int, passed: int) -> None:
    """Few groups say little; what was filtered long ago is over."""
    text = final_block(ending(ScriptedRun(versions=3).build(), "interrupted", filtered=filtered, passed=passed))
    assert "Of the last" not in text
    assert text.rstrip().endswith("headway train --resume r")
