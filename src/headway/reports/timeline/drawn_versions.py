"""Choice of the versions that a timeline draws: of a large run the newest, or those asked for.

events.jsonl, segments ─▶ `newest_versions` or `chosen_versions` ─▶ `draw`: what lanes, marks and groups need of them
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.events import LeaseChanged, ReplicaJoined, ReplicaLost, RunStarted, UpdatePhase, VersionReached
from headway.reports.record.dense_events import ALL, segments_of
from headway.reports.record.events_file import EventReader, SurvivingRecord
from headway.reports.timeline.timeline import TimelineBuilder

MOST_DENSE = 50_000
"""Most dense events of the newest versions that are drawn, but for one version; some seconds to read."""
LASTING = (RunStarted, ReplicaJoined, ReplicaLost, LeaseChanged, UpdatePhase)
"""Events that say what still holds versions later: who is there, what it serves, who has the devices."""


@dataclass(frozen=True, slots=True)
class DrawnVersions:
    """The versions ``first`` to ``last``, and their lines of ``events.jsonl``: ``line`` to before ``end``."""

    first: int
    last: int
    line: int
    end: int = ALL


def newest_versions(
    events: Path, record: SurvivingRecord, most: int | None = None, versions: int = 1
) -> DrawnVersions | None:
    """Return the newest versions that have at most ``most`` dense events, by default `MOST_DENSE`, but at least
    so many ``versions``; None where the whole run has no more.
    """
    count, begin = 0, ALL
    for segment in reversed(segments_of(events)):
        count += segment.rows()
        if count > (most or MOST_DENSE) and sum(line >= begin for line in record.boundaries.values()) >= versions:
            break
        begin = segment.line
    else:
        return None
    before = [version for version, line in record.boundaries.items() if line < begin]
    return (
        None if not before else DrawnVersions(max(before), max(record.boundaries), record.boundaries[max(before)] + 1)
    )


def chosen_versions(versions: str, record: SurvivingRecord) -> DrawnVersions:
    """Return the versions that ``versions`` names, as ``A:B``. Raises `ConfigError` where there are none."""
    newest = max(record.boundaries, default=0)
    first, _, last = versions.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= min(int(last), newest)):
        raise ConfigError(
            f"--versions: got {versions}; expected A:B, the first and the last of the versions 0 to {newest}"
        )
    line = record.boundaries.get(int(first), -1) + 1
    return DrawnVersions(int(first), min(int(last), newest), line, record.boundaries.get(int(last) + 1, ALL - 1) + 1)


def draw(events: Path, drawn: DrawnVersions, builder: TimelineBuilder, end: int = ALL) -> None:
    """Have ``builder`` draw those versions, up to ``end`` lines, and what continues from the version before.

    Raises `DataError` where the record cannot be read.
    """
    reader = EventReader(events, kinds=(*LASTING, VersionReached))
    before = reader.record.boundaries.get(drawn.first - 1, -1) + 1
    for event in reader.read():
        if reader.line >= drawn.line:
            break
        if isinstance(event, VersionReached):
            builder.since = event.time
        elif reader.line < before:
            builder.draw(event)
    builder.versions = (drawn.first, drawn.last)
    builder.groups.version = max(drawn.first - 1, 0)
    reader = EventReader(events, after=before)
    for event in reader.read():
        if reader.line >= min(drawn.end, end):
            break
        builder.draw(event)
