"""A run's samples, ``samples.jsonl``: answers of sampled groups and held-out problems, one JSON object per line.

    on_sample ─▶ line ─▶ line ─▶ … ─▶ more than `LIMIT` bytes: half of the groups, and of the validations, leave
                                      the file, and of those to come half are taken

So a run of weeks has a file of bounded size, with as many samples of old versions as of new ones. Each line ends with
``thinned``, the number of times that the file was thinned, which is the same on all lines. See docs/samples.md.

A group's line is long, since it has its tokens: `SampleIndex` stores the offset, and the line is read when it is shown.
A group or a validation undone by a resume is written again; its last line counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.config.schema import Config
from headway.data.mixing import place_of_group, share_of
from headway.errors import DataError, writable_json
from headway.reports.record.events_file import JsonLines
from headway.reports.record.file_access import Tail, draft_of, whole_lines

LIMIT = 64 * 2**20
"""Number of bytes above which the file is thinned."""
ON_CLOCK = ("admitted", "generated", "rewarded", "settled", "started", "finished", "time")
"""Names of the times in a sample."""
HEAD = re.compile(rb'\{"(group|validation)": ?(-?\d+), ?"(?:version|problem)": ?(-?\d+)')
"""Beginning of a line: kind, the group's number or the validated version, and the group's version or the problem."""
_END = re.compile(rb', "thinned": (\d+)\}\s*$')
_OF_VALIDATION = frozenset({"validation", "problem", "source", "prompt", "answer", "time", "episodes"})
_OF_GROUP = frozenset(
    {"group", "version", "fate", "reason", "lag", "source", "prompt", "answer", "baseline", "times", "episodes"}
)
_OF_ANSWER = frozenset({"k", "reward", "parts", "turns", "length", "finish", "text", "conversation"})
_OF_EPISODE = _OF_ANSWER | frozenset(
    {"replica", "turn_rewards", "limit", "failure", "started", "finished", "waited_s", "worked_s", "rows"}
)
_OF_ROW = frozenset(
    {"context", "prompt_length", "cut", "ids", "pieces", "mask", "versions", "behaviour", "logprobs", "entropy"}
    | {"columns"}
)

Sample = Mapping[str, Any]


def mean_of(episodes: Iterable[Sample], name: str) -> float | None:
    """Return the mean of the field ``name``, such as ``reward``, over ``episodes``; None if no episode has it."""
    values = [value for episode in episodes if (value := episode.get(name)) is not None]
    return round(fmean(values), 5) if values else None


@dataclass(frozen=True, slots=True)
class Thinning:
    """Rule for the samples that stay in a file, by the number of times that it was thinned."""

    seed: int
    share: float
    """Share of groups that were drawn."""
    every: int
    """Number of versions between two validations."""
    last: int | None = None
    """The run's last version, whose validation stays; None if the run's length is not a number of groups."""

    @classmethod
    def of(cls, config: Config) -> Thinning:
        share = share_of(config.reports.samples, config.groups_per_version)
        total = config.rollout.total_rollout_steps
        last = None if total is None else total // config.groups_per_version
        return cls(config.run.seed, share, max(1, config.rollout.test_freq), last)

    def keeps(self, what: str, number: int, thinned: int) -> bool:
        """Tell whether the sample of a ``group``, or of the ``validation`` of a version, stays."""
        if what == "validation":
            return number == self.last or number // self.every % (1 << thinned) == 0
        return not thinned or place_of_group(self.seed, number) < self.share / 2**thinned


class SamplesFile:
    """Writer of ``samples.jsonl``. A failing disk does not end the run."""

    def __init__(self, path: Path, thinning: Thinning, report: Callable[[str], None], limit: int = LIMIT) -> None:
        """Open the file, which may have samples. ``report`` is called once with a text if writing fails."""
        self._path = path
        self._thinning = thinning
        self._report = report
        self._limit = limit
        self._reported = False
        self.thinned = _thinned(path)
        """Number of times that the file was thinned."""
        self._lines = JsonLines(path, report)

    def takes(self, sample: Sample) -> bool:
        """Return True if ``sample`` belongs in the file, by the number of times that it was thinned."""
        what = "group" if "group" in sample else "validation"
        return self._thinning.keeps(what, sample[what], self.thinned)

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Write a sample that `takes` accepts. If the file becomes too large, about half of its samples are removed."""
        # Flushed at once: the next line may be minutes away.
        # ``thinned`` stays last, where `_END` finds it without parsing the tokens before it.
        self._lines.write({**sample, "thinned": self.thinned}, at_once=True)
        # At most once per sample: lines that always stay, such as the first validation, may exceed the limit alone.
        if self._lines.whole and self._lines.size > self._limit and self._thin():
            # Otherwise a file that stays nearly full would be rewritten at each of the next samples.
            while self._lines.size > self._limit * 3 // 4:
                self._limit *= 2

    def close(self) -> None:
        self._lines.close()

    def _thin(self) -> bool:
        """Rewrite the file with about half of its samples. Returns True on success."""
        # First: pending lines would go to the file that is replaced.
        self._lines.close()
        self.thinned += 1
        draft = draft_of(self._path)
        try:
            with draft.open("wb") as kept:
                for line in _lines_of(self._path):
                    found = HEAD.match(line)
                    if found and self._thinning.keeps(found[1].decode(), int(found[2]), self.thinned):
                        kept.write(_END.sub(b', "thinned": %d}\n' % self.thinned, line))
            draft.replace(self._path)
            return True
        except (OSError, DataError) as cause:
            self._limit *= 2
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if not self._reported:
                self._reported = True
                self._report(f"cannot thin {self._path}: {cause}; it grows beyond {self._limit // 2**21} MiB")
            return False
        finally:
            self._lines = JsonLines(self._path, self._report)  # also after a failure: it was closed above


