"""Sums over episodes that programs made: turns, environments, tools, forks, failures, and numbers of the programs' own.

TrajectoryFinished ─▶ `EpisodeSums.add` ─▶ `values`: flat metric names, of one version's row or of the whole run
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from headway.events import TrajectoryFinished

ENVIRONMENT_S = "environment_s"
"""Name of the number that every episode of a program has, and no single answer."""
ENDPOINT = ("refused_requests", "overridden_sampling", "repeated_requests", "hung_up_requests")
"""Names of the numbers of episodes whose agents asked an endpoint for what they did not get."""
BUILT_IN = frozenset({ENVIRONMENT_S, "tool_errors", "tries", "cached_tokens", "forks", "tool_call_problems", *ENDPOINT})
"""Names of the numbers that are Headway's; all others are a program's own."""
MOST_OWN = 100
"""Most names of a program's own numbers that are reported: each is a series, and a program may invent any number."""


def is_of_program(event: TrajectoryFinished) -> bool:
    """Tell whether a program made the episode. False for an aborted one, which does not show it."""
    return ENVIRONMENT_S in event.metrics


@dataclass(slots=True)
class Mean:
    """Sum, count and maximum of numbers."""

    total: float = 0.0
    count: int = 0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.most = max(self.most, value) if self.count else value
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """The mean of at least one number."""
        return self.total / self.count


@dataclass(slots=True)
class EpisodeSums:
    """Sums over finished episodes of programs, those that failed included."""

    turns: Mean = field(default_factory=Mean)
    environment_s: Mean = field(default_factory=Mean)
    wait_s: Mean = field(default_factory=Mean)
    """Seconds that programs waited to begin."""
    seconds: float = 0.0
    """Seconds of episodes, from the begin of their programs to their ends."""
    forks: float = 0.0
    tool_errors: float = 0.0
    unread_calls: float = 0.0
    retries: float = 0.0
    endpoint: Counter[str] = field(default_factory=Counter)
    """Kind of requests (`ENDPOINT`) → number of them."""
    limits: Counter[str] = field(default_factory=Counter)
    """Name of the limit that ended an episode → number of episodes."""
    failed_turns: Mean = field(default_factory=Mean)
    failed_tokens: Mean = field(default_factory=Mean)
    own: dict[str, Mean] = field(default_factory=lambda: defaultdict(Mean))
    """Numbers of the program's own."""

    @property
    def finished(self) -> int:
        """Number of episodes."""
        return self.turns.count

    @property
    def failed(self) -> int:
        """Number of episodes that failed."""
        return self.failed_turns.count

    @property
    def environment_share(self) -> float | None:
        """Share of the episodes' time in which their programs worked; None where it is unknown."""
        return min(self.environment_s.total / self.seconds, 1.0) if self.seconds > 0 else None

    def add(self, event: TrajectoryFinished) -> None:
        """Add an episode for which `is_of_program` holds."""
        numbers = event.metrics
        self.turns.add(event.turns)
        self.environment_s.add(numbers[ENVIRONMENT_S])
        self.wait_s.add(sum(end - start for start, end in event.waits))
        if event.steps:
            self.seconds += event.steps[-1][1] - event.steps[0][0]
        self.forks += numbers.get("forks", 0.0)
        self.tool_errors += numbers.get("tool_errors", 0.0)
        self.unread_calls += numbers.get("tool_call_problems", 0.0)
        self.retries += max(numbers.get("tries", 1.0) - 1.0, 0.0)
        for name in ENDPOINT:
            if name in numbers:
                self.endpoint[name] += int(numbers[name])
        if event.limit is not None:
            self.limits[event.limit] += 1
        if event.failure is not None:
            self.failed_turns.add(event.turns)
            self.failed_tokens.add(event.tokens)
        for name in numbers.keys() - BUILT_IN:
            if name in self.own or len(self.own) < MOST_OWN:
                self.own[name].add(numbers[name])

    def values(self) -> dict[str, Any]:
        """Return flat metric names to values; nothing where there was no episode of a program."""
        if not self.finished:
            return {}
        values: dict[str, Any] = {
            "num_turns/mean": self.turns.mean,
            "num_turns/max": int(self.turns.most),
            "environment_s/mean": self.environment_s.mean,
            "environment_s/max": self.environment_s.most,
            "environment_s/wait_mean": self.wait_s.mean,
        }
        if (share := self.environment_share) is not None:
            values["environment_s/share"] = share
        if (further := self.turns.total - self.finished) > 0:
            values["num_turns/fork_ratio"] = self.forks / further
        values |= {
            "tools/errors_mean": self.tool_errors / self.finished,
            "tools/unread_calls_mean": self.unread_calls / self.finished,
            "episodes/failed_ratio": self.failed / self.finished,
            "episodes/retries": int(self.retries),
            **{f"endpoint/{name}": count for name, count in sorted(self.endpoint.items())},
            **{f"episodes/limit/{name}": count / self.finished for name, count in sorted(self.limits.items())},
        }
        if self.failed:
            values["episodes/failed_num_turns_mean"] = self.failed_turns.mean
            values["episodes/failed_length_mean"] = self.failed_tokens.mean
        return values | {f"episode/{name}": self.own[name].mean for name in sorted(self.own)}
