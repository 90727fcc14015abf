"""Data of ``headway show``: samples of a run, or a group's history in its record if it left none.

samples.jsonl ─▶ listed, found          events.jsonl ─▶ found, for a group that was not drawn

A sample is read from ``samples.jsonl`` alone. The record, which is large, is looked at where that does not help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import events
from headway.errors import ConfigError
from headway.reports.metrics.group_tally import FATES, IN_FLIGHT
from headway.reports.report import events_file_of, events_of, not_yet, readable
from headway.reports.run_directory import RunDirectory
from headway.reports.samples.samples_file import mean_of, read_samples
from headway.reports.terminal import visible

OF_A_GROUP = (
    events.GroupAdmitted,
    events.TrajectoryFinished,
    events.GroupRewarded,
    events.BatchTaken,
    events.GroupSettled,
)
ALL_FATES = (*FATES, IN_FLIGHT)

Sample = dict[str, Any]
Summary = dict[str, Any]
"""The line of a sample in a table, as JSON."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Table of a run's samples."""

    lines: list[Summary]
    """The last ones, in the order in which they were written."""
    left_out: int
    """Number of earlier ones."""


def listed(
    run: Path,
    damaged: list[int],
    *,
    last: int,
    validation: bool = False,
    fate: str | None = None,
    source: str | None = None,
) -> Listed:
    """Return a table of the ``last`` samples of a run, of groups or of validations, which are read one at a time.

    ``damaged`` gets the numbers of lines of the file that are no samples.

    Raises:
        ConfigError: ``run`` is no run's directory, has no samples yet, or was told to keep none; its samples cannot be
            read; it has no such fate or source.
    """
    what = "validation" if validation else "group"
    if fate is not None and (validation or fate not in ALL_FATES):
        wanted = f"expected one of {', '.join(ALL_FATES)}" if not validation else "but held-out problems have no fate"
        raise ConfigError(f"--fate: got {fate}, {wanted}")
    lines, sources, count = deque[Summary](maxlen=last), set[str](), 0
    for sample in _samples(run, what, damaged):
        sources.add(str(sample["source"]))
        if (fate is None or sample["fate"] == fate) and (source is None or sample["source"] == source):
            lines.append(_summary(sample))
            count += 1
    if not sources:
        raise ConfigError(_why_none(run, what, damaged))
    if source is not None and source not in sources:
        raise ConfigError(f"--source: got {visible(source)}, expected one of {visible(', '.join(sorted(sources)))}")
    return Listed(list(lines), count - len(lines))


def of_problem(run: Path, problem: int, damaged: list[int]) -> list[Sample]:
    """Return the samples of one held-out problem, by version. Raises `ConfigError` where it was not shown.

    ``damaged`` gets the numbers of lines of the file that are no samples.
    """
    samples, shown = list[Sample](), set[int]()
    for sample in _samples(run, "validation", damaged):
        shown.add(sample["problem"])
        if sample["problem"] == problem:
            samples.append(sample)
    if not shown:
        raise ConfigError(_why_none(run, "validation", damaged))
    if not samples:
        those = ", ".join(map(str, sorted(shown)))
        raise ConfigError(
            f"GROUP: got {problem}, but with --validation it is one of the problems that are shown: {those}"
        )
    return samples


def found(run: Path, number: int, damaged: list[int]) -> Sample:
    """Return the last sample of group ``number``, or what the record tells of it where it left none.

    That has no text, and says under ``why`` why it has none. ``damaged`` gets the numbers of lines of the file that may
    have been its own and are no samples.

    Raises `ConfigError` for a group that was never admitted, and what cannot be read.
    """
    last: Sample | None = None
    for sample in _samples(run, "group", damaged, number):
        last = sample
    return last if last is not None else _from_record(run, number, damaged)


def of_episode(sample: Sample, k: int | None) -> Sample:
    """Return ``sample`` with the episode ``k`` alone, or all of it for None. Raises `ConfigError` where it has none."""
    if k is None:
        return sample
    there = [one["k"] for one in sample["episodes"]]
    if k not in there:
        has = ", ".join(map(str, there)) or "none, for it ended before any was made"
        raise ConfigError(f"--episode: got {k}, but group {sample['group']} has the episodes {has}")
    return {**sample, "episodes": [one for one in sample["episodes"] if one["k"] == k]}


def _summary(sample: Sample) -> Summary:
    episodes = sample["episodes"]
    lengths = [e["length"] for e in episodes]
    common = {
        "source": sample["source"],
        "reward": mean_of(episodes, "reward"),
        "lengths": [min(lengths), max(lengths)] if lengths else None,
        "turns": max((e["turns"] for e in episodes), default=None),
        "prompt": sample["prompt"],
        "question": sample.get("question") or sample["prompt"],
    }
    if "group" in sample:
        own = {name: sample[name] for name in ("group", "version", "fate", "reason", "lag")}
        return own | {"episodes": len(episodes), "failed": sum(e["failure"] is not None for e in episodes)} | common
    return {"validation": sample["validation"], "problem": sample["problem"], "episodes": len(episodes)} | common


