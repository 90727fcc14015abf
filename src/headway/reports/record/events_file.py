"""The run's record, ``events.jsonl`` and the dense events beside it: written as events happen, read as typed events.

    … version.reached (2) … version.reached (3) … killed │ run.resumed (2) … version.reached (3) …
                          └──────── undone ──────────────┘

A run that is resumed goes on in the same file. Its *surviving history* is what led to the weights that it has: all but
what was told between the boundary that it went back to and its return. Nothing is ever removed from the file.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError, said_by
from headway.events import Event, RunFinished, RunResumed, VersionReached
from headway.reports.record.dense_events import (
    ALL,
    DENSE,
    LINES,
    REPAIR,
    SEGMENT_BYTES,
    DenseReader,
    folder_of,
    line_prefixes,
    parse_event,
    seal,
    segment,
)
from headway.reports.record.file_access import Tail, cut_off_half_line, whole_lines

FLUSH_EVERY_S = 1.0
KEPT_BYTES = 64 * 2**20
"""Most bytes of lines that are kept while a disk refuses them: minutes of a large run."""
DENSE_PREFIXES = line_prefixes(DENSE)
"""Beginnings of lines of records in which dense events are among the others."""
AT_ONCE = (VersionReached, RunResumed, RunFinished)
"""Events that are flushed when they happen: a checkpoint, and whoever reads the file after a kill, relies on them."""


class JsonLines:
    """A file of JSON objects, one a line, appended and flushed at least every second while lines come.

    What a disk refuses is kept and tried again at each flush, so that the file has no gap. It is given up at the end,
    or where it becomes more than `KEPT_BYTES`; the run goes on without it. Either is reported once through ``report``.
    Numbers that are not finite become null, since JSON has no word for them.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        given_up: Callable[[], str] = lambda: "it stays incomplete",
    ) -> None:
        """Open the file. ``given_up`` returns words for the user on what becomes of it after writing failed."""
        self.beside: JsonLines | None = None
        """A file whose lines are written whenever those of this one are, before them; it is given up with it."""
        self._path = path
        self._report = report
        self._given_up = given_up
        self._file: int | None = None
        self._end: int | None = None
        """Size of the file in bytes; None before it is opened, and after it was given up."""
        self._waiting = bytearray()
        """Lines not written yet, after those that are being written."""
        self._ended = False
        self._refused: str | None = None
        self._flushed = time.monotonic()
        self._flush()

    @property
    def whole(self) -> bool:
        """True if everything written so far is in the file."""
        return self._end is not None and not self._waiting

    @property
    def size(self) -> int:
        """Number of bytes that are in the file."""
        return self._end or 0

    def write(self, row: dict[str, Any], *, at_once: bool = False) -> None:
        if self._ended:
            return
        self._waiting += to_json_line(row).encode() + b"\n"
        if at_once or time.monotonic() - self._flushed >= FLUSH_EVERY_S:
            self.flush()

    def on_row(self, row: dict[str, Any]) -> None:
        self.write(row, at_once=True)  # trackers read it there

    def flush(self) -> None:
        """Write what waits, or try to; give up where too much does."""
        if self._ended:
            return
        if self.beside is not None:
            self.beside.flush()
        self._flush()
        if self.beside is not None and self.beside.given_up:
            self._refused = self.beside._refused
            self._give_up()
        elif len(self._waiting) > KEPT_BYTES:
            self._give_up()

    @property
    def given_up(self) -> bool:
        """True if lines are missing for good."""
        return self._ended and self._end is None

    def close(self) -> None:
        if not self._ended:
            self._flush()
            try:
                self._close_file()
            except OSError as cause:  # some file systems say only now that there was no room
                self._refused, self._end = cause.strerror or str(cause), None
            if not self.whole:
                self._give_up()
            self._ended = True

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        try:
            self._append()
        except OSError as cause:
            with suppress(OSError):
                self._close_file()  # one that is opened anew may work again
            if self._refused is None:
                self._report(
                    f"cannot write {self._path}: {cause.strerror or cause}; trying again while the run goes on"
                )
            self._refused = cause.strerror or str(cause)

    def _append(self) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._end is None:
            self._end = os.lseek(self._file, 0, os.SEEK_END)
        while self._waiting:
            # At its place: an interrupt before the next line only has the same bytes written there again.
            written = os.pwrite(self._file, self._waiting, self._end)
            self._end += written
            del self._waiting[:written]

    def _give_up(self) -> None:
        self._ended, self._end = True, None
        self._waiting.clear()
        with suppress(OSError):
            self._close_file()
        self._report(f"cannot write {self._path}: {self._refused}; {self._given_up()}")

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class EventsFile:
    """Observer that appends every event to ``path``, or to a segment of dense events beside it."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._reached = -1
        self.told = -1
        """The newest version whose boundary, and all events before it, are in the file; -1 for none."""
        self._report = report
        self._folder = folder_of(path)
        self._count = sum(1 for _ in complete_lines(path)) if path.is_file() else 0
        """Number of lines of ``path``."""
        self._apart = self._folder.is_dir()
        """True where dense events go to segments: from the version on with which ``path`` is no small file any more."""
        self._dense: JsonLines | None = None
        """The segment that is written; None between two."""
        self._begun = 0
        """Number of lines before that segment."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seal-events")
        self._beside: deque[tuple[Future[None], str]] = deque()
        """The thread's work that has not been looked at since, each with words on what is so where it fails."""
        self._failed: set[str] = set()
        """Texts that `fail` has reported."""
        self._lines = JsonLines(path, report, self._without_the_rest)
        for left in sorted(self._folder.glob(f"*{LINES}")):  # by a process that was killed
            cut_off_half_line(left)
            if left != segment(self._folder, self._count):
                self._seal(left)

    def on_event(self, event: Event) -> None:
        if self._apart and isinstance(event, DENSE):
            self._on_dense(event)
            return
        self._lines.write(event.to_json(), at_once=isinstance(event, AT_ONCE))
        self._count += 1
        if isinstance(event, AT_ONCE):
            self._reached = event.version
        if self._whole:
            self.told = self._reached
        if isinstance(event, VersionReached):
            self._apart |= self._lines.size >= SEGMENT_BYTES
            if self._dense is not None and self._dense.whole and self._dense.size >= SEGMENT_BYTES:
                self._end_segment()

    def _on_dense(self, event: Event) -> None:
        if self._lines.given_up:
            return
        if self._dense is None:
            with suppress(OSError):  # writing the segment will say so
                self._folder.mkdir(exist_ok=True)
            self._begun = self._count
            self._dense = JsonLines(segment(self._folder, self._count), self._report)
            self._lines.beside = self._dense
        before = self._dense.size
        self._dense.write(event.to_json() | {"line": self._count})
        if self._dense.size != before:
            self._lines.flush()

    @property
    def lines(self) -> int | None:
        """Number of lines of the record of a large run; None of a small one, which is read as a whole."""
        return self._count if self._apart else None

    @property
    def _whole(self) -> bool:
        return self._lines.whole and (self._dense is None or self._dense.whole)

    def _end_segment(self) -> None:
        """End the segment, and let a thread turn a large one into columns."""
        dense, self._dense, self._lines.beside = self._dense, None, None
        if dense is not None:
            large = dense.size >= SEGMENT_BYTES
            dense.close()
            if large and dense.whole:
                self._seal(segment(self._folder, self._begun))

    def _seal(self, path: Path) -> None:
        self.beside(partial(seal, path), f"{path} stays as it is, which takes more room")

    def waiting(self, failed: str) -> int:
        """Number of pieces of work with these words that the thread has yet to do."""
        self._look_beside()
        return sum(words == failed for _, words in self._beside)

    def beside(self, work: Callable[[], None], failed: str) -> None:
        """Have ``work`` done in a thread, after what was given to it before; where it fails, see `fail`."""
        self._beside.append((self._thread.submit(work), failed))
        self._look_beside()

    def _look_beside(self, *, wait: bool = False) -> None:
        """Report failures of the thread's work that is done; of all of it with ``wait``."""
        while self._beside and (wait or self._beside[0][0].done()):
            work, failed = self._beside[0]
            if (cause := work.exception()) is not None:
                self.fail(failed, cause)
            self._beside.popleft()

    def fail(self, what: str, cause: BaseException) -> None:
        """Report ``what`` is so because of ``cause``: each such text once."""
        if what not in self._failed:
            self._failed.add(what)
            self._report(f"{what}: {said_by(cause)}")

    def close(self) -> None:
        self._lines.flush()
        self._end_segment()
        self._lines.close()
        self._look_beside(wait=True)
        self._thread.shutdown()

    def _without_the_rest(self) -> str:
        later = "" if self.told < 0 else f" from a later version than {self.told}"
        return f"it stays incomplete, and the run cannot be resumed{later}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return _finite(value.tolist())
    return str(value)


