"""What a run has closed is in its storage, whatever fails there, and comes back from it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from headway.api.storage.storage_client import StorageClient
from headway.api.storage.stored_run import brought_back, check_storage, complete_versions, located
from headway.config.schema import Config
from headway.errors import ConfigError, DataError, UserError
from headway.events import Note, RunStarted, StorageReached
from headway.reports.checkpoint_folders import CheckpointRetention, Checkpoints
from headway.reports.record.events_file import read_events
from tests.api.storage.stored_runs import Broken, contents, let_go, reach, save, stored, uploader_of

NAMES = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    """A storage in this process's memory."""
    import fsspec

    name = f"/test{next(NAMES)}"
    yield f"memory:/{name}/run"
    fsspec.filesystem("memory").rm(name, recursive=True) if fsspec.filesystem("memory").exists(name) else None


def bring(url: str, into: Path) -> dict[str, bytes]:
    return contents(brought_back(url, into, lambda text: None))


def test_what_was_sent_comes_back_byte_for_byte(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run")
    uploader, _ = uploader_of(config, reports)
    directory = reports.directory
    for folder in ("journal", "initial_model", "code"):
        (directory.path / folder).mkdir()
    (directory.journal / "driver.0.0").write_bytes(b"\0record" * 9)
    (directory.journal / "settings.json").write_text("{}")
    (directory.initial_model / "model.safetensors").write_bytes(bytes(1000))
    (directory.code / "empty.py").touch()
    reach(reports, 1)
    reports.close()
    uploader.send_changes()
    expected = contents(directory.path)
    assert {"events.jsonl", "config.yaml", "summary.json", "journal/driver.0.0", "code/empty.py"} <= expected.keys()
    assert bring(url, tmp_path / "other") == expected


def test_a_file_that_grows_has_few_pieces_and_is_not_sent_again_and_again(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run")
    uploader, store = uploader_of(config, reports)
    path = reports.directory.path / "journal"
    path.mkdir()
    with (path / "driver.0.0").open("ab", buffering=0) as file:
        for turn in range(200):
            file.write(bytes([turn]) * 100)
            uploader.send_changes()
    files = json.loads(store.read("run.json"))["files"]
    assert len(files["journal/driver.0.0"]) <= 8
    assert len(store.sizes("pieces")) == sum(map(len, files.values())), "what no file needs is removed"
    manifests = 200 * 2000
    assert store.sent < manifests + 200 * 100 * 9
    reach(reports, 1)
    uploader.send_changes()
    assert bring(url, tmp_path / "other")["journal/driver.0.0"] == (path / "driver.0.0").read_bytes()


def test_whatever_operation_fails_the_storage_has_a_whole_state_and_the_next_pass_completes_it(
    url: str, tmp_path: Path
) -> None:
    config, reports = stored(url, tmp_path / "run", trainer={"max_actor_ckpt_to_keep": 1})
    uploader, store = uploader_of(config, reports)
    reach(reports, 1)
    uploader.send_changes()
    for version in (2, 3):
        reach(reports, version)
        CheckpointRetention(
            Checkpoints(reports.directory.checkpoints), keep=1, recorded_version=lambda: reports.resumable
        )
        for operation in itertools.count(1):
            store.operations, store.fails = 0, lambda count, _, last=operation: count >= last  # type: ignore[misc]
            try:
                uploader.send_changes()
            except Broken:
                failed = True
            else:
                failed = False
            store.fails = lambda count, what: False
            back = tmp_path / f"back-{version}-{operation}"
            found = bring(url, back)
            (saved,) = Checkpoints(back / "checkpoints").complete(with_critic=False)
            assert saved in (version - 1, version)
            assert all(
                found[name] == data for name, data in contents(reports.directory.path).items() if f"_{saved}/" in name
            )
            told = [event.version for event in read_events(back / "events.jsonl") if event.kind == "version.reached"]
            assert saved in told, "the record tells of every checkpoint that is there"
            if not failed:
                break
        assert operation > 3
        assert complete_versions(store.sizes()) == [version], "older ones go when the newer one is there"
    assert len(store.sizes("pieces")) == sum(map(len, json.loads(store.read("run.json"))["files"].values()))


def test_a_checkpoint_is_complete_only_after_the_sizes_of_its_files_were_compared(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run", trainer={"max_actor_ckpt_to_keep": 1})
    uploader, store = uploader_of(config, reports)
    reach(reports, 1)
    uploader.send_changes()
    reach(reports, 2)
    send = store.send

    def cut_off(file: Path, name: str) -> None:
        send(file, name)
        if name.endswith("version_2/__1_0.distcp"):
            store.put(name, b"half")

    store.send = cut_off  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"version_2/__1_0\.distcp has 4 bytes .*204"):
        uploader.send_changes()
    assert complete_versions(store.sizes()) == [1]
    store.send = send  # type: ignore[method-assign]
    uploader.send_changes()
    assert complete_versions(store.sizes()) == [2]


def test_a_process_that_was_taken_for_dead_writes_nothing_once_another_one_goes_on(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run")
    dead, store = uploader_of(config, reports)
    for version in (1, 2, 3):
        reach(reports, version)
    dead.send_changes()
    assert complete_versions(store.sizes()) == [2, 3], "as many as are kept"

    brought_back(url, tmp_path / "other", lambda text: None)
    other_config, others = stored(url, tmp_path / "fresh")
    shutil.copytree(tmp_path / "other", others.directory.path, dirs_exist_ok=True)
    other, _ = uploader_of(other_config, others, start=2)
    other.send_changes()
    assert complete_versions(store.sizes()) == [2], "what it does not go on from is undone"
    before = store.sizes()
    reach(reports, 4)
    with pytest.raises(ConfigError, match=r"run\.json names another process, .*fresh"):
        dead.send_changes()
    assert store.sizes() == before
    with pytest.raises(ConfigError, match=r"^run\.storage=.* is ahead .*fresh"):
        check_storage(config, reports.directory.path, resumed=True)


def test_a_process_that_stood_still_while_another_one_took_over_neither_writes_nor_stops_it(
    url: str, tmp_path: Path
) -> None:
    config, reports = stored(url, tmp_path / "run")
    dead, store = uploader_of(config, reports)
    reach(reports, 1)
    dead.send_changes()
    old = store.read("run.json")
    brought_back(url, tmp_path / "other", lambda text: None)
    other_config, others = stored(url, tmp_path / "fresh")
    shutil.copytree(tmp_path / "other", others.directory.path, dirs_exist_ok=True)
    other, _ = uploader_of(other_config, others, start=1)
    reach(reports, 2)
    put = store.put

    def take_over(name: str, data: bytes) -> None:
        store.put = put  # type: ignore[method-assign]
        other.send_changes()
        put(name, data)

    store.put = take_over  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="names another process"):
        dead.send_changes()
    newer = json.loads(store.read("run.json"))
    store.put("run.json", old)  # it stood still between the question and the answer
    other.send_changes()
    assert json.loads(store.read("run.json")) == newer, "the later process goes on"
    with pytest.raises(ConfigError, match="names another process"):
        dead.send_changes()


def test_an_operation_that_did_not_answer_in_time_never_replaces_what_was_written_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, goes_on = StorageClient(url), Event()
    pipe_file = store._fs.pipe_file

    def slow(path: str, data: bytes) -> None:
        goes_on.wait(60.0)
        pipe_file(path, data)

    monkeypatch.setattr(store._fs, "pipe_file", slow)
    with monkeypatch.context() as short:
        short.setattr("headway.config.sizing.timeouts.STORAGE_S", 0.05)
        for data in (b"older", b"refused"):
            with pytest.raises(TimeoutError, match=r"storage .*answer for 0 s"):
                store.put("file", data)
    goes_on.set()
    store.put("file", b"newer")
    assert store.read("file") == b"newer"


def test_an_outage_is_told_once_and_so_is_its_end_and_the_summary_has_both(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run")
    uploader, store = uploader_of(config, reports)
    uploader._every_s, uploader._end_s = 0.01, 0.2
    store.fails = lambda count, what: True
    reports.emit(
        started := RunStarted(
            time=0.0, mode="m", seed=0, groups_per_version=1, total_groups=1, lag_bound=0, order="fifo", slots={}
        )
    )
    uploader.on_event(started)
    reach(reports, 1)
    uploader.finish()
    assert reports.summary()["storage"]["missing"].startswith("not everything is there")
    store.fails = lambda count, what: False
    uploader._end_s = 60.0
    uploader.finish()
    assert reports.summary()["storage"] == {"version": 1, "outages": 1, "missing": None}
    reports.close()
    uploader._tell("what is told after the record is closed ends no thread")
    told = list(read_events(reports.directory.events))
    notes = [event.text for event in told if isinstance(event, Note)]
    assert [text.split(" ", 2)[1] for text in notes] == ["lacks", "has"]
    assert any(isinstance(event, StorageReached) for event in told)


def test_a_resumed_run_that_has_nothing_to_send_tells_what_is_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reports = stored(url, tmp_path / "run")
    reach(reports, 1)
    uploader_of(config, reports)[0].send_changes()
    told = list[StorageReached]()
    monkeypatch.setattr(reports, "emit", told.append)
    uploader_of(config, reports, start=1)[0].send_changes()
    assert [(event.version, event.reason) for event in told] == [(1, None)]


def test_what_is_missing_or_cut_off_is_refused_by_its_name(url: str, tmp_path: Path) -> None:
    config, reports = stored(url, tmp_path / "run")
    uploader, store = uploader_of(config, reports)
    (reports.directory.journal).mkdir()
    (reports.directory.journal / "driver.0.0").write_bytes(bytes(50))
    reach(reports, 1)
    reach(reports, 2)
    uploader.send_changes()
    files = json.loads(store.read("run.json"))["files"]

    store.put("checkpoints/version_2/__0_0.distcp", b"half")
    told: list[str] = []
    brought_back(url, tmp_path / "older", told.append)
    assert Checkpoints(tmp_path / "older/checkpoints").complete(with_critic=False) == [1], "the one before is whole"

    store.put(files["journal/driver.0.0"][0][0], bytes(20))
    brought_back(url, tmp_path / "journal", told.append)
    assert "a part of journal/driver.0.0, has 20 bytes, and was written with 50" in told[-2]

    store.remove(["checkpoints/version_1/__1_0.distcp"])
    with pytest.raises(UserError) as refused:
        brought_back(url, tmp_path / "nowhere", told.append)
    for part in (
        "version_2/__0_0.distcp has 4 bytes, and was written with 204",
        "version_1/__1_0.distcp is missing",
        url,
        str(tmp_path / "nowhere/checkpoints"),
        "start the run over",
    ):
        assert part in str(refused.value)

    save(reports.directory, 3)
    store.put("checkpoints/version_2/__0_0.distcp", bytes(204))
    store.remove([files["events.jsonl"][-1][0]])
    with pytest.raises(DataError, match=r"events\.jsonl, is missing"):
        brought_back(url, tmp_path / "nowhere", told.append)
    assert not (tmp_path / "nowhere").exists()


def test_a_lost_directory_is_found_by_the_storage_that_is_given_and_a_directory_without_checkpoints_gets_one(
    url: str, tmp_path: Path
) -> None:
    config, reports = stored(url, tmp_path / "run")
    uploader, _ = uploader_of(config, reports)
    reach(reports, 1)
    uploader.send_changes()
    let_go(reports)
    run = reports.directory.path
    shutil.rmtree(run / "checkpoints")
    mark = (run / ".storage.json").read_text()
    (run / ".storage.json").write_text('{"run": "another", "epoch": 1}')
    with pytest.raises(ConfigError, match=r"holds another run than .*no checkpoint"):
        located(str(run), None, None, print)
    (run / ".storage.json").write_text(mark)
    assert located(str(run), None, None, print) == (run, url)
    assert Checkpoints(run / "checkpoints").complete(with_critic=False) == [1]
    assert located(str(run), None, None, print) == (run, None)
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"does not exist; .*run\.storage"):
        located(str(run), None, None, print)
    assert located(str(run), url, None, print) == (run, url)
    assert located(url, None, str(tmp_path / "b"), print) == (tmp_path / "b", url)
    with pytest.raises(UserError, match=r"no run\.json"):
        located("memory://nothing", None, None, print)


def test_a_run_in_a_folder_that_may_not_be_entered_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ConfigError, match=r"RUN: .*: PermissionError"):
        located(str(tmp_path), None, None, print)


def test_a_checkpoint_that_is_being_sent_is_not_removed(tmp_path: Path) -> None:
    _, reports = stored("memory://unused", tmp_path / "run")
    checkpoints = Checkpoints(reports.directory.checkpoints)
    sending = [1]
    retention = CheckpointRetention(
        checkpoints, keep=1, recorded_version=lambda: reports.resumable, in_use=lambda: sending[0]
    )
    for version in (1, 2):
        reach(reports, version)
    from headway.events import CheckpointSaved

    event = CheckpointSaved(time=2.0, version=2, path="", span=(0.0, 1.0))
    retention.on_event(event)
    assert checkpoints.complete(with_critic=False) == [1, 2]
    sending[0] = 0
    retention.on_event(event)
    retention.close()
    assert checkpoints.complete(with_critic=False) == [2]


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (
            "nosuch://bucket/run",
            r"run\.storage=nosuch://bucket/run .*: nosuch.*expected",
        ),
        ("DIR/run/storage", r"run\.storage=.*/run/storage and run\.dir=.*/run are inside each other"),
        ("DIR", r"are inside each other"),
        ("DIR/full", r"is not empty: it has notes\.txt"),
        ("DIR/taken", r"holds another run, .*/elsewhere/run; .* headway train --resume .*/taken"),
        ("DIR/damaged", r"run\.json is damaged"),
        ("DIR/file", r"it cannot be written: FileExistsError"),
        ("DIR/denied", r"it cannot be written: PermissionError.*\.headway-probe"),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused_before_the_start(
    storage: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, files in {
        "full": {"notes.txt": "x"},
        "taken": {"run.json": json.dumps({"run": "a", "epoch": 1, "directory": "/elsewhere/run"})},
        "damaged": {"run.json": "{"},
        "denied": {},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "file").write_text("no directory")
    if storage.endswith("denied"):

        def denied(self: StorageClient, name: str, data: bytes) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(StorageClient, "put", denied)
    config = Config.model_validate({"run": {"storage": storage.replace("DIR", str(tmp_path))}, "data": {"train": "r"}})
    with pytest.raises(ConfigError, match=message):
        check_storage(config, tmp_path / "run")


def test_of_a_checkpoint_that_is_removed_no_empty_folder_is_left(tmp_path: Path) -> None:
    store = StorageClient(str(tmp_path / "there"))
    names = [f"checkpoints/version_{version}/state.json" for version in (1, 2)]
    for name in names:
        store.put(name, b"{}")
    store.remove(names[:1])
    assert [path.name for path in (tmp_path / "there" / "checkpoints").iterdir()] == ["version_2"]


def test_a_protocol_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"s3fs.*pip install 'headway\[storage\]'"):
        StorageClient("s3://bucket/run")


def test_a_path_is_a_storage_like_any_other_and_shows_no_file_that_is_half_written(tmp_path: Path) -> None:
    config, reports = stored(str(tmp_path / "storage"), tmp_path / "run")
    check_storage(config, tmp_path / "run")
    assert not list((tmp_path / "storage").iterdir())
    uploader, store = uploader_of(config, reports)
    reach(reports, 1)
    uploader.send_changes()
    reports.close()
    uploader.send_changes()
    (tmp_path / "storage/pieces/1-99.draft").write_text("half")
    assert "pieces/1-99" not in store.sizes() and "pieces/1-99.draft" not in store.sizes()
    found = located(str(tmp_path / "storage"), None, str(tmp_path / "other"), print)[0]
    assert contents(found) == contents(reports.directory.path)
