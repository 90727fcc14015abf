"""A tracker in a thread against a tool that is scripted: it fails, hangs, and comes back."""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.reports.record.file_access import Tail
from headway.reports.trackers.tracker import table
from headway.reports.trackers.tracker_set import Trackers
from headway.reports.trackers.tracker_thread import MOST_SAMPLES, TrackerState, TrackerThread, memory_file
from headway.reports.trackers.tracker_tools import ADDRESSES
from tests.full_disk import files_of_at_most
from tests.reports.trackers.fakes import SOON_S, Told, Tool, threaded, write_row

SAMPLE: dict[str, Any] = {"group": 3, "version": 0, "prompt": "?", "episodes": [{"k": 0}]}


def memory(folder: Path) -> TrackerState:
    return TrackerState.read(memory_file(folder / "trackers", "wandb"))


def end(tracker: TrackerThread, summary: dict[str, Any] | None = None) -> None:
    tracker.end(summary or {"status": "completed"})
    assert tracker.join(SOON_S)


def remedy(folder: Path) -> str:
    return f"; send it with: headway sync {folder}"


def test_what_the_run_hands_over_reaches_the_tool_in_order(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    tool.wait_for(2)
    tracker.on_sample(SAMPLE)
    tool.wait_for(3)
    tracker.row({"version": 1})
    end(tracker, {"status": "interrupted"})
    assert tool.calls == [
        ("on_row", {"version": 0}),
        ("on_sample", table(SAMPLE)),
        ("on_row", {"version": 1}),
        ("on_summary", {"status": "interrupted"}),
        ("close", "interrupted"),
    ]
    assert memory(tmp_path) == TrackerState("entry-1", rows=2, whole=True)
    assert (told.warnings, told.notes) == ([], ["wandb: http://tool/entry-1"])
    assert tracker.missing("silent") == ""


@pytest.mark.parametrize("call", ["open", "on_row", "on_summary", "close"])
def test_a_tool_that_hangs_is_given_up_at_the_end_and_what_it_lacks_is_said(call: str, tmp_path: Path) -> None:
    tool, told = Tool(hangs_at=call), Told()
    tracker = threaded(tool, told, tmp_path)
    trackers = Trackers([tracker], told.say)
    trackers.start()
    write_row(tmp_path / "metrics.jsonl", {"version": 0})
    trackers.on_row({"version": 0})
    if call in ("open", "on_row"):
        assert tool.hanging.wait(SOON_S)
        for version in range(1, 1000):
            trackers.on_row({"version": version})  # the run goes on
    trackers.finish({"status": "completed"}, limit_s=0.1)
    assert len(told.warnings) == 1
    assert told.warnings[0].startswith("wandb did not get ")
    assert told.warnings[0].endswith(f" (it did not answer within 0 s){remedy(tmp_path)}")
    tool.released.set()
    assert tracker.join(SOON_S)
    assert len(told.warnings) == 1
    if call != "close":
        assert not memory(tmp_path).whole


def test_a_tool_that_never_answered_is_named_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDRESSES, "wandb", ("TOOL_URI",))  # type: ignore[arg-type]
    monkeypatch.setenv("TOOL_URI", "http://me:secret@203.0.113.1:5000")
    tool, told = Tool(hangs_at="open"), Told()
    trackers = Trackers([threaded(tool, told, tmp_path)], told.say)
    trackers.start()
    trackers.finish({"status": "completed"}, limit_s=0.0)
    assert "(it did not answer within 0 s; it is looked for at TOOL_URI=http://203.0.113.1:5000)" in told.warnings[0]
    tool.released.set()


def test_a_tool_that_does_not_answer_for_a_minute_is_said_to_be_behind_once(tmp_path: Path) -> None:
    tool, told, now = Tool(hangs_at="on_row"), Told(), 0.0
    tracker = threaded(tool, told, tmp_path, clock=lambda: now)
    tracker.start()
    tracker.row({"version": 0})
    assert tool.hanging.wait(SOON_S)
    for now in (30.0, 59.0, 61.0, 200.0):
        tracker.row({"version": 1})
        assert told.warnings == ["wandb: has not answered for 61 s; the run goes on, and what waits is sent later"] * (
            now > 60
        )
    tracker.give_up()
    tool.released.set()


