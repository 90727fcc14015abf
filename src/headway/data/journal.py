"""The journal: a run's finished work, appended to files as it happens, for the process that resumes the run.

    RUN/journal/WRITER.BLOCK.LIFE     of one writer in one life of its process, on the groups of one block of numbers;
                                      a later life has a higher number, in whatever block

    record: length, CRC-32 │ header: one line of JSON │ bytes

Files are append-only, in whole records; the first record names the run. Reading ends at the first incomplete record:
its writer died, or its disk was full. A truncated file is therefore a valid earlier state. *Finished* work is written
before anything uses it: the death of a process loses nothing, that of a machine loses unsynced records.

A record is found by its content: a completion by its trajectory, call and context. So there is no list of open calls.
`headway.pipeline.admission.run_journal` has the driver's records.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority
from headway.data.types import FinishReason, SampledTokens, TrajectoryId, version_spans

log = logging.getLogger(__name__)

TOKEN_BYTES = 12
"""Bytes of a token: its id, log-prob and version."""
FRAME = struct.Struct("<II")
SETTINGS = "settings.json"
"""File of the settings by which groups are made, and of the run's id."""
GIVEN_UP = "given-up-"
"""Prefix of the name of an empty file for each writer that was given up."""
FILE_NAME = re.compile(r"[^.]+\.\d+\.\d+")
"""Pattern of the names of the journal's files: other files may lie beside them, such as an editor's."""
OPEN_BLOCKS = 8
"""Maximum number of blocks whose files a writer keeps open, and for which a reader keeps places of records."""


