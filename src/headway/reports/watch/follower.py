"""Follows a run by the files of its directory, which it only reads, and tells what has changed.

    events.jsonl, events/ ─▶ events ─▶ TimelineBuilder ─▶ curves, ledger, groups, and now and then the timeline
    samples.jsonl ─▶ SampleIndex                                                       │
    run.lock      ─▶ is it trained?                           Follower.message(since) ─┴▶ what a page has not seen

A run that is resumed undoes a part of its record: everything is then read anew, and pages begin anew with it (`epoch`).
One thread reads and builds; what pages see changes under a lock that is never held while something is built or parsed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DataError, HeadwayError, RunError, said_by
from headway.events import RunResumed, RunStarted
from headway.reports import human
from headway.reports.metrics.metrics_state import newest
from headway.reports.metrics.summary import summary
from headway.reports.record.events_file import EventReader, SurvivingRecord, look_through, to_json_line
from headway.reports.record.file_access import Rewritten
from headway.reports.report import draw, newest_versions
from headway.reports.run_directory import RunDirectory, only_starts, standing
from headway.reports.samples.samples_file import MOST_VALIDATIONS, Key, SampleIndex
from headway.reports.timeline.html_timeline import cards, live_parts
from headway.reports.timeline.run_history import MOST_GROUPS, GroupLog, ledger
from headway.reports.timeline.run_history import to_json as curves_json
from headway.reports.timeline.timeline import TimelineBuilder

LOOK_EVERY_S = 0.5
"""Seconds between two looks at the files."""
BUSY_SHARE = 0.004
"""Largest share of a core that building curves takes over time, and building timelines: each is as rare as that."""
CURVES_EVERY_S, TIMELINE_EVERY_S = 1.0, 3.0
LIVE_SPANS = 30_000
"""Most spans of a timeline that is drawn again and again."""
JOIN_TIMEOUT_S = 10.0
READING: dict[str, Any] = {"status": "reading", "reason": None}


@dataclass(slots=True)
class _Part:
    """A part of the page that costs time: it is built again when something is new, as rarely as its cost asks for."""

    every_s: float
    value: Any = None
    serial: int = 0
    """Serial number of the message that has ``value`` first."""
    times: int = 0
    """Number of times that it was built."""
    built_from: int = -1
    """Number of rows, or of events, that ``value`` was made from."""
    next_s: float = 0.0


@dataclass(slots=True)
class _Read:
    """Data read from the run since its record was last read from the beginning."""

    events: EventReader
    samples: SampleIndex
    builder: TimelineBuilder
    count: int = 0
    """Number of events that were read."""
    starting: bool = False
    """True from a resume to the start behind it."""
    serials: dict[tuple[int, int], int] = field(default_factory=dict)
    """Sample of a validation → serial number when it came."""


class Follower:
    """Follows the run in ``directory`` from `start` to `close`. All other methods may be called from any thread."""

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._failure: HeadwayError | None = None
        self._thread = threading.Thread(target=self._follow, name="follow-run", daemon=True)
        self._read = self._anew(SurvivingRecord())
        self._outdated = True
        """True where the record is to be read from its beginning."""
        self._watched = 0
        """Number of pages that are open."""
        # What pages see, all of it under the condition's lock:
        self.epoch = 0
        self.serial = 0
        """Number of changes so far, of anything."""
        self._curves, self._timeline = _Part(CURVES_EVERY_S), _Part(TIMELINE_EVERY_S)
        """Charts, and the timeline as JSON."""
        self._cards: tuple[int, list[tuple[str, str, str]], str] = (0, [], "")
        """The page's first figures and its sentence, with the number of events that they were made from."""
        self._status: dict[str, Any] = READING

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------ pages

    def page_opened(self) -> None:
        with self._changed:
            self._watched += 1

    def page_closed(self) -> None:
        with self._changed:
            self._watched -= 1

    def wait(self, since: int, epoch: int, timeout_s: float) -> bool:
        """Wait for a change since message ``since`` of ``epoch``, so many seconds at most; tell whether one came."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_newer(since, epoch) or self._closing.is_set(), timeout_s)
            return self._is_newer(since, epoch)

    def _is_newer(self, since: int, epoch: int) -> bool:
        return self.epoch != epoch or self.serial > since

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def first_look(self, timeout_s: float) -> bool:
        """Wait until the run was read, so many seconds at most; tell whether it can be followed, as far as is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._status != READING or self._closing.is_set(), timeout_s)
        return self._failure is None

    def join(self) -> None:
        """Wait until following ends, by `close` or by a failure. Raises `DataError` where the record is damaged.

        Raises `RunError` where following failed in a way that nobody has thought of.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def message(self, since: int, epoch: int) -> dict[str, Any]:
        """Return what has changed since the message with the number ``since`` of ``epoch``: all in another epoch."""
        with self._changed:
            since = since if epoch == self.epoch else 0
            read, curves = self._read, self._curves
            lines = list(read.builder.groups.lines(since))
            fresh = [key for key, serial in read.serials.items() if serial > since]
            sampled = [f"group={line.number}" for line in lines if line.number in read.samples.groups]
            if self._cards[0] != read.count:
                figures, window = summary(read.builder.metrics), (read.builder.first or 0.0, read.builder.last)
                self._cards = (read.count, list(cards(figures, window)), figures["bottleneck"])
            return {
                "epoch": self.epoch,
                "serial": self.serial,
                "status": self._status,
                "figures": self._cards[1],
                "sentence": self._cards[2],
                "ledger": ledger(read.builder.metrics) if read.count else None,
                "curves": curves.value if curves.serial > since else None,
                "groups": [line.values() for line in lines],
                "validations": [read.samples.lines[key] for key in fresh if key in read.samples.lines],
                "sampled": sampled + [f"validation={version}&problem={problem}" for version, problem in fresh],
                "damaged": read.samples.damaged,
                "timeline": self._timeline.times,
                "most": 2 * MOST_GROUPS + MOST_VALIDATIONS,
            }

    def timeline(self) -> bytes:
        """Return the newest timeline as JSON, which `live_parts` describes; empty before there is one."""
        with self._changed:
            return self._timeline.value or b""

    def sample(self, key: Key) -> bytes | None:
        """Return the JSON of a sample; None where there is none. Raises `OSError` where it cannot be read."""
        with self._changed:
            samples = self._read.samples
        return samples.line(key)

    # ------------------------------------------------------------------------------------------ reading

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                if not self.look():
                    self._closing.wait(LOOK_EVERY_S)
        except DataError as cause:
            self._failure = cause
            self._show_status({"status": "damaged", "reason": str(cause)})
        except Exception as cause:  # a thread's own traceback would leave the command with nothing to end with
            self._failure = RunError(f"{self._directory.path}: the run cannot be followed any more: {said_by(cause)}")
            self._failure.__cause__ = cause
            self._show_status({"status": "unreadable", "reason": str(self._failure)})

    def look(self) -> bool:
        """Look at the files once. Return whether there may be more to read at once.

        Raises `DataError` for a record that is damaged.
        """
        try:
            if self._outdated:
                self._begin_anew()
                self._outdated = False
            went_on = self._read_samples()
            went_on |= self._read_events()
            if not went_on:  # up to date
                self._show_status(self._stands())
        except Rewritten:
            self._outdated = True
            return True
        except (OSError, DataError) as cause:
            unread = cause.__cause__ if isinstance(cause, DataError) else cause
            if not isinstance(unread, OSError):
                raise
            self._show_status({"status": "unreadable", "reason": f"a file of the run cannot be read: {unread}"})
            return False
        if not went_on:
            self._build()
        return went_on

    def _anew(self, record: SurvivingRecord) -> _Read:
        samples = SampleIndex(self._directory.samples)
        builder = TimelineBuilder(groups=GroupLog(samples.groups))
        return _Read(EventReader(self._directory.events, record=record), samples, builder)

    def _begin_anew(self) -> None:
        """Read the record from its beginning. Raises `DataError` where it is damaged or cannot be read."""
        there = self._directory.events.is_file()
        read = self._anew(look_through(self._directory.events) if there else SurvivingRecord())
        if there:
            self._begin_late(read)
        with self._changed:
            self._read, self._status = read, READING
            self.epoch += 1
            self._curves, self._cards = _Part(CURVES_EVERY_S), (0, [], "")
            self._timeline.built_from, self._timeline.next_s = -1, 0.0
            # Serial numbers of groups begin again, and a page's must not be ahead of them: it asks by its epoch.
            self.serial = 0

    def _begin_late(self, read: _Read) -> None:
        """Begin at the newest saved metrics of a large run, and read only the events of the versions after them."""
        events, record, builder = self._directory.events, read.events.record, read.builder
        drawn, state = newest_versions(record), newest(self._directory, record, builder.curves)
        if drawn is not None and state.offset:
            builder.metrics = state.metrics
            draw(events, drawn, builder, state.offset)
            read.events, read.count = EventReader(events, record=record, after=state.offset), state.offset

    def _read_samples(self) -> bool:
        read = self._read
        found = read.samples.parsed()
        if not found:
            return False
        with self._changed:  # the index is what pages ask
            damaged = read.samples.damaged
            groups, validations = read.samples.merge(found)
            for number in groups:
                read.builder.groups.touch(number)
            self._advance()
            if validations or read.samples.damaged > damaged:
                self.serial += 1
                read.builder.groups.serial = self.serial
                read.serials.update({(version, problem): self.serial for version, problem, *_ in validations})
            self._changed.notify_all()
        return True

    def _read_events(self) -> bool:
        """Read a chunk of the record. Raises `Rewritten` where the run was resumed since it was looked through."""
        read = self._read
        before, resumed = read.events.offset, read.events.record.resumed
        events = list(read.events.read_on())
        if any(isinstance(event, RunResumed) and event.times > resumed for event in events):
            raise Rewritten
        if read.events.offset == before:
            return False
        with self._changed:
            read.count += len(events)
            for event in events:
                read.builder.on_event(event)
                read.starting = isinstance(event, RunResumed) or (read.starting and not isinstance(event, RunStarted))
            self._advance()
            self._changed.notify_all()
        return True

    def _advance(self) -> None:
        """Bring the serial number up to that of the groups. Called with the lock held."""
        self.serial = max(self.serial, self._read.builder.groups.serial)

    def _bump(self) -> None:
        """Count a change outside the groups, and set their serial to it. Called with the lock held."""
        self._advance()
        self.serial += 1
        self._read.builder.groups.serial = self.serial
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ how it stands

    def _show_status(self, status: dict[str, Any]) -> None:
        with self._changed:
            if status != self._status:
                self._status = status
                self._bump()

    def _stands(self) -> dict[str, Any]:
        """The run's status: by its last event, or by its lock."""
        if not self._directory.path.is_dir():
            return {"status": "unreadable", "reason": "the run's directory is gone"}
        metrics = self._read.builder.metrics
        found = standing(metrics.started, metrics.finished, self._directory.lock)
        if not found.goes_on:
            return {"status": found.status, "reason": found.reason}
        words = self._words() + ("; the lock does not tell whether it goes on" if found.trained is None else "")
        return {"status": "running", "reason": None, "words": words}

    def _words(self) -> str:
        """Activity of a running run."""
        read, metrics = self._read, self._read.builder.metrics
        started, finished = metrics.started, metrics.finished
        if started is None:
            return "starting"
        if read.starting:
            return f"starting again from version {metrics.version}"
        if only_starts(self._directory.lock, self._directory.events):
            return "starting again"
        if finished is not None:
            return f"{finished.status}; it still writes its model and reports"
        of = "" if started.total_groups is None else f" of {human.count(started.total_groups)}"
        return f"running: version {metrics.version}, {human.count(metrics.tally.fates['trained'])}{of} groups trained"

    # ------------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        """Make curves and timeline again, where something is new and their time has come, if anybody looks.

        Once a run is over both are made at once: nothing follows.
        """
        with self._changed:
            if not self._watched:
                return
            over = self._read.builder.metrics.finished is not None or self._status["status"] != "running"
        read = self._read
        builder = read.builder
        self._build_part(self._curves, builder.curves.serial, over, lambda: curves_json(builder.curves))
        self._build_part(
            self._timeline,
            read.count,
            over,
            lambda: to_json_line(live_parts(builder.build(ended=False), LIVE_SPANS)).encode(),
        )

    def _build_part(self, part: _Part, count: int, over: bool, build: Callable[[], Any]) -> None:
        began = self._clock()
        if count == part.built_from or not (over or began >= part.next_s):
            return
        value = build()
        with self._changed:
            self._bump()
            part.value, part.serial, part.built_from, part.times = value, self.serial, count, part.times + 1
        ended = self._clock()
        part.next_s = ended + max(part.every_s, (ended - began) / BUSY_SHARE)
