"""State and fate of every group, from the events.

    admitted ─▶ rewarded ─▶ taken ─▶ settled: trained | dropped(nonfinite)
        └──────────┴─▶ settled: filtered | dropped | failed            (in_flight: whatever is left)

It is independent of the pipeline's own ledger and checks it: both must have the same numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from headway import events
from headway.events import Event

FATES = ("trained", "filtered", "dropped", "failed")
IN_FLIGHT = "in_flight"
RECENT = 256
"""Number of latest groups in the recent share of filtered groups."""
MOST_REASONS, OTHER_REASONS = 200, "another reason"
"""Maximum number of reasons of one fate that are counted separately, as some quote an answer; and the others' name."""
MOST_PROBLEMS = 100


@dataclass(slots=True)
class GroupRecord:
    """Facts about one group between its admission and its fate."""

    number: int
    version: int = 0
    """The version with which it was admitted."""
    source: str = ""
    rewards: list[float] | None = None
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Component of the reward → its values for the group's answers; empty without several components."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each episode that did not fail, without the baseline. Events are not kept: open groups have thousands,
    and the driver waits while the state of a large run is copied at each boundary."""
    clipped: int = 0
    """Number of the episodes in ``lengths`` that were cut off by their length."""
    oldest: list[int] = field(default_factory=list)
    """Oldest version of each episode in ``lengths`` that has tokens."""
    newest: int = -1
    """Newest version of these episodes' tokens."""
    failed: int = 0
    """Number of episodes that failed, its baseline included."""
    lost: list[int] = field(default_factory=list)
    """Tokens of each episode that failed, its baseline not counted."""
    episodes: int = 0
    """Number of its episodes; 0 if the record does not tell."""
    reported: int = 0
    """Number of its episodes that ended, its baseline included."""
    taken_at: int | None = None
    """The trainer's version when the group was taken into a batch."""

    def add(self, event: events.TrajectoryFinished) -> None:
        self.reported += 1
        if event.failure is not None:
            self.failed += 1
        if event.baseline:
            return
        if event.failure is not None:
            self.lost.append(event.tokens)
            return
        self.lengths.append(event.tokens)
        self.clipped += event.finish_reason == "length"
        if versions := [version for _, version in event.version_spans]:
            self.oldest.append(min(versions))
            self.newest = max(self.newest, *versions)

    def stale_trajectories(self) -> int:
        """Number of trajectories whose oldest token was sampled before the version that trained them."""
        return 0 if self.taken_at is None else sum(oldest < self.taken_at for oldest in self.oldest)


