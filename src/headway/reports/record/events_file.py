"""The run's record, ``events.jsonl``: written as events happen, read as typed events.

    … version.reached (2) … version.reached (3) … killed │ run.resumed (2) … version.reached (3) …
                          └──────── undone ──────────────┘

A resumed run appends to the same file. Its *surviving history* has the events that led to its weights: all except those
between the boundary to which it went back and ``run.resumed``. Nothing is ever removed from the file. Places in it are
byte offsets, so that the newest versions of a large run can be read alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway import events
from headway.errors import DataError
from headway.events import Event
from headway.reports.record.earlier_records import files_beside
from headway.reports.record.event_lines import OTHER_VERSION, line_prefixes, parse_event
from headway.reports.record.file_access import CHUNK, Tail

FLUSH_EVERY_S = 1.0
KEPT_BYTES = 64 * 2**20
"""Maximum number of bytes of lines kept while writing fails: minutes of a large run."""
DENSE = (
    events.TrajectoryFinished,
    events.StageChanged,
    events.GroupAdmitted,
    events.GroupRewarded,
    events.GroupSettled,
    events.ReplicaActivity,
)
"""Frequent events, for each answer or group, or every few seconds: nearly all events of a large run."""
DENSE_PREFIXES = line_prefixes(DENSE)
AT_ONCE = (events.VersionReached, events.RunResumed, events.RunFinished)
"""Events that are flushed when they happen: checkpoints, and readers of the file after a kill, rely on them."""
AT_ONCE_LINE = re.compile(b"|".join(map(re.escape, line_prefixes(AT_ONCE))))
"""Prefix of a line with one of these events. No text within JSON contains it."""
ALL = 1 << 62
"""Number larger than the bytes of any record."""


class JsonLines:
    """A file of JSON objects, one a line, appended and flushed at least every second while lines come.

    Lines that could not be written are kept and retried at each flush, so that the file has no gap. They are dropped at
    the end, or if they exceed `KEPT_BYTES`; the run goes on. The first failure, and that lines are dropped, are each
    reported once through ``report``. Numbers that are not finite become null, since JSON has none.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        given_up: Callable[[], str] = lambda: "it stays incomplete",
    ) -> None:
        """Open the file. ``given_up`` returns a text for the user on the file's fate after writing failed."""
        self._path = path
        self._report = report
        self._given_up = given_up
        self._file: int | None = None
        self._end: int | None = None
        """Size of the file in bytes; None before it is opened and after it was given up."""
        self._waiting = bytearray()
        """Lines not written yet, without those being written."""
        self._ended = False
        self._refused: OSError | None = None
        self._flushed = time.monotonic()
        self._flush()

    @property
    def whole(self) -> bool:
        """True if everything written so far is in the file."""
        return self._end is not None and not self._waiting

    @property
    def failure(self) -> OSError | None:
        """Error that keeps lines out of the file; None while it is complete."""
        return None if self.whole else self._refused

    @property
    def size(self) -> int:
        """Number of bytes that are in the file."""
        return self._end or 0

    def write(self, row: dict[str, Any], *, at_once: bool = False) -> None:
        if self._ended:
            return
        self._waiting += to_json_line(row).encode() + b"\n"
        if at_once or time.monotonic() - self._flushed >= FLUSH_EVERY_S:
            self._flush()
            if len(self._waiting) > KEPT_BYTES:
                self._give_up()

    def on_row(self, row: dict[str, Any]) -> None:
        self.write(row, at_once=True)  # trackers read it there

    def close(self) -> None:
        if not self._ended:
            self._flush()
            try:
                self._close_file()
            except OSError as cause:  # some file systems report a full disk only now
                self._refused, self._end = cause, None
            if not self.whole:
                self._give_up()
            self._ended = True

    def _flush(self) -> None:
        # Before the write: otherwise a disk that hangs and refuses would be tried again at every line.
        self._flushed = time.monotonic()
        try:
            self._append()
        except OSError as cause:
            with suppress(OSError):
                self._close_file()  # a reopened file may work again
            if self._refused is None:
                self._report(
                    f"cannot write {self._path}: {cause.strerror or cause}; trying again while the run goes on"
                )
            self._refused = cause

    def _append(self) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._end is None:
            self._end = os.lseek(self._file, 0, os.SEEK_END)
        while self._waiting:
            # Written at a fixed offset: after an interrupt before the next line the same bytes are written there again.
            written = os.pwrite(self._file, self._waiting, self._end)
            self._end += written
            del self._waiting[:written]

    def _give_up(self) -> None:
        self._ended, self._end = True, None
        self._waiting.clear()
        with suppress(OSError):
            self._close_file()
        why = self._refused and (self._refused.strerror or self._refused)
        self._report(f"cannot write {self._path}: {why}; {self._given_up()}")

    def _close_file(self) -> None:
        # Forgotten first: the descriptor is free even if closing fails, and may be reused for another file.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class EventsFile:
    """Observer that appends every event to ``path``."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._reached = -1
        self.recorded_version = -1
        """Newest version whose boundary, and all events before it, are in the file; -1 for none."""
        self._lines = JsonLines(path, report, self._without_the_rest)

    def on_event(self, event: Event) -> None:
        self._lines.write(event.to_json(), at_once=isinstance(event, AT_ONCE))
        if isinstance(event, AT_ONCE):
            self._reached = event.version
        if self._lines.whole:
            self.recorded_version = self._reached

    @property
    def size(self) -> int:
        """Number of bytes that are in the file."""
        return self._lines.size

    def close(self) -> None:
        self._lines.close()

    def _without_the_rest(self) -> str:
        later = "" if self.recorded_version < 0 else f" from a later version than {self.recorded_version}"
        return f"it stays incomplete, and the run cannot be resumed{later}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return _finite(value.tolist())
    return str(value)


_STRICT = json.JSONEncoder(default=_plain, allow_nan=False)


def to_json_line(value: Any) -> str:
    """Return ``value`` as strict JSON on one line. Numpy values, paths and fractions become plain values."""
    try:
        return _STRICT.encode(value)
    except (ValueError, TypeError):  # a number that is not finite, or a numpy number as a key
        return _STRICT.encode(_finite(value))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key.item() if isinstance(key, np.generic) else key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case np.generic() | np.ndarray():
            return _finite(value.tolist())
    return value


@dataclass(slots=True)
class SurvivingRecord:
    """Surviving parts of a record, and the run's status."""

    parts: list[tuple[int, int]] = field(default_factory=lambda: [(0, ALL)])
    """Ranges [from, to) of byte offsets, in order."""
    boundaries: dict[int, int] = field(default_factory=dict)
    """Version -> offset after its surviving `VersionReached`."""
    resumed: int = 0
    """Number of resumes of the run, including undone ones."""
    ended: str | None = None
    """Status at the run's end; None if the record has none."""
    size: int = 0
    """Number of bytes of complete lines examined."""

    def survives(self, offset: int) -> bool:
        """Return True if the line that begins at ``offset`` survived."""
        return any(first <= offset < last for first, last in self.parts)

    def end_at(self, version: int) -> None:
        """Undo everything after the boundary of ``version``."""
        end = self.boundaries[version]
        self.parts = [(first, min(last, end)) for first, last in self.parts if first < end]
        self.boundaries = {reached: offset for reached, offset in self.boundaries.items() if offset <= end}


