from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.reports.trackers.tracker_queue import ROWS, SAMPLES, RunEnd, TrackerQueue


def rows(numbers: range) -> list[dict[str, Any]]:
    return [{"version": number} for number in numbers]


def write(path: Path, written: list[dict[str, Any]], end: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in written) + end)
    return path


def drained(outbox: TrackerQueue) -> list[Any]:
    values = []
    while (message := outbox.first()) is not None:
        values.append(message.value)
        outbox.sent(message)
    return values


def announced(metrics: Path, count: int) -> TrackerQueue:
    """A queue to which ``count`` rows were announced, whether or not the file has them."""
    outbox = TrackerQueue(metrics)
    for _ in range(count):
        outbox.put_row()
    return outbox


def test_rows_are_read_from_the_file_in_their_order(tmp_path: Path) -> None:
    told = rows(range(300))
    outbox = announced(write(tmp_path / "metrics.jsonl", told), len(told))
    assert drained(outbox) == told
    assert (outbox.left(), outbox.lost()) == ([], [])


def test_a_row_that_a_disk_refuses_is_waited_for_until_the_run_ends(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    outbox = announced(metrics, 2)
    assert outbox.first() is None
    write(metrics, rows(range(1)))
    assert drained(outbox) == rows(range(1))
    assert outbox.left() == ["1 of 2 rows"]
    outbox.end(RunEnd({"status": "completed"}))
    assert drained(outbox) == [{"status": "completed"}]
    assert outbox.damaged() == f"1 rows, which {metrics} does not have whole (line 2)"


def test_the_newest_rows_are_sent_while_the_disk_of_the_file_is_full(tmp_path: Path) -> None:
    metrics = write(tmp_path / "metrics.jsonl", rows(range(2)))
    outbox = TrackerQueue(metrics, rows=2, sent=2)
    for version in range(2, 5):
        outbox.put_row({"version": version, "actor/loss": float("nan")})
    assert drained(outbox) == [{"version": version, "actor/loss": None} for version in range(2, 5)]
    write(metrics, rows(range(5)))
    outbox.put_row({"version": 5})
    assert (drained(outbox), outbox.left(), outbox.unread) == ([{"version": 5}], [], [])
    for version in range(6, 6 + ROWS + 3):
        outbox.put_row({"version": version})
    assert outbox.first() is None, "the first three of these are waited for, as their lines will come"


def test_half_a_line_in_the_file_costs_what_is_behind_it_alone(tmp_path: Path) -> None:
    outbox = announced(write(tmp_path / "metrics.jsonl", rows(range(3)), end='{"versi'), 5)
    outbox.end(RunEnd({"status": "completed"}))
    assert drained(outbox) == [*rows(range(3)), {"status": "completed"}]
    assert outbox.unread == [4, 5]
    assert outbox.lost() == []


@pytest.mark.parametrize("damage", ["garbage", "{}", "3", "\udcff"])
def test_a_damaged_line_costs_no_other_row(damage: str, tmp_path: Path) -> None:
    told = rows(range(8))
    at = {1, 2, 4, 7}
    path = tmp_path / "metrics.jsonl"
    text = "".join((damage if row["version"] in at else json.dumps(row)) + "\n" for row in told)
    path.write_text(text, errors="surrogateescape")
    outbox = TrackerQueue(path, rows=len(told))
    assert drained(outbox) == [row for row in told if row["version"] not in at]
    assert outbox.unread == [line + 1 for line in sorted(at)]


def test_rows_of_before_that_were_not_sent_come_first(tmp_path: Path) -> None:
    told = rows(range(4))
    outbox = TrackerQueue(write(tmp_path / "metrics.jsonl", told), rows=3, sent=1)
    outbox.put_row()
    assert drained(outbox) == told[1:]


def test_a_tracker_that_has_rows_which_are_undone_goes_on_with_the_next(tmp_path: Path) -> None:
    outbox = TrackerQueue(write(tmp_path / "metrics.jsonl", rows(range(3))), rows=2, sent=6)
    outbox.put_row()
    assert drained(outbox) == [{"version": 2}]


def test_samples_and_rows_keep_their_order(tmp_path: Path) -> None:
    outbox = TrackerQueue(write(tmp_path / "metrics.jsonl", rows(range(2))))
    told = [{"group": 0}, {"version": 0}, {"group": 1}, {"group": 2}, {"version": 1}, {"group": 3}]
    for one in told:
        if "version" in one:
            outbox.put_row()
        else:
            outbox.put_sample(one)
    assert drained(outbox) == told


def test_the_newest_samples_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    outbox = TrackerQueue(tmp_path / "metrics.jsonl")
    for group in range(SAMPLES + 3):
        outbox.put_sample({"group": group})
    assert [sample["group"] for sample in drained(outbox)] == list(range(3, SAMPLES + 3))
    assert outbox.lost() == ["3 samples"]


def test_a_sample_that_made_room_while_it_was_being_sent_is_not_counted_as_lost(tmp_path: Path) -> None:
    outbox = TrackerQueue(tmp_path / "metrics.jsonl")
    outbox.put_sample({"group": 0})
    message = outbox.first()
    assert message is not None
    for group in range(1, SAMPLES + 1):
        outbox.put_sample({"group": group})
    outbox.sent(message)
    assert outbox.lost() == []
    assert [sample["group"] for sample in drained(outbox)] == list(range(1, SAMPLES + 1))


def test_the_end_comes_last_and_what_is_left_of_it_is_said(tmp_path: Path) -> None:
    outbox = announced(write(tmp_path / "metrics.jsonl", rows(range(1))), 1)
    outbox.end(RunEnd({"status": "completed"}, tmp_path))
    assert outbox.left() == ["1 of 1 rows", "the summary", "the model"]
    assert outbox.wait(1) == (2, True)
    assert drained(outbox) == [{"version": 0}, {"status": "completed"}, str(tmp_path)]
    assert (outbox.left(), outbox.status) == ([], "completed")
