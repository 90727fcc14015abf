"""A run's directory and its storage, without a run: what the tests of both need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.api.storage.storage_client import StorageClient
from headway.api.storage.uploader import StorageUploader
from headway.config.schema import Config
from headway.events import CheckpointSaved, VersionReached
from headway.reports.report_manager import Reports, open_reports
from headway.reports.run_directory import RunDirectory, RunLock


class Broken(OSError):
    """The storage's failure that a test asked for."""


class FaultyStore(StorageClient):
    """A storage of which operations fail: those for which `fails` says so. It counts them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.operations = 0
        self.sent = 0
        self.fails: Callable[[int, str], bool] = lambda count, what: False

    def _count(self, what: str) -> None:
        self.operations += 1
        if self.fails(self.operations, what):
            raise Broken(f"503 at {what}")

    def put(self, name: str, data: bytes) -> None:
        self._count(f"put {name}")
        self.sent += len(data)
        super().put(name, data)

    def send(self, file: Path, name: str) -> None:
        self._count(f"send {name}")
        super().send(file, name)

    def read(self, name: str, size: int = 0) -> bytes:
        self._count(f"read {name}")
        return super().read(name, size)

    def sizes(self, below: str = "") -> dict[str, int]:
        self._count(f"list {below}")
        return super().sizes(below)

    def remove(self, names: Any) -> None:
        for name in names:
            self._count(f"remove {name}")
            super().remove([name])


def stored(url: str, path: Path, **settings: Any) -> tuple[Config, Reports]:
    """The configuration and the open reports of a run in ``path``, whose storage is at ``url``."""
    values = {"run": {"storage": url, **settings.pop("run", {})}, "data": {"train": "rows.jsonl"}, **settings}
    config = Config.model_validate(values)
    return config, open_reports(config, path)


def reach(reports: Reports, version: int) -> None:
    """Reach the boundary of ``version``, and save a checkpoint of it."""
    reports.emit(VersionReached(time=float(version), version=version, groups={"admitted": 4 * version}))
    save(reports.directory, version)
    path = str(reports.directory.checkpoints / f"version_{version}")
    reports.emit(CheckpointSaved(time=float(version), version=version, path=path, span=(0.0, 1.0)))


def save(directory: RunDirectory, version: int) -> None:
    """Write a checkpoint of ``version`` whose bytes tell its version."""
    folder = directory.checkpoints / f"version_{version}"
    folder.mkdir()
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([version, rank]) * (100 + version))
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / "state.json").write_text(json.dumps({"optimizer_steps": version, "extra": {}, "files": files}))


def uploader_of(config: Config, reports: Reports, start: int | None = None) -> tuple[StorageUploader, FaultyStore]:
    assert config.run.storage is not None
    store = FaultyStore(config.run.storage)
    return StorageUploader(store, reports, config, start), store


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a run's directory that come back, by name."""
    left = ("run.lock", "run.alive", ".room", ".storage.json")
    files = (path for path in directory.rglob("*") if path.is_file())
    found = {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if name not in left and not name.startswith(("logs/", "model/"))}


def let_go(reports: Reports) -> None:
    """Release the lock of a run whose process is taken to be dead."""
    lock: RunLock = reports._run_lock
    lock.release()
