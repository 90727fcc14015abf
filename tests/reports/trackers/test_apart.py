"""A tracker in a process of its own against a tool that is scripted: it fails, hangs, dies, and comes back."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from headway.reports.trackers.tracker_client import GOOD_ROWS, MOST_STARTS, TrackerApart, TrackerState, memory_file
from headway.reports.trackers.tracker_queue import RunEnd, TrackerQueue
from headway.reports.trackers.tracker_set import Trackers
from headway.reports.trackers.tracker_tools import ADDRESSES
from tests.full_disk import files_of_at_most
from tests.reports.trackers.fakes import SOON_S, Told, Tool, apart, write_row

SAMPLE: dict[str, Any] = {"group": 3, "version": 0, "prompt": "?", "episodes": []}


def memory(folder: Path) -> TrackerState:
    return TrackerState.read(memory_file(folder / "trackers", "tool"))


def end(tracker: TrackerApart, summary: dict[str, Any] | None = None) -> None:
    tracker.end(RunEnd(summary or {"status": "completed"}))
    assert tracker.join(SOON_S)


def test_what_the_run_hands_over_reaches_the_tool_in_order(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    tool.wait_for(2)
    tracker.on_sample(SAMPLE)
    tool.wait_for(3)
    tracker.row({"version": 1})
    end(tracker, {"status": "interrupted"})
    assert tool.calls == [
        ("on_row", {"version": 0}),
        ("on_sample", SAMPLE),
        ("on_row", {"version": 1}),
        ("on_summary", {"status": "interrupted"}),
        ("close", "interrupted"),
    ]
    assert memory(tmp_path) == TrackerState("entry-1", rows=2, whole=True)
    assert (told.warnings, told.notes) == ([], ["tool: http://tool/entry-1"])
    assert tracker.missing("silent") == ""


@pytest.mark.parametrize("call", ["open", "on_row", "on_summary", "close"])
def test_a_tool_that_hangs_is_given_up_at_the_end_and_what_it_lacks_is_said(call: str, tmp_path: Path) -> None:
    tool, told = Tool(hangs_at=call), Told()
    tracker = apart(tool, told, tmp_path)
    trackers = Trackers(None, [tracker], told.say)
    trackers.start()
    write_row(tracker.metrics, {"version": 0})
    trackers.on_row({"version": 0})
    if call in ("open", "on_row"):
        assert tool.hanging.wait(SOON_S)
        for version in range(1, 1000):
            trackers.on_row({"version": version})  # the run goes on
    trackers.finish({"status": "completed"}, limit_s=0.1)
    assert tracker.join(SOON_S)
    assert len(told.warnings) == 1
    assert told.warnings[0].startswith("tool did not get ")
    assert told.warnings[0].endswith(" (it did not answer within 0 s); send it with: headway sync RUN")
    assert not memory(tmp_path).whole
    assert not [thread for thread in threading.enumerate() if thread.name == "tracker-tool"]


def test_a_tool_that_never_answered_is_named_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ADDRESSES,  # type: ignore[arg-type]
        "tool",
        ("TOOL_URI",),
    )
    monkeypatch.setenv("TOOL_URI", "http://me:secret@203.0.113.1:5000")
    tool, told = Tool(hangs_at="open"), Told()
    tracker = apart(tool, told, tmp_path)
    trackers = Trackers(None, [tracker], told.say)
    trackers.start()
    trackers.finish({"status": "completed"}, limit_s=0.0)
    assert tracker.join(SOON_S)
    assert "(it did not answer within 0 s; it is looked for at TOOL_URI=http://203.0.113.1:5000)" in told.warnings[0]


def test_a_tool_that_does_not_answer_for_a_minute_is_said_to_be_behind_once(tmp_path: Path) -> None:
    tool, told, now = Tool(hangs_at="on_row"), Told(), 0.0
    tracker = apart(tool, told, tmp_path, clock=lambda: now)
    tracker.start()
    tracker.row({"version": 0})
    assert tool.hanging.wait(SOON_S)
    for now in (30.0, 59.0, 61.0, 200.0):
        tracker.row({"version": 1})
        assert told.warnings == ["tool: has not answered for 61 s; the run goes on, and what waits is sent later"] * (
            now > 60
        )
    tracker.give_up()
    assert tracker.join(SOON_S)


def test_what_a_tool_refused_is_sent_again_with_the_next_row_and_in_order(tmp_path: Path) -> None:
    tool, told = Tool(problems=deque(["ConnectionError: away", "ConnectionError: away", None])), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    for version in range(3):
        tracker.row({"version": version})
        tool.wait_for(2 + version)  # the opening, and an attempt for each row
    end(tracker)
    assert tool.rows == [0, 1, 2]
    assert told.warnings == ["tool: ConnectionError: away; the run goes on, and what waits is sent later"]
    assert tracker.missing("silent") == ""
    assert memory(tmp_path).whole


def test_what_a_tool_refuses_to_the_end_is_said_with_its_reason_and_its_remedy(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"row 0": "HTTPError: 503", "on_summary": "HTTPError: 503"}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    end(tracker)
    assert tracker.missing("silent") == (
        "tool did not get 1 of 1 rows, the summary (HTTPError: 503); send it with: headway sync RUN"
    )
    assert tool.calls == [("close", "completed")]
    assert memory(tmp_path) == TrackerState("entry-1", rows=0, whole=False)


def test_a_tool_whose_process_dies_gets_another_one_that_goes_on_in_the_entry(tmp_path: Path) -> None:
    tool, told = Tool(dies_at={3}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    tool.wait_for(2)
    tracker.row({"version": 1})
    tool.wait_for(3)
    tracker.row({"version": 2})
    end(tracker)
    assert [setting["entry"] for setting in tool.opened_with] == ["", "entry-1"]
    assert tool.rows == [0, 1, 2]
    assert told.warnings == ["tool: its process ended (SIGSEGV); the run goes on, and what waits is sent later"]


def test_what_a_tool_took_and_did_not_keep_is_told_again_to_another_process(tmp_path: Path) -> None:
    tool, told = Tool(loses_at={4}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    for version in range(3):
        tracker.row({"version": version})
        tool.wait_for(version + 2)
    end(tracker)
    assert (tool.processes, tool.rows) == (2, [0, 1, 0, 1, 2])
    assert tracker.missing("silent") == ""
    assert memory(tmp_path) == TrackerState("entry-1", rows=3, whole=True)


def test_what_a_tool_has_not_kept_at_its_end_is_not_counted_as_taken(tmp_path: Path) -> None:
    tool, told = Tool(loses_at={4}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    end(tracker)
    assert tool.calls == [("on_row", {"version": 0}), ("on_summary", {"status": "completed"})]
    assert tracker.missing("silent") == (
        "tool did not get 1 of 1 rows, the summary (it could not be persisted); send it with: headway sync RUN"
    )
    assert memory(tmp_path) == TrackerState("entry-1", rows=0, whole=False)


def test_a_tool_whose_process_always_dies_is_started_a_few_times(tmp_path: Path) -> None:
    tool, told = Tool(dies_at=set(range(99))), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    for version in range(MOST_STARTS + 3):
        tracker.row({"version": version})
        tool.wait_for(min(version + 1, MOST_STARTS))
    end(tracker)
    assert tool.processes == MOST_STARTS
    assert "(its process ended (SIGSEGV)); send it with" in tracker.missing("silent")
    assert told.warnings[1:] == [
        "tool: its process ended 3 times, and gets no other in this run; send the rest with: headway sync RUN"
    ]


def test_a_process_that_worked_for_a_while_makes_up_for_those_that_died_before(tmp_path: Path) -> None:
    row_after_each_death = GOOD_ROWS + 1
    deaths = [2 + life * (row_after_each_death + 1) for life in range(1, MOST_STARTS + 3)]
    tool, told = Tool(dies_at=set(deaths)), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tool.wait_for(1)
    rows = deaths[-1] + 20  # each is a reason to go on, also after the last death
    for version in range(rows):
        asked = tool.asked
        tracker.row({"version": version})
        tool.wait_for(asked + 1)
    end(tracker)
    assert tool.processes == len(deaths) + 1
    assert tool.rows == list(range(rows))
    assert (len(told.warnings), tracker.missing("silent")) == (1, "")


def test_settings_that_are_refused_cost_no_row_and_no_other_entry_and_are_said(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"on_settings": "RestException: a parameter is too long"}), Told()
    tracker = apart(tool, told, tmp_path, config={"run.seed": 7})
    tracker.start()
    for version in range(6):
        tracker.row({"version": version})
    end(tracker)
    assert tool.rows == list(range(6))
    assert [opened["entry"] for opened in tool.opened_with] == [""]
    assert tracker.missing("silent") == (
        "tool did not get the settings (RestException: a parameter is too long); send it with: headway sync RUN"
    )
    assert told.warnings == [
        "tool: RestException: a parameter is too long; the run goes on, and what waits is sent later"
    ]
    assert memory(tmp_path) == TrackerState("entry-1", rows=6, whole=False)


def test_settings_that_end_the_process_leave_the_next_one_to_the_rows(tmp_path: Path) -> None:
    tool, told = Tool(dies_at={2}), Told()
    tracker = apart(tool, told, tmp_path, config={"run.seed": 7})
    tracker.start()
    tool.wait_for(2)
    tracker.row({"version": 0})
    tool.wait_for(4)
    end(tracker)
    assert [call for call, _ in tool.calls] == ["on_row", "on_summary", "on_settings", "close"]
    assert tracker.missing("silent") == ""


def test_a_row_that_is_refused_again_and_again_does_not_hold_up_those_behind_it(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"row 1": "ValueError: a name"}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    for version in range(7):
        tracker.row({"version": version})
        tool.wait_for(version + 2)
    end(tracker)
    assert tool.rows == [0, 2, 3, 4, 5, 6]
    assert (
        tracker.missing("")
        == "tool did not get 1 rows (it was too slow, or refused them); the run's directory has them"
    )
    assert memory(tmp_path) == TrackerState("entry-1", rows=7, whole=True)


def test_the_last_row_that_is_refused_again_and_again_holds_up_neither_summary_nor_model(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"row 2": "ValueError: a name"}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    for version in range(3):
        tracker.row({"version": version})
    tracker.end(RunEnd({"status": "completed"}, tmp_path / "model"))
    assert tracker.join(SOON_S)
    assert [call for call, _ in tool.calls] == ["on_row", "on_row", "on_summary", "on_model", "close"]
    assert (
        tracker.missing("")
        == "tool did not get 1 rows (it was too slow, or refused them); the run's directory has them"
    )
    assert memory(tmp_path) == TrackerState("entry-1", rows=3, whole=True)


def test_the_last_row_is_taken_where_the_tool_was_away_for_a_moment_at_the_end(tmp_path: Path) -> None:
    tool, told = Tool(problems=deque(["HTTPError: 503"] * 2)), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    end(tracker)
    assert [call for call, _ in tool.calls] == ["on_row", "on_summary", "close"]
    assert (tracker.missing(""), memory(tmp_path).whole) == ("", True)


def test_samples_that_the_tool_dropped_are_counted_and_said_once(tmp_path: Path) -> None:
    tool, told = Tool(account={"held": 0, "dropped": 2, "why": "OSError: no place"}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    tracker.row({"version": 1})
    end(tracker)
    assert told.warnings == ["tool: did not take samples (OSError: no place); it gets the rows without them"]
    assert tracker.missing("silent").startswith("tool did not get 4 samples (")


def test_samples_that_waited_in_a_process_that_died_are_counted(tmp_path: Path) -> None:
    tool, told = Tool(account={"held": 3, "dropped": 0, "why": ""}, dies_at={3}), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tracker.on_sample(SAMPLE)
    tool.wait_for(2)
    tool.account = {"held": 0, "dropped": 0, "why": ""}
    tracker.row({"version": 0})
    tool.wait_for(3)
    end(tracker)
    assert tool.rows == [0]
    assert tracker.missing("silent").startswith("tool did not get 3 samples (")


def test_the_entry_is_there_before_the_first_version_ends(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = apart(tool, told, tmp_path)
    tracker.start()
    tool.wait_for(1)
    end(tracker)
    assert told.notes == ["tool: http://tool/entry-1"]


def test_a_run_that_never_began_to_train_makes_no_entry(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    trackers = Trackers(None, [apart(tool, told, tmp_path)], told.say)
    trackers.finish({"status": "failed"}, limit_s=0.0)
    assert (tool.processes, told.warnings, list(tmp_path.iterdir())) == (0, [], [])


def test_a_disk_that_is_full_is_said_and_the_tool_gets_its_rows(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = apart(tool, told, tmp_path)
    write_row(tracker.metrics, {"version": 0})
    with files_of_at_most(0):
        tracker.start()
        tracker.on_row()
        end(tracker)
    assert tool.rows == [0]
    path = tmp_path / "trackers" / "tool.json"
    assert told.warnings == [f"tool: cannot write {path} (File too large); a resumed run would begin another entry"]


def test_an_interrupt_ends_the_wait_for_a_tool_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, told = Tool(hangs_at="on_summary"), Told()
    tracker = apart(tool, told, tmp_path)
    join = tracker.join

    def interrupted(timeout_s: float | None) -> bool:
        assert tool.hanging.wait(SOON_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(tracker, "join", interrupted)
    trackers = Trackers(None, [tracker], told.say)
    trackers.start()
    trackers.finish({"status": "completed"}, limit_s=3600.0)
    assert join(SOON_S)
    assert told.warnings == [
        "tool did not get the summary (the wait for it was interrupted); send it with: headway sync RUN"
    ]


def test_a_resumed_run_goes_on_in_its_entry_and_sends_what_it_lacks_first(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"version": version}) + "\n" for version in range(3)))
    tool, told = Tool(), Told()
    tracker = apart(tool, told, tmp_path, TrackerQueue(metrics, rows=3, sent=1))
    tracker.start()
    tracker.row({"version": 3})
    end(tracker)
    assert tool.rows == [1, 2, 3]
    assert memory(tmp_path).rows == 4