def test_what_a_tool_refused_is_sent_again_with_the_next_row_and_in_order(tmp_path: Path) -> None:
    tool, told = Tool(problems=deque(["away", "away", None])), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    for version in range(3):
        tracker.row({"version": version})
        tool.wait_for(2 + version)  # the opening, and an attempt for each row
    end(tracker)
    assert tool.rows == [0, 1, 2]
    assert told.warnings == ["wandb: ConnectionError: away; the run goes on, and what waits is sent later"]
    assert tracker.missing("silent") == ""
    assert memory(tmp_path).whole


def test_what_a_tool_refuses_to_the_end_is_said_with_its_reason_and_its_remedy(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"row 0": "503", "on_summary": "503"}), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    end(tracker)
    assert tracker.missing("silent") == (
        f"wandb did not get 1 of 1 rows, the summary (ConnectionError: 503){remedy(tmp_path)}"
    )
    assert tool.calls == [("close", "completed")]
    assert memory(tmp_path) == TrackerState("entry-1", rows=0, whole=False)


def test_what_a_tool_took_and_did_not_keep_is_told_again(tmp_path: Path) -> None:
    tool, told = Tool(loses_at={4}), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    for version in range(3):
        tracker.row({"version": version})
        tool.wait_for(version + 2)
    end(tracker)
    assert [setting.entry for setting in tool.opened_with] == ["", "entry-1"]
    assert tool.rows == [0, 1, 0, 1, 2]
    assert tracker.missing("silent") == ""
    assert memory(tmp_path) == TrackerState("entry-1", rows=3, whole=True)


def test_what_a_tool_has_not_kept_at_its_end_is_not_counted_as_taken(tmp_path: Path) -> None:
    tool, told = Tool(loses_at={4}), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    end(tracker)
    assert tool.calls == [("on_row", {"version": 0}), ("on_summary", {"status": "completed"})]
    assert tracker.missing("silent") == (
        f"wandb did not get 1 of 1 rows, the summary (it could not be persisted){remedy(tmp_path)}"
    )
    assert memory(tmp_path) == TrackerState("entry-1", rows=0, whole=False)


def test_settings_that_are_refused_cost_no_row_and_no_other_entry_and_are_said(tmp_path: Path) -> None:
    tool, told = Tool(refuses={"on_settings": "a parameter is too long"}), Told()
    tracker = threaded(tool, told, tmp_path, config={"run.seed": 7})
    tracker.start()
    for version in range(6):
        tracker.row({"version": version})
    end(tracker)
    assert tool.rows == list(range(6))
    assert [opened.entry for opened in tool.opened_with] == [""]
    assert tracker.missing("silent") == (
        f"wandb did not get the settings (ConnectionError: a parameter is too long){remedy(tmp_path)}"
    )
    assert len(told.warnings) == 1
    assert memory(tmp_path) == TrackerState("entry-1", rows=6, whole=False)


@pytest.mark.parametrize("refused", [1, 6])
def test_a_row_that_is_refused_again_and_again_does_not_hold_up_what_is_behind_it(refused: int, tmp_path: Path) -> None:
    tool, told = Tool(refuses={f"row {refused}": "a name"}), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    for version in range(7):
        tracker.row({"version": version})
        tool.wait_for(version + 2)
    tracker.end({"status": "completed"}, tmp_path / "model")
    assert tracker.join(SOON_S)
    assert tool.rows == [version for version in range(7) if version != refused]
    assert [call for call, _ in tool.calls][-3:] == ["on_summary", "on_model", "close"]
    assert tracker.missing("").startswith("wandb did not get 1 rows (refused, ")
    assert memory(tmp_path) == TrackerState("entry-1", rows=7, whole=True)


