"""A run with states of its metrics: what is read of it, against what reading every event gives."""

from __future__ import annotations

import io
import pickle
import shutil
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.errors import ConfigError
from headway.events import Event, VersionReached
from headway.reports.comparison import read_runs
from headway.reports.metrics.metrics_state import newest, pickled, save
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.record.events_file import look_through
from headway.reports.report import _timeline, report
from headway.reports.report_manager import Reports, open_reports
from headway.reports.run_directory import RunDirectory
from headway.reports.timeline.lanes import clipped
from headway.reports.timeline.run_history import CurveLog, to_json
from headway.reports.timeline.timeline import Lane, Timeline, build_timeline
from headway.reports.watch.follower import Follower
from tests.pipeline.scenario import Scenario
from tests.reports.stories import only_late, sample
from tests.reports.timelines import simulated_events

VERSIONS = 6
LARGE_FROM = "headway.reports.report_manager.LARGE"


def _emitted(run: Path, events: Iterable[Event]) -> tuple[Reports, io.StringIO]:
    """The reports of a large run, to which ``events`` were told, and what they print."""
    output = io.StringIO()
    reports = open_reports(Scenario("async_partial").config, run, Console(file=output, width=300))
    for event in events:
        reports.emit(event)
    return reports, output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run, with a state at each of its newest versions."""
    directory = tmp_path_factory.mktemp("large") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LARGE_FROM, 1)
        _emitted(directory, simulated_events("async_partial", VERSIONS))[0].close()
    return directory


@pytest.fixture
def always_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LARGE_FROM, 1)


@pytest.fixture
def few_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.reports.report.DRAWN_BYTES", 1)


def copy(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def without_states(run: Path) -> Path:
    for path in (run / "events").glob("*.state"):
        path.unlink()
    return run


def drawn(run: Path, versions: str | None = None) -> Timeline:
    return _timeline(run, [], versions)


def inside(lanes: tuple[Lane, ...], window: tuple[float, float]) -> list[tuple[str, str, float, dict[str, float]]]:
    """Each lane's busy seconds, and idle ones by reason; stages may be in a state that began long before."""
    found = []
    for lane in lanes:
        part = replace(lane, spans=tuple(clipped(lane.spans, [window])))
        reasons = {reason: round(seconds, 6) for reason, seconds in part.idle_by_reason(window).items()}
        if lane.group == "Stages":
            reasons = {"idle": round(sum(reasons.values()), 5)}
        if part.spans:
            found.append((lane.group, lane.name, round(part.seconds(window), 6), reasons))
    return found


def test_figures_and_curves_of_a_large_run_are_those_of_all_its_events(run: Path, tmp_path: Path) -> None:
    replayed = read_runs([without_states(copy(run, tmp_path))])[0]
    found = read_runs([only_late(copy(run, tmp_path / "late"))])[0]
    assert found.figures == replayed.figures
    assert found.figures["groups"]["trained"] > 0
    assert to_json(found.curves) == to_json(replayed.curves)


@pytest.mark.usefixtures("few_drawn")
def test_the_page_of_a_large_run_draws_its_newest_versions_and_says_so(run: Path, tmp_path: Path) -> None:
    whole, late = build_timeline(simulated_events("async_partial", VERSIONS)), drawn(run)
    assert late.versions is not None
    assert late.versions[0] > 0
    assert late.window[0] > whole.window[0]
    assert inside(late.lanes, late.window) == inside(whole.lanes, late.window)
    assert late.summary == whole.summary
    assert [mark.label for mark in late.marks] == [m.label for m in whole.marks if m.time >= late.window[0]]
    page = report(only_late(copy(run, tmp_path))).html.read_text()
    assert "cover the versions {} to {};".format(*late.versions) in page


def test_versions_that_are_asked_for_are_drawn_as_the_whole_run_s_page_has_them(run: Path) -> None:
    whole, early = build_timeline(simulated_events("async_partial", VERSIONS)), drawn(run, "2:3")
    begins = {e.version: e.time for e in simulated_events("async_partial", VERSIONS) if isinstance(e, VersionReached)}
    assert early.window == pytest.approx((begins[2], begins[4]))
    assert early.versions == (2, 3)
    assert [busy for *busy, _ in inside(early.lanes, early.window)] == [
        busy for *busy, _ in inside(whole.lanes, early.window)
    ]
    assert early.summary == whole.summary


@pytest.mark.parametrize("versions", ["3", "4:2", "7:9", "a:b", "-1:2"])
def test_versions_that_there_are_not_are_refused(run: Path, versions: str) -> None:
    with pytest.raises(ConfigError, match=r"--versions: got .*; expected A:B, .*\b0 to\b"):
        drawn(run, versions)


def test_a_small_run_is_drawn_as_a_whole(run: Path) -> None:
    assert drawn(run).versions is None