def look_through(path: Path) -> SurvivingRecord:
    """Find the surviving parts of a record. Raises `DataError` for an unreadable file or an unknown resume point."""
    for left in files_beside(path):
        raise DataError(f"{left} has a part of the run's events, as earlier versions of Headway wrote. {OTHER_VERSION}")
    record = SurvivingRecord()
    try:
        for at, line in _lines_at_once(path, record):
            match event := _event(path, at, line):
                case events.VersionReached():
                    record.boundaries[event.version] = at + len(line)
                case events.RunFinished():
                    record.ended = event.status
                case events.RunResumed():
                    if event.version not in record.boundaries:
                        raise DataError(f"{_where(path, at)}: the run went back to a version that it did not reach")
                    record.end_at(event.version)
                    # After `end_at`, which would cut off this part, too.
                    record.parts.append((at, ALL))
                    record.resumed, record.ended = event.times, None
    except OSError as cause:
        raise DataError(f"cannot read the events of a run: {cause}") from cause
    return record


def _lines_at_once(path: Path, record: SurvivingRecord) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of `AT_ONCE` events, each with its offset, and count bytes in ``record``. Raises `OSError`."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            # Up to the end of a line: a prefix split over two chunks would not be found.
            chunk += file.readline()
            half = not chunk.endswith(b"\n")
            chunk = chunk[: chunk.rfind(b"\n") + 1]
            # Searched as a whole: a loop over all lines takes a minute for each two million.
            found = (line.start() for line in AT_ONCE_LINE.finditer(chunk))
            yield from ((record.size + at, chunk[at : chunk.index(b"\n", at) + 1]) for at in found)
            record.size += len(chunk)  # after the lines: it is where the chunk begins
            if half:  # its writer may finish the line meanwhile, which would shift later offsets
                return


