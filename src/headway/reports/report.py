"""``headway report RUN``: a run's record as a page and as a trace, of all versions or, of a large run, the newest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headway.errors import ConfigError, DataError, RunError
from headway.events import Event, LeaseChanged, ReplicaJoined, ReplicaLost, RunStarted, UpdatePhase, VersionReached
from headway.reports.metrics.metrics_state import newest
from headway.reports.metrics.run_metrics import RowSink, RunMetrics
from headway.reports.record.events_file import ALL, EventReader, SurvivingRecord, look_through, read_events
from headway.reports.record.file_access import FULL, Rewritten
from headway.reports.run_directory import RunDirectory, is_trained, status_of
from headway.reports.samples.samples_file import Sample, for_page, read_all
from headway.reports.timeline.html_timeline import write_html
from headway.reports.timeline.run_history import GroupLog
from headway.reports.timeline.timeline import Timeline, TimelineBuilder
from headway.reports.timeline.trace import write_trace

DRAWN_BYTES = 16 * 2**20
"""Most bytes of events that are drawn, those of the newest versions; one version is drawn even if it has more. Reading
them takes some seconds."""
LASTING = (RunStarted, ReplicaJoined, ReplicaLost, LeaseChanged, UpdatePhase)
"""Events whose effect lasts for later versions: present replicas, what they serve, who has the devices."""


@dataclass(frozen=True, slots=True)
class DrawnVersions:
    """The versions ``first`` to ``last``, whose events lie at the offsets ``begin`` to before ``end`` of the record."""

    first: int
    last: int
    begin: int
    end: int = ALL


def newest_versions(record: SurvivingRecord, most: int | None = None, versions: int = 1) -> DrawnVersions | None:
    """Return the newest versions whose events have at most ``most`` bytes, by default `DRAWN_BYTES`, but at least so
    many ``versions``; None where the whole run has no more.
    """
    begin = record.size - (most or DRAWN_BYTES)
    if begin <= 0 or len(record.boundaries) <= versions:
        return None
    before = sorted(record.boundaries.items())[:-versions]
    first, at = next((found for found in before if found[1] >= begin), before[-1])
    return DrawnVersions(first, max(record.boundaries), at)


def chosen_versions(versions: str, record: SurvivingRecord) -> DrawnVersions:
    """Return the versions that ``versions`` names, as ``A:B``. Raises `ConfigError` where there are none."""
    newest = max(record.boundaries, default=0)
    first, _, last = versions.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= min(int(last), newest)):
        raise ConfigError(
            f"--versions: got {versions}; expected A:B, the first and the last of the versions 0 to {newest}"
        )
    begin = record.boundaries.get(int(first), 0)
    return DrawnVersions(int(first), min(int(last), newest), begin, record.boundaries.get(int(last) + 1, ALL))


def draw(events: Path, drawn: DrawnVersions, builder: TimelineBuilder, end: int = ALL) -> None:
    """Have ``builder`` draw those versions, up to the offset ``end``, and what continues from the version before.

    Raises `DataError` where the record cannot be read.
    """
    reader = EventReader(events, kinds=(*LASTING, VersionReached))
    before = reader.record.boundaries.get(drawn.first - 1, 0)
    for event in reader.read():
        if reader.at >= drawn.begin:
            break
        if isinstance(event, VersionReached):
            builder.since = event.time
        elif reader.at < before:
            builder.draw(event)
    builder.versions = (drawn.first, drawn.last)
    builder.groups.version = max(drawn.first - 1, 0)
    reader = EventReader(events, record=reader.record, after=before)
    for event in reader.read():
        if reader.at >= min(drawn.end, end):
            break
        builder.draw(event)


HTML_NAME, TRACE_NAME = "timeline.html", "trace.json"


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Paths of a report's files."""

    html: Path
    trace: Path
    damaged: int = 0
    """Number of lines of ``samples.jsonl`` that are no samples, and are left out."""
    adds_up: bool = True
    """False where groups of the record are without their fate, or the reverse: lines of it are missing."""


def places(run: Path, html: Path | None = None, trace: Path | None = None) -> ReportFiles:
    """Return the paths that `report` will write to. Raises `ConfigError` where ``run`` is no run's directory."""
    events_file_of(run)
    return ReportFiles(html or run / HTML_NAME, trace or run / TRACE_NAME)