def test_samples_that_wait_are_the_newest_and_others_are_counted(tmp_path: Path) -> None:
    tool, told = Tool(hangs_at="open"), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    assert tool.hanging.wait(SOON_S)
    for number in range(MOST_SAMPLES + 2):
        tracker.on_sample({**SAMPLE, "group": number})
    tool.released.set()
    end(tracker)
    assert [value[0]["number"] for call, value in tool.calls if call == "on_sample"] == list(range(2, MOST_SAMPLES + 2))
    assert tracker.missing("").startswith("wandb did not get 2 samples (")


def test_a_sample_that_is_none_costs_itself_alone(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    trackers = Trackers([tracker], told.say)
    for sample in ({"version": 0, "episodes": [{"k": 0}]}, SAMPLE, {**SAMPLE, "episodes": []}):
        trackers.on_sample(sample)
    trackers.start()
    tracker.row({"version": 0})
    end(tracker)
    assert [call for call, _ in tool.calls] == ["on_sample", "on_row", "on_summary", "close"]
    assert len(told.warnings) == 1
    assert "KeyError" in told.warnings[0]
    assert tracker.missing("").startswith("wandb did not get 1 samples (")


def test_the_entry_is_there_before_the_first_version_ends(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    tool.wait_for(1)
    end(tracker)
    assert told.notes == ["wandb: http://tool/entry-1"]


def test_a_run_that_never_began_to_train_makes_no_entry(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    trackers = Trackers([threaded(tool, told, tmp_path)], told.say)
    trackers.finish({"status": "failed"}, limit_s=0.0)
    assert (tool.asked, told.warnings, list(tmp_path.iterdir())) == (0, [], [])


def test_a_disk_that_is_full_is_said_and_the_tool_gets_its_rows(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    write_row(tmp_path / "metrics.jsonl", {"version": 0})
    with files_of_at_most(0):
        tracker.start()
        tracker.on_row()
        end(tracker)
    assert tool.rows == [0]
    path = tmp_path / "trackers" / "wandb.json"
    assert told.warnings == [f"wandb: cannot write {path} (File too large); a resumed run would begin another entry"]


def test_a_row_that_the_disk_did_not_take_is_said_to_be_missing(tmp_path: Path) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    tracker.start()
    tracker.row({"version": 0})
    tracker.on_row()  # of which metrics.jsonl has nothing
    end(tracker)
    assert memory(tmp_path) == TrackerState("entry-1", rows=1, whole=False)
    assert tracker.missing("silent") == f"wandb did not get 1 of 2 rows (silent){remedy(tmp_path)}"


def test_rows_that_cannot_be_read_for_a_moment_are_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path)
    read, answers = Tail.read, iter([OSError(errno.EIO, "Input/output error")])

    def refused_once(tail: Tail) -> Iterator[tuple[int, bytes]]:
        if cause := next(answers, None):
            raise cause
        return read(tail)

    monkeypatch.setattr(Tail, "read", refused_once)
    tracker.row({"version": 0})
    tracker.start()
    end(tracker)
    assert tool.rows == [0] and tracker.missing("silent") == ""
    (warning,) = told.warnings
    assert "metrics.jsonl cannot be read" in warning and "the run goes on, and what waits is sent later" in warning


def test_an_interrupt_ends_the_wait_for_a_tool_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, told = Tool(hangs_at="on_summary"), Told()
    tracker = threaded(tool, told, tmp_path)

    def interrupted(timeout_s: float | None) -> bool:
        assert tool.hanging.wait(SOON_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(tracker, "join", interrupted)
    trackers = Trackers([tracker], told.say)
    trackers.start()
    trackers.finish({"status": "completed"}, limit_s=3600.0)
    assert told.warnings == [f"wandb did not get the summary (the wait for it was interrupted){remedy(tmp_path)}"]
    tool.released.set()


def test_a_resumed_run_goes_on_in_its_entry_and_sends_what_it_lacks_first(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"version": version}) + "\n" for version in range(3)))
    tool, told = Tool(), Told()
    tracker = threaded(tool, told, tmp_path, TrackerState("entry-0", rows=1))
    tracker.start()
    tracker.row({"version": 3})
    end(tracker)
    assert tool.rows == [1, 2, 3]
    assert memory(tmp_path) == TrackerState("entry-0", rows=4, whole=True)
