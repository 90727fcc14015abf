from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.schema import Config
from headway.errors import ConfigError, UserError
from headway.reports.record.file_access import replace_file, whole_file
from headway.reports.run_directory import ROOM, Occupied, RunDirectory, RunLock, is_trained, signs_of_life
from tests.full_disk import files_of_at_most
from tests.tiers import mostly_slow

CONFIG = Config()
DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def test_a_run_directory_holds_the_resolved_config_and_places_for_the_rest(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "a", CONFIG)
    assert load(run.config).config == CONFIG
    assert run.tensorboard.is_dir()
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()
    assert not run.model.exists()


@mostly_slow("recipe", ["demo.yaml", "agents/guess.yaml", "agents/lookup.yaml"], quick=["agents/lookup.yaml"])
def test_the_configuration_of_a_run_can_be_used_for_another_one(tmp_path: Path, recipe: str) -> None:
    config = load(DEMO.parent / recipe, ["mode=async_stale"]).config
    again = load(RunDirectory.create(tmp_path, config).config)
    diagnose(again)
    assert again.config == config


def test_an_empty_directory_that_exists_is_used(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path, CONFIG).config.exists()


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", CONFIG)
    before = run.config.read_text()
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.create(tmp_path / "a", Config(mode="on_policy"))
    assert run.config.read_text() == before


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "summary.json"])
def test_what_is_left_of_a_run_is_refused_too(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.create(tmp_path, CONFIG)
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("name", ["train.jsonl", ".git/config", "logs/mine.txt"])
def test_a_directory_with_anything_else_in_it_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Occupied, match=rf"is not empty: it has {name.partition('/')[0]}, "):
        RunDirectory.create(tmp_path, CONFIG)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_start_that_failed_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("run.lock", ".room"):
        (tmp_path / name).touch()
    (tmp_path / "tensorboard").mkdir()
    assert RunDirectory.create(tmp_path, CONFIG).config.exists()


def test_a_start_that_is_discarded_leaves_the_code_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "code").mkdir(parents=True)
    (tmp_path / "run" / "code" / "mine.py").touch()
    RunDirectory.create(tmp_path / "run", CONFIG).discard()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["code", "mine.py", "run"]
    RunDirectory.create(tmp_path / "other", CONFIG).discard()
    assert not (tmp_path / "other").exists()


def test_a_name_that_no_file_can_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written \(File name too long\)"):
        RunDirectory(tmp_path / ("a" * 300)).check_free()


def test_a_name_that_is_too_long_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory.create(tmp_path / ("x" * 300) / "run", CONFIG)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(tmp_path / "a", CONFIG)


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)"):
        RunDirectory.create(tmp_path / "file" / "a", CONFIG)


@pytest.mark.parametrize(("journal", "command"), [(True, "headway train"), (False, "headway sft --resume")])
def test_a_directory_without_a_record_is_told_by_what_else_is_there(
    journal: bool, command: str, tmp_path: Path
) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    if journal:
        (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError, match=r"no events\.jsonl") as refused:
        RunDirectory.existing(tmp_path)
    assert command in str(refused.value)
    if journal:
        with pytest.raises(UserError, match="a run of headway train"):
            RunDirectory.existing_sft(tmp_path)


def test_a_folder_of_a_run_in_its_place_is_answered_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=rf"did you mean {tmp_path}\?"):
        RunDirectory.existing(tmp_path / "model")


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.write_summary({"version": 1})
    run.write_summary({"version": 2})
    assert json.loads(run.summary.read_text()) == {"version": 2}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("size", [0, ROOM - 1], ids=["for the configuration", "for the summary"])
def test_a_disk_without_room_is_refused_and_taken_when_it_has_some(size: int, tmp_path: Path) -> None:
    with (
        files_of_at_most(size),
        pytest.raises(UserError, match=r"cannot be written \(File too large\)"),
    ):
        RunDirectory.create(tmp_path / "a", CONFIG)
    assert RunDirectory.create(tmp_path / "a", CONFIG).config.exists()


def test_a_refused_start_leaves_no_directory_that_it_made(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with files_of_at_most(0), pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create(there / "deep" / "run", CONFIG)
    assert [*there.iterdir()] == []


def test_a_run_holds_room_for_its_summary_until_that_is_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    held = {path.name for path in tmp_path.iterdir() if path.is_file() and path.stat().st_blocks * 512 >= ROOM}
    assert len(held) == 1
    run.write_summary({"version": 1})
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"config.yaml", "summary.json"}


def test_a_summary_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.write_summary({"version": 1})
    with files_of_at_most(0), pytest.raises(OSError, match="File too large"):
        run.write_summary({"version": 2})
    assert json.loads(run.summary.read_text()) == {"version": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lock_is_held_on_a_full_disk_too(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "run.lock"), RunLock(tmp_path / "run.lock")
    with files_of_at_most(0):
        first.take()
    with pytest.raises(UserError, match="another process trains this run"):
        second.take()
    first.release()
    second.take()
    assert f"process {os.getpid()} " in (tmp_path / "run.lock").read_text()
    second.release()


def test_a_lock_is_looked_at_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = RunLock(path)
    assert is_trained(path) is False
    assert not path.exists()
    lock.take()
    before = path.read_text()
    assert is_trained(path) is True
    lock.release()
    path.chmod(0o444)
    assert is_trained(path) is False
    assert path.read_text() == before


def test_a_lock_is_taken_while_others_look_at_it(tmp_path: Path) -> None:
    """Whoever asks whether a run is trained shares its lock for a moment, and keeps nobody from it."""
    path = tmp_path / "run.lock"
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        away = threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN))
        away.start()
        lock = RunLock(path)
        lock.take()
        away.join()
    with pytest.raises(UserError, match=f"process {os.getpid()} on .* trains this run"):
        RunLock(path).take()
    assert is_trained(path) is True
    lock.release()


def test_a_lock_where_nothing_can_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); .*run\.dir"):
        RunLock(tmp_path / "run" / "run.lock").take()


def test_a_start_that_is_discarded_leaves_what_others_put_there(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", CONFIG)
    lock = RunLock(run.lock)
    lock.take()
    (run.path / "notes.txt").write_text("mine")
    (run.path / "data").mkdir()
    lock.release()
    run.discard()
    assert sorted(entry.name for entry in run.path.iterdir()) == ["data", "notes.txt"]
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty", CONFIG).discard()
    assert list((tmp_path / "empty").iterdir()) == []  # the folder itself was there before
    RunDirectory.create(tmp_path / "new", CONFIG).discard()
    assert not (tmp_path / "new").exists()


def test_a_file_is_replaced_whole_or_not_at_all_by_writers_that_do_not_meet(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with suppress(RuntimeError), whole_file(link) as text:
        text.write("half")
        raise RuntimeError
    assert file.read_text() == "old"
    with whole_file(link) as first:
        first.write("first")
        other = threading.Thread(target=replace_file, args=(file, "second"))
        other.start()
        other.join()
        assert file.read_text() == "second"
    assert link.is_symlink() and file.read_text() == "first" and file.stat().st_mode & 0o777 == 0o640
    with whole_file(Path("/dev/null")) as text:
        text.write("gone")
    assert Path("/dev/null").is_char_device()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = RunLock(tmp_path / "run.lock")
    lock.take()
    assert "cannot be locked (Operation not supported): nothing keeps a second process" in caplog.text
    assert signs_of_life(tmp_path / "run.lock").exists()
    lock.release()
    assert not signs_of_life(tmp_path / "run.lock").exists()
