"""Token files: tokens of finished groups, as files in memory on the machine that made them, until a rank reads them.

episode worker ──write──▶ file ◀──read── ranks of the same machine; others have a task on that machine read for them
                   └ removed when the driver has forgotten the group

size of the index │ index │ each prompt: ids │ each row: ids, log-probs, versions, mask

The index has the place of each prompt and row, so that a rank reads only the rows that it trains on.

A file outlives the episode worker that wrote it, so the death of an episode worker loses no finished group. Nor does
the loss of a machine other than the driver's: a small group's tokens travel with their handle, and the journal has a
copy of all others.

The directory in memory is one run's, and must not outlive the run: its files take memory until they are removed.

made ─▶ locked ─▶ named headway-run-… ─▶ … ─▶ removed at the end
                                         └─ killed: the lock ends with the process, and the next run removes it
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir, mkdtemp

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import Config
from headway.config.sizing.run_memory import BYTES_PER_TOKEN, token_bytes
from headway.data.journal import records
from headway.data.types import GroupTokens, RowTokens, TurnSpan
from headway.errors import RunError
from headway.records import pickled_by_fields

PREFIX = "headway-run-"
SHARED_MEMORY = Path("/dev/shm")
"""Directory on Linux whose files are in memory."""


@contextmanager
def directory_in_memory(parent: Path) -> Iterator[Path]:
    """Make a directory in ``parent`` for the duration of the block. Directories of killed runs are removed first."""
    remove_abandoned(parent)
    made = Path(mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    path = made  # under a hidden name, which `remove_abandoned` of other runs does not match
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = made.rename(made.with_name(made.name.removeprefix(".")))  # locked before others can find it
        yield path
    finally:
        rmtree(path, ignore_errors=True)
        os.close(lock)


def held_directory(path: Path) -> None:
    """Make the directory ``path`` if it is missing, and lock it until this process ends, so that no other run removes
    it.

    Directories of killed runs are removed from its parent first.
    """
    remove_abandoned(path.parent, but=path)
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_SH)
        # `held` stays open on success: its lock lasts as long as the process.
        if path.is_dir() and os.path.samestat(os.fstat(held), path.stat()):
            return
        os.close(held)  # another run took it for abandoned before it was held


def remove_abandoned(parent: Path, *, but: Path | None = None) -> None:
    """Remove the directories of this user's ended or killed runs, except ``but``."""
    for path in parent.glob(f"{PREFIX}*"):
        if path == but:
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # another user's directory, or gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rmtree(path, ignore_errors=True)
        except BlockingIOError:  # its run lives, and holds the lock
            continue
        finally:
            os.close(lock)


SMALL = 100_000
"""Largest size of tokens that travel with their handle, in bytes."""


@pickled_by_fields
@dataclass(frozen=True, slots=True, weakref_slot=True)
class TokenFile:
    """Handle of one group's `GroupTokens`."""

    host: str
    """Address of the machine that has the file."""
    path: str
    data: bytes | None = field(default=None, compare=False)
    """Contents, if they travel with the handle and there is no file; None if a file or ``copy`` has them."""
    copy: tuple[Path, int] | None = field(default=None, compare=False)
    """File of the journal with a copy, and the record's offset there; None without a copy."""


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Handle of some rows of a group: those with the indices ``rows``."""

    file: TokenFile
    rows: tuple[int, ...]


_PromptAt = tuple[int, int]
"""Offset of a prompt after the index, in bytes, and its length in tokens."""
_PlainTurns = tuple[tuple[int, ...], ...]
"""`TurnSpan`s as tuples: an instance of a class costs ten times as much to pickle."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Place of a run's token files: one path, the same on each machine."""

    host: str
    """Address of the driver's machine. The driver removes the directory from all machines at the end."""
    directory: Path


class TokenFiles:
    """The files of one episode worker."""

    def __init__(self, worker: str, place: TokenPlace, host: str) -> None:
        """Use the directory on this machine, whose address is ``host``. ``worker``: name of the episode worker."""
        self._host = host
        self._beside_driver = host == place.host
        if not self._beside_driver:
            held_directory(place.directory)
        self._prefix = f"{place.directory}/{worker}-"
        self._numbers = count()

    def write(self, tokens: GroupTokens, copy: Callable[[bytes], tuple[Path, int] | None] | None = None) -> TokenFile:
        """Store ``tokens``, in a new file unless they are few. Raises `RunError` if there is neither room nor a copy.

        ``copy``: function that also appends them to the journal, and returns their place there.
        """
        path = f"{self._prefix}{next(self._numbers)}"
        parts = _laid_out(tokens)
        size = sum(len(part) for part in parts)
        if not self._beside_driver and size <= SMALL:
            return TokenFile(self._host, path, b"".join(parts))
        refused: OSError | None = None
        try:
            with open(path, "wb") as file:  # noqa: PTH123 - a Path takes as long to make as the file
                file.writelines(parts)
        except OSError as error:
            Path(path).unlink(missing_ok=True)  # half a file would only take room
            refused = error
        needs_copy = refused is not None or not self._beside_driver
        copied = copy(b"".join(parts)) if copy is not None and needs_copy else None
        if refused is not None and copied is None:
            raise RunError(
                f"the tokens of a group cannot be written to {path} ({size} bytes): {refused.strerror}. They wait "
                "there for the trainer: make room, or let fewer groups wait (async_training.staleness_threshold)"
            ) from refused
        return TokenFile(self._host, path, copy=copied)

    def remove(self, files: Iterable[TokenFile]) -> None:
        """Remove files that are no longer needed."""
        for file in files:
            Path(file.path).unlink(missing_ok=True)


