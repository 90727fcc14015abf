"""Weights as safetensors files (https://huggingface.co/docs/safetensors): versions in a directory, and exports.

    <directory>/<dtype>/version_7.safetensors      one folder for each dtype that receivers are served in

As a transport, for late joiners, other systems, and machines that share only a directory. A file appears under its name
when it is complete, and the newest two versions stay. The directory belongs to a single run: a sender treats files
that it finds there as those of an earlier sender of the run. The file's data are the unchanged flat bytes of the
weights.

    model-00001-of-00002.safetensors    [8 bytes: header's length][header: JSON][tensors, without a gap]
    model.safetensors.index.json        which file has which tensor

An export (`write_files`) is written while the weights are gathered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Header,
    Link,
    OutgoingWeights,
    StoredReceiver,
    StoredSender,
    StoredVersion,
    WeightSink,
)
from headway.engines.weights.weight_layout import Manifest, TensorSlot
from headway.errors import UpdateFailed, boundary

if TYPE_CHECKING:
    import torch

    from headway.engines.weights.outgoing_version import Window


LENGTH_BYTES = 8
"""Bytes at the beginning of a file that tell how long its header is."""
SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a file of several, but for a tensor that is larger: what `transformers` writes."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names that the format has for dtypes, by torch's."""


def header(slots: Sequence[TensorSlot], metadata: Mapping[str, str]) -> bytes:
    """Make the header of a file with neighbouring ``slots`` of a layout: its length in 8 bytes, then JSON, padded to a
    multiple of 8.

    Raises `UpdateFailed` for a dtype that the format does not have.
    """
    for slot in slots:
        if slot.dtype not in _DTYPES:
            raise UpdateFailed(f"tensor {slot.name!r} has dtype {slot.dtype}, which safetensors files do not have")
    first = slots[0].offset if slots else 0
    tensors = {
        slot.name: {
            "dtype": _DTYPES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.offset - first, slot.end - first],
        }
        for slot in slots
    }
    text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **tensors}).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors, which begin at a multiple of 8 then
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class SafetensorsFile:
    """A safetensors file that is written in pieces. It appears under its name when it is complete, or never.

    Raises `OSError`.
    """

    def __init__(self, path: Path, slots: Sequence[TensorSlot], metadata: Mapping[str, str], writer: str = "") -> None:
        """Begin the file at ``path`` for ``slots``, neighbours of a layout. ``writer``: a part of its temporary
        name until it is complete, so that an abandoned writer that still writes uses another name.
        """
        self._path, self._partial = path, path.with_suffix(f".{writer}.partial" if writer else ".partial")
        first = header(slots, metadata)  # before there is a file: it may raise
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
        try:
            self._file.write(first)
        except BaseException:
            self.discard()
            raise

    def write(self, data: memoryview) -> None:
        """Append bytes of the tensors."""
        self._file.write(data)

    def finish(self) -> None:
        """Have the file appear under its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # After the sync: a machine that goes down in between must not leave a file of this name without its data.
        self._partial.rename(self._path)

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # what could not be written before cannot be written now
            self._file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


def write_files(folder: Path, manifest: Manifest, windows: Iterable[Window], most: int = SHARD_BYTES) -> None:
    """Write weights to ``folder``, in one file or in shards of at most ``most`` bytes with an index.

    ``windows`` are the flat bytes, in order. Holds none of them longer than until the next is drawn. Raises `OSError`.
    """
    shards = _shards(manifest, most)
    names = [f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    drawn = iter(windows)
    at, data = manifest.start, memoryview(b"")
    for name, slots in zip(names, shards, strict=True):
        # After an error it stays as it is: the caller's folder is removed as a whole.
        file = SafetensorsFile(folder / name, slots, {})
        while at < slots[-1].end:
            if not data:
                at, window = next(drawn)
                data = window.cpu().numpy().data
            part = data[: slots[-1].end - at]
            file.write(part)
            at, data = at + len(part), data[len(part) :]
        file.finish()
    if len(shards) > 1:
        places = {slot.name: name for name, slots in zip(names, shards, strict=True) for slot in slots}
        index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(manifest: Manifest, most: int) -> list[list[TensorSlot]]:
    """Partition a layout's tensors into neighbours of at most ``most`` bytes each."""
    shards: list[list[TensorSlot]] = [[]]
    for slot in manifest.slots:
        if shards[-1] and slot.end - shards[-1][0].offset > most:
            shards.append([])
        shards[-1].append(slot)
    return shards