def later(sample: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return ``sample`` with its times moved to a clock that is ``seconds`` ahead."""

    def moved(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: round(one + seconds, 4) if name in ON_CLOCK and isinstance(one, float | int) else one
            for name, one in value.items()
        }

    result = moved(sample)
    if "times" in result:
        result["times"] = moved(result["times"])
    result["episodes"] = [moved(episode) for episode in result["episodes"]]
    return result


def write_surviving(path: Path, draft: Path, version: int, boundary: float, *, validated: bool = False) -> None:
    """Write to ``draft`` the samples of ``path`` from a run's history up to the boundary of ``version``, at the time
    ``boundary``. With ``validated``, that version's validation is included, with the boundary as its time. Lines that
    are no samples are left out.

    Raises `OSError` if writing fails.
    """
    with draft.open("wb") as kept:
        for line in _lines_of(path):
            with suppress(ValueError, KeyError, TypeError):
                sample = json.loads(line)
                if _survives(sample, version, boundary):
                    kept.write(line)
                elif validated and sample.get("validation") == version:
                    kept.write(json.dumps(sample | {"time": boundary}).encode() + b"\n")


def read_samples(
    path: Path, *, what: str | None = None, number: int | None = None, damaged: list[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the samples in a file, in order. An incomplete last line is left out.

    ``what``: ``group`` or ``validation`` for only these; None for both. ``number``: number of the only group wanted, so
    that other groups' lines are not parsed. ``damaged``: list to which the numbers, from 1, of lines that are no
    samples are added; these lines are left out.

    Raises `DataError` for a file that cannot be read, and without ``damaged`` also for a line that is no sample.
    """
    for index, line in enumerate(_lines_of(path)):
        head = HEAD.match(line) if number is not None else None
        if head is not None and (head[1] != b"group" or int(head[2]) != number):
            continue
        try:
            sample = _checked(parsed(line))
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            if damaged is None:
                raise DataError(f"{path}:{index + 1} is not a sample of this version of Headway: {cause!r}") from cause
            damaged.append(index + 1)
            continue
        if (what is None or what in sample) and number in (None, sample.get("group")):
            yield sample


def parsed(line: bytes) -> Any:
    """Return the JSON value of a line, with lone surrogates escaped, so that it can be written as UTF-8.

    Raises `ValueError` for a line that is not JSON or not UTF-8.
    """
    value = json.loads(line.decode())
    # Only for such lines: lone surrogates parse, but fail later, when the text is written as UTF-8.
    if b"\\ud" in line.lower():
        value = json.loads(writable_json(json.dumps(value, ensure_ascii=False)))
    return value


def _checked(sample: dict[str, Any]) -> dict[str, Any]:
    """Return ``sample`` if it has all keys. Raises `KeyError` for a missing key, `AttributeError` or `TypeError` for a
    value of a wrong type.
    """
    of_group = "group" in sample
    _has(sample, _OF_GROUP if of_group else _OF_VALIDATION)
    for episode in sample["episodes"]:
        _has(episode, _OF_EPISODE if of_group else _OF_ANSWER)
        for row in episode["rows"] if of_group else ():
            _has(row, _OF_ROW)
    return sample


def _has(value: Mapping[str, Any], keys: frozenset[str]) -> None:
    if missing := keys - value.keys():
        raise KeyError(min(missing))


def _survives(sample: Sample, version: int, boundary: float) -> bool:
    if "group" in sample:
        return bool(sample["version"] < version)
    return bool(sample["validation"] < version and sample["time"] <= boundary + 1e-3)  # times in samples are rounded


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file. Raises `DataError` if it cannot be read."""
    try:
        yield from whole_lines(path)
    except OSError as cause:
        raise DataError(f"cannot read the samples of a run: {cause}") from cause


def _thinned(path: Path) -> int:
    """Return the number of times that a file was thinned, by its last complete line; 0 without a line."""
    if not path.is_file():
        return 0
    last = b""
    for line in _lines_of(path):
        last = line
    found = _END.search(last)
    return int(found[1]) if found else 0


ON_PAGE = 2 * 10**6
"""Largest size of the samples in a self-contained page, in bytes."""
MOST_OF_ONE = ON_PAGE // 6
MOST_VALIDATIONS = 2_000

Key = tuple[int] | tuple[int, int]
"""Number of a group, or version and problem of a validation."""


@dataclass(slots=True)
class SampleIndex:
    """Index of the lines read so far. `read_on` resumes at the end of the last reading."""

    path: Path
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Group → offset and size of its line."""
    validations: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Version and problem → offset and size of its line."""
    lines: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Version and problem -> its entry in a list: version, problem, source, mean reward and length. Only the newest
    entries."""
    damaged: int = 0
    """Number of lines found to be no samples. A group's line is checked only when it is shown."""
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.path)

    @property
    def offset(self) -> int:
        """Number of bytes before the next line."""
        return self._tail.offset

    def read_on(self) -> int:
        """Index the new lines, a few MiB of them. Returns their number. Raises `Rewritten` and `OSError`."""
        count = 0
        for offset, line in self._tail.read():
            count += 1
            (key, told), at = _parsed(line), (offset, len(line))
            if key is None:
                self.damaged += 1
            elif len(key) == 1:
                self.groups[key[0]] = at
            else:
                self.validations[key], self.lines[key] = at, told
                if len(self.lines) > MOST_VALIDATIONS:
                    del self.lines[next(iter(self.lines))]
        return count

    def line(self, key: Key) -> bytes | None:
        """Return the JSON of one sample; None if there is none. Raises `OSError` if it cannot be read."""
        at = self.groups.get(key[0]) if len(key) == 1 else self.validations.get(key)
        if at is None:
            return None
        offset, size = at
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def _parsed(line: bytes) -> tuple[Key | None, list[Any]]:
    """Return a sample's key, None for a line that is no sample; and a validation's entry in a list."""
    if (found := HEAD.match(line)) and found[1] == b"group":  # most of them, without parsing their tokens
        return (int(found[2]),), []
    try:
        row = parsed(line)
        if "group" in row:  # spelled in another order than its writer's
            return (int(row["group"]),), []
        return (int(row["validation"]), int(row["problem"])), validation_line(row)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, []


