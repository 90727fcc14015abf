"""The live panel, the live view's life, the plain lines and the final block."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.events import (
    Event,
    GroupSettled,
    Note,
    PromptsLeftOut,
    ReplicaLost,
    RunFinished,
    RunStarted,
    UpdateRetried,
    ValidationFinished,
)
from headway.reports.live.console_view import report_end
from headway.reports.live.live_view import LiveView
from headway.reports.live.panel import RunProgress, panel
from headway.reports.live.plain_log import EventLog, PlainView, validation_line
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.run_directory import RunDirectory
from tests.reports.scripted_run import ScriptedRun


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(run: list[Event], clock: Clock | None = None) -> RunProgress:
    """The progress of a run that has come as far as ``run``."""
    rows: list[Any] = []
    metrics = RunMetrics(rows)
    progress = RunProgress(metrics, clock or Clock())
    rows.append(progress)
    for event in run:
        metrics.on_event(event)
        progress.on_event(event)
    return progress


def drawn(run: RunProgress, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=60, force_terminal=False)
    console.print(panel(run, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def half_a_run() -> list[Event]:
    run = ScriptedRun(versions=6).build()
    return run[: len(run) // 2]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_panel_shows_all_there_is_to_know_and_fits_the_terminal(width: int) -> None:
    text = drawn(watched(half_a_run()), width)
    for word in ("validation", "reward", "lag", "bound 2", "versions", "idle", "generating", "queued", "filtered"):
        assert word in text
    assert "ActorTrain" in text
    assert re.search(r"\d+% +\d+/48 groups", text)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "…" not in text
    assert len(text.splitlines()) <= 24


def test_stages_are_listed_in_the_order_in_which_data_flows() -> None:
    names = ["Generate", "Rollout", "Reward", "ActorTrain", "ParamUpdate", "Validate"]
    text = drawn(watched(half_a_run()), 80)
    assert [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0] in names] == names


def test_a_wide_terminal_gets_two_columns() -> None:
    run = watched(half_a_run())
    assert len(drawn(run, 120).splitlines()) < len(drawn(run, 80).splitlines())


def test_the_panel_of_a_run_that_just_started_has_no_figures_yet() -> None:
    run = ScriptedRun().build()
    text = drawn(watched(run[:1]), 80)
    assert "not measured yet" in text
    assert "nothing trained yet" in text
    assert "nan" not in text.lower()


def test_a_finished_run_shows_neither_stages_nor_time_left() -> None:
    text = drawn(watched(ScriptedRun().build()), 80)
    assert "100%" in text
    assert "left" not in text
    assert "ActorTrain" not in text


def test_the_time_left_falls_between_two_events() -> None:
    clock = Clock()
    progress = watched(half_a_run(), clock)
    left, elapsed = progress.seconds_left, progress.seconds
    clock.now += 0.25
    assert left is not None
    assert progress.seconds_left == pytest.approx(max(left - 0.25, 0.0))
    assert progress.seconds == pytest.approx(elapsed + 0.25)


def live_view(progress: RunProgress) -> tuple[LiveView, io.StringIO, threading.RLock]:  # type: ignore[valid-type]
    lock = threading.RLock()
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, height=40)
    return LiveView(console, progress, lock), output, lock


def test_the_live_view_prints_finished_phases_and_notes_and_ends_with_the_panel() -> None:
    run = half_a_run()
    metrics = RunMetrics()
    progress = RunProgress(metrics)
    view, output, lock = live_view(progress)
    try:
        with lock:
            view.phase("Making the model")
            view.phase("Warming up", "step 1")
            view.phase("Warming up", "step 2")
            view.on_event(Note(time=0.0, level="warning", text="look here"))
        for event in run:
            with lock:
                for observer in (metrics, progress, view):
                    observer.on_event(event)
    finally:
        view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert text.count("✓ Making the model") == 1
    assert text.count("✓ Warming up  step 2") == 1
    assert "✓ Warming up  step 1" not in text
    assert "look here" in text
    assert "async_partial, seed 0" in text
    assert not [thread for thread in threading.enumerate() if thread.name == "live-view"]


def test_the_live_view_gives_the_cursor_back() -> None:
    view, output, _ = live_view(watched([]))
    view.close()
    assert output.getvalue().rstrip().endswith("\x1b[?25h")


def plain_lines(run: list[Event]) -> list[str]:
    rows: list[Any] = []
    metrics = RunMetrics(rows)
    output = io.StringIO()
    clock = Clock()
    progress = RunProgress(metrics, clock)
    view = PlainView(Console(file=output, width=40), progress, clock)
    rows.append(view)
    view.phase("Warming up", "held-out accuracy 0.45")
    for event in run:
        for observer in (metrics, progress, view):
            observer.on_event(event)
    view.close()
    return output.getvalue().splitlines()


def test_without_a_terminal_there_is_one_line_per_version_and_validation_and_never_a_wrapped_one() -> None:
    lines = plain_lines(ScriptedRun(versions=3).build())
    assert all(re.match(r"\d\d:\d\d:\d\d  \S", line) for line in lines)
    assert len([line for line in lines if "  version " in line]) == 3
    assert len([line for line in lines if "validation of version" in line]) == 4
    assert any("warning: the reward raised ValueError" in line for line in lines)
    assert "Warming up: held-out accuracy 0.45" in lines[0]
    assert "training starts: async_partial, seed 0, 8 groups per version of 24" in lines[1]
    assert lines[1].rstrip().endswith(" answers at once")
    assert lines[-1].endswith("completed")


def test_version_lines_count_the_groups_that_failed() -> None:
    lines = plain_lines(with_failures(ScriptedRun(versions=3).build(), ["the reward failed"]))
    assert re.search(r"  5 filtered  1 failed$", next(line for line in lines if "  version 2 " in line))


def with_failures(run: list[Event], reasons: list[str]) -> list[Event]:
    """Let the first filtered groups of a run fail, each for a reason."""
    left = iter(reasons)
    return [
        replace(event, fate="failed", reason=reason)
        if isinstance(event, GroupSettled) and event.fate == "filtered" and (reason := next(left, None))
        else event
        for event in run
    ]


def final_block(run: list[Event], model: Path | None, folder: Path = Path("r")) -> str:
    metrics = RunMetrics()
    for event in run:
        metrics.on_event(event)
    output = io.StringIO()
    report_end(Console(file=output, width=60), summary(metrics), RunDirectory(folder), model)
    return output.getvalue()


def test_the_final_block_says_what_came_of_the_run_where_things_lie_and_what_to_do_next(tmp_path: Path) -> None:
    (tmp_path / "tensorboard" / "points").mkdir(parents=True)
    text = final_block(ScriptedRun(versions=3).build(), tmp_path / "model", tmp_path)
    assert "Completed: validation reward 0.520 → 0.740" in text
    assert "lag at most 1 (bound 2)" in text
    assert "took turns" in text
    places = [f"{tmp_path}/{name}" for name in ("model", "tensorboard", "events.jsonl")]
    places += [f"headway report {tmp_path}\n", f"tensorboard --logdir {tmp_path}/tensorboard"]
    for place in places:
        assert place in text
    assert "does not balance" not in text and "did not rise" not in text and "best" not in text
    assert re.search(r"Not trained: \d+ filtered \(\d+ no variance\)", text)
    assert "headway show" not in text


def test_the_final_block_counts_one_fault_that_quotes_answers_once_and_says_how_many_others_there_are() -> None:
    failures = [f"exception: KeyError: '{n}' (my_reward.py:4, in score)" for n in range(5)]
    failures += ["timeout after 1 s"] * 3 + ["no number"] * 2 + ["other", "another"]
    text = final_block(with_failures(ScriptedRun(versions=8).build(), failures), None).replace("\n", " ")
    told = " ".join(text.split())
    assert "12 failed (5 exception: KeyError: '0' (my_reward.py:4, in score) and alike, 3 timeout after 1 s" in told
    assert "2 no number, and 2 others)" in told


def test_the_final_block_names_the_command_for_what_was_said_where_something_was_kept(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").touch()
    assert f"headway show {tmp_path}\n" in final_block(ScriptedRun(versions=3).build(), None, tmp_path)


@pytest.mark.parametrize(
    ("accuracies", "headline", "flat"),
    [
        ([0.5, 0.5, 0.2, 0.5], "validation reward 0.500 → 0.500\n", True),
        ([0.5, 0.4, 0.9, 0.7], "validation reward 0.500 → 0.700 (best 0.900, version 2)\n", False),
        ([1.0, 1.0, 1.0, 1.0], "validation reward 1.000 → 1.000\n", False),
    ],
)
def test_the_final_block_names_the_best_version_and_says_where_nothing_was_learned(
    accuracies: list[float], headline: str, flat: bool
) -> None:
    values = iter(accuracies)
    run = [
        replace(event, accuracy=next(values)) if isinstance(event, ValidationFinished) else event
        for event in ScriptedRun(versions=3).build()
    ]
    text = final_block(run, None)
    assert headline in text
    assert ("Validation reward did not rise" in text) == flat


def test_the_final_block_of_a_run_without_an_end_shows_no_model_and_says_if_the_ledger_does_not_balance() -> None:
    run = ScriptedRun(versions=3).build()
    settled = next(event for event in run if event.kind == "group.settled")
    text = final_block([*run[:-1], settled], None)
    assert "r/model\n" not in text
    assert "does not balance" in text


def test_the_first_line_of_a_run_without_a_bound_says_so() -> None:
    started = RunStarted(
        time=0.0,
        mode="stream",
        seed=1,
        groups_per_version=1024,
        total_groups=None,
        lag_bound=None,
        order="ready",
        slots={},
    )
    (_, line) = plain_lines([started])
    assert "1,024 groups per version, ready, no bound on lag" in line


LEFT_OUT = PromptsLeftOut(time=0.0, part="training", source="math", count=1234, max_tokens=512)


def shown(live: bool, *events: Event) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=live)
    view = LiveView(console, watched([]), threading.RLock()) if live else PlainView(console, watched([]))
    for event in events:
        view.on_event(event)
    view.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("live", [True, False])
def test_a_replica_that_is_lost_is_told_at_once_with_the_reason(live: bool) -> None:
    text = shown(live, ReplicaLost(time=1.0, replica="rollout-1", reason="worker rollout-1 died: its log"))
    assert "rollout-1 is lost, what it was generating runs again elsewhere: worker rollout-1 died: its log" in text
    assert ("warning: " in text) == (not live)


@pytest.mark.parametrize("live", [True, False])
def test_prompts_that_were_left_out_are_a_line(live: bool) -> None:
    text = shown(live, LEFT_OUT, replace(LEFT_OUT, part="held-out", count=1))
    assert "1,234 training prompts were left out: more than 512 tokens (math)" in text
    assert "1 held-out prompt was left out" in text


def test_a_validation_line_names_the_sources_where_there_are_several() -> None:
    one = ValidationFinished(time=1.0, version=3, accuracy=0.5, problems=8, mean_tokens=1, failed=0, span=(0.0, 1.0))
    assert "(" not in validation_line(one)
    several = validation_line(replace(one, by_source={"code": 0.25, "math": 0.75}))
    assert "mean reward 0.500 on 8 problems (code 0.250, math 0.750)" in several


def test_the_drivers_log_has_trouble_at_its_level_with_the_reason(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.on_event(Note(time=0.0, level="info", text="workers are up"))
    log.on_event(UpdateRetried(time=1.0, version=2, receivers=["rollout-0", "rollout-1"], reason="connection reset"))
    log.on_event(RunFinished(time=2.0, status="failed", reason="worker actor died", version=2, groups={}))
    log.end()
    told = [re.sub(r"^.*?(?=INFO|WARNING|ERROR)", "", line) for line in (tmp_path / "logs" / "driver.log").open()]
    words = [(line.split()[0], line.partition(": ")[2].strip()) for line in told]
    assert words == [
        ("INFO", "workers are up"),
        ("WARNING", "version 2 is sent to rollout-0, rollout-1 again: connection reset"),
        ("ERROR", "failed at version 2: worker actor died"),
    ]
