"""Who was busy when: the trainer, each replica and each stage, as unions of intervals on the event clock.

    TrainerBusy ──────┐
    FetchTaken.waited ┤                            ┌─▶ idle ratios, slot utilization
    ReplicaActivity ──┼─▶ IntervalUnion per party ─┤
    StageChanged ─────┤        (clipped to a window) └─▶ who waited for whom, for how long
    CheckpointSaved ──┘

The run's window reaches from the first admission to the last optimizer step. Time in which a party reported nothing is
idle time: a paused or loading replica decodes nothing and therefore reports nothing. A replica's time, busy or idle, is
counted from its join to its loss: before and after, it is no part of the run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from headway.events import (
    CheckpointSaved,
    FetchTaken,
    ReplicaActivity,
    ReplicaJoined,
    ReplicaLost,
    Span,
    StageChanged,
    TrainerBusy,
)
from headway.reports.intervals import IntervalUnion, complement, intersection, length

TRAINER_STAGE = "ActorTrain"
TRAINER_WORK = frozenset({"forward", "critic", "step", "gather"})
"""What counts as the trainer's own work; saving a checkpoint does not."""


@dataclass(slots=True)
class ReplicaTime:
    """One replica's activity while it was part of the run, ``joined`` to ``lost``."""

    slots: int
    joined: float = -inf
    lost: float = inf
    busy: IntervalUnion = field(default_factory=IntervalUnion)
    reports: list[tuple[float, float, float]] = field(default_factory=list)
    """(start, end, slot_seconds): each report's busy extent and the slot time inside it."""
    last_report: float = 0.0

    @property
    def reported_until(self) -> float:
        """The instant up to which its activity is known: before it joined and after its loss there is none."""
        return max(self.joined, self.last_report) if self.lost == inf else inf

    def presence(self, window: Span) -> Span:
        """The part of ``window`` in which it was part of the run; may be empty."""
        return max(self.joined, window[0]), min(self.lost, window[1])

    def seconds(self, window: Span) -> float:
        start, end = self.presence(window)
        return max(end - start, 0.0)

    def busy_seconds(self, window: Span) -> float:
        return self.busy.within(self.presence(window))

    def slot_seconds(self, window: Span) -> float:
        """Slot time inside ``window``; a report that straddles its edge counts by the part that lies inside."""
        present = self.presence(window)
        total = 0.0
        for start, end, slot_seconds in self.reports:
            inside = min(end, present[1]) - max(start, present[0])
            if inside > 0:
                total += slot_seconds * inside / (end - start)
        return total


@dataclass(slots=True)
class TrainerTime:
    """The trainer's work. A span of it is reported at its end, so what is under way is not known yet.

    It computes forwards and steps while its stage is processing. While its stage waits for an update it gathers, once.
    Else it computes nothing.
    """

    busy: IntervalUnion = field(default_factory=IntervalUnion)
    known_until: float = inf
    """The instant up to which its work is known: infinite while it computes nothing."""

    def stage_changed(self, event: StageChanged) -> None:
        self.known_until = event.time if event.state in ("processing", "waiting_output") else inf

    def report(self, event: TrainerBusy) -> None:
        if event.what in TRAINER_WORK:
            self.busy.add(event.span)
        if self.known_until < inf:
            self.known_until = inf if event.what == "gather" else event.time


@dataclass(slots=True)
class StageView:
    """What a stage is doing now."""

    name: str
    state: str
    waiting_for: str | None
    active: int
    since: float


