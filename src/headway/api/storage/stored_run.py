"""A run's storage: its ownership, and restoring a run from it into a directory, to be resumed there.

A storage belongs to one run, and to the process that began or resumed the run last. That process writes its name into
``run.json`` when training begins. A process that finds another name there, because it was taken for dead, writes
nothing more. ``RUN/.storage.json`` holds the state of the storage that a run's directory corresponds to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from headway.api.storage.storage_client import ABSENT, StorageClient
from headway.config.loading import load
from headway.config.schema import Config
from headway.engines.train.state_file import STATE_FILE
from headway.errors import ConfigError, DataError, UserError, boundary, said_by
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.file_access import replace_file
from headway.reports.run_directory import RUN_EXPECTED, RunDirectory

RUN_FILE = "run.json"
COMPLETE = re.compile(rf"checkpoints/version_(\d+)/{re.escape(STATE_FILE)}")
OF_CHECKPOINT = re.compile(r"checkpoints/(?:critic/)?version_(\d+)/")

Files = dict[str, list[tuple[str, int]]]
"""File of the record → the name and the bytes of each of its pieces."""
Sizes = Mapping[str, int]
"""File name → bytes."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """A process's entry in its storage."""

    run: str
    """Unique name of the run; all its processes have the same."""
    epoch: int
    """Number of processes that have written to the storage, this one included."""
    owner: str
    directory: str

    def manifest(self, files: Files) -> bytes:
        """Return the content of ``run.json``."""
        return json.dumps({**asdict(self), "files": files}).encode()

    def check(self, store: StorageClient) -> bool:
        """Raise `ConfigError` if another process has taken over the storage. Returns False if an earlier process,
        unaware of this one, has written ``run.json`` since.
        """
        found = manifest_of(store)
        if found is not None and found["epoch"] < self.epoch:
            return False
        if found is None or found["owner"] != self.owner:
            was = "was removed" if found is None else f"names another process, which resumed in {found['directory']}"
            raise ConfigError(f"{store.url}/{RUN_FILE} {was}; this process writes nothing there any more")
        return True


def manifest_of(store: StorageClient) -> dict[str, Any] | None:
    """Return the content of ``run.json``; None if there is no run. Raises `ConfigError` if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(store.read(RUN_FILE))
    except ABSENT:
        return None
    except ValueError as cause:
        raise ConfigError(f"{store.url}/{RUN_FILE} is damaged ({said_by(cause)}); give another run.storage") from cause
    return found


def store_of(config: Config, run_dir: Path | None) -> StorageClient | None:
    """Return the storage of ``config``; None if it names none. Makes no request yet.

    Raises `ConfigError` for an unusable URL, and if storage and ``run_dir`` are inside each other.
    """
    if config.run.storage is None:
        return None
    store = StorageClient(config.run.storage)
    if run_dir is not None and store.directory is not None:
        own, there = run_dir.resolve(), store.directory.resolve()
        if own.is_relative_to(there) or there.is_relative_to(own):
            raise ConfigError(
                f"run.storage={store.url} and run.dir={run_dir} are inside each other, and would be lost together; "
                "give a directory on another disk, or a URL like s3://bucket/run"
            )
    return store


def check_storage(config: Config, run_dir: Path | None, *, resumed: bool = False) -> None:
    """Check before a start that the run may write to its storage, if it has one. Raises `ConfigError`."""
    if (store := store_of(config, run_dir)) is not None:
        store.check_writable()
        try:
            _check_ours(store, manifest_of(store), marked(RunDirectory(run_dir)) if run_dir and resumed else {})
        except OSError as cause:
            raise ConfigError(f"run.storage={store.url} cannot be read: {said_by(cause)}") from cause


def _check_ours(store: StorageClient, found: dict[str, Any] | None, mark: dict[str, Any]) -> None:
    """Raise `ConfigError` if the storage holds other files or another run, or is newer than the run's directory.

    ``mark``: content of the directory's ``.storage.json``.
    """
    if found is None:
        if others := sorted(store.sizes()):
            raise ConfigError(
                f"run.storage={store.url} is not empty: it has {others[0]}, and holds no run; give a place of its own"
            )
    elif found["run"] != mark.get("run"):
        raise ConfigError(
            f"run.storage={store.url} holds another run, which was trained in {found['directory']}; give a place of "
            f"this run's own, or go on with that one: headway train --resume {store.url}"
        )
    elif found["epoch"] > mark["epoch"]:
        raise ConfigError(
            f"run.storage={store.url} is ahead of this directory: the run was resumed in {found['directory']} since. "
            "Go on there, or remove this directory, and bring the run back with: headway train "
            f"--resume {store.url}"
        )


def claim(store: StorageClient, directory: RunDirectory, version: int | None) -> Ownership:
    """Take over the storage for a process that begins, or resumes from ``version``. Removes later and incomplete
    checkpoints.

    Raises `ConfigError` if the storage is not this run's, or no longer.
    """
    found, mark = manifest_of(store), marked(directory)
    _check_ours(store, found, mark)
    # Above both epochs: a process may have ended between writing its mark here and its entry there.
    epoch = 1 + max(0 if found is None else found["epoch"], mark.get("epoch", 0))
    own = Ownership(mark.get("run") or uuid4().hex, epoch, uuid4().hex, str(directory.path.resolve()))
    write_mark(directory, own.run, epoch)  # first: a process that ends in between may still go on here
    there = store.sizes("checkpoints")
    whole = [number for number in complete_versions(there) if version is not None and number <= version]
    store.remove(left_over(there, whole.__contains__))
    # What earlier processes have sent stays in place until this one has sent its own.
    files: Files = {} if found is None else found["files"]
    store.put(RUN_FILE, own.manifest(files))
    return own


def write_mark(directory: RunDirectory, run: str, epoch: int) -> None:
    """Write in the run's directory which state of the storage it has."""
    # Atomic: without the file the storage counts as another run's
    replace_file(directory.storage, json.dumps({"run": run, "epoch": epoch}))


