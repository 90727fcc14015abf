"""Occupancy: when the trainer, each replica and each stage were busy, as unions of intervals on the event clock.

    TrainerBusy ──────┐
    BatchTaken.waited ┤                            ┌─▶ idle ratios, slot utilization
    ReplicaActivity ──┼─▶ IntervalUnion per party ─┤
    StageChanged ─────┤        (clipped to a window) └─▶ who waited for whom, for how long
    CheckpointCopied ─┘

The run's window reaches from the first admission to the last optimizer step. Time in which a party reported nothing is
idle time: a paused or loading replica decodes nothing and therefore reports nothing. A replica's time, busy or idle, is
counted from its join to its loss: before and after, it is no part of the run.

Intervals are kept only while a window may begin or end among them. `sum_up` sums up earlier ones, so that neither the
memory nor the cost of a window grows with the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from headway import events
from headway.events import Span
from headway.reports.metrics.intervals import IntervalUnion, Spread, complement, intersection, length

TRAINER_STAGE = "ActorTrain"
TRAINER_WORK = frozenset({"forward", "critic", "step", "gather"})
"""The kinds of work that count as the trainer's own; saving a checkpoint does not."""


@dataclass(slots=True)
class ReplicaTime:
    """One replica's activity while it was part of the run, ``joined`` to ``lost``."""

    slots: int
    joined: float = -inf
    lost: float = inf
    busy: IntervalUnion = field(default_factory=IntervalUnion)
    slot_time: Spread = field(default_factory=Spread)
    """Busy slot-seconds of each report, spread over the extent of its busy spans."""
    last_report: float = 0.0
    late: bool = False
    """True if it joined in the course of the run, under a name that no other one ever has."""

    @property
    def reported_until(self) -> float:
        """Instant up to which the replica's activity is known; infinite after its loss."""
        return max(self.joined, self.last_report) if self.lost == inf else inf

    def presence(self, window: Span) -> Span:
        """The part of ``window`` in which the replica was part of the run; may be empty."""
        return max(self.joined, window[0]), min(self.lost, window[1])

    def seconds(self, window: Span) -> float:
        start, end = self.presence(window)
        return max(end - start, 0.0)

    def busy_seconds(self, window: Span) -> float:
        return self.busy.within(self.presence(window))


REPLICA_SECONDS: Mapping[str, Callable[[ReplicaTime, Span], float]] = {
    "present": ReplicaTime.seconds,
    "busy": ReplicaTime.busy_seconds,
    "slots": lambda replica, window: replica.slots * replica.seconds(window),
    "filled": lambda replica, window: replica.slot_time.within(replica.presence(window)),
}
"""Seconds of a replica within a window: present and busy seconds; slot-seconds, and filled slot-seconds."""


@dataclass(slots=True)
class TrainerTime:
    """The trainer's work. A span of work is reported at its end, so current work is not known yet.

    The trainer computes forwards and steps while its stage is processing. While its stage waits for an update it
    gathers, once. Else it computes nothing.
    """

    busy: IntervalUnion = field(default_factory=IntervalUnion)
    known_until: float = inf
    """Time up to which the trainer's work is known: infinite while it computes nothing."""

    def stage_changed(self, event: events.StageChanged) -> None:
        self.known_until = event.time if event.state in ("processing", "waiting_output") else inf

    def report(self, event: events.TrainerBusy) -> None:
        if event.what in TRAINER_WORK:
            self.busy.add(event.span)
        if self.known_until < inf:
            self.known_until = inf if event.what == "gather" else event.time


@dataclass(slots=True)
class StageView:
    """The present state of a stage."""

    name: str
    state: str
    waiting_for: str | None
    active: int
    since: float
    accounted: float
    """Time up to which the stage's work and waits are added up."""