def _samples(run: Path, what: str, damaged: list[int], number: int | None = None) -> Iterator[Sample]:
    events_file_of(run)
    path = RunDirectory(run).samples
    if not path.is_file():
        return
    with readable(run, "samples"):
        yield from read_samples(path, what=what, number=number, damaged=damaged)


def _from_record(run: Path, number: int, damaged: list[int]) -> Sample:
    """Return what the record tells of a group, in the form of a sample."""
    sample: Sample | None = None
    for event in events_of(run, OF_A_GROUP, number):
        match event:
            case events.GroupAdmitted(number=n) if n == number:
                times = {"admitted": event.time, "generated": None, "rewarded": None, "settled": None}
                sample = {"group": number, "version": event.version, "fate": IN_FLIGHT, "reason": None, "lag": None}
                sample |= {"source": event.source, "prompt": None, "answer": None, "baseline": None, "times": times}
                sample |= {"rewards": [], "parts": {}, "episodes": []}
            case _ if sample is None:
                pass
            case events.TrajectoryFinished(number=n) if n == number:
                sample["episodes"].append(_episode_of(event))
                sample["times"]["generated"] = max(sample["times"]["generated"] or event.finished, event.finished)
            case events.GroupRewarded(number=n) if n == number:
                sample |= {"rewards": event.rewards, "parts": event.parts}
                sample["times"]["rewarded"] = event.time
            case events.BatchTaken() if number in event.numbers:
                sample["version"] = event.version
            case events.GroupSettled(number=n) if n == number:
                sample |= {"fate": event.fate, "reason": event.reason, "lag": event.lag}
                sample["times"]["settled"] = event.time
    if sample is None:
        raise ConfigError(_never_admitted(run, number))
    sample["episodes"].sort(key=lambda one: one["k"])
    return sample | {"why": _why_no_text(run, sample, damaged)}


def _episode_of(event: events.TrajectoryFinished) -> dict[str, Any]:
    seconds = {name: sum(end - start for start, end in getattr(event, name)) for name in ("waits", "steps")}
    return {
        **{name: getattr(event, name) for name in ("k", "replica", "turns", "limit", "failure", "notes")},
        "length": event.tokens,
        "finish": event.finish_reason,
        "started": event.started,
        "finished": event.finished,
        "waited_s": seconds["waits"],
        "worked_s": seconds["steps"],
        "reward": None,
        "parts": {},
        "versions": list(dict.fromkeys(version for _, version in event.version_spans)),
    }


def _why_no_text(run: Path, sample: Sample, damaged: list[int]) -> str:
    if damaged:
        return "It has no text that can be read: it was not drawn, or its line in samples.jsonl is damaged."
    if sample["times"]["settled"] is None:
        return "Its fate is not settled yet; a group that is drawn leaves its text when it is."
    if (drawn := _drawn_per_version(run)) == 0:
        return "Its text was not kept, for the run has reports.samples=0; reports.samples=N keeps N groups a version."
    if not RunDirectory(run).samples.is_file():
        return "Whether it was drawn, and what it said, is not known: the run's samples.jsonl is missing."
    rate = "some groups" if drawn is None else f"about {drawn} groups"
    return (
        f"It was not drawn, so its text was not kept: {rate} of each version leave theirs. "
        "A larger reports.samples keeps more."
    )


def _never_admitted(run: Path, number: int) -> str:
    last = _last_admitted(run)
    if last is None:
        return f"GROUP: got {number}, but in {run} no group was admitted yet: {not_yet(run)}"
    return f"GROUP: got {number}, but the run in {run} has admitted the groups 0 to {last}"


def _why_none(run: Path, what: str, damaged: list[int]) -> str:
    if damaged:
        return f"RUN: got {run}, whose samples.jsonl has damaged lines and no sample of a {what} that can be read"
    if _last_admitted(run) is None and what == "group":
        return f"RUN: got {run}, where no group was admitted yet: {not_yet(run)}"
    if _drawn_per_version(run) == 0:
        return f"RUN: got {run}, which keeps no samples: it has reports.samples=0"
    if not RunDirectory(run).samples.is_file():
        return f"RUN: got {run}, whose samples.jsonl is missing: what was said is in no other file; take it from a copy"
    if what == "validation":
        return f"RUN: got {run}, which has no samples of a validation: none has ended, or rollout.test_freq is -1"
    return f"RUN: got {run}, where no group that was drawn has ended yet"


def _last_admitted(run: Path) -> int | None:
    next(events_of(run), None)  # raises where the record is empty
    admitted = events_of(run, (events.GroupAdmitted,))
    return max((event.number for event in admitted if isinstance(event, events.GroupAdmitted)), default=None)


def _drawn_per_version(run: Path) -> int | None:
    """Return ``reports.samples`` of a run; None where its configuration does not tell."""
    from headway.config.loading import load

    try:
        return load(RunDirectory(run).config, []).config.reports.samples
    except (ConfigError, OSError):
        return None