@pytest.mark.usefixtures("few_drawn")
def test_watching_a_large_run_begins_with_its_newest_versions(run: Path, tmp_path: Path) -> None:
    messages = []
    for directory in (only_late(copy(run, tmp_path)), without_states(copy(run, tmp_path / "all"))):
        follower = Follower(RunDirectory(directory))
        while follower.look():
            pass
        messages.append(follower.message())
    late, whole = messages
    assert [late[key] for key in ("figures", "sentence", "ledger")] == [
        whole[key] for key in ("figures", "sentence", "ledger")
    ]
    assert 0 < len(late["groups"]) < len(whole["groups"])


def harmful(state: bytes) -> bytes:
    import zlib

    header, _, _ = state.partition(b"\n")
    return header + b"\n" + zlib.compress(pickle.dumps(shutil.rmtree))


def of_old_modules(state: bytes) -> bytes:
    """Named as before its classes moved to `headway.reports.metrics`."""
    import zlib

    header, _, _ = state.partition(b"\n")
    return header + b"\n" + zlib.compress(b"cheadway.reports.run_metrics\nRunMetrics\n)\x81.")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: b"",
        lambda state: state[: len(state) // 2],
        lambda state: state.replace(b'"code": "', b'"code": "other'),
        lambda state: state.replace(b'"offset": ', b'"offset": 1'),
        harmful,
        of_old_modules,
    ],
    ids=["empty", "half", "of other code", "of another boundary", "of other classes", "of old modules"],
)
def test_a_state_that_does_not_fit_is_passed_over(run: Path, tmp_path: Path, spoil: Any) -> None:
    directory = RunDirectory(copy(run, tmp_path))
    record = look_through(directory.events)
    assert newest(directory, record, CurveLog()).offset > 0
    for path in (directory.path / "events").glob("*.state"):
        path.write_bytes(spoil(path.read_bytes()))
    assert newest(directory, record, CurveLog()).offset == 0


def test_states_of_checkpoints_and_the_newest_ones_are_kept_and_undone_ones_go(run: Path, tmp_path: Path) -> None:
    directory = RunDirectory(copy(run, tmp_path))
    (directory.checkpoints / "version_2").mkdir(parents=True)
    for version in (2, 3, 4, 5, 6, 7, 8, 9, 5):
        save(directory, pickled(RunMetrics()), version, 1, 0.0)
    assert sorted(int(path.stem) for path in (directory.path / "events").glob("*.state")) == [2, 5]
    for version in (6, 7, 8, 9):
        save(directory, pickled(RunMetrics()), version, 1, 0.0)
    assert sorted(int(path.stem) for path in (directory.path / "events").glob("*.state")) == [2, 6, 7, 8, 9]


@pytest.mark.usefixtures("few_drawn")
def test_an_old_group_whose_text_is_on_the_page_is_in_its_list(run: Path) -> None:
    text = sample(0, 0)
    assert drawn(run).ledger
    found = _timeline(run, [text], None)
    assert found is not None
    number, version, _, fate, *_ = found.groups.lines()[0]
    assert (number, fate, version) == (0, text["fate"], 0)


@pytest.mark.usefixtures("always_large")
def test_a_state_is_written_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, may = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        assert may.wait(60)
        save(*args)
        written.set()

    monkeypatch.setattr("headway.reports.metrics.metrics_state.save", slow)
    reports, _ = _emitted(tmp_path / "run", simulated_events("async_partial", 2))
    assert not written.is_set()
    may.set()
    reports.close()
    assert written.is_set()


@pytest.mark.usefixtures("always_large")
def test_a_slow_disk_costs_states_and_no_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may, kept = threading.Event(), list[int]()

    def slow(run: RunDirectory, state: bytes, version: int, *_: Any) -> None:
        assert may.wait(60)
        kept.append(version)

    monkeypatch.setattr("headway.reports.metrics.metrics_state.save", slow)
    monkeypatch.setattr("headway.reports.metrics.metrics_state.MOST_WAITING", 1)
    reports, _ = _emitted(tmp_path / "run", simulated_events("async_partial", 5))
    may.set()
    reports.close()
    assert len(kept) == 1


@pytest.mark.usefixtures("always_large")
@pytest.mark.parametrize("step", ["pickled", "save"])
def test_a_state_that_cannot_be_kept_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(f"headway.reports.metrics.metrics_state.{step}", fails)
    reports, output = _emitted(tmp_path / "run", simulated_events("async_partial", 3))
    reports.close()
    assert output.getvalue().count("no state of the metrics was kept") == 1
    assert reports.summary()["balanced"]


def test_open_groups_keep_no_events_that_each_state_would_copy() -> None:
    metrics = RunMetrics()
    for event in simulated_events("async_partial", 2):
        metrics.on_event(event)
        if metrics.tally.whereabouts()["queued"]:
            break
    assert b"TrajectoryFinished" not in pickled(metrics)


def test_a_state_needs_all_rows_that_it_has_counted(run: Path, tmp_path: Path) -> None:
    directory = RunDirectory(copy(run, tmp_path))
    directory.metrics.write_text("")
    assert newest(directory, look_through(directory.events), CurveLog()).offset == 0