def marked(directory: RunDirectory) -> dict[str, Any]:
    """Return which state of a storage the run's directory has; empty for none."""
    try:
        mark: dict[str, Any] = json.loads(directory.storage.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return mark


def complete_versions(names: Iterable[str]) -> list[int]:
    """Return the versions with complete checkpoints among a storage's files, ascending."""
    return sorted(int(found[1]) for name in names if (found := COMPLETE.fullmatch(name)))


def left_over(names: Iterable[str], kept: Callable[[int], bool]) -> list[str]:
    """Return the files of checkpoints that are not ``kept``; first those whose presence marks a checkpoint complete."""
    found = [name for name in names if (version := OF_CHECKPOINT.match(name)) and not kept(int(version[1]))]
    return sorted(found, key=lambda name: not COMPLETE.fullmatch(name))


def located(run: str, storage: str | None, run_dir: str | None, tell: Callable[[str], None]) -> tuple[Path, str | None]:
    """Return the directory of the run to resume, and the storage that it was restored from; None if it was here.

    ``run``: the directory, or a storage. ``storage``, ``run_dir``: the user's settings of that name, or None.

    Raises:
        ConfigError: there is no such run, or the storage cannot be used here.
        UserError: the storage has no run, or no checkpoint to resume from; or the directory cannot be written.
        DataError: files of the stored run are missing or cut off.
    """
    with boundary(f"RUN: {run} cannot be looked into", ConfigError):
        stored = "://" in run or (Path(run) / RUN_FILE).is_file()
    if stored:
        return brought_back(run, None if run_dir is None else Path(run_dir).expanduser(), tell), run
    directory = RunDirectory(Path(run))
    if storage is None and directory.config.is_file():
        storage = load(directory.config).config.run.storage
    if storage is not None and not Checkpoints(directory.checkpoints).complete(with_critic=False):
        return brought_back(storage, directory.path, tell), storage
    if not directory.path.exists():
        raise ConfigError(
            f"RUN: got {run}, which does not exist; {RUN_EXPECTED}, or its run.storage: where the directory was lost, "
            "give that, as --resume URL"
        )
    return directory.path, None


def brought_back(url: str, run_dir: Path | None, tell: Callable[[str], None]) -> Path:
    """Restore the run in the storage at ``url`` into ``run_dir``, or where it was trained. Returns that directory.
    Existing files stay. Raises as `located`.
    """
    store = StorageClient(url)
    with boundary(f"{url} cannot be read", UserError):
        found = manifest_of(store)
    if found is None:
        raise UserError(
            f"{url}: no run is there to resume, for it has no {RUN_FILE}; expected the run.storage of a run that began "
            "to train"
        )
    directory = RunDirectory(run_dir or Path(found["directory"]))
    has_record = directory.config.is_file() and directory.events.is_file()
    if has_record and Checkpoints(directory.checkpoints).complete(with_critic=False):
        tell(f"{directory.path} has a run, and nothing is brought back")
        return directory.path
    if has_record and marked(directory).get("run") != found["run"]:
        raise ConfigError(
            f"{url} holds another run than {directory.path}, which has no checkpoint; give its own storage"
        )
    with boundary(f"{url} cannot be brought back into {directory.path}", UserError):
        sizes = store.sizes()
        version, checkpoint = _newest(store, sizes, directory)
        files = {} if has_record else _whole(found["files"], sizes, url, tell)
        tell(f"bringing version {version} back from {url} into {directory.path}")
        for folder, names in checkpoint.items():
            _fetch_folder(store, folder, directory.path / folder, names)
        last = (directory.events.name, directory.config.name)  # the directory holds a run once these are there
        for name in sorted(files, key=lambda name: last.index(name) if name in last else -1):
            path = directory.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for piece, nbytes in files[name]:
                    file.write(store.read(piece, nbytes))
            if path == directory.events:
                # Before the configuration, which comes last: without this mark the run would be refused as another.
                write_mark(directory, found["run"], found["epoch"])
        directory.tensorboard.mkdir(exist_ok=True)
        directory.logs.mkdir(exist_ok=True)
    return directory.path


def _newest(store: StorageClient, sizes: Sizes, directory: RunDirectory) -> tuple[int, dict[str, Sizes]]:
    """Return the newest version with a complete checkpoint, and checkpoint folder → the sizes of its files.

    Raises `UserError` if there is none.
    """
    troubles = []
    for version in reversed(complete_versions(sizes)):
        own = f"checkpoints/version_{version}"
        folders: dict[str, Sizes] = {}
        trouble: str | None = None
        for folder in (f"checkpoints/critic/version_{version}", own):  # the last one makes it complete
            if f"{folder}/{STATE_FILE}" in sizes:
                files = json.loads(store.read(f"{folder}/{STATE_FILE}")).get("files", {})
                for name, nbytes in files.items():
                    trouble = trouble or _wrong(f"{folder}/{name}", nbytes, sizes.get(f"{folder}/{name}"))
                folders[folder] = {**files, STATE_FILE: sizes[f"{folder}/{STATE_FILE}"]}
        if trouble is None:
            return version, folders
        troubles.append(trouble)
    why = "; ".join(troubles) if troubles else "it has none"
    raise UserError(
        f"there is no whole checkpoint to resume from, neither in {store.url} ({why}) nor in {directory.checkpoints}. "
        "Put the files back from a copy, or start the run over with another run.dir and run.storage"
    )


def _whole(files: Files, sizes: Sizes, url: str, tell: Callable[[str], None]) -> Files:
    """Return the record's complete files. Missing parts of the journal are dropped; others raise `DataError`."""
    whole: Files = {}
    for name, pieces in files.items():
        whole[name] = []
        for piece, nbytes in pieces:
            if wrong := _wrong(f"{piece}, a part of {name},", nbytes, sizes.get(piece)):
                if not name.startswith("journal/"):
                    raise DataError(f"{url}: the run's record is damaged: {wrong}. Put it back from a copy")
                tell(f"{wrong}; what was finished behind it is made again")
                break
            whole[name].append((piece, nbytes))
    return whole


def _wrong(what: str, size: int, there: int | None) -> str | None:
    if there == size:
        return None
    return f"{what} is missing" if there is None else f"{what} has {there} bytes, and was written with {size}"


def _fetch_folder(store: StorageClient, below: str, folder: Path, files: Sizes) -> None:
    """Fetch the files of a checkpoint. Renaming its folder at the end makes it complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    rmtree(partial, ignore_errors=True)
    rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, size in files.items():
        store.fetch(f"{below}/{name}", partial / name, size)
        if (got := (partial / name).stat().st_size) != size:
            raise DataError(f"{store.url}/{below}/{name} came with {got} bytes, of {size}; try again")
    partial.rename(folder)