class GroupTally:
    """Counts of admissions and fates, and their inconsistencies."""

    def __init__(self) -> None:
        self.admitted = 0
        self.fates: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)
        self.problems: list[str] = []
        self.episode_fates: Counter[str] = Counter()
        """Fate → number of episodes: their group's fate, or failed before it."""
        self.failures: Counter[str] = Counter()
        """Numbers of failed episodes by reason."""
        self._episodes = 0
        """Number of episodes of each group admitted from now on; 0 if the record does not tell."""
        self._episodes_admitted = 0
        self.sources: set[str] = set()
        """Sources of the prompts that were admitted."""
        self._recent: deque[bool] = deque(maxlen=RECENT)
        """True for a filtered group, False for a trained one; only the last groups, in order."""
        self._records: dict[int, GroupRecord] = {}
        self._lowest: int | None = None
        self._highest = -1

    def on_event(self, event: Event) -> GroupRecord | None:
        """Take an event of any kind. Returns the record of the group that it settled, which is then dropped; else
        None.
        """
        match event:
            case events.RunStarted():  # first or resumed: from here on groups may have another number of episodes
                self._episodes = event.episodes
            case events.GroupAdmitted():
                self._admit(event)
            case events.TrajectoryFinished():
                if event.failure is not None:
                    _count(self.failures, event.failure)
                if (record := self._records.get(event.number)) is not None:
                    record.add(event)
            case events.GroupRewarded() if (record := self._records.get(event.number)) is not None:
                record.rewards, record.parts = event.rewards, event.parts
            case events.BatchTaken():
                for number in event.numbers:
                    if (record := self._records.get(number)) is not None:
                        record.taken_at = event.version
            case events.GroupSettled() if event.fate != IN_FLIGHT:
                return self._settle(event)
        return None

    def _admit(self, event: events.GroupAdmitted) -> None:
        if event.number in self._records:
            self._notice(f"group {event.number} was admitted twice")
            return
        self._lowest = event.number if self._lowest is None else min(self._lowest, event.number)
        self._highest = max(self._highest, event.number)
        self.admitted += 1
        self._records[event.number] = GroupRecord(event.number, event.version, event.source, episodes=self._episodes)
        self._episodes_admitted += self._episodes
        self.sources.add(event.source)

    def _settle(self, event: events.GroupSettled) -> GroupRecord | None:
        """Count a group's fate. Returns its record; None for an inconsistent event."""
        if event.fate not in FATES:
            self._notice(f"group {event.number} has the unknown fate {event.fate!r}")
            return None
        record = self._records.pop(event.number, None)
        if record is None:
            self._notice(f"group {event.number} was {event.fate}, but was settled before or never admitted")
            return None
        self.fates[event.fate] += 1
        if event.fate in ("trained", "filtered"):
            self._recent.append(event.fate == "filtered")
        if event.reason is not None:
            _count(self.reasons[event.fate], event.reason)
        self._settle_episodes(record, event.fate)
        return record

    def _settle_episodes(self, record: GroupRecord, fate: str) -> None:
        """Count the fates of a group's episodes. All of them must have ended where the group was scored or trained."""
        if not record.episodes:
            return
        most = record.reported if fate in ("trained", "filtered") else max(record.reported, record.episodes)
        if most != record.episodes:
            self._notice(f"group {record.number} was {fate}, with {record.reported} episodes of {record.episodes}")
        self.episode_fates[fate] += record.episodes - record.failed
        self.episode_fates["failed"] += record.failed

    def _notice(self, problem: str) -> None:
        """Record an inconsistency. One is enough to report an imbalance, so only the first few are kept."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def under_way(self) -> Collection[GroupRecord]:
        """The groups without a fate."""
        return self._records.values()

    def filtered_share(self) -> float | None:
        """Share of filtered groups among those trained or filtered; None when there are none."""
        scored = self.fates["trained"] + self.fates["filtered"]
        return self.fates["filtered"] / scored if scored else None

    def recently_filtered(self) -> tuple[int, int]:
        """Number of filtered groups among the last ones trained or filtered, and number of these: at most `RECENT`."""
        return sum(self._recent), len(self._recent)

    def whereabouts(self) -> dict[str, int]:
        """Numbers of groups under way: being generated or rewarded, waiting in the queue, being trained on."""
        training = sum(1 for r in self._records.values() if r.taken_at is not None)
        queued = sum(1 for r in self._records.values() if r.taken_at is None and r.rewards is not None)
        generating = len(self._records) - training - queued
        return {"generating": generating, "queued": queued, "training": training}

    def counts(self) -> dict[str, int]:
        """Numbers of groups: ``admitted``, each fate, and ``in_flight`` for groups without one."""
        return {"admitted": self.admitted, **{fate: self.fates[fate] for fate in FATES}, IN_FLIGHT: len(self._records)}

    def episode_counts(self) -> dict[str, int]:
        """Numbers of episodes, as in `counts`. Failed episodes of open groups count as failed. All are 0 if the record
        does not tell the number of a group's episodes.
        """
        fates = Counter(self.episode_fates)
        for record in self._records.values():
            if record.episodes:
                fates["failed"] += record.failed
                fates[IN_FLIGHT] += record.episodes - record.failed
        return {"admitted": self._episodes_admitted, **{fate: fates[fate] for fate in (*FATES, IN_FLIGHT)}}

    def balances(self, ledger: dict[str, int] | None, episodes: dict[str, int] | None = None) -> bool:
        """Tell whether every number from the first to the last admitted has one fate, and ``ledger`` has the same
        counts. ``episodes``: the ledger's counts of episodes, which are compared if given.
        """
        counts = self.counts()
        settled = sum(counts[fate] for fate in FATES)
        numbers = 0 if self._lowest is None else self._highest - self._lowest + 1
        agrees = ledger is None or all(counts[key] == value for key, value in ledger.items() if key in counts)
        agrees &= not episodes or episodes == self.episode_counts()
        return not self.problems and numbers == counts["admitted"] == settled + counts[IN_FLIGHT] and agrees


def _count(reasons: Counter[str], reason: str) -> None:
    known = reason in reasons or len(reasons) < MOST_REASONS
    reasons[reason if known else OTHER_REASONS] += 1


def partial_span(event: events.TrajectoryFinished) -> int:
    """Newest minus oldest version of a trajectory's tokens: 0 when one version wrote all of them."""
    versions = [version for _, version in event.version_spans]
    return max(versions) - min(versions) if versions else 0
