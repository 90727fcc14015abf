"""Versions as safetensors files in a directory: for late joiners, other systems, and machines that share only that.

    <directory>/<dtype>/version_7.safetensors      one folder for each dtype that receivers are served in

A file appears under its name when it is complete, and the newest two versions stay. The directory is for one run alone:
a sender takes what it finds there for its predecessor's. The flat bytes of the weights are the file's data as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headway.engines.weights.protocols import Header, OutgoingWeights, StoredVersion, WeightSink
from headway.engines.weights.safetensors_files import LENGTH_BYTES, header
from headway.engines.weights.transports.links import EndContext, TransportAddress, needs
from headway.engines.weights.transports.object_store import contents
from headway.engines.weights.weight_layout import Manifest
from headway.errors import UpdateFailed

KEPT = 2
"""Number of versions that are kept: the newest, and the one that receivers may still be reading."""


@dataclass(frozen=True, slots=True)
class DiskLink:
    directory: Path
    manifest: Manifest


def make_link(meeting: TransportAddress) -> DiskLink:
    if meeting.directory is None:
        raise needs("disk", "a directory")
    dtypes = sorted({slot.dtype for slot in meeting.manifest.slots})
    return DiskLink(meeting.directory / "-".join(dtypes), meeting.manifest)


def open_sender(link: DiskLink, here: EndContext) -> DiskSender:
    return DiskSender(link)


def open_receiver(link: DiskLink, name: str, here: EndContext) -> DiskReceiver:
    return DiskReceiver(name)


class DiskSender:
    """The trainer's end of the disk transport (`WeightSender`). On disk: two sets of weights, three while writing."""

    def __init__(self, link: DiskLink) -> None:
        self._directory = link.directory
        self._manifest = link.manifest
        # What an earlier sender has left here is older than whatever comes now.
        self._written = sorted(link.directory.glob("version_*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        for partial in link.directory.glob("version_*.partial"):
            with suppress(OSError):  # whoever writes under this name finds out why
                partial.unlink(missing_ok=True)

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        path = self._directory / f"version_{version}.safetensors"
        file = _File(path, version)
        headers = []
        try:
            file.write(header(self._manifest.slots, {"version": str(version)}))
            for chunk in weights:
                if chunk.header.base >= 0:
                    raise UpdateFailed("param_update.transport=disk writes whole versions, not deltas")
                file.write(chunk.payload.cpu().numpy().data)
                headers.append(chunk.header)
            file.finish()
        except BaseException:
            file.discard()
            raise
        self._keep(path)
        return StoredVersion(version, tuple(headers), (str(path),) * len(headers), weights.digests)

    def close(self) -> None:
        """Leave the last versions on disk, for others."""

    def _keep(self, path: Path) -> None:
        self._written = [*(p for p in self._written if p != path), path]
        for old in self._written[:-KEPT]:
            with suppress(OSError):  # the new version is there, whatever becomes of the old one
                old.unlink(missing_ok=True)
        self._written = self._written[-KEPT:]


class DiskReceiver:
    """A receiver's end of the disk transport (`WeightReceiver`)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def receive(self, version: int, sink: WeightSink, parcel: StoredVersion | None) -> None:
        pieces, digests = contents(parcel, version, self._name)
        if pieces:
            self._read(version, Path(pieces[0][1]), [header for header, _ in pieces], sink)
        sink.ended(digests)

    def _read(self, version: int, path: Path, headers: Sequence[Header], sink: WeightSink) -> None:
        with ExitStack() as open_files:
            with self._reading(version, path):
                file = open_files.enter_context(path.open("rb"))
                data = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
            for header in headers:
                room = sink.room(header)
                with self._reading(version, path):
                    file.seek(data + header.offset)
                    read = file.readinto(room.numpy().data)
                if read != room.numel():
                    raise UpdateFailed(f"version {version}: {path} ends within bucket {header.index}")
                sink.filled(header)

    @contextmanager
    def _reading(self, version: int, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            raise UpdateFailed(
                f"version {version}: {self._name} cannot read {path}: {cause.strerror or cause}; set "
                "param_update.directory to a place that all workers can write and read"
            ) from cause

    def close(self) -> None: ...


class _File:
    """A file that appears under its name when it is complete, or never. Raises `UpdateFailed` for what goes wrong."""

    def __init__(self, path: Path, version: int) -> None:
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._version = version
        with _writing(version, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        with _writing(self._version, self._path):
            self._file.write(data)

    def finish(self) -> None:
        with _writing(self._version, self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.rename(self._path)

    def discard(self) -> None:
        with suppress(OSError):  # what could not be written before cannot be written now
            self._file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


@contextmanager
def _writing(version: int, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise UpdateFailed(
            f"version {version} cannot be written to {path}: {cause.strerror or cause}; free space there, or set "
            "param_update.directory to a place that all workers can write and read"
        ) from cause
