"""A run brought back from its storage into a directory, to be resumed there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree

from headway.api.storage.ownership import RUN_FILE, Files, complete_versions, manifest_of, marked, write_mark
from headway.api.storage.storage_client import StorageClient
from headway.config.loading import load
from headway.engines.train.state_file import STATE_FILE
from headway.errors import ConfigError, DataError, UserError, boundary
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.run_directory import RunDirectory

Sizes = Mapping[str, int]
"""Names of files, and their bytes."""


def located(run: str, storage: str | None, run_dir: str | None, tell: Callable[[str], None]) -> tuple[Path, str | None]:
    """Return the directory of the run to resume, and the storage that it was brought back from; None where it was here.

    ``run``: the directory, or a storage; ``storage`` and ``run_dir``: what the user gave with it.

    Raises:
        ConfigError: there is no such run, or the storage cannot be used here.
        UserError: there is no run in the storage, or nothing to resume it from; or its directory cannot be written.
        DataError: files of it are missing or cut off.
    """
    if "://" in run or (Path(run) / RUN_FILE).is_file():
        return brought_back(run, None if run_dir is None else Path(run_dir).expanduser(), tell), run
    directory = RunDirectory(Path(run))
    if storage is None and directory.config.is_file():
        storage = load(directory.config).config.run.storage
    if storage is not None and not Checkpoints(directory.checkpoints).complete(with_critic=False):
        return brought_back(storage, directory.path, tell), storage
    if not directory.path.exists():
        raise ConfigError(
            f"RUN: got {run}, which does not exist; expected a run's directory, the run.dir of a headway train, or its "
            "run.storage: where the directory was lost, give that, as --resume URL"
        )
    return directory.path, None


def brought_back(url: str, run_dir: Path | None, tell: Callable[[str], None]) -> Path:
    """Bring the run in the storage at ``url`` into ``run_dir``, or where it was trained. Returns that directory; what
    is there already stays. Raises as `located`.
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
                write_mark(directory, found["run"], found["epoch"])
        directory.tensorboard.mkdir(exist_ok=True)
        directory.logs.mkdir(exist_ok=True)
    return directory.path


def _newest(store: StorageClient, sizes: Sizes, directory: RunDirectory) -> tuple[int, dict[str, Sizes]]:
    """Return the newest version with a whole checkpoint, and each of its folders with the files there and their bytes.

    Raises `UserError` where there is none.
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
    """Return the record's files, those of the journal as far as they are there. Raises `DataError` for any other."""
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
    """Fetch the files of a checkpoint, which is complete once its folder has its name."""
    partial = folder.with_name(f".{folder.name}.partial")
    rmtree(partial, ignore_errors=True)
    rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, size in files.items():
        store.fetch(f"{below}/{name}", partial / name, size)
        if (got := (partial / name).stat().st_size) != size:
            raise DataError(f"{store.url}/{below}/{name} came with {got} bytes, of {size}; try again")
    partial.rename(folder)