class EventReader:
    """Reads the surviving history of a run, in order.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> line = '{"kind": "version.reached", "time": 2.5, "version": 0, "groups": {}, "episodes": {}}'
        >>> with TemporaryDirectory() as run:
        ...     path = Path(run) / "events.jsonl"
        ...     _ = path.write_text(line + "\\n")
        ...     reader = EventReader(path, kinds=[events.VersionReached])
        ...     print([event.time for event in reader.read()], reader.record.boundaries)
        [2.5] {0: 85}
    """

    def __init__(
        self,
        path: Path,
        *,
        record: SurvivingRecord | None = None,
        after: int = 0,
        kinds: Collection[type[Event]] | None = None,
        number: int | None = None,
    ) -> None:
        """Open the record. ``record``: its surviving parts, if known; ``after``: offset at which to begin.

        ``kinds``: kinds of events to read, None for all; ``number``: group whose frequent events to read, None for all.
        Other lines are not parsed. Raises `DataError` if the file cannot be read.
        """
        self._path = path
        self.at = after
        """Offset of the event read last."""
        self.record = record or look_through(path)
        self._tail = Tail(path, after)
        self._prefixes = None if kinds is None else line_prefixes(kinds)
        # With its comma: group 1 must not find group 17.
        self._needle = None if number is None else f'"number": {number},'.encode()

    @property
    def offset(self) -> int:
        """Number of bytes before the next line."""
        return self._tail.offset

    def read(self) -> Iterator[Event]:
        """Yield the events in the file. An incomplete last line (of a killed run) is left out.

        Raises `DataError` for a line that is no event.
        """
        before = -1
        while self.offset > before:
            before = self.offset
            yield from self.read_on()

    def read_on(self) -> Iterator[Event]:
        """Yield the next events in the file, a few MiB of them. Raises `Rewritten`, and `DataError` as `read` does."""
        try:
            for at, line in self._tail.read():
                if self.record.survives(at) and self._wanted(line):
                    self.at = at
                    yield _event(self._path, at, line)
        except OSError as cause:
            raise DataError(f"cannot read the events of a run: {cause}") from cause

    def _wanted(self, line: bytes) -> bool:
        if self._prefixes is not None and not line.startswith(self._prefixes):
            return False
        return self._needle is None or not line.startswith(DENSE_PREFIXES) or self._needle in line


def read_events(
    path: Path,
    *,
    after: int = 0,
    kinds: Collection[type[Event]] | None = None,
    number: int | None = None,
) -> Iterator[Event]:
    """Yield the surviving history of a run, in order. See `EventReader`."""
    yield from EventReader(path, after=after, kinds=kinds, number=number).read()


def _event(path: Path, at: int, line: bytes) -> Event:
    try:
        return parse_event(line)
    except ValueError as cause:
        raise DataError(f"{_where(path, at)} {cause}") from cause


def _where(path: Path, at: int) -> str:
    """Name the line that begins at the offset ``at``."""
    with path.open("rb") as file:
        return f"{path}:{file.read(at).count(bytes([10])) + 1}"