class Occupancy:
    """Accumulates busy and waiting intervals; every answer is for a window and lies within it."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaTime] = {}
        self.stages: dict[str, StageView] = {}
        self._trainer = TrainerTime()
        self._trainer_waits = IntervalUnion()
        self._saves = IntervalUnion()
        self._stage_waits: dict[tuple[str, str], IntervalUnion] = defaultdict(IntervalUnion)
        self._stage_work: dict[str, IntervalUnion] = defaultdict(IntervalUnion)

    def declare(self, slots: dict[str, int]) -> None:
        """Replicas exist, and are idle, before they report anything."""
        for name, count in slots.items():
            self.replicas.setdefault(name, ReplicaTime(count)).slots = count

    def restart(self, slots: dict[str, int], time: float) -> None:
        """The run was resumed: it has these replicas from ``time`` on, some of which it had before."""
        for name, replica in self.replicas.items():
            if name not in slots:
                replica.lost = min(replica.lost, time)
        for name, count in slots.items():
            replica = self.replicas.setdefault(name, ReplicaTime(count, joined=time))
            replica.slots, replica.lost = count, inf

    def join(self, event: ReplicaJoined) -> None:
        self.replicas[event.replica] = ReplicaTime(event.slots, joined=event.time)

    def lose(self, event: ReplicaLost) -> None:
        """One that never joined was no part of the run."""
        if (replica := self.replicas.get(event.replica)) is not None:
            replica.lost = event.time

    def trainer_busy(self, event: TrainerBusy) -> None:
        self._trainer.report(event)

    def fetch_taken(self, event: FetchTaken) -> None:
        self._trainer_waits.add(event.waited)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._saves.add(event.span)

    def replica_active(self, event: ReplicaActivity) -> None:
        replica = self.replicas.setdefault(event.replica, ReplicaTime(0))
        replica.last_report = max(replica.last_report, event.time)
        for span in event.busy:
            replica.busy.add(span)
        if event.busy and event.slot_seconds > 0:
            start, end = min(s for s, _ in event.busy), max(e for _, e in event.busy)
            if end > start:
                replica.reports.append((start, end, event.slot_seconds))

    def stage_changed(self, event: StageChanged) -> None:
        if event.stage == TRAINER_STAGE:
            self._trainer.stage_changed(event)
        before = self.stages.get(event.stage)
        since = event.time
        if before is not None:
            self._account(before, event.time)
            if (before.state, before.waiting_for) == (event.state, event.waiting_for):
                since = before.since
        self.stages[event.stage] = StageView(event.stage, event.state, event.waiting_for, event.active, since)

    def _account(self, stage: StageView, until: float) -> None:
        span = (stage.since, until)
        if stage.waiting_for is not None:
            self._stage_waits[stage.name, stage.waiting_for].add(span)
        elif stage.state.upper() == "PROCESSING":
            self._stage_work[stage.name].add(span)

    def trainer_idle(self, window: Span) -> float | None:
        """Share of ``window`` outside any forward, optimizer step or gather; None for an empty window."""
        wall = window[1] - window[0]
        return None if wall <= 0 else 1.0 - self._trainer.busy.within(window) / wall

    @property
    def trainer_known_until(self) -> float:
        """The instant up to which the trainer's work is known; infinite while none is under way."""
        return self._trainer.known_until

    def trainer_saved(self, window: Span) -> float:
        """Seconds in which a checkpoint was saved and the trainer computed nothing."""
        return length(intersection(self._saves.spans, complement(self._trainer.busy.spans, window)))

    def rollouter_idle(self, window: Span) -> float | None:
        """Share of the replicas' time in ``window`` in which one had no sequence prefilling or decoding.

        The mean over replicas, each with the weight of the time that it was part of the run. None when none was.
        """
        present = sum(replica.seconds(window) for replica in self.replicas.values())
        if present <= 0:
            return None
        return 1.0 - sum(replica.busy_seconds(window) for replica in self.replicas.values()) / present

    def idle_while_saving(self, window: Span) -> float:
        """The part of `rollouter_idle` in which a checkpoint was saved; 0 when no replica was part of the run."""
        present = sum(replica.seconds(window) for replica in self.replicas.values())
        if present <= 0:
            return 0.0
        saves = intersection(self._saves.spans, [window])
        idle = sum(
            replica.seconds(span) - replica.busy_seconds(span) for replica in self.replicas.values() for span in saves
        )
        return idle / present

    def slot_utilization(self, window: Span) -> float | None:
        """Busy slot time over slot time; None when no slots were declared or the window is empty."""
        capacity = sum(replica.slots * replica.seconds(window) for replica in self.replicas.values())
        if capacity <= 0:
            return None
        return min(sum(replica.slot_seconds(window) for replica in self.replicas.values()) / capacity, 1.0)

    def reported_until(self) -> float | None:
        """The instant up to which every replica's activity is known; infinite when all are lost."""
        return min((replica.reported_until for replica in self.replicas.values()), default=None)

    def trainer_waited(self, window: Span) -> float:
        """Seconds in which the trainer waited for groups."""
        return self._trainer_waits.within(window)

    def waited_for_reward(self, window: Span) -> float:
        """Seconds in which the trainer waited for groups, no replica decoded and a reward was being computed."""
        all_idle = [window]
        for replica in self.replicas.values():
            all_idle = intersection(all_idle, complement(replica.busy.spans, window))
        return length(intersection(intersection(all_idle, self._trainer_waits.spans), self._stage_work["Reward"].spans))

    def stage_waits(self, window: Span) -> dict[str, dict[str, float]]:
        """For each stage, seconds of ``window`` that it waited, by whom it waited for."""
        waits: dict[str, dict[str, float]] = defaultdict(dict)
        for (stage, other), union in sorted(self._stage_waits.items()):
            if (seconds := union.within(window)) > 0:
                waits[stage][other] = seconds
        return dict(waits)
