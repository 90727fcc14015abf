"""Follower of a run by reading the files of its directory; it reports changes.

    events.jsonl  ─▶ TimelineBuilder ─▶ figures, curves, ledger, groups ─┐
    samples.jsonl ─▶ SampleIndex     ─▶ which groups have a text         ├─▶ `Follower.message`: the whole page as JSON
    run.lock      ─▶ is it trained?  ─▶ the status                       ─┘     and, more rarely, `Follower.timeline`

A resumed run undoes a part of its record: then everything is read again, and pages start again (`epoch`). One thread
reads and builds. Pages get its last result, and never wait for a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError, HeadwayError, RunError, said_by
from headway.events import RunResumed, RunStarted
from headway.reports import human
from headway.reports.metrics.metrics_state import newest
from headway.reports.metrics.summary import summary
from headway.reports.record.events_file import EventReader, SurvivingRecord, look_through, to_json_line
from headway.reports.record.file_access import Rewritten
from headway.reports.report import draw, newest_versions
from headway.reports.run_directory import RunDirectory, only_starts, status_of
from headway.reports.samples.samples_file import Key, SampleIndex
from headway.reports.timeline.html_timeline import cards, live_parts
from headway.reports.timeline.run_history import GroupLog, ledger
from headway.reports.timeline.run_history import to_json as curves_json
from headway.reports.timeline.timeline import TimelineBuilder

LOOK_EVERY_S = 0.5
"""Seconds between two looks at the files."""
BUSY_SHARE = 0.01
"""Maximum share of a core for building a part of the page, which limits how often it is built."""
MESSAGE_EVERY_S, TIMELINE_EVERY_S = 0.5, 3.0
LIVE_SPANS = 30_000
"""Most spans of a timeline that is drawn again and again."""
JOIN_TIMEOUT_S = 10.0
READING: dict[str, Any] = {"status": "reading", "reason": None}


@dataclass(slots=True)
class _Built:
    """Part of the page that takes time to build. It is rebuilt when its data is new, and the more rarely the longer it
    takes.
    """

    every_s: float
    value: bytes = b""
    times: int = 0
    """Number of times that it was built."""
    built_from: tuple[object, ...] = ()
    """Numbers of the data from which ``value`` was built."""
    next_s: float = 0.0


@dataclass(slots=True)
class _Read:
    """Data read from the run since its record was last read from the beginning."""

    events: EventReader
    samples: SampleIndex
    builder: TimelineBuilder
    starting: bool = False
    """True from a resume until the following start."""


class Follower:
    """Follows the run in ``directory`` from `start` to `close`, in a thread that calls `look` again and again.

    From other threads only `news`, `timeline`, `sample`, `first_look`, `join` and `close` may be called.
    """

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._failure: HeadwayError | None = None
        self._thread = threading.Thread(target=self._follow, name="follow-run", daemon=True)
        self._read = self._anew(SurvivingRecord())
        self._outdated = True
        """True if the record has to be read from its beginning."""
        self.watched = 0
        """Number of open pages. Nothing is built without any."""
        self.epoch = 0
        self._status: dict[str, Any] = READING
        self._message, self._timeline = _Built(MESSAGE_EVERY_S), _Built(TIMELINE_EVERY_S)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------ pages

    def news(self, since: int, timeout_s: float) -> tuple[int, bytes] | None:
        """Wait at most ``timeout_s`` for a message with a number above ``since``. Returns number and message, or
        None.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._message.times > since or self.closing, timeout_s)
            return (self._message.times, self._message.value) if self._message.times > since else None

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def first_look(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until the run was read. Returns True unless it is known that it cannot be
        followed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._status != READING or self.closing, timeout_s)
        return self._failure is None

    def join(self) -> None:
        """Wait until following ends, by `close` or by a failure. Raises `DataError` where the record is damaged.

        Raises `RunError` if following failed for an unexpected reason.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def message(self) -> dict[str, Any]:
        """Return everything that a page shows, with only the number of its timeline."""
        builder, samples = self._read.builder, self._read.samples
        figures = summary(builder.metrics)
        groups = builder.groups.lines()
        sampled = [f"group={number}" for number, *_ in groups if number in samples.groups]
        return {
            "epoch": self.epoch,
            "status": self._status,
            "figures": list(cards(figures, (builder.first or 0.0, builder.last))),
            "sentence": figures["bottleneck"],
            "ledger": ledger(builder.metrics),
            "curves": curves_json(builder.curves),
            "groups": groups,
            "validations": [*samples.lines.values()],
            "sampled": sampled + [f"validation={version}&problem={problem}" for version, problem in samples.lines],
            "damaged": samples.damaged,
            "timeline": self._timeline.times,
        }

    def timeline(self) -> bytes:
        """Return the newest timeline as JSON, which `live_parts` describes; empty before there is one."""
        return self._timeline.value

    def sample(self, key: Key) -> bytes | None:
        """Return the JSON of a sample; None where there is none. Raises `OSError` where it cannot be read."""
        return self._read.samples.line(key)

    # ------------------------------------------------------------------------------------------ reading

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                if not self.look():
                    self._closing.wait(LOOK_EVERY_S)
        except DataError as cause:
            self._failure = cause
            self._show({"status": "damaged", "reason": str(cause)})
        except Exception as cause:  # a thread's own traceback would leave the command with nothing to end with
            self._failure = RunError(f"{self._directory.path}: the run cannot be followed any more: {said_by(cause)}")
            self._failure.__cause__ = cause
            self._show({"status": "unreadable", "reason": str(self._failure)})

    def look(self) -> bool:
        """Look at the files once. Return whether there may be more to read at once.

        Raises `DataError` for a record that is damaged.
        """
        try:
            if self._outdated:
                self._begin_anew()
                self._outdated = False  # only now: after a failure above it is read again
            went_on = self._read.samples.read_on() > 0
            went_on |= self._read_events()  # not `went_on or`, which would skip it
            if not went_on:  # up to date
                self._show(self._stands())
            return went_on
        except Rewritten:
            self._outdated = True
            return True
        except (OSError, DataError) as cause:
            unread = cause.__cause__ if isinstance(cause, DataError) else cause
            if not isinstance(unread, OSError):
                raise
            self._show({"status": "unreadable", "reason": f"a file of the run cannot be read: {unread}"})
            return False

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
        # In one assignment: pages ask for samples from other threads at any time.
        self._read = read
        self.epoch += 1
        self._show(READING)

    def _begin_late(self, read: _Read) -> None:
        """Begin at the newest saved metrics of a large run, and read only the events of the versions after them."""
        events, record, builder = self._directory.events, read.events.record, read.builder
        drawn, state = newest_versions(record), newest(self._directory, record, builder.curves)
        if drawn is not None and state.offset:
            builder.metrics = state.metrics
            draw(events, drawn, builder, state.offset)
            read.events = EventReader(events, record=record, after=state.offset)

    def _read_events(self) -> bool:
        """Read a chunk of the record. Raises `Rewritten` where the run was resumed since it was looked through."""
        read = self._read
        before, resumed = read.events.offset, read.events.record.resumed
        # The whole chunk first: if the run was resumed within it, none of it is drawn.
        events = list(read.events.read_on())
        if any(isinstance(event, RunResumed) and event.times > resumed for event in events):
            raise Rewritten
        for event in events:
            read.builder.on_event(event)
            read.starting = isinstance(event, RunResumed) or (read.starting and not isinstance(event, RunStarted))
        return read.events.offset > before

    # ------------------------------------------------------------------------------------------ how it stands

    def _stands(self) -> dict[str, Any]:
        """The run's status: by its last event, or by its lock."""
        if not self._directory.path.is_dir():
            return {"status": "unreadable", "reason": "the run's directory is gone"}
        metrics = self._read.builder.metrics
        found = status_of(metrics.started, metrics.finished, self._directory.lock)
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

    def _show(self, status: dict[str, Any]) -> None:
        """Build the parts of pages that are new and due. A new status is sent at once.

        Once a run is over its timeline is made at once, too: nothing follows.
        """
        read = self._read
        with self._changed:
            self._status = status
            self._changed.notify_all()
        if not self.watched:
            return
        if status != READING:
            over = read.builder.metrics.finished is not None or status["status"] != "running"
            self._build(
                self._timeline,
                (self.epoch, read.events.offset),
                lambda: live_parts(read.builder.build(ended=False), LIVE_SPANS),
                at_once=over,
            )
        known = (self.epoch, read.events.offset, read.samples.offset, self._timeline.times, str(status))
        told = self._message.built_from
        self._build(self._message, known, self.message, at_once=known[3:] != told[3:])

    def _build(self, part: _Built, built_from: tuple[object, ...], build: Callable[[], Any], *, at_once: bool) -> None:
        began = self._clock()
        if built_from == part.built_from or not (at_once or began >= part.next_s):
            return
        value = to_json_line(build()).encode()
        with self._changed:
            # Together, under the lock: a reader of the number must find the matching data.
            part.value, part.built_from, part.times = value, built_from, part.times + 1
            self._changed.notify_all()
        ended = self._clock()
        part.next_s = ended + max(part.every_s, (ended - began) / BUSY_SHARE)
