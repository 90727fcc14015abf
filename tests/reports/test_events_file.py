from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import events
from headway.errors import DataError
from headway.events import (
    EpisodeWorkerLost,
    Event,
    GroupAdmitted,
    Note,
    OptimizerStepped,
    ReplicaActivity,
    RunFinished,
    RunResumed,
    Span,
    TrainerBusy,
    VersionReached,
)
from headway.reports.record.events_file import EventReader, EventsFile, JsonLines, look_through, read_events
from headway.reports.record.file_access import CHUNK
from tests.reports.scripted_run import ScriptedRun

EVENT_TYPES = [
    cls for cls in vars(events).values() if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
]
ALONE = [cls for cls in EVENT_TYPES if cls is not RunResumed]
"""A run that was resumed has a boundary to go back to."""
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=10),
    bool: st.booleans(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that an event's field of this type may have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if origin in (Union, type(int | None)):
        return st.none() | st.one_of([values(a) for a in arguments if a is not type(None)])
    return SCALARS[hint]


def fields_of(cls: type[Event]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: values(hint) for name, hint in get_type_hints(cls).items() if get_origin(hint) is not ClassVar}


def unexpected(problem: str) -> None:
    raise AssertionError(problem)


def write(path: Path, run: list[Event], report: Callable[[str], None] = unexpected) -> None:
    file = EventsFile(path, report)
    for event in run:
        file.on_event(event)
    file.close()


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", ALONE, ids=lambda cls: cls.kind)
def test_every_kind_of_event_comes_back_as_it_was_written(cls: type[Event], examples: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(st.builds(cls, **fields_of(cls)))
    def round_trip(event: Event) -> None:
        path.unlink(missing_ok=True)
        write(path, [event])
        (back,) = read_events(path)
        assert back == event
        assert type(back) is cls

    round_trip()


def test_a_whole_run_comes_back_in_order(tmp_path: Path) -> None:
    run = ScriptedRun().build()
    write(tmp_path / "events.jsonl", run)
    assert list(read_events(tmp_path / "events.jsonl")) == run


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first, second = Note(time=1.0, level="info", text="a\nb"), Note(time=2.0, level="warning", text="η")
    write(path, [first])
    write(path, [second])
    assert list(read_events(path)) == [first, second]


def test_numpy_values_are_written_as_plain_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event = OptimizerStepped(
        time=np.float64(1.5),
        step=np.int64(1),
        fetch=0,
        version=0,
        skipped=np.bool_(False),
        tokens=3,
        trajectories=1,
        lags=np.array([0, 1]),
        token_lag={np.int64(1): np.int32(7)},
        metrics={"loss": np.float32(0.25)},
    )
    write(path, [event])
    row = json.loads(path.read_text())
    assert row["lags"] == [0, 1]
    assert row["token_lag"] == {"1": 7}
    assert row["metrics"] == {"loss": 0.25}
    assert row["skipped"] is False


def test_a_number_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    metrics = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1}
    write(
        path,
        [
            OptimizerStepped(
                time=0, step=0, fetch=0, version=0, skipped=True, tokens=0, trajectories=0, lags=[], metrics=metrics
            )
        ],
    )
    assert json.loads(path.read_text())["metrics"] == {"loss": None, "grad_norm": None, "lr": 0.1}
    (event,) = read_events(path)
    assert isinstance(event, OptimizerStepped)
    assert math.isnan(event.metrics["loss"])
    assert event.metrics["lr"] == 0.1


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run: list[Event] = [TrainerBusy(time=1, what="step", version=0, span=(0.0, 1.0))]
    write(path, run)
    with path.open("a") as file:
        file.write('{"kind": "note", "time"')
    assert list(read_events(path)) == run


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("nonsense", "is damaged: it is not one whole JSON object. Take the file from a copy, or remove that line"),
        ("[1]", "is damaged: it is no object with a kind. Take the file from a copy, or remove that line"),
        ('{"kind": "unheard.of", "time": 1}', "is not an event of .*: 'unheard.of' is none that it has. Read the run"),
        *(
            (f'{{"kind": "note", {fields}}}', "is not .*: 'note' has other fields, or values of another kind. Read")
            for fields in (
                '"time": 1, "colour": "red"',
                '"time": 1, "level": "", "text": "", "colour": 1',
                '"time": [], "level": "", "text": ""',
            )
        ),
    ],
)
def test_a_line_that_is_no_event_is_an_error_that_names_the_line(line: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "note", "time": 1, "level": "info", "text": ""}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"events\.jsonl:2 {wrong}"):
        list(read_events(path))