class Record(NamedTuple):
    """One record: named values, and bytes."""

    values: Mapping[str, Any]
    data: bytes = b""
    at: int = 0
    """Byte offset of the record in its file, if it was read."""

    def packed(self) -> bytes:
        """Return the record's bytes, as in a file."""
        payload = json.dumps(self.values, separators=(",", ":")).encode() + b"\n" + self.data
        return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def records(
    path: Path, at: int = 0, tell: Callable[[str], object] = log.warning, *, values_alone: bool = False
) -> Iterator[Record]:
    """Yield the whole records of a file from byte ``at`` on, up to the first incomplete one, with one record in memory
    at a time. ``values_alone``: do not read records' bytes or compare checksums; read a record again before its bytes
    are used.

    ``tell`` gets a line about the bytes from an incomplete record on, or about an unreadable file. A missing file has
    no records.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # the current size: its writer may append meanwhile
            file.seek(at)
            while size - at >= FRAME.size:
                length, checksum = FRAME.unpack(file.read(FRAME.size))
                # A damaged length may be gigabytes, which must not be read.
                read = file.readline if values_alone else file.read
                payload = read(length) if length <= size - at - FRAME.size else b""
                if not payload or not (values_alone or zlib.crc32(payload) == checksum):
                    break  # a machine that died may leave zeros, whose checksum is that of nothing
                header, _, data = payload.partition(b"\n")
                try:
                    values = json.loads(header)
                except ValueError:  # damaged, and no sum was compared
                    break
                if not isinstance(values, dict):
                    break
                yield Record(values, data, at)
                # Skipped, not read: reading 200 MB of tokens held an episode worker's event loop for 0.9 s.
                at += FRAME.size + length
                file.seek(at)
            if at < size:
                tell(f"{path} is not whole: its last {size - at} bytes of {size} are left out")
    except FileNotFoundError:
        pass
    except OSError as cause:
        tell(f"{path} cannot be read, and is left out: {cause}")


def written(
    directory: Path,
    writer: str = "*",
    block: int | str = "*",
    tell: Callable[[str], object] = log.warning,
    *,
    values_alone: bool = False,
) -> Iterator[tuple[Path, Record]]:
    """Yield the records of a ``writer`` and a ``block``, earlier lives first, as `records` does. ``tell`` gets a line
    about each file of another run, and those of `records`.
    """
    run = settings_in(directory).get("run")
    for path in segments(directory, writer, block):
        for record in records(path, tell=tell, values_alone=values_alone):
            if record.at == 0 and record.values.get("run") != run:
                tell(f"{path} is of another run, and is left out")
                break
            if record.at:  # the first record only names the run
                yield path, record


def settings_in(directory: Path) -> Mapping[str, str]:
    """Return the settings of the journal in ``directory``; empty if they are missing or damaged."""
    try:
        found = json.loads((directory / SETTINGS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def segments(directory: Path, writer: str = "*", block: int | str = "*") -> list[Path]:
    """Return the files of a ``writer`` and a ``block``: first those of given-up writers, then by life. If a call has
    two records, the last one counts.
    """

    def rank(path: Path) -> tuple[bool, int]:
        # Lives as numbers: as text 10 would come before 9.
        return not (directory / f"{GIVEN_UP}{path.name.split('.')[0]}").exists(), int(path.suffix[1:])

    paths = directory.glob(f"{writer}.{block}.*")
    return sorted((path for path in paths if FILE_NAME.fullmatch(path.name)), key=rank)


def give_up(directory: Path, writer: str) -> None:
    """Give other writers precedence over ``writer``, which was given up and may come back."""
    with suppress(OSError):
        (directory / f"{GIVEN_UP}{writer}").touch()


def block_of(path: Path) -> int:
    """Return the block number of a file."""
    return int(path.stem.rpartition(".")[2])


class JournalWriter:
    """Writer of one process's records. Block b has the groups ``groups_per_block`` · b and following.

    Example:
        >>> from tempfile import mkdtemp
        >>> directory = Path(mkdtemp())
        >>> writer = JournalWriter(directory, "driver", groups_per_block=4, sync_s=None)
        >>> place = writer.append(6, Record({"kind": "batch"}))
        >>> [(path.name, record.values) for path, record in written(directory)]
        [('driver.1.0', {'kind': 'batch'})]
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        groups_per_block: int,
        sync_s: float | None,
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        """Set up. ``sync_s``: maximum seconds until a record is on the disk; None: the system decides. ``tell`` gets
        one warning if the disk fails.
        """
        self.directory, self.groups_per_block = directory, groups_per_block
        self._name, self._sync_s, self._tell = name, sync_s, tell
        # Files of its own: records after a half record of an earlier life are never read.
        self._life = 1 + max((int(path.suffix[1:]) for path in segments(directory, name)), default=-1)
        self._files: dict[int, tuple[int, int]] = {}
        """Block → descriptor and length of its file."""
        self._unsynced: set[int] = set()
        self._told = False

    def append(self, number: int, record: Record) -> int | None:
        """Append a record of group ``number``. Returns its offset in the group's `file_of`. None: the disk failed, of
        which one warning is given; the record's work is then repeated when it is needed.
        """
        block = number // self.groups_per_block
        try:
            file, length = self._file(block)
            first = b"" if length else Record({"run": settings_in(self.directory).get("run")}).packed()
            data = first + record.packed()
            # Unbuffered: an appended record survives this process.
            if (written := os.write(file, data)) < len(data):
                os.ftruncate(file, length)  # a half record would hide later ones
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as cause:
            if not self._told:
                self._tell(f"the journal {self.directory} cannot be written: {cause}. A resumed run repeats more")
            self._told = True
            return None
        self._files[block] = file, length + len(data)
        if self._sync_s is not None:
            if not self._unsynced:  # else a timer is set already
                asyncio.get_running_loop().call_later(self._sync_s, self._sync)
            self._unsynced.add(file)
        return length + len(first)

    def file_of(self, number: int) -> Path:
        """Return the file with the records of group ``number``."""
        return self._path(number // self.groups_per_block)

    def owns(self, path: Path) -> bool:
        """Tell whether this writer, in this life, writes the file."""
        return path.suffix == f".{self._life}" and path.name.startswith(f"{self._name}.")

    def close(self) -> None:
        """Close all files."""
        for block in list(self._files):
            self._close(block)

    def _file(self, block: int) -> tuple[int, int]:
        if block not in self._files:
            if len(self._files) >= OPEN_BLOCKS:
                self._close(min(self._files))  # the oldest groups have the fewest records still to come
            # O_APPEND: a life that was given up may still write to its own file, but never over this life's records
            file = os.open(self._path(block), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._files[block] = file, os.fstat(file).st_size
        return self._files[block]

    def _path(self, block: int) -> Path:
        return self.directory / f"{self._name}.{block}.{self._life}"

    def _close(self, block: int) -> None:
        file, _ = self._files.pop(block)
        if file in self._unsynced:
            self._unsynced.discard(file)  # synced here: the timer will not find its descriptor
            with suppress(OSError):
                os.fsync(file)
        os.close(file)

    def _sync(self) -> None:
        """Start to sync the written files, in another thread."""
        files: list[int] = []
        with suppress(OSError):  # no descriptor is left: later records are synced after the next write
            # Copies: `_close` may close a file while the thread syncs it, and its number may become another file's.
            files.extend(os.dup(file) for file in self._unsynced)
        self._unsynced.clear()

        def sync() -> None:
            for file in files:
                with suppress(OSError):
                    os.fsync(file)
                os.close(file)

        asyncio.get_running_loop().run_in_executor(None, sync)


class CompletionJournal:
    """Finished calls of training groups: writes those of one episode worker, and finds those of all workers."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self._found: dict[int, dict[tuple[int, ...], dict[tuple[int, int], tuple[Path, int]]]] = {}
        """Block → trajectory → (call, checksum of its request) → file and offset of another process's record that was
        not recalled. The tokens stay on the disk."""

    def append(self, number: int, request: GenerateRequest, replica: str, completion: Completion) -> None:
        """Write a call of group ``number`` that ``replica`` has finished. Calls of validation, aborted and simulated
        calls are not written.
        """
        tokens = completion.tokens
        training = request.priority is Priority.TRAINING
        if tokens is None or not training or completion.finish_reason is FinishReason.ABORTED:
            return
        values = {
            "kind": "completion",
            "group": number,
            "trajectory": request.trajectory,
            "key": request.key,
            "asked": _asked(request),
            "replica": replica,
            "finish_reason": completion.finish_reason.value,
        }
        data = b"".join(array.tobytes() for array in (tokens.ids, tokens.logprobs, tokens.versions))
        self._writer.append(number, Record(values, data))

    def keep(self, number: int, tokens: bytes) -> tuple[Path, int] | None:
        """Write the tokens of the finished group ``number``. Returns the record's file and offset; None if the disk
        failed.
        """
        at = self._writer.append(number, Record({"kind": "tokens", "group": number}, tokens))
        return None if at is None else (self._writer.file_of(number), at)

    def reread(self, number: int) -> None:
        """Read other writers' records of group ``number`` again: its episode worker was lost."""
        self._found.pop(number // self._writer.groups_per_block, None)

    def recall(self, number: int, request: GenerateRequest) -> tuple[str, Completion] | None:
        """Return the replica and the result of an earlier finished call of group ``number``; None if there is none with
        this context and sampling.
        """
        if request.priority is not Priority.TRAINING:
            return None
        block = number // self._writer.groups_per_block
        if (found := self._found.get(block)) is None:
            if len(self._found) >= OPEN_BLOCKS:
                del self._found[min(self._found)]
            found = self._found[block] = self._read(block)
        calls = found.get(request.trajectory)
        # Removed: the journal answers each call once, and `unused` counts the remaining ones.
        place = calls.pop((request.key, _asked(request)), None) if calls else None
        if place is None:
            return None
        path, at = place

        def tell(_: str) -> None:
            log.warning("%s: the record at byte %d is damaged, and its call is made again", path, at)

        if (record := next(records(path, at, tell), None)) is None:  # or removed meanwhile: then it is not needed
            return None
        # A writable copy.
        ids, logprobs, versions = np.frombuffer(record.data, np.int32).reshape(3, -1).copy()
        now = asyncio.get_running_loop().time()
        completion = Completion(
            number=0,
            length=len(ids),
            version_spans=version_spans(versions),
            finish_reason=FinishReason(record.values["finish_reason"]),
            started=now,
            finished=now,
            tokens=SampledTokens(ids, logprobs.view(np.float32), versions),  # the same 4 bytes, read as int32 above
        )
        return record.values["replica"], completion

    def unused(self, number: int, trajectory: TrajectoryId) -> int:
        """Return the number of finished calls of an episode of group ``number`` that were not recalled."""
        return len(self._found.get(number // self._writer.groups_per_block, {}).get(trajectory, ()))

    def close(self) -> None:
        self._writer.close()

    def _read(self, block: int) -> dict[tuple[int, ...], dict[tuple[int, int], tuple[Path, int]]]:
        found: dict[tuple[int, ...], dict[tuple[int, int], tuple[Path, int]]] = {}
        for path, record in written(self._writer.directory, block=block, values_alone=True):
            # Not the records that this life wrote: those calls have had their answers.
            if record.values.get("kind") == "completion" and not self._writer.owns(path):
                with suppress(KeyError, TypeError):  # damaged, and no checksum was compared
                    call = record.values["key"], record.values["asked"]
                    found.setdefault(tuple(record.values["trajectory"]), {})[call] = path, record.at
        return found


def _asked(request: GenerateRequest) -> int:
    """Return a checksum of a call's context and sampling."""
    digest = xxhash.xxh64(repr(request.sampling).encode())
    digest.update(request.input_ids.tobytes())
    return digest.intdigest()