class Occupancy:
    """Accumulated busy and waiting times of trainer, replicas and stages. Each figure is for a window of time.

    After `begin` and `sum_up` a window begins at the origin, or at an instant that was not summed up.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaTime] = {}
        self.stages: dict[str, StageView] = {}
        self.trainer = TrainerTime()
        self.trainer_waits = IntervalUnion()
        """Waits of the trainer for groups."""
        self.saves = IntervalUnion()
        """Spans in which training stood still for the copy of a checkpoint."""
        self.handovers = IntervalUnion()
        """Spans in which shared devices changed hands."""
        self._stage_waits: dict[tuple[str, str], IntervalUnion] = {}
        self._stage_work: dict[str, IntervalUnion] = {}
        self._origin = self._summed_until = -inf
        self._summed: dict[str, float] = defaultdict(float)
        """Seconds before the last `sum_up`: by the names in `seconds`; and of replicas lost before it, by the names of
        `REPLICA_SECONDS`."""

    def begin(self, origin: float) -> None:
        """Forget what lies before ``origin``; no window will start earlier."""
        self._origin = self._summed_until = origin
        for sums in self._sums():
            sums.begin(origin)

    def sum_up(self, until: float) -> None:
        """Sum up the time before ``until``. Later windows begin at the origin or after ``until``, and end after it.

        Everything before ``until`` must have been reported by now, except states of stages that still last.
        """
        if until <= self._summed_until:
            return
        # Before the sums: a state that lasts is added to its union only when it changes, or here.
        for stage in self.stages.values():
            self._account(stage, until)
        window = (self._summed_until, until)
        for what, within in self._measures().items():
            self._summed[what] += within(window)
        for name, replica in list(self.replicas.items()):
            if replica.late and replica.lost <= until:  # else a run with many losses would hold ever more of them
                for what, seconds in REPLICA_SECONDS.items():
                    self._summed[what] += seconds(replica, (self._origin, until))
                del self.replicas[name]
        for sums in self._sums():
            sums.sum_up(until)
        self._summed_until = until

    def _sums(self) -> Iterator[IntervalUnion | Spread]:
        for replica in self.replicas.values():
            yield from (replica.busy, replica.slot_time)
        yield from (self.trainer.busy, self.trainer_waits, self.saves, self.handovers)
        yield from self._stage_waits.values()
        yield from self._stage_work.values()

    def _replica(self, slots: int, joined: float = -inf) -> ReplicaTime:
        return ReplicaTime(slots, joined, busy=IntervalUnion(self._origin), slot_time=Spread(self._origin))

    def declare(self, slots: dict[str, int], since: float = -inf) -> None:
        """Declare the run's replicas and their slots; they are idle until they report.

        In a run that was resumed at ``since`` some may be known. Known ones that are not declared again are lost.
        """
        for name, replica in self.replicas.items():
            if name not in slots:
                replica.lost = min(replica.lost, since)
        for name, count in slots.items():
            replica = self.replicas.setdefault(name, self._replica(count, joined=since))
            if replica.lost < inf:  # it is back: its absence is not part of the run
                replica.lost, replica.last_report = inf, max(replica.last_report, since)
            replica.slots = count

    def join(self, event: events.ReplicaJoined) -> None:
        self.replicas[event.replica] = replica = self._replica(event.slots, joined=event.time)
        replica.late = True

    def lose(self, event: events.ReplicaLost) -> None:
        """Record the time of a replica's loss. A replica that never joined is ignored."""
        if (replica := self.replicas.get(event.replica)) is not None:
            replica.lost = event.time

    def replica_active(self, event: events.ReplicaActivity) -> None:
        replica = self.replicas.setdefault(event.replica, self._replica(0))
        replica.last_report = max(replica.last_report, event.time)
        for span in event.busy:
            replica.busy.add(span)
        if event.busy and event.slot_seconds > 0:
            start, end = min(s for s, _ in event.busy), max(e for _, e in event.busy)
            replica.slot_time.add((start, end), event.slot_seconds)

    def stage_changed(self, event: events.StageChanged) -> None:
        if event.stage == TRAINER_STAGE:
            self.trainer.stage_changed(event)
        before = self.stages.get(event.stage)
        since = event.time
        if before is not None:
            self._account(before, event.time)
            if (before.state, before.waiting_for) == (event.state, event.waiting_for):
                since = before.since
        self.stages[event.stage] = StageView(
            event.stage, event.state, event.waiting_for, event.active, since, accounted=event.time
        )

    def _account(self, stage: StageView, until: float) -> None:
        """Add the time up to ``until`` to the sums of the stage's state. Spans of one stage never overlap."""
        span, stage.accounted = (stage.accounted, until), max(stage.accounted, until)
        if stage.waiting_for is not None:
            self._stage_waits.setdefault((stage.name, stage.waiting_for), IntervalUnion(self._origin)).add(span)
        elif stage.state.upper() == "PROCESSING":
            self._stage_work.setdefault(stage.name, IntervalUnion(self._origin)).add(span)

    def trainer_idle(self, window: Span) -> float | None:
        """Share of ``window`` outside any forward, optimizer step or gather; None for an empty window."""
        wall = window[1] - window[0]
        return None if wall <= 0 else 1.0 - self.trainer.busy.within(window) / wall

    def seconds(self, what: str, window: Span) -> float:
        """Return the seconds of ``window``, including summed-up time, in which a condition held.

        ``what`` names it. ``saved``: the trainer copied its state for a checkpoint. ``between_steps``: the trainer had
        a batch but computed nothing, as advantages, rows or results were pending, and neither saved a checkpoint nor
        waited for shared devices. ``waited_for_reward``: the trainer waited for groups, nothing decoded and a reward
        was computed. ``idle_while_saving``: a replica was idle while the trainer saved, summed over replicas.
        """
        summed = self._summed[what] if window[0] < self._summed_until else 0.0
        return summed + self._measures()[what]((max(window[0], self._summed_until), window[1]))

    def _measures(self) -> dict[str, Callable[[Span], float]]:
        return {
            "saved": self._saved,
            "between_steps": self._between_steps,
            "idle_while_saving": self._idle_while_saving,
            "waited_for_reward": self._waited_for_reward,
        }

    def _saved(self, window: Span) -> float:
        return length(intersection(self.saves.spans, complement(self.trainer.busy.spans, window)))

    def _between_steps(self, window: Span) -> float:
        if (working := self._stage_work.get(TRAINER_STAGE)) is None:
            return 0.0
        other = [*self.trainer.busy.spans, *self.saves.spans, *self.handovers.spans]
        return length(intersection(working.spans, complement(other, window)))

    def _of_replicas(self, what: str, window: Span) -> float:
        """Return the sum of one of `REPLICA_SECONDS` over all replicas, lost ones included."""
        lost = self._summed[what] if window[0] < self._summed_until else 0.0
        return lost + sum(REPLICA_SECONDS[what](replica, window) for replica in self.replicas.values())

    def rollouter_idle(self, window: Span) -> float | None:
        """Share of the replicas' time in ``window`` without a sequence prefilling or decoding.

        This is the mean over replicas, weighted by the time that each was part of the run; None when none was.
        """
        present = self._of_replicas("present", window)
        return None if present <= 0 else 1.0 - self._of_replicas("busy", window) / present

    def idle_while_saving(self, window: Span) -> float:
        """Return the part of `rollouter_idle` in which the trainer copied its state; 0 without replicas."""
        present = self._of_replicas("present", window)
        return 0.0 if present <= 0 else self.seconds("idle_while_saving", window) / present

    def _idle_while_saving(self, window: Span) -> float:
        saves = intersection(self.saves.spans, [window])
        return sum(
            replica.seconds(span) - replica.busy_seconds(span) for replica in self.replicas.values() for span in saves
        )

    def slot_utilization(self, window: Span) -> float | None:
        """Share of the replicas' slot time that was busy; None when no slots were declared or the window is empty."""
        capacity = self._of_replicas("slots", window)
        return None if capacity <= 0 else min(self._of_replicas("filled", window) / capacity, 1.0)

    def reported_until(self) -> float | None:
        """Return the instant up to which every replica's activity is known; infinite if all are lost."""
        return min((replica.reported_until for replica in self.replicas.values()), default=None)

    def _waited_for_reward(self, window: Span) -> float:
        if (rewarding := self._stage_work.get("Reward")) is None:
            return 0.0
        all_idle = [window]
        for replica in self.replicas.values():
            all_idle = intersection(all_idle, complement(replica.busy.spans, window))
        return length(intersection(intersection(all_idle, self.trainer_waits.spans), rewarding.spans))

    def stage_waits(self, window: Span) -> dict[str, dict[str, float]]:
        """Return stage → the stage that it waited for → seconds of ``window``."""
        waits: dict[str, dict[str, float]] = defaultdict(dict)
        for (stage, other), union in sorted(self._stage_waits.items()):
            if (seconds := union.within(window)) > 0:
                waits[stage][other] = seconds
        return dict(waits)
