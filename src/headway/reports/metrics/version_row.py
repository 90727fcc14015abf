"""One row of metrics, a line of ``metrics.jsonl`` and a step of every tracker: the time in which a version was trained.

A metric is added in `VersionRow.values`, from an event of `headway.events`. What a loss, a correction or the trainer
returns under a name is there as ``actor/NAME`` without a further line.

`EpisodeSums` has the part about episodes that programs made: turns, environments, tools, forks, failures, and numbers
of the programs' own. It is also summed over the whole run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from headway import events
from headway.reports.metrics.group_tally import GroupRecord, partial_span

ENVIRONMENT_S = "environment_s"
"""Name of the number that every episode of a program has, and no single answer."""
ENDPOINT = ("hung_up_requests", "overridden_sampling", "refused_requests", "repeated_requests")
"""Names of the numbers of episodes whose agents asked an endpoint for what they did not get."""
BUILT_IN = frozenset({ENVIRONMENT_S, "tool_errors", "tries", "cached_tokens", "forks", "tool_call_problems", *ENDPOINT})
"""Names of the numbers that are Headway's; all others are a program's own."""
MOST_OWN = 100
"""Most names of a program's own numbers that are reported: each is a series, and a program may invent any number."""


def is_of_program(event: events.TrajectoryFinished) -> bool:
    """Tell whether a program made the episode. False for an aborted one, which does not show it."""
    return ENVIRONMENT_S in event.metrics


@dataclass(slots=True)
class Mean:
    """Sum, count and maximum of numbers.

    Example:
        >>> lengths = Mean()
        >>> for tokens in (3, 8, 4):
        ...     lengths.add(tokens)
        >>> lengths.total, lengths.mean, lengths.most
        (15, 5.0, 8)
    """

    total: float = 0
    count: int = 0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.most = max(self.most, value) if self.count else value  # all may be below 0.0
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
    wait_s: Mean = field(default_factory=Mean)
    """Seconds that programs waited to begin."""
    seconds: float = 0.0
    """Seconds of episodes, from the begin of their programs to their ends."""
    numbers: dict[str, Mean] = field(default_factory=lambda: defaultdict(Mean))
    """Numbers of the episodes by name: Headway's own (`BUILT_IN`), and at most `MOST_OWN` of the program's."""
    limits: Counter[str] = field(default_factory=Counter)
    """Name of the limit that ended an episode → number of episodes."""
    failed_turns: Mean = field(default_factory=Mean)
    failed_tokens: Mean = field(default_factory=Mean)

    @property
    def finished(self) -> int:
        """Number of episodes."""
        return self.turns.count

    @property
    def environment_share(self) -> float | None:
        """Share of the episodes' time in which their programs worked; None where it is unknown."""
        return min(self._total(ENVIRONMENT_S) / self.seconds, 1.0) if self.seconds > 0 else None

    def add(self, event: events.TrajectoryFinished) -> None:
        """Add an episode for which `is_of_program` holds."""
        self.turns.add(event.turns)
        self.wait_s.add(sum(end - start for start, end in event.waits))
        if event.steps:
            self.seconds += event.steps[-1][1] - event.steps[0][0]
        for name, value in event.metrics.items():
            if name in BUILT_IN or name in self.numbers or len(self.numbers.keys() - BUILT_IN) < MOST_OWN:
                self.numbers[name].add(value)
        if event.limit is not None:
            self.limits[event.limit] += 1
        if event.failure is not None:
            self.failed_turns.add(event.turns)
            self.failed_tokens.add(event.tokens)

    def _total(self, name: str) -> float:
        return self.numbers[name].total if name in self.numbers else 0.0

    def values(self) -> dict[str, Any]:
        """Return flat metric names to values; nothing where there was no episode of a program."""
        if not self.finished:
            return {}
        numbers, finished, failed = self.numbers, self.finished, self.failed_turns.count
        turns_after_first = self.turns.total - finished
        return drop_none(
            {
                "num_turns/mean": self.turns.mean,
                "num_turns/max": int(self.turns.most),
                "environment_s/mean": numbers[ENVIRONMENT_S].mean,
                "environment_s/max": numbers[ENVIRONMENT_S].most,
                "environment_s/wait_mean": self.wait_s.mean,
                "environment_s/share": self.environment_share,
                "num_turns/fork_ratio": self._total("forks") / turns_after_first if turns_after_first > 0 else None,
                "tools/errors_mean": self._total("tool_errors") / finished,
                "tools/unread_calls_mean": self._total("tool_call_problems") / finished,
                "episodes/failed_ratio": failed / finished,
                "episodes/retries": int(self._total("tries")) - (numbers["tries"].count if "tries" in numbers else 0),
                **{f"endpoint/{name}": int(numbers[name].total) for name in ENDPOINT if name in numbers},
                **{f"episodes/limit/{name}": count / finished for name, count in sorted(self.limits.items())},
                "episodes/failed_num_turns_mean": self.failed_turns.mean if failed else None,
                "episodes/failed_length_mean": self.failed_tokens.mean if failed else None,
                **{f"episode/{name}": numbers[name].mean for name in sorted(numbers.keys() - BUILT_IN)},
            }
        )