def report(run: Path, html: Path | None = None, trace: Path | None = None, versions: str | None = None) -> ReportFiles:
    """Write the page and the trace of the run in directory ``run``; by default they lie beside its events.

    A run that failed or still goes on is reported up to its last event. ``versions``: which ones the timeline draws, as
    ``A:B``; by default all, of a large run the newest ones.

    Raises:
        ConfigError: ``versions`` names none, ``run`` is no run's directory, its record cannot be read, or a file cannot
            be written.
        RunError: a disk has no room for a file.
    """
    written = places(run, html, trace)
    with readable(run, "samples.jsonl"):
        samples = read_all(RunDirectory(run).samples)
    shown = for_page(samples)
    timeline = _timeline(run, [sample for sample in shown if "group" in sample], versions)
    write_page = partial(write_html, samples=shown, name=run.resolve().name)
    _write(write_page, timeline, written.html, "--html", default=html is None)
    _write(write_trace, timeline, written.trace, "--trace", default=trace is None)
    return replace(written, damaged=samples.damaged, adds_up=bool(timeline.summary["balanced"]))


def _timeline(run: Path, sampled: Sequence[Sample], versions: str | None) -> Timeline:
    builder = TimelineBuilder(groups=GroupLog({sample["group"] for sample in sampled}))
    path = events_file_of(run)
    with readable(run):
        record = look_through(path)
        drawn = newest_versions(record) if versions is None else chosen_versions(versions, record)
    if drawn is None:
        for event in events_of(run):
            builder.on_event(event)
    else:
        builder.metrics = metrics_of(run, builder.curves)
        with readable(run):
            draw(path, drawn, builder)
        for sample in sampled:
            builder.groups.add_sampled(sample)
    timeline = builder.build()
    found = status_of(builder.metrics.started, builder.metrics.finished, RunDirectory(run).lock)
    return replace(timeline, summary=timeline.summary | {"status": found.status, "reason": found.reason})


def metrics_of(run: Path, sink: RowSink) -> RunMetrics:
    """Return the metrics of the run in directory ``run``; ``sink`` gets the rows. Raises `ConfigError` as `report`."""
    path = events_file_of(run)
    with readable(run):
        state = newest(RunDirectory(run), look_through(path), sink)
    for event in events_of(run, after=state.offset):
        state.metrics.on_event(event)
    return state.metrics


def events_of(
    run: Path, kinds: Collection[type[Event]] | None = None, number: int | None = None, after: int = 0
) -> Iterator[Event]:
    """Yield the surviving history of the run in directory ``run``. Raises `ConfigError` as `report` does.

    ``kinds``, ``number``, ``after``: which events to read, see `EventReader`; there may be none then.
    """
    path = events_file_of(run)
    empty = True
    with readable(run):
        for event in read_events(path, kinds=kinds, number=number, after=after):
            empty = False
            yield event
    if empty and kinds is None and not after:
        raise ConfigError(
            f"RUN: got {run}, where nothing has happened yet: {path.name} has no complete line; {not_yet(run)}"
        )


@contextmanager
def readable(run: Path, what: str = "record") -> Iterator[None]:
    """Raise `ConfigError` where ``what``, which is of the run in directory ``run``, cannot be read in the block."""
    try:
        yield
    except (DataError, OSError, Rewritten) as cause:
        raise ConfigError(f"RUN: got {run}, whose {what} cannot be read: {cause}") from cause


def not_yet(run: Path) -> str:
    """Say why something may not be there yet in the run in directory ``run``, and whether it will be."""
    trained = is_trained(RunDirectory(run).lock)
    if trained is False:
        return "nobody trains there, and nothing will"
    return f"the run {'is' if trained else 'may be'} still starting; ask again in a moment"


def events_file_of(run: Path) -> Path:
    """Return the record of the run in directory ``run``. Raises `ConfigError` where that is no run's directory."""
    return RunDirectory.existing(run, RunDirectory(run).events.name).events


def _write(
    write: Callable[[Timeline, Path], None], timeline: Timeline, path: Path, option: str, *, default: bool
) -> None:
    try:
        write(timeline, path)
    except OSError as cause:
        error = RunError if cause.errno in FULL else ConfigError
        named, give = (path, f"with {option}, give") if default else (f"{option}: got {path}, which", "give")
        raise error(
            f"{named} cannot be written ({cause.strerror or cause}); {give} a file in a directory that exists and has "
            "room"
        ) from cause