def test_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the events"):
        list(read_events(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("byte", [b"\xff", b"\x80", b"\xed\xa0\x80"])
def test_a_line_that_is_not_utf_8_is_an_error_that_names_the_line(byte: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [note("a"), note("b")])
    with path.open("ab") as file:
        file.write(b'{"kind": "note", "text": "' + byte + b'"}\n')
    with pytest.raises(DataError, match=r"events\.jsonl:3 is damaged: .*UTF-8 \(byte 27\)"):
        list(read_events(path))


# ---------------------------------------------------------------------------------------------- a disk that refuses


class Disk:
    """Takes ``room`` bytes more, and at most ``at_once`` of them in one write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 2**30, at_once: int = 2**30) -> None:
        self.room = room
        self._at_once = at_once
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, bytes(data[: min(self.room, self._at_once)]), offset)
        self.room -= written
        return written


def test_what_a_disk_refused_for_a_while_is_written_later_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, problems, disk = tmp_path / "events.jsonl", [], Disk(monkeypatch, room=100, at_once=7)
    file = EventsFile(path, problems.append)
    run = [event for n in range(5) for event in (note("x" * 50), reached(n))]
    for event in run[:6]:
        file.on_event(event)
    assert (path.stat().st_size, file.recorded_version) == (100, -1)
    disk.room = 2**30
    for event in run[6:]:
        file.on_event(event)
    assert file.recorded_version == 4
    file.close()
    assert list(read_events(path)) == run
    assert problems == [f"cannot write {path}: No space left on device; trying again while the run goes on"]


def test_a_record_that_stays_incomplete_says_from_where_on_the_run_cannot_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, problems, disk = tmp_path / "events.jsonl", [], Disk(monkeypatch)
    file = EventsFile(path, problems.append)
    for version in range(5):
        disk.room *= version < 3
        file.on_event(reached(version))
    assert file.recorded_version == 2
    assert len(problems) == 1
    file.close()
    assert problems[1:] == [
        f"cannot write {path}: No space left on device; it stays incomplete, and the run cannot be resumed from a "
        "later version than 2"
    ]
    assert sorted(look_through(path).boundaries) == [0, 1, 2]


def test_a_disk_that_refuses_too_much_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded; and half a record without a gap is one, half a record with a gap is none."""
    monkeypatch.setattr("headway.reports.record.events_file.KEPT_BYTES", 1000)
    path, problems, disk = tmp_path / "events.jsonl", [], Disk(monkeypatch)
    file = EventsFile(path, problems.append)
    file.on_event(reached(0))
    disk.room = 0
    for event in (note("x" * 900), reached(1), note("x" * 900), reached(2)):
        file.on_event(event)
    disk.room = 2**30
    file.on_event(reached(3))
    file.close()
    assert list(read_events(path)) == [reached(0)]
    assert file.recorded_version == 0
    assert len(problems) == 2


def test_an_interrupt_in_the_middle_of_a_write_leaves_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pwrite = tmp_path / "events.jsonl", os.pwrite
    file = EventsFile(path, unexpected)

    def interrupted(*arguments: Any) -> int:
        pwrite(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.on_event(reached(0))
    monkeypatch.setattr(os, "pwrite", pwrite)
    file.on_event(reached(1))
    file.close()
    assert list(read_events(path)) == [reached(0), reached(1)]


def test_a_resumed_run_s_record_tells_of_the_boundary_that_it_went_back_to(tmp_path: Path) -> None:
    write(tmp_path / "e", [reached(0), reached(1), reached(2)])
    file = EventsFile(tmp_path / "e", unexpected)
    file.on_event(resumed(1, 1))
    assert file.recorded_version == 1
    file.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_and_the_run_goes_on() -> None:
    problems: list[str] = []
    long = Note(time=0, level="info", text="x" * 100_000)
    write(Path("/dev/full"), [long, reached(0), long, reached(1)], problems.append)
    assert problems == [
        "cannot write /dev/full: No space left on device; trying again while the run goes on",
        "cannot write /dev/full: No space left on device; it stays incomplete, and the run cannot be resumed",
    ]


def test_a_file_that_cannot_be_opened_is_reported_and_tried_again(tmp_path: Path) -> None:
    path, problems = tmp_path / "none" / "events.jsonl", []
    lines = JsonLines(path, problems.append)
    lines.write({"a": 1}, at_once=True)
    assert problems == [f"cannot write {path}: No such file or directory; trying again while the run goes on"]
    path.parent.mkdir()
    lines.write({"a": 2}, at_once=True)
    lines.close()
    assert lines.whole
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    assert len(problems) == 1


def test_a_file_that_is_never_opened_stays_incomplete(tmp_path: Path) -> None:
    problems: list[str] = []
    lines = JsonLines(tmp_path / "none" / "metrics.jsonl", problems.append)
    lines.close()
    assert not lines.whole
    assert problems[1].endswith("metrics.jsonl: No such file or directory; it stays incomplete")


def test_optional_fields_come_back_as_none(tmp_path: Path) -> None:
    event = RunFinished(time=0, status="completed", reason=None, version=1, groups={"admitted": 3})
    write(tmp_path / "e", [event])
    assert list(read_events(tmp_path / "e")) == [event]


# ---------------------------------------------------------------------------------------------- resumed runs


def note(text: str) -> Note:
    return Note(time=0.0, level="info", text=text)


def reached(version: int) -> VersionReached:
    return VersionReached(time=0.0, version=version, groups={"admitted": version})


def resumed(version: int, times: int) -> RunResumed:
    return RunResumed(time=0.0, version=version, times=times)


def ended(status: str) -> RunFinished:
    return RunFinished(time=0.0, status=status, reason=None, version=0, groups={})


def test_what_came_after_the_boundary_that_a_run_went_back_to_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = [note("a"), reached(0), note("b"), reached(1), note("c")]
    undone = [reached(2), note("d"), ended("failed")]
    second = [resumed(1, 1), note("e"), reached(2), note("f")]
    write(path, [*first[:-1], first[-1], *undone, *second])
    survived = [*first[:-1], *second]
    assert list(read_events(path)) == survived
    record = look_through(path)
    assert (sorted(record.boundaries), record.resumed, record.ended) == ([0, 1, 2], 1, None)


def test_a_run_may_go_back_behind_an_earlier_return(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(
        path,
        [
            *[reached(0), note("a"), reached(1), note("b"), reached(2), note("c")],
            *[resumed(2, 1), note("d"), reached(3), note("e")],
            *[resumed(3, 2), note("f")],
            *[resumed(1, 3), note("g"), reached(2), ended("completed")],
        ],
    )
    assert list(read_events(path)) == [
        *[reached(0), note("a"), reached(1), resumed(1, 3), note("g"), reached(2), ended("completed")]
    ]
    record = look_through(path)
    assert (sorted(record.boundaries), record.resumed, record.ended) == ([0, 1, 2], 3, "completed")
    record.end_at(1)
    assert list(EventReader(path, record=record).read()) == [reached(0), note("a"), reached(1)]


def test_a_run_cannot_have_gone_back_to_what_it_never_reached(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [reached(0), resumed(1, 1)])
    with pytest.raises(DataError, match=r"events\.jsonl:2: .*went back to a version"):
        list(read_events(path))


@pytest.mark.parametrize("half", ["", '{"kind": "note", "ti', "x" * 200_000])
def test_what_a_kill_left_of_a_line_is_no_part_of_the_record(half: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [note("a"), note("b")])
    with path.open("a") as file:
        file.write(half)
    os.truncate(path, look_through(path).size)
    write(path, [note("c")])
    assert list(read_events(path)) == [note("a"), note("b"), note("c")]


def test_a_file_of_half_a_line_has_no_record(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind"')
    assert look_through(path).size == 0


def test_a_boundary_is_on_disk_as_soon_as_it_was_told(tmp_path: Path) -> None:
    """Whoever kills the process then finds a checkpoint, and the boundary that it belongs to."""
    path = tmp_path / "events.jsonl"
    file = EventsFile(path, unexpected)
    file.on_event(note("a"))
    assert list(read_events(path)) == []
    file.on_event(reached(1))
    assert list(read_events(path)) == [note("a"), reached(1)]
    file.close()


@pytest.mark.parametrize("cls", EVENT_TYPES, ids=lambda cls: cls.kind)
def test_every_span_of_an_event_is_on_the_runs_clock(cls: type[Event]) -> None:
    spans = {name for name, hint in get_type_hints(cls).items() if hint in (Span, list[Span])}
    assert spans | {"time"} <= set(cls.on_clock)


def test_an_event_on_another_clock_has_all_its_moments_moved() -> None:
    event = ReplicaActivity(
        time=3.0, replica="r", busy=[(1.0, 2.0), (2.5, 3.0)], slot_seconds=1.5, generated_tokens=4, prefilled_tokens=0
    )
    later = event.later(10.0)
    assert isinstance(later, ReplicaActivity)
    assert (later.time, later.busy, later.slot_seconds) == (13.0, [(11.0, 12.0), (12.5, 13.0)], 1.5)


def test_one_kind_and_one_group_are_read_alone(tmp_path: Path) -> None:
    run = ScriptedRun().build()
    write(tmp_path / "events.jsonl", run)
    wanted = [e for e in run if isinstance(e, GroupAdmitted) and e.number == 3]
    assert list(read_events(tmp_path / "events.jsonl", kinds=[GroupAdmitted], number=3)) == wanted


def test_a_part_of_the_events_that_an_earlier_version_left_elsewhere_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [reached(0)])
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "000000000001.parquet").touch()
    with pytest.raises(DataError, match=r"events/0+1\.parquet .*part of the run's events"):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_line_that_is_ended_while_the_file_is_looked_through_moves_no_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [reached(0), note("to come"), reached(1)])
    whole = path.read_bytes()
    first, half = whole.index(b"\n") + 1, whole.index(b"to come")

    class Growing(io.BytesIO):
        """A file of which the first look sees half a line, and a later one all."""

        seen = half

        def read(self, size: int | None = -1) -> bytes:
            found = super().read(min(CHUNK if size is None else size, max(0, self.seen - self.tell())))
            self.seen = len(whole)
            return found

        def readline(self, size: int | None = -1) -> bytes:
            return b""

    monkeypatch.setattr(Path, "open", lambda *_: Growing(whole))
    record = look_through(path)
    assert (record.boundaries, record.size) == ({0: first}, first)


@pytest.mark.parametrize("kinds", [None, (EpisodeWorkerLost,)])
def test_events_of_older_versions_are_read_under_their_present_names(
    tmp_path: Path, kinds: tuple[type[Event], ...] | None
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "keeper.lost", "time": 1.5, "keeper": "keeper-0", "reason": "killed"}\n')
    (lost,) = read_events(path, kinds=kinds)
    assert lost == EpisodeWorkerLost(time=1.5, worker="keeper-0", reason="killed")
