"""Samples of a run, found by group or by validation and problem, in ``samples.jsonl``.

Lines of a group are long, for they hold its tokens: the index keeps where they lie, and one is read when it is shown. A
group or a validation that a resume undid is written again; its last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.reports.record.file_tail import Tail
from headway.reports.samples.samples_file import HEAD, Sample, mean_of, parsed

ON_PAGE = 2 * 10**6
"""Most bytes of samples in a page that is one file."""
MOST_OF_ONE = ON_PAGE // 6
MOST_VALIDATIONS = 2_000

Key = tuple[int] | tuple[int, int]
"""A group's number, or the version of a validation and the problem."""


@dataclass(frozen=True, slots=True)
class At:
    """Place of a sample's line in the file, and the trainer's version that it belongs to."""

    offset: int
    size: int
    version: int


Found = tuple[Key | None, At, list[Any]]
"""What a line is: the sample's key, None where it is no sample; where it lies; a validation's line in a list."""


@dataclass(slots=True)
class SampleIndex:
    """Index of the lines read so far. ``read`` resumes at the end of the last reading."""

    path: Path
    groups: dict[int, At] = field(default_factory=dict)
    validations: dict[tuple[int, int], At] = field(default_factory=dict)
    lines: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Version and problem → its line in a list: version, problem, source, mean reward and length. The newest alone."""
    damaged: int = 0
    """Number of lines that were found to be no samples; a group's line is parsed when a page is made of it."""
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.path)

    def read_on(self) -> bool:
        """Read as `read` does; tell whether there was anything."""
        before = self._tail.offset
        self.read()
        return self._tail.offset > before

    def read(self) -> tuple[list[int], list[list[Any]]]:
        """Read on; return the groups and the lines of validations that came. Raises `Rewritten` and `OSError`."""
        return self.merge(self.parsed())

    def parsed(self) -> list[Found]:
        """Read on and parse, which takes time, and leave what the index tells to `merge`. Raises as `read` does."""
        return [_parsed(offset, line) for offset, line in self._tail.read()]

    def merge(self, found: Sequence[Found]) -> tuple[list[int], list[list[Any]]]:
        """Take up what `parsed` has found. Returns what `read` does."""
        groups: list[int] = []
        validations: list[list[Any]] = []
        for key, at, told in found:
            if key is None:
                self.damaged += 1
            elif len(key) == 1:
                self.groups[key[0]] = at
                groups.append(key[0])
            else:
                self.validations[key], self.lines[key] = at, told
                validations.append(told)
                if len(self.lines) > MOST_VALIDATIONS:
                    del self.lines[next(iter(self.lines))]
        return groups, validations

    def find(self, key: Key) -> At | None:
        """Return where the sample of ``key`` lies; None where there is none."""
        return self.groups.get(key[0]) if len(key) == 1 else self.validations.get(key)

    def line(self, key: Key) -> bytes | None:
        """Return the JSON of one sample; None where there is none. Raises `OSError` where it cannot be read."""
        if (at := self.find(key)) is None:
            return None
        with self.path.open("rb") as file:
            file.seek(at.offset)
            return file.read(at.size)


def _parsed(offset: int, line: bytes) -> Found:
    if (found := HEAD.match(line)) and found[1] == b"group":  # most of them, without parsing their tokens
        return (int(found[2]),), At(offset, len(line), int(found[3])), []
    try:
        row = parsed(line)
        if "group" in row:  # spelled in another order than its writer's
            return (int(row["group"]),), At(offset, len(line), int(row["version"])), []
        key, told = (int(row["validation"]), int(row["problem"])), validation_line(row)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, At(offset, len(line), -1), []
    return key, At(offset, len(line), key[0]), told


def validation_line(sample: Sample) -> list[Any]:
    """Return a held-out problem's line in a list: version, problem, source, mean reward and length."""
    episodes = sample["episodes"]
    means = mean_of(episodes, "reward"), mean_of(episodes, "length")
    return [int(sample["validation"]), int(sample["problem"]), str(sample.get("source", "")), *means]


def read_all(path: Path) -> SampleIndex:
    """Return the index of a whole file. A file that does not exist has no samples."""
    index = SampleIndex(path)
    while index.read_on():
        pass
    return index


def for_page(index: SampleIndex, budget: int = ON_PAGE) -> list[dict[str, Any]]:
    """Samples that fit into ``budget`` bytes of JSON: the newest, the oldest, and evenly between them.

    Groups and validations get a half each, and what the other leaves. Of a group that is large its first episodes keep
    their tokens; ``left_out`` counts the others.
    """
    validations = sorted(index.validations, key=lambda key: (index.validations[key].version, key))
    chosen, left = _fill(index, validations, budget // 2)
    groups, _ = _fill(index, [(number,) for number in sorted(index.groups)], budget - budget // 2 + left)
    return groups + chosen


def _fill(index: SampleIndex, keys: Sequence[Key], budget: int) -> tuple[list[dict[str, Any]], int]:
    """Return samples of ``keys`` that fit, and how much of the budget is left."""
    found: list[dict[str, Any]] = []
    for place in spread(len(keys)):
        sample = _small(index.line(keys[place]))
        if sample is None:
            index.damaged += 1
            continue
        size = len(json.dumps(sample, ensure_ascii=False).encode())
        if size > budget:
            if budget < MOST_OF_ONE:
                break
            continue
        budget -= size
        found.append(sample)
    return found, budget


def spread(count: int) -> Iterator[int]:
    """Yield each number below ``count`` once: the last, the first, then by halves, so that any beginning is spread."""
    seen: set[int] = set()
    parts = 1
    while len(seen) < count:
        for step in range(parts, -1, -1):
            place = (count - 1) * step // parts
            if place not in seen:
                seen.add(place)
                yield place
        parts *= 2


def _small(line: bytes | None) -> dict[str, Any] | None:
    """Parse a sample, without its ids, and with tokens of as many episodes as fit into `MOST_OF_ONE`."""
    try:
        sample: dict[str, Any] = parsed(line or b"")
        room, left_out = MOST_OF_ONE, 0
        for episode in sample["episodes"]:
            rows = [{name: value for name, value in row.items() if name != "ids"} for row in episode.get("rows", [])]
            size = len(json.dumps(rows)) + len(json.dumps(episode.get("text", "")))
            if rows and size > room:
                rows, left_out = [], left_out + 1
            episode["rows"] = rows
            room -= size if rows else 0
        sample["left_out"] = left_out
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return sample