KEPT = 2
"""Number of versions that are kept: the newest, and the one that receivers may still be reading."""
ELSEWHERE = "set param_update.directory to a place that all workers can write and read"
"""Advice for messages about a file that cannot be written or read."""


class DiskSender(StoredSender):
    """The trainer's end of the disk transport (`WeightSender`). On disk: two sets of weights, three while writing."""

    def __init__(self, link: Link, here: EndContext) -> None:
        super().__init__(link, here)
        assert link.directory is not None
        dtypes = sorted({slot.dtype for slot in link.manifest.slots})
        directory = self._path = self._directory = link.directory / "-".join(dtypes)
        self._file: SafetensorsFile | None = None
        # By time and not by name, where version_10 comes before version_9.
        # What an earlier sender has left here is older than whatever comes now.
        self._written = sorted(directory.glob("version_*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        for partial in directory.glob("version_*.partial"):
            with suppress(OSError):  # whoever writes under this name finds out why
                partial.unlink(missing_ok=True)

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        path = self._path = self._directory / f"version_{version}.safetensors"
        with boundary(self._writing(version), UpdateFailed):
            slots, metadata = self._link.manifest.slots, {"version": str(version)}
            file = self._file = SafetensorsFile(path, slots, metadata, self._link.sender)
        try:
            stored = super().send(version, weights)
            with boundary(self._writing(version), UpdateFailed):
                file.finish()
        except BaseException:
            file.discard()
            raise
        # A version that is sent again is the newest, in its old file's place.
        self._written = [*(p for p in self._written if p != path), path]
        for old in self._written[:-KEPT]:
            with suppress(OSError):  # the new version is there: an old file that stays costs only space
                old.unlink(missing_ok=True)
        self._written = self._written[-KEPT:]
        return stored

    def _put(self, version: int, chunk: Chunk) -> str:
        if chunk.header.base >= 0:
            raise UpdateFailed("param_update.transport=disk writes whole versions, not deltas")
        assert self._file is not None
        with boundary(self._writing(version), UpdateFailed):
            self._file.write(chunk.payload.cpu().numpy().data)
        return str(self._path)

    def _writing(self, version: int) -> str:
        return f"version {version} cannot be written to {self._path} (free space there, or {ELSEWHERE})"


class DiskReceiver(StoredReceiver):
    """A receiver's end of the disk transport (`WeightReceiver`)."""

    _file: BinaryIO | None = None
    """The version's file. It stays open, and readable when the sender removes it, until all of it was read."""

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None) -> None:
        try:
            super().receive(version, sink, stored)
        finally:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _get(self, version: int, header: Header, content: str, room: torch.Tensor) -> None:
        with boundary(f"version {version}: {self._name} cannot read {content} ({ELSEWHERE})", UpdateFailed):
            if self._file is None:
                self._file = Path(content).open("rb")  # noqa: SIM115  # open for all buckets
            self._file.seek(0)
            data = LENGTH_BYTES + int.from_bytes(self._file.read(LENGTH_BYTES), "little")
            self._file.seek(data + header.offset)
            read = self._file.readinto(room.numpy().data)  # type: ignore[attr-defined]
        if read != room.numel():
            raise UpdateFailed(f"version {version}: {content} ends within bucket {header.index}")


open_sender, open_receiver = DiskSender, DiskReceiver
