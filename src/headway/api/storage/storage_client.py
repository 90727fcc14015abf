"""Client of a run's storage, an object store or a directory. Each operation has a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.config.sizing.timeouts import storage_s
from headway.errors import ConfigError, said_by
from headway.runtime.task_groups import in_daemon_thread

DRAFT = ".draft"
"""Suffix of a file that is being written to a directory. An object store shows only whole objects."""
ABSENT = (FileNotFoundError, NotADirectoryError)
S3: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 3}}
R = TypeVar("R")


class StorageClient:
    """Files below a URL that fsspec knows, like ``s3://bucket/run``, or below the path of a directory.

    An operation that misses its deadline goes on in its thread. The next one waits for it, so that older content never
    replaces newer content.

    Example:
        >>> store = StorageClient("memory://example/run")
        >>> store.put("a/b", b"text")
        >>> store.sizes(), store.read("a/b")
        ({'a/b': 4}, b'text')
    """

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` where fsspec does not know the URL's protocol, or its package is not installed."""
        import fsspec

        self.url = url.rstrip("/") or "/"
        protocol = url.partition("://")[0] if "://" in url else "file"
        options: dict[str, Any] = {"config_kwargs": S3} if protocol in ("s3", "s3a") else {}
        try:
            is_directory = "file" in fsspec.get_filesystem_class(protocol).protocol
            if is_directory:
                options = {"auto_mkdir": True}
            # No cached listing: other processes write there, too. No shared instance: it would share thread and options
            self._fs, self._root = fsspec.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError) as cause:
            raise ConfigError(
                f"run.storage={url} cannot be used here: {cause}; expected the path of a directory, or a URL like "
                "s3://bucket/run, which needs pip install 'headway[storage]'"
            ) from None
        self.directory = Path(self._root) if is_directory else None
        """The directory; None for an object store."""
        self._last: Future[Any] | None = None
        """Result of the last operation."""

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return file name → bytes. ``below``: folder to list; empty: all files. Raises `OSError`."""
        try:
            found = self._within(storage_s(0), lambda: self._fs.find(self._path(below), detail=True))
        except ABSENT:
            return {}
        names = {path.removeprefix(self._root).lstrip("/"): entry["size"] for path, entry in found.items()}
        return {name: size for name, size in names.items() if not name.endswith(DRAFT)}

    def read(self, name: str, size: int = 0) -> bytes:
        """Return a file's content. ``size``: its bytes, for the deadline of a large file."""
        data: bytes = self._within(storage_s(size), lambda: self._fs.cat_file(self._path(name)))
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        path = self._path(name)
        draft = path + DRAFT if self.directory is not None else path

        def put() -> None:
            self._fs.pipe_file(draft, data)
            if draft != path:
                # A reader sees the old content until then, never half of the new one
                Path(draft).replace(path)

        self._within(storage_s(len(data)), put)

    def send(self, file: Path, name: str) -> None:
        """Copy a local ``file`` of any size. A failure may leave a part of it; the caller compares sizes afterwards."""
        self._within(storage_s(file.stat().st_size), lambda: self._fs.put_file(str(file), self._path(name)))

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Copy a file of ``size`` bytes to the local ``file``."""
        self._within(storage_s(size), lambda: self._fs.get_file(self._path(name), str(file)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in this order, and then empty folders. Missing files are ignored."""
        for name in names:
            with suppress(*ABSENT):
                self._within(storage_s(0), partial(self._fs.rm_file, self._path(name)))
            if self.directory is not None and "/" in name:  # object stores have no folders
                with suppress(OSError):
                    (self.directory / name).parent.rmdir()

    def check_writable(self) -> None:
        """Write, read and remove a file. Raises `ConfigError`."""
        probe = ".headway-probe"
        try:
            self.put(probe, b"probe")
            self.read(probe)
            self.remove([probe])
        except Exception as cause:
            absent = isinstance(cause, FileNotFoundError) and self.directory is None
            why = "its bucket does not exist" if absent else f"it cannot be written: {said_by(cause)}"
            raise ConfigError(
                f"run.storage={self.url}: {why}. A file {probe} was to be written there, read and removed; give a "
                "place that this machine may write to, with its credentials in the environment, or run.storage=null"
            ) from cause

    def _within(self, limit_s: float, operation: Callable[[], R]) -> R:
        """Return the result of ``operation``. Raises `TimeoutError` after ``limit_s``; the thread is then abandoned."""
        if self._last is None or wait([self._last], limit_s).done:
            # A daemon: a mount that hangs would keep the process from ending
            self._last = future = in_daemon_thread("headway-storage-operation", operation)
            if wait([future], limit_s).done:
                return future.result()
        raise TimeoutError(f"the storage did not answer for {limit_s:.0f} s")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)