_STRICT = json.JSONEncoder(default=_plain, allow_nan=False)


def to_json_line(value: Any) -> str:
    """``value`` as strict JSON on one line; numpy scalars and arrays, paths and fractions are spelled plainly."""
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
    """The lines of a record that survived, as ranges, and how the run stands."""

    lines: list[tuple[int, int]] = field(default_factory=lambda: [(0, ALL)])
    """Ranges [from, to) of line indices, in order."""
    boundaries: dict[int, int] = field(default_factory=dict)
    """Version → index of its `VersionReached` that survived."""
    resumed: int = 0
    """Number of times that the run was resumed, undone ones included."""
    ended: str | None = None
    """The status that the run ended with; None where it did not say."""

    def survives(self, line: int) -> bool:
        """Tell whether a line survived."""
        return any(first <= line < last for first, last in self.lines)

    def survives_behind(self, line: int) -> bool:
        """Tell whether a dense event survived that came behind so many lines."""
        return any((first < line or line == first == 0) and line < last for first, last in self.lines)

    def end_at(self, version: int) -> None:
        """Undo the lines behind the boundary of ``version``."""
        end = self.boundaries[version] + 1
        self.lines = [(first, min(last, end)) for first, last in self.lines if first < end]
        self.boundaries = {reached: line for reached, line in self.boundaries.items() if line < end}