def validation_line(sample: Sample) -> list[Any]:
    """Return a held-out problem's entry in a list: version, problem, source, mean reward and length."""
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

    Groups and validations get half of the budget each, plus what the other half leaves. In a large group only the first
    episodes keep their tokens; ``left_out`` counts the rest.
    """
    chosen, left = _fill(index, sorted(index.validations), budget // 2)
    groups, _ = _fill(index, [(number,) for number in sorted(index.groups)], budget - budget // 2 + left)
    return groups + chosen


def _fill(index: SampleIndex, keys: Sequence[Key], budget: int) -> tuple[list[dict[str, Any]], int]:
    """Return the samples of ``keys`` that fit, and the rest of the budget in bytes."""
    found: list[dict[str, Any]] = []
    for place in spread(len(keys)):
        sample = _small(index.line(keys[place]))
        if sample is None:
            index.damaged += 1
            continue
        size = len(json.dumps(sample, ensure_ascii=False).encode())
        if size > budget:
            # With less room than one may take, it is over; else this one alone was large.
            if budget < MOST_OF_ONE:
                break
            continue
        budget -= size
        found.append(sample)
    return found, budget


def spread(count: int) -> Iterator[int]:
    """Yield each number below ``count`` once: the last, the first, then by halves, so that any prefix is spread
    evenly.
    """
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
