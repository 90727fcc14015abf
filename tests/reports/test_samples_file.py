"""``samples.jsonl``: what is in it, how large it becomes, and what a resumed run leaves of it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config.schema import Config
from headway.data.mixing import place_of_group
from headway.errors import DataError, UserError
from headway.events import GroupSettled, Note, RunResumed
from headway.pipeline.admission.sample_collector import SampleOutlet
from headway.pipeline.recovery.checkpoint_manager import balance
from headway.reports import report_manager
from headway.reports.record.events_file import read_events
from headway.reports.report_manager import Reports, open_reports, reopen_reports
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.samples.samples_file import SamplesFile, Thinning, later, read_samples
from tests.full_disk import files_of_at_most
from tests.pipeline.scenario import Run, Scenario
from tests.pipeline.test_samples import Spelled
from tests.reports.samples import episode, sample, validation
from tests.reports.test_resumed_run import SCENARIO, quiet

THINNING = Thinning(seed=0, share=0.5, every=5)


def of_group(number: int, version: int = 0) -> dict[str, Any]:
    times = {"admitted": 1.0, "generated": None, "rewarded": 2.0, "settled": 3.0}
    one = episode(0, [], started=1.5, finished=1.75, waited_s=0.5)
    return sample(number, [one], version=version, times=times)


def of_validation(version: int, time: float = 0.0) -> dict[str, Any]:
    return {**validation(version, 1, "x"), "time": time}


def drawn(most: int) -> list[int]:
    return [number for number in range(most) if place_of_group(0, number) < THINNING.share]


def file_of(path: Path, limit: int, told: list[str] | None = None) -> SamplesFile:
    return SamplesFile(path, THINNING, (told if told is not None else []).append, limit)


def fill(file: SamplesFile, numbers: list[int], validations: tuple[int, ...] = ()) -> None:
    for one in [of_group(number, number // 4) for number in numbers] + [of_validation(v) for v in validations]:
        if file.takes(one):
            file.on_sample(one)


def test_a_file_stays_small_and_thins_older_and_newer_samples_alike(tmp_path: Path) -> None:
    path, limit, told = tmp_path / "samples.jsonl", 40_000, list[str]()
    file = file_of(path, limit, told)
    for start in range(0, 4000, 100):
        fill(file, [number for number in drawn(4000) if start <= number < start + 100], (start // 20,))
        assert path.stat().st_size <= limit
    file.close()
    samples = list(read_samples(path))
    thinned = file.thinned
    assert {one["thinned"] for one in samples} == {thinned}
    assert thinned > 3
    kept = [one["group"] for one in samples if "group" in one]
    assert kept == [n for n in drawn(4000) if place_of_group(0, n) < 0.5 / 2**thinned]
    assert 0.3 < sum(number < 2000 for number in kept) / len(kept) < 0.7  # older and newer
    validations = [one["validation"] for one in samples if "validation" in one]
    assert validations == [version for version in range(0, 200, 5) if version // 5 % 2**thinned == 0]
    assert told == []
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


def test_the_validations_of_the_first_and_of_the_last_version_are_never_thinned_out() -> None:
    thinning = Thinning(seed=0, share=0.5, every=5, last=37)
    assert [version for version in range(40) if thinning.keeps("validation", version, 9)] == [0, 1, 2, 3, 4, 37]


def test_the_last_version_is_known_where_the_length_is_a_number_of_groups() -> None:
    by_groups = Config.model_validate({"rollout": {"total_rollout_steps": 96}, "actor": {"ppo_mini_batch_size": 16}})
    assert Thinning.of(by_groups).last == 96 // by_groups.groups_per_version
    assert Thinning.of(Config.model_validate({"data": {"epochs": 2}})).last is None


def test_a_first_validation_of_any_size_does_not_end_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = file_of(path, 20_000)
    file.on_sample({**of_validation(0), "prompt": "x" * 50_000})
    fill(file, drawn(400))
    file.close()
    assert file.thinned < 8
    left = list(read_samples(path))
    assert "validation" in left[0]
    assert len(left) > 10
    assert path.stat().st_size < 100_000


def test_a_file_that_is_opened_again_goes_on_as_it_was_thinned(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = file_of(path, 20_000)
    fill(first, drawn(1000))
    first.close()
    assert first.thinned > 0
    again = file_of(path, 20_000)
    assert again.thinned == first.thinned
    refused = next(n for n in drawn(9000) if place_of_group(0, n) >= 0.5 / 2**first.thinned)
    assert not again.takes(of_group(refused))
    again.close()


def test_a_sample_is_on_the_disk_at_once(tmp_path: Path) -> None:
    file = file_of(tmp_path / "samples.jsonl", 20_000)
    for number in drawn(20)[:3]:
        file.on_sample(of_group(number))
        assert [s["group"] for s in read_samples(tmp_path / "samples.jsonl")][-1] == number
    file.close()


def test_a_disk_without_room_for_a_thinned_file_is_one_warning_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "samples.jsonl", list[str]()
    file = file_of(path, 2_000, told)
    (tmp_path / "samples.jsonl.tmp").mkdir()
    numbers = drawn(60)
    fill(file, numbers)
    file.close()
    assert told[0].startswith(f"cannot thin {path}: ")
    assert len(told) == 1
    left = [(one["group"], one["thinned"]) for one in read_samples(path)]
    assert [thinned for _, thinned in left] == sorted(thinned for _, thinned in left)
    taken = iter(left)
    for thinned in range(file.thinned + 1):  # what came while it could not be thinned is all there
        own = [number for number, at in left if at == thinned]
        between = [n for n in numbers if own and own[0] <= n <= own[-1] and place_of_group(0, n) < 0.5 / 2**thinned]
        assert own == between == [next(taken)[0] for _ in own]
    assert file.thinned > 1


def test_a_full_disk_ends_what_is_written_and_not_the_run(tmp_path: Path) -> None:
    told: list[str] = []
    file = file_of(tmp_path / "samples.jsonl", 10**9, told)
    with files_of_at_most(2_000):
        fill(file, drawn(200))
        file.close()
    assert "File too large" in told[0]
    assert len(told) == 2


def test_moments_are_moved_to_a_resumed_runs_clock_and_seconds_are_not() -> None:
    moved = later(of_group(1), 10.0)
    assert moved["times"] == {"admitted": 11.0, "generated": None, "rewarded": 12.0, "settled": 13.0}
    assert (moved["episodes"][0]["started"], moved["episodes"][0]["waited_s"]) == (11.5, 0.5)
    assert later(of_validation(1, 2.0), 10.0)["time"] == 12.0


@pytest.mark.parametrize(
    ("line", "where"),
    [("[1]", ":2"), ('{"group": 1}', ":2"), ("{", ":2"), ('{"other": 1, "episodes": []}', ":2")],
)
def test_a_damaged_line_is_named(line: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{json.dumps(of_group(1))}\n{line}\n")
    with pytest.raises(DataError, match=f"samples.jsonl{where} is not a sample"):
        list(read_samples(path))
    path.write_text(f'{json.dumps(of_group(1))}\n{{"group": 2, "half')
    assert [one["group"] for one in read_samples(path)] == [1]


# ---------------------------------------------------------------------------------------------- in the reports


def config(samples: int) -> Config:
    return Config.model_validate({"reports": {"samples": samples, "trackers": [], "live": "off"}})


def test_samples_are_in_their_file_and_at_trackers_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = open_reports(config(2), tmp_path / "run", quiet())
    tracked: list[dict[str, Any]] = []
    monkeypatch.setattr(reports._trackers, "on_sample", tracked.append)
    reports.emit(Note(time=0.0, level="info", text="a line"))
    reports.on_sample(of_group(3))
    reports.on_sample(of_validation(0))
    reports.close()
    directory = reports.directory
    assert list(read_samples(directory.samples)) == [{**s, "thinned": 0} for s in (of_group(3), of_validation(0))]
    assert tracked == [of_group(3), of_validation(0)]
    assert len(directory.events.read_text().splitlines()) == 1


def test_a_run_without_samples_has_no_file(tmp_path: Path) -> None:
    reports = open_reports(config(0), tmp_path / "run", quiet())
    reports.on_sample(of_group(3))
    reports.close()
    assert not reports.directory.samples.exists()


# ---------------------------------------------------------------------------------------------- resumed

SHOWN = replace(SCENARIO, sections={**SCENARIO.sections, "reports": {"samples": 3}})


def shown(scenario: Scenario, reports: Reports, killed_at: float | None = None) -> Run:
    def script(run: Run) -> None:
        run.recorder.on = reports.emit

    outlet = SampleOutlet(reports.on_sample, Spelled())
    return replace(scenario, script=script, samples=outlet, validated=reports.validated).run(killed_at)


def without_times(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in one.items() if name not in ("times", "time")}
        | {"episodes": [{**e, "started": 0, "finished": 0} for e in one["episodes"]]}
        for one in read_samples(path)
        if one.get("reason") != "left at once"
    ]


def test_a_resumed_runs_samples_are_those_of_a_run_that_nobody_killed(tmp_path: Path) -> None:
    whole = open_reports(SHOWN.config, tmp_path / "whole", quiet())
    shown(SHOWN, whole).assert_completed()
    whole.close()
    reports = open_reports(SHOWN.config, tmp_path / "run", quiet())
    state = json.loads(json.dumps(shown(SHOWN, reports, 18.0).trainer.saved[-1][1]))
    reports.close()
    directory = RunDirectory.existing(tmp_path / "run")
    with directory.samples.open("a") as file:
        file.write('{"group": 12, "half')
    before = list(read_samples(directory.samples))
    lock = RunLock(directory.lock)
    lock.take()
    again = reopen_reports(
        SHOWN.config, directory, lock, state["version"], balance(state), quiet(), keeps_validation=True
    )
    survived = list(read_samples(directory.samples))
    assert 0 < len(survived) < len(before)
    kept = [
        s for s in before if s.get("version", -1) < state["version"] and s.get("validation", -1) <= state["version"]
    ]
    boundary = next(e.time for e in read_events(directory.events) if isinstance(e, RunResumed))
    assert survived == [s | {"time": boundary} if s.get("validation") == state["version"] else s for s in kept]
    shown(replace(SHOWN, resume_from=state), again)
    again.close()
    found = list(without_times(directory.samples))
    assert [s for s in found if s.get("fate") == "trained"] == [
        s for s in without_times(tmp_path / "whole" / "samples.jsonl") if s.get("fate") == "trained"
    ]
    assert [s["validation"] for s in found if "validation" in s] == sorted(
        s["validation"] for s in read_samples(tmp_path / "whole" / "samples.jsonl") if "validation" in s
    )
    settled = {e.number: e.time for e in read_events(directory.events) if isinstance(e, GroupSettled)}
    times = {s["group"]: s["times"]["settled"] for s in read_samples(directory.samples) if "group" in s}
    assert times == pytest.approx({number: settled[number] for number in times}, abs=1e-4)  # on one clock


@pytest.mark.parametrize(("error", "remedy"), [(errno.ENOSPC, "; make room"), (errno.EACCES, "")])
def test_samples_that_cannot_be_rewritten_refuse_the_resume_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, remedy: str
) -> None:
    reports = open_reports(SHOWN.config, tmp_path / "run", quiet())
    state = json.loads(json.dumps(shown(SHOWN, reports, 18.0).trainer.saved[-1][1]))
    reports.close()
    directory = RunDirectory.existing(tmp_path / "run")

    def full(path: Path, draft: Path, version: int, boundary: float, *, validated: bool) -> None:
        draft.write_text("half")
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(report_manager, "write_surviving", full)
    before = {path.name: path.read_bytes() for path in directory.path.iterdir() if path.is_file()}
    why = rf"samples\.jsonl\.tmp could not be written \({os.strerror(error)}\), .* nothing of it is lost{remedy}$"
    with pytest.raises(UserError, match=why):
        reopen_reports(SHOWN.config, directory, RunLock(directory.lock), state["version"], balance(state), quiet())
    assert {path.name: path.read_bytes() for path in directory.path.iterdir() if path.is_file()} == before
