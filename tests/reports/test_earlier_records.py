"""Runs of earlier versions, whose frequent events are in files beside ``events.jsonl``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.errors import DataError
from headway.events import Event, GroupSettled, TrajectoryFinished
from headway.reports.record.earlier_records import upgrade
from headway.reports.record.event_lines import event_types
from headway.reports.record.events_file import read_events
from headway.reports.run_directory import RunDirectory, RunLock
from tests.reports.timelines import simulated_events

APART = (TrajectoryFinished, GroupSettled)


def columns(rows: list[dict[str, object]], path: Path) -> None:
    """Write events as earlier versions did: sorted by kind, a column for each field of a kind, mappings as JSON."""
    tables, kinds, first = [], {}, 0
    for kind in sorted({str(row["kind"]) for row in rows}):
        own = [(order, row) for order, row in enumerate(rows) if row["kind"] == kind]
        names = [name for name in event_types()[kind][1] if name != "number"]
        table = [
            {"order": order, "line": row["line"], "number": row["number"]}
            | {f"{kind}/{name}": json.dumps(row[name]) if isinstance(row[name], dict) else row[name] for name in names}
            for order, row in own
        ]
        tables.append(pa.Table.from_pylist(table))
        kinds[kind], first = (first, len(own)), first + len(own)
    table = pa.concat_tables(tables, promote_options="permissive")
    pq.write_table(table.replace_schema_metadata({b"kinds": json.dumps(kinds).encode()}), path)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A run as an earlier version left it, with one segment as columns and the next as lines, and its events."""
    run, events = tmp_path_factory.mktemp("earlier") / "run", simulated_events("async_partial", 4)
    (run / "events").mkdir(parents=True)
    (run / "config.yaml").write_text("mode: async_partial\n")
    segments: dict[int, list[dict[str, object]]] = {0: [], 40: []}
    lines: list[str] = []
    for event in events:
        if isinstance(event, APART):
            segments[40 if len(lines) >= 40 else 0].append(event.to_json() | {"line": len(lines)})
        else:
            lines.append(json.dumps(event.to_json()) + "\n")
    (run / "events.jsonl").write_text("".join(lines))
    columns(segments[0], run / "events" / f"{0:012d}.parquet")
    (run / "events" / f"{40:012d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in segments[40]))
    (run / "events" / "000003.state").write_bytes(b"sums of another version")
    return run, events


@pytest.fixture
def run(earlier: tuple[Path, list[Event]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(earlier[0], tmp_path / "run"))


def test_a_run_of_an_earlier_version_has_all_its_events_in_order_once_it_is_opened(
    run: Path, earlier: tuple[Path, list[Event]]
) -> None:
    with pytest.raises(DataError, match=r"events/0000000000"):
        list(read_events(run / "events.jsonl"))
    RunDirectory.existing(run)
    assert [repr(event) for event in read_events(run / "events.jsonl")] == [repr(event) for event in earlier[1]]
    assert not (run / "events").exists()


@pytest.mark.parametrize("killed_at", ["rename", "replace", "rmtree"])
def test_an_upgrade_that_is_killed_is_finished_by_the_next_one(
    run: Path, earlier: tuple[Path, list[Event]], killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil if killed_at == "rmtree" else Path, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            upgrade(run / "events.jsonl")
    upgrade(run / "events.jsonl")
    assert len(list(read_events(run / "events.jsonl"))) == len(earlier[1])
    assert not list(run.glob("events.[on]*"))


def test_a_run_that_goes_on_is_not_rewritten(run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    lock = RunLock(run / "run.lock")
    lock.take()
    try:
        RunDirectory.existing(run)
    finally:
        lock.release()
    assert (run / "events.jsonl").read_bytes() == before


def test_a_damaged_file_is_named_and_changes_nothing(run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    (run / "events" / f"{0:012d}.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not be put into events"):
        upgrade(run / "events.jsonl")
    assert (run / "events.jsonl").read_bytes() == before