PHASES = ("gather", "send", "recv", "register", "load")


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of each phase of an update. Receivers work side by side: the slowest one counts."""

    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    sent_nbytes: int | None = None
    """Bytes sent to one receiver, or to all together; the maximum where receivers differ."""
    probe_difference: float | None = None
    """The largest difference of log-probs over the receivers' probes, in nats; None where nothing was compared."""

    def add(self, event: events.UpdatePhase) -> None:
        self.seconds[event.phase, event.where] += event.seconds
        if event.phase == "send":
            self.sent_nbytes = max(event.nbytes, self.sent_nbytes or 0)
        if event.probe_difference is not None:
            self.probe_difference = max(event.probe_difference, self.probe_difference or 0.0)

    def totals(self) -> dict[str, float]:
        return {
            f"{phase}_s": max((s for (p, _), s in self.seconds.items() if p == phase), default=0.0) for phase in PHASES
        }

    def critical_path_s(self) -> float:
        """Seconds that the update took at least: send and recv run side by side, the others one after the other."""
        totals = self.totals()
        return totals["gather_s"] + max(totals["send_s"], totals["recv_s"]) + totals["register_s"] + totals["load_s"]


@dataclass(slots=True)
class EventSums:
    """Sums over what happened in a part of the run: while one version was the trainer's, or in all of it."""

    finished: int = 0
    """Finished trajectories, whatever became of their groups."""
    generated_tokens: int = 0
    partial: int = 0
    """Finished trajectories with tokens of more than one version."""
    max_partial_span: int = 0
    episodes: EpisodeSums = field(default_factory=EpisodeSums)
    """Episodes of programs that finished."""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    """Times that a replica parked an answer for want of memory."""
    unpinned: int = 0
    """Times that a replica gave up what it kept for the next turn of an open episode, for want of memory."""
    optimizer_steps: int = 0
    skipped_steps: int = 0

    def add_finished(self, event: events.TrajectoryFinished) -> None:
        span = partial_span(event)
        self.finished += 1
        self.generated_tokens += event.tokens
        self.partial += span > 0
        self.max_partial_span = max(self.max_partial_span, span)
        if is_of_program(event):
            self.episodes.add(event)

    def add_activity(self, event: events.ReplicaActivity) -> None:
        self.prefilled_tokens += event.prefilled_tokens
        self.cached_tokens += event.cached_tokens
        self.preempted += event.preempted
        self.unpinned += event.unpinned

    def count_step(self, event: events.OptimizerStepped) -> None:
        self.optimizer_steps += not event.skipped
        self.skipped_steps += event.skipped

    def partial_values(self, prefix: str = "") -> dict[str, Any]:
        """Figures on the finished trajectories whose tokens carry more than one version."""
        return {
            f"{prefix}total_partial_num": self.partial,
            f"{prefix}partial_ratio": self.partial / self.finished if self.finished else 0.0,
            f"{prefix}max_partial_span": self.max_partial_span,
        }