def look_through(path: Path) -> SurvivingRecord:
    """Find the surviving lines of a record. Raises `DataError` for an unreadable file or an unknown resume point."""
    record = SurvivingRecord()
    prefixes = line_prefixes((VersionReached, RunResumed, RunFinished))
    for index, line in complete_lines(path):
        if line.startswith(prefixes):
            match event := parse_event(line, f"{path}:{index + 1}"):
                case VersionReached():
                    record.boundaries[event.version] = index
                case RunFinished():
                    record.ended = event.status
                case RunResumed():
                    if event.version not in record.boundaries:
                        raise DataError(f"{path}:{index + 1}: the run went back to a version that it did not reach")
                    record.end_at(event.version)
                    record.lines.append((index, ALL))
                    record.resumed, record.ended = event.times, None
    return record


class EventReader:
    """Reads the surviving history of a run, in order, from ``events.jsonl`` and its segments.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> line = '{"kind": "version.reached", "time": 2.5, "version": 0, "groups": {}, "episodes": {}}'
        >>> with TemporaryDirectory() as run:
        ...     path = Path(run) / "events.jsonl"
        ...     _ = path.write_text(line + "\\n")
        ...     reader = EventReader(path, kinds=[VersionReached])
        ...     print([event.time for event in reader.read()], reader.record.boundaries)
        [2.5] {0: 0}
    """

    def __init__(
        self,
        path: Path,
        *,
        record: SurvivingRecord | None = None,
        until: int | None = None,
        after: int = 0,
        kinds: Collection[type[Event]] | None = None,
        number: int | None = None,
    ) -> None:
        """``record``: which lines survive, if that is known; ``until``: read only up to the boundary of that version.

        ``after``: begin behind so many lines; ``kinds``: only events of these; ``number``: of dense events only those
        of that group. Others are not parsed. Raises `DataError` where the file cannot be read or has no such boundary.
        """
        self._path, self._after = path, after
        self.line = after
        """Number of lines before the event that was read last."""
        self.lines = 0
        """Number of lines that were read."""
        self.record = record or look_through(path)
        if until is not None:
            if until not in self.record.boundaries:
                raise DataError(f"{path} has no boundary of version {until}")
            self.record.end_at(until)
        self._tail = Tail(path)
        self._prefixes = None if kinds is None else line_prefixes(kinds)
        self._dense = DenseReader(path, kinds=kinds, number=number, line=after)
        self._needle = None if number is None else f'"number": {number},'

    def read(self) -> Iterator[Event]:
        """Yield the events that are there. A last line that was cut off (a run that was killed) is left out.

        Raises `DataError` for what is no event.
        """
        before = -1
        while self.lines > before:
            before = self.lines
            yield from self.read_on()
        yield from self._dense_until(ALL)  # a run that was killed may have written them, and not the lines before them

    def read_on(self) -> Iterator[Event]:
        """Yield the next events that are there, a few MiB of them. Raises `Rewritten`, and `DataError` as `read`."""
        self._dense.list_segments()
        try:
            for _, line in self._tail.read():
                index, self.lines = self.lines, self.lines + 1
                if index < self._after:
                    continue
                yield from self._dense_until(index)
                text = decoded(line, self._path, index)
                if self.record.survives(index) and self._wanted(text):
                    self.line = index
                    yield parse_event(text, f"{self._path}:{index + 1}")
        except OSError as cause:
            raise DataError(f"cannot read the events of a run: {cause}") from cause
        yield from self._dense_until(self.lines)

    def _dense_until(self, line: int) -> Iterator[Event]:
        for at, event in self._dense.until(line):
            if self.record.survives_behind(at):
                self.line = at
                yield event

    def _wanted(self, line: str) -> bool:
        if self._prefixes is not None and not line.startswith(self._prefixes):
            return False
        return self._needle is None or not line.startswith(DENSE_PREFIXES) or self._needle in line


def read_events(
    path: Path,
    *,
    until: int | None = None,
    after: int = 0,
    kinds: Collection[type[Event]] | None = None,
    number: int | None = None,
) -> Iterator[Event]:
    """Yield the surviving history of a run, in order. See `EventReader`."""
    yield from EventReader(path, until=until, after=after, kinds=kinds, number=number).read()


def complete_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the complete lines of a record, each with its index. Raises `DataError` for what cannot be read."""
    try:
        for index, line in enumerate(whole_lines(path)):
            yield index, decoded(line, path, index)
    except OSError as cause:
        raise DataError(f"cannot read the events of a run: {cause}") from cause


def decoded(line: bytes, path: Path, index: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}:{index + 1} is damaged: it is not UTF-8 (byte {cause.start + 1}). {REPAIR}") from cause