def carried(tokens: GroupTokens, name: str) -> TokenFile:
    """Return a handle that contains all of ``tokens``. ``name`` must be unique."""
    return TokenFile("", name, b"".join(_laid_out(tokens)))


def token_directory(config: Config) -> AbstractContextManager[Path]:
    """Make a directory for token files for the duration of the block: in memory or, if there is too little room, on
    disk.
    """
    parent = SHARED_MEMORY
    if not parent.is_dir() or _free(parent) < token_bytes(config):
        parent = Path(gettempdir())
    return directory_in_memory(parent)


Read = Callable[[int, int], bytearray]
"""Function of an offset and a number of bytes that returns these bytes of a file."""


def read_rows(file: TokenFile, indices: Iterable[int] | None = None) -> dict[int, RowTokens] | None:
    """Read and return index -> row, for these indices into a group's `GroupTokens`. ``indices`` None: all rows.

    Rows with the same prompt share its array. Returns None if this machine does not have the file.
    """
    if (data := file.data) is not None:
        return _rows_in(data, indices)
    try:
        # Unbuffered, so that nothing is read ahead.
        with Path(file.path).open("rb", buffering=0) as opened:
            return _rows(partial(_bytes_of, opened), indices)
    except FileNotFoundError:
        return None


def read_copy(file: TokenFile, indices: Iterable[int]) -> dict[int, RowTokens] | None:
    """Return rows as `read_rows` does, from the journal's copy; None if that is missing or incomplete."""
    record = None if file.copy is None else next(records(*file.copy), None)
    return None if record is None else _rows_in(record.data, indices)


def _rows_in(data: bytes, indices: Iterable[int] | None) -> dict[int, RowTokens]:
    return _rows(lambda offset, size: bytearray(data[offset : offset + size]), indices)


def _bytes_of(file: io.FileIO, offset: int, size: int) -> bytearray:
    data = bytearray(os.pread(file.fileno(), size, offset))  # not bytes: arrays over these could not be written to
    if len(data) < size:
        raise RunError(f"{file.name!r} ends {size - len(data)} bytes too early: the tokens of a group are cut short")
    return data


def _laid_out(tokens: GroupTokens) -> list[bytes]:
    """Return the parts of a file, in order. A prompt shared by rows is stored once."""
    prompts, rows, blobs, offset = list[_PromptAt](), list[tuple[int, int, int, _PlainTurns]](), list[bytes](), 0
    numbers: dict[int, int] = {}
    """Identity of a prompt's array -> number of the prompt."""
    for row in tokens:
        prompt, length = row.prompt_ids, len(row.ids)
        if id(prompt) not in numbers:  # by identity: rows of a group share the array itself
            numbers[id(prompt)] = len(prompts)
            prompts.append((offset, len(prompt)))
            blobs.append(prompt.astype(np.int32, copy=False).tobytes())
            offset += 4 * len(prompt)
        rows.append((numbers[id(prompt)], offset, length, tuple(map(tuple, row.turns))))
        blobs += (
            row.ids.astype(np.int32, copy=False).tobytes(),
            row.logprobs.astype(np.float32, copy=False).tobytes(),
            row.versions.astype(np.int32, copy=False).tobytes(),
            row.loss_mask.astype(np.bool_, copy=False).tobytes(),
        )
        offset += BYTES_PER_TOKEN * length  # the four arrays above: `_rows` counts the same
    packed = pickle.dumps((prompts, rows), pickle.HIGHEST_PROTOCOL)
    return [len(packed).to_bytes(8, "little"), packed, *blobs]


def _rows(read: Read, indices: Iterable[int] | None) -> dict[int, RowTokens]:
    """Return index -> row, for these indices or all rows."""
    size = int.from_bytes(read(0, 8), "little")
    prompts_at, rows_at = pickle.loads(read(8, size))
    data = 8 + size
    prompts: dict[int, NDArray[np.int32]] = {}
    rows: dict[int, RowTokens] = {}
    for index in range(len(rows_at)) if indices is None else indices:
        prompt, offset, length, turns = rows_at[index]
        if prompt not in prompts:
            start, prompt_length = prompts_at[prompt]
            prompts[prompt] = np.frombuffer(read(data + start, 4 * prompt_length), np.int32)
        # Ids are read separately, so that they can be freed once they are joined to their prompt.
        ids, rest = read(data + offset, 4 * length), read(data + offset + 4 * length, (BYTES_PER_TOKEN - 4) * length)
        rows[index] = RowTokens(
            prompt_ids=prompts[prompt],
            ids=np.frombuffer(ids, np.int32, length),
            logprobs=np.frombuffer(rest, np.float32, length),
            versions=np.frombuffer(rest, np.int32, length, 4 * length),
            loss_mask=np.frombuffer(rest, np.bool_, length, 8 * length),
            turns=tuple(TurnSpan(*turn) for turn in turns),
        )
    return rows


def _free(directory: Path) -> int:
    there = os.statvfs(directory)
    return there.f_bavail * there.f_frsize