@dataclass(slots=True, kw_only=True)
class VersionRow(EventSums):
    """Accumulates the metrics of one version: groups trained at it, what finished meanwhile, the update after it.

    ``values()`` has only what happened: no key without a measurement.
    """

    version: int
    rewards: list[float] = field(default_factory=list)
    reward_parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Part of the reward, or further number that one told → its values for the answers that it applies to."""
    source_rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    source_groups: Counter[str] = field(default_factory=Counter)
    generated_rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each trained trajectory."""
    clipped: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    lag_in_flight: list[int] = field(default_factory=list)
    lag_in_queue: list[int] = field(default_factory=list)
    token_lags: Counter[int] = field(default_factory=Counter)
    actor: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    """Rows of trajectories that optimizer steps were made on, with repetition."""
    stepped_trajectories: int = 0
    """Trajectories of these rows, with repetition."""
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    update: events.UpdateFinished | None = None
    validation: events.ValidationFinished | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.trained or self.lags or self.finished or self.validation)

    @property
    def trained(self) -> bool:
        """True if the trainer made a step at this version, even a skipped one."""
        return self.optimizer_steps + self.skipped_steps > 0

    def add_trained(self, group: GroupRecord, lag: int | None) -> None:
        self.rewards += group.rewards or []
        for name, values in group.parts.items():
            self.reward_parts[name] += [value for value in values if value is not None]
        self.source_rewards[group.source] += group.rewards or []
        self.source_groups[group.source] += 1
        self.lengths += group.lengths
        self.clipped += group.clipped
        if lag is not None:
            self.lags[lag] += 1
        if group.taken_at is not None and group.oldest:
            self.lag_in_flight.append(group.newest - min(group.oldest))
            self.lag_in_queue.append(group.taken_at - group.newest)

    def add_step(self, event: events.OptimizerStepped) -> None:
        self.count_step(event)
        if event.skipped:
            return
        self.token_lags.update(event.token_lag)
        if event.rows:
            self.rows += event.rows
            self.stepped_trajectories += event.trajectories
        for name, value in event.metrics.items():
            self.actor[name if "/" in name else f"actor/{name}"].append(float(value))

    def add_critic_step(self, event: events.CriticStepped) -> None:
        if not event.skipped:
            for name, value in event.metrics.items():
                self.actor[f"critic/{name}"].append(float(value))

    def values(self, *, by_source: bool = False) -> dict[str, Any]:
        """Return flat metric names to values, those of learning first; ``by_source``: also for each source."""
        return drop_none(
            {
                "version": self.version,
                **self._learning(),
                **(self._sources() if by_source else {}),
                **self._staleness(),
                **self.partial_values("fully_async/partial/"),
                **self.episodes.values(),
                **self._prefixes(),
                **self._update(),
                **({} if self.validation is None else validation_values(self.validation)),
            }
        )

    def _learning(self) -> dict[str, Any]:
        lengths = self.lengths
        return {
            "reward/mean": _mean(self.rewards),
            **{f"reward/{name}/mean": _mean(given) for name, given in self.reward_parts.items()},
            "reward/generated_mean": _mean(self.generated_rewards),
            "response_length/mean": _mean(lengths),
            "response_length/max": max(lengths, default=None),
            "response_length/clip_ratio": self.clipped / len(lengths) if lengths else None,
            "rows/mean": self.rows / self.stepped_trajectories if self.rows else None,
            **{name: _over_steps(name, series) for name, series in self.actor.items()},
            "actor/optimizer_steps": self.optimizer_steps,
            "actor/skipped_steps": self.skipped_steps,
        }

    def _sources(self) -> dict[str, Any]:
        rewards = {f"reward/source/{name}/mean": _mean(given) for name, given in sorted(self.source_rewards.items())}
        return rewards | {f"groups/source/{name}": self.source_groups[name] for name in sorted(self.source_groups)}

    def _staleness(self) -> dict[str, Any]:
        if not self.lags:
            return {}
        return {
            "lag/mean": mean_of(self.lags),
            "lag/max": max(self.lags),
            "lag/histogram": histogram(self.lags),
            "lag/token_mean": mean_of(self.token_lags) if self.token_lags else None,
            "lag/in_flight_mean": _mean(self.lag_in_flight),
            "lag/in_queue_mean": _mean(self.lag_in_queue),
        }

    def _prefixes(self) -> dict[str, Any]:
        context = self.cached_tokens + self.prefilled_tokens
        return {
            "rollouter/prefix_hit_ratio": self.cached_tokens / context if context else None,
            "rollouter/unpinned": self.unpinned if self.episodes.finished else None,
        }

    def _update(self) -> dict[str, Any]:
        if self.update is None:
            return {}
        sent, full = self.phases.sent_nbytes, self.update.full_nbytes
        return {
            **{f"param_update/{name}": seconds for name, seconds in self.phases.totals().items()},
            "param_update/trainer_stall_s": self.update.trainer_stall_s,
            "param_update/rollout_stall_s": self.update.rollout_stall_s,
            "param_update/interrupted": self.update.interrupted,
            "validation/stall_s": self.update.validation_stall_s,
            "param_update/bytes": sent,
            "param_update/bytes_saved": 1 - sent / full if sent is not None and full else None,
            "param_update/changed_ratio": self.update.changed,
            "param_update/probe_difference": self.phases.probe_difference,
        }


def validation_values(event: events.ValidationFinished) -> dict[str, Any]:
    return {
        "validation/accuracy": event.accuracy,
        "validation/mean_tokens": event.mean_tokens,
        "validation/failed": event.failed,
        "validation/failed_episodes": event.failed_episodes,
        **{f"validation/source/{name}/accuracy": accuracy for name, accuracy in event.by_source.items()},
        **{f"validation/reward/{name}/mean": mean for name, mean in event.parts.items()},
    }


def drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` without those that are None: what was not measured."""
    return {name: value for name, value in values.items() if value is not None}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def mean_of(counts: Mapping[int, int]) -> float:
    """Mean of a histogram, value → count."""
    return sum(value * count for value, count in counts.items()) / sum(counts.values())


def histogram(counts: Mapping[int, int]) -> dict[str, int]:
    """Value → count as JSON spells it, by ascending value."""
    return {str(value): counts[value] for value in sorted(counts)}


def _over_steps(name: str, values: Sequence[float]) -> float:
    """Combine a metric's values over optimizer steps: last learning rate, largest maximum, mean of all else."""
    name = name.partition("/lag_")[0]
    if name.endswith("lr"):
        return values[-1]
    return max(values) if name.endswith("max") else fmean(values)
