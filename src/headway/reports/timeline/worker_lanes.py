"""Lanes of trainer, replicas, stages, environments and updates: their work and the reasons for idle time.

Idle time is what ``trainer/idle_ratio`` and ``rollouter/idle_ratio`` count: saving a checkpoint and loading weights are
not work. Claims are ordered from the most specific to the least.

Each state of a stage lasts from the event that names it to the next one. An episode's steps and waits are reported when
it has finished, so the lanes of environments lack episodes that are under way when the record ends.

An `UpdatePhase` says how long a phase took and is reported when a transfer is over, several phases at once. Phases of
one version at one place follow each other, so they are placed from the last one backwards: each ends where it was
reported, or where the next one begins if that is earlier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from headway import events
from headway.events import Span
from headway.reports.human import number
from headway.reports.metrics.intervals import complement, intersection, union
from headway.reports.metrics.occupancy import TRAINER_WORK
from headway.reports.metrics.version_row import PHASES
from headway.reports.timeline.lanes import (
    NOTHING_REPORTED,
    Counters,
    Lane,
    LaneSpan,
    SpanKind,
    clipped,
    idle,
    joined,
    lay_out,
    side_by_side,
)

STAGES = "Stages"
WAITING_INPUT, WAITING_OUTPUT, PROCESSING, PAUSED = "waiting_input", "waiting_output", "processing", "paused"
FIRST_AWAITED = "waits for its first input"
ENDED = ("draining", "stopped", "failed")
"""States of a stage that gets no more input; while draining, items may still be in processing."""


@dataclass(frozen=True, slots=True)
class LaneInterval:
    """Interval of a stage in one state, ``processing`` while any item is processed. ``active``: most items at once."""

    start: float
    end: float
    state: str
    waiting_for: str | None
    active: int


@dataclass(slots=True)
class StageLog:
    """Intervals of one stage in its states, in order and without gaps. The last one lasts until ``end``."""

    name: str
    end: float = 0.0
    _changes: list[LaneInterval] = field(default_factory=list)
    """Intervals without their ends: each lasts until the next one begins."""

    def change(self, event: events.StageChanged) -> None:
        # Counts items in processing. An item that waits to be sent is not counted.
        works = event.state == PROCESSING or event.active - (event.state == WAITING_OUTPUT) > 0
        state = PROCESSING if works else event.state
        waiting_for = None if state == PROCESSING else event.waiting_for
        stay = LaneInterval(event.time, event.time, state, waiting_for, event.active)
        if self._changes and (state, waiting_for) == ((last := self._changes[-1]).state, last.waiting_for):
            if event.active > last.active:
                self._changes[-1] = replace(last, active=event.active)
        else:
            self._changes.append(stay)

    @property
    def stays(self) -> list[LaneInterval]:
        ends = [*(stay.start for stay in self._changes[1:]), self.end]
        stays = zip(self._changes, ends, strict=False)
        return [replace(stay, end=end) for stay, end in stays if end > stay.start]

    def when(self, *states: str) -> list[Span]:
        return [(stay.start, stay.end) for stay in self.stays if stay.state in states]

    def lane(self, life: Span, *, late: bool = False) -> Lane:
        """Return the stage's lane, which ends when the stage stops. From ``life``'s start to the first transition it is
        idle: ``late``, since what is drawn begins there.
        """
        stays = self.stays
        first = stays[0].start if stays else life[1]
        spans = [_span(stay) for stay in stays if stay.state not in ENDED]
        before = idle((life[0], first), NOTHING_REPORTED if late else FIRST_AWAITED)
        return Lane(STAGES, self.name, joined([before, *spans]))


def _span(stay: LaneInterval) -> LaneSpan:
    span = (stay.start, stay.end)
    if stay.state == PROCESSING:
        return LaneSpan(*span, SpanKind.PROCESS, "1 item" if stay.active == 1 else f"up to {stay.active} items at once")
    if stay.state == PAUSED:
        return idle(span, "paused", kind=SpanKind.HALTED)
    return idle(span, f"waits for {stay.waiting_for}" if stay.waiting_for else stay.state)


UPDATES = "Parameter update"
KINDS = {"gather": SpanKind.GATHER, "load": SpanKind.LOAD}


@dataclass(slots=True)
class UpdateLanes:
    """Accumulates the phases of updates, and the versions served by each replica over time."""

    finished: list[events.UpdateFinished] = field(default_factory=list)
    served: dict[str, list[tuple[float, int | None]]] = field(default_factory=dict)
    """Replica → (time, version that it served from then on; None from its loss on)."""
    _phases: dict[str, dict[int, list[events.UpdatePhase]]] = field(default_factory=lambda: defaultdict(dict))

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():  # new or resumed: replicas start with the initial model
                for replica, points in self.served.items():
                    points.append((event.time, 0 if replica in event.slots else None))
                for replica in event.slots:
                    self.served.setdefault(replica, [(event.time, 0)])
            case events.UpdatePhase():
                self._phases[event.where].setdefault(event.version, []).append(event)
                if event.phase == "load" and event.where in self.served:
                    self.served[event.where].append((event.time, event.version))
            case events.UpdateFinished():
                self.finished.append(event)
            case events.ReplicaJoined():
                self.served[event.replica] = [(event.time, event.version)]
            case events.ReplicaLost() if event.replica in self.served:
                self.served[event.replica].append((event.time, None))

    def phases(self) -> dict[str, list[LaneSpan]]:
        """The phases of all updates, by the place where they happened."""
        return {
            where: [span for phases in versions.values() for span in _placed(phases)]
            for where, versions in self._phases.items()
        }

    def transferred(self, version: int) -> float | None:
        """Time at which the last replica had registered ``version``; None if not recorded."""
        ends = [
            event.time
            for versions in self._phases.values()
            for event in versions.get(version, [])
            if event.phase == "register"
        ]
        return max(ends, default=None)

    def lanes(self) -> list[Lane]:
        """One lane for each place, the trainer's first; more where phases of several updates overlap there."""
        replicas = {name: place for place, name in enumerate(self.served)}
        phases = sorted(self.phases().items(), key=lambda found: replicas.get(found[0], -1))
        return [lane for where, spans in phases for lane in side_by_side(UPDATES, where, spans)]

    def serving(self, replica: str, end: float) -> list[LaneSpan]:
        """One span for each version that ``replica`` served."""
        points = [*self.served.get(replica, []), (end, None)]
        return [
            LaneSpan(start, stop, SpanKind.SERVE, f"serves v{version}")
            for (start, version), (stop, _) in pairwise(points)
            if version is not None and stop > start
        ]

    def absent(self, replica: str, life: Span) -> list[Span]:
        """The parts of ``life`` before ``replica`` joined and after it was lost."""
        return (
            complement((span.span for span in self.serving(replica, life[1])), life) if replica in self.served else []
        )

    def loading(self, replica: str, around: float) -> int | None:
        """Return the version that ``replica`` began to serve at the time ``around`` or next after it; None without
        one.
        """
        return next((v for time, v in self.served.get(replica, []) if time >= around and v is not None), None)


def _placed(phases: list[events.UpdatePhase]) -> list[LaneSpan]:
    placed: list[LaneSpan] = []
    next_phase, next_start = len(PHASES), float("inf")
    for event in reversed(phases):
        phase = PHASES.index(event.phase)
        # The same phase twice means two transfers side by side: neither is shortened for the other.
        end = min(event.time, next_start) if phase < next_phase else event.time
        next_phase, next_start = phase, end - event.seconds
        moved = f", {number(event.nbytes / 1e6)} MB" if event.nbytes else ""
        label = f"{event.phase} v{event.version}{moved}"
        placed.append(LaneSpan(next_start, end, KINDS.get(event.phase, SpanKind.TRANSFER), label))
    return placed[::-1]


ENVIRONMENTS = "Environments"
NO_STEP = "no episode is in a step"
WAITED_FOR = "episodes wait for an environment"


def environment_lanes(counters: Counters, life: Span) -> Iterator[Lane]:
    """Yield the lane of steps and, below it, the lane of waits; nothing without an agent program."""
    steps = [
        LaneSpan(*span, SpanKind.ENVIRONMENT, _many(most, "episode in a step", "episodes in steps"))
        for span, most in counters.in_steps.stretches()
    ]
    waits = [
        idle(span, WAITED_FOR, _many(most, "episode waits", "episodes wait") + " for an environment")
        for span, most in counters.waiting.stretches()
    ]
    if counters.in_steps or counters.waiting:
        yield Lane(ENVIRONMENTS, "steps", lay_out(steps, [[idle(life, NO_STEP)]], life))
    if waits:
        yield Lane(ENVIRONMENTS, "steps: waited for", tuple(waits), annotates=True)


def _many(most: int, one: str, several: str) -> str:
    return f"1 {one}" if most == 1 else f"up to {most} {several} at once"


TRAINER, REPLICAS = "Trainer", "Replicas"
TRAINER_KINDS = {
    "step": SpanKind.STEP,
    "forward": SpanKind.FORWARD,
    "critic": SpanKind.FORWARD,
    "gather": SpanKind.GATHER,
}
GROUPS_AWAITED = f"waits for {events.WAITS_FOR_GROUPS}"
SCORES_AWAITED = "waits for groups: rewards are being computed, and nothing decodes"
STEPS_AWAITED = "waits for groups: episodes are in their environments, and nothing decodes"
UPDATE_AWAITED = "waits for the parameter update"
DRAIN_AWAITED = "waits for the parameter update: answers in flight finish first"
VALIDATION_AWAITED = "waits for the parameter update: a validation finishes first"
TRANSFER_AWAITED = "waits for the parameter update: weights are sent and received"
LOAD_AWAITED = "waits for the parameter update: replicas load"
HANDOVER = {"train": "waits for the shared devices", "generate": "hands the shared devices back"}
SAVES = "saves a checkpoint"
IN_ENVIRONMENTS = "episodes are in their environments"
NO_ROOM = "no requests: the staleness limit is reached"
NONE_ADMITTED = "no requests: all groups of the run are admitted"
NONE_FOR_IT = "no requests for this replica"
NO_MORE = "nothing left to do"
PREPARES = "between steps: advantages are computed and rows handed over"
SETTLES = "between steps: results are taken and groups settled"
RELEASED = "waits for the driver, which is at work elsewhere"
HALTED = {"load": "halted: loads new weights", "lease": "halted: training has the shared devices"}


@dataclass(slots=True)
class TrainerLanes:
    """Accumulates the trainer's activity for its lanes."""

    _work: list[LaneSpan] = field(default_factory=list)
    _saves: list[LaneSpan] = field(default_factory=list)
    _waits: list[Span] = field(default_factory=list)
    _batch: int | None = None
    leases: list[events.LeaseChanged] = field(default_factory=list)

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.BatchTaken():
                self._batch = event.fetch
                self._waits.append(event.waited)
            case events.TrainerBusy(what=what) if what in TRAINER_WORK:
                batch = "" if self._batch is None or what == "gather" else f", batch {self._batch}"
                self._work.append(LaneSpan(*event.span, TRAINER_KINDS[what], f"{what} v{event.version}{batch}"))
            case events.CheckpointCopied(version=version):
                self._saves.append(idle(event.span, SAVES, f"copies the state of v{version}", SpanKind.CHECKPOINT))
            case events.LeaseChanged():
                self.leases.append(event)

    def lane(
        self,
        life: Span,
        stage: StageLog,
        updates: UpdateLanes,
        *,
        scoring: Iterable[Span],
        in_steps: Iterable[Span],
        drains: bool,
    ) -> Lane:
        """Return the trainer's lane. ``stage``: ActorTrain. ``scoring``: when a reward ran and nothing decoded.
        ``in_steps``: when programs of episodes worked and nothing decoded.

        ``drains``: an update waits until answers in flight are finished.
        """
        waits = union([*self._waits, *stage.when(WAITING_INPUT)])
        claims = [
            self._saves,
            [idle((lease.asked, lease.time), HANDOVER[lease.holder]) for lease in self.leases],
            [idle(span, SCORES_AWAITED) for span in intersection(waits, scoring)],
            [idle(span, STEPS_AWAITED) for span in intersection(waits, in_steps)],
            [idle(span, GROUPS_AWAITED) for span in waits],
            *_update_claims(stage, updates, drains),
            [idle(span, SETTLES) for span in _behind((span.end for span in self._work), stage.when(PROCESSING))],
            [idle(span, PREPARES) for span in stage.when(PROCESSING)],
            [idle(span, NO_MORE) for span in stage.when(*ENDED)],
        ]
        return Lane(TRAINER, "trainer", lay_out(self._work, claims, life))


def _behind(moments: Iterable[float], spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the part of each of ``spans`` after the last of ``moments`` within it."""
    ordered = sorted(moments)
    for start, end in spans:
        last = bisect_right(ordered, end) - 1
        if last >= 0 and ordered[last] >= start:
            yield ordered[last], end


def _update_claims(stage: StageLog, updates: UpdateLanes, drains: bool) -> list[list[LaneSpan]]:
    """Claims for the trainer's waits for updates, by the phase that it waited for, most telling first."""
    waited = union(stage.when(WAITING_OUTPUT))
    validations = [_validation_wait(event, updates) for event in updates.finished if event.validation_stall_s > 0]
    phases = [span for spans in updates.phases().values() for span in spans]
    transfers = union(span.span for span in phases if span.kind in (SpanKind.TRANSFER, SpanKind.GATHER))
    loads = union(span.span for span in phases if span.kind is SpanKind.LOAD)
    return [
        [idle(span, TRANSFER_AWAITED) for span in intersection(transfers, waited)],
        [idle(span, LOAD_AWAITED) for span in intersection(loads, waited)],
        clipped(validations, waited),
        [idle(span, RELEASED) for span in _behind((event.time for event in updates.finished), waited)],
        [idle(span, DRAIN_AWAITED if drains else UPDATE_AWAITED) for span in waited],
    ]


def _validation_wait(event: events.UpdateFinished, updates: UpdateLanes) -> LaneSpan:
    """Claim for the wait for a validation, which comes right after the transfer, before any replica is halted."""
    start = updates.transferred(event.version)
    start = event.time - event.trainer_stall_s if start is None else start
    return idle((start, start + event.validation_stall_s), VALIDATION_AWAITED)


@dataclass(slots=True)
class Replicas:
    """Accumulates the replicas' activity. A lane begins with its replica's join and ends with its loss.

    Time before the join or after the loss of a replica is not idle time, here and in the ratio.
    """

    names: list[str] = field(default_factory=list)
    _busy: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    _halts: dict[str, list[events.ReplicaHalted]] = field(default_factory=lambda: defaultdict(list))

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.names += [name for name in event.slots if name not in self.names]
            case events.ReplicaJoined() | events.ReplicaActivity():
                if event.replica not in self.names:
                    self.names.append(event.replica)
                if isinstance(event, events.ReplicaActivity):
                    self._busy[event.replica] += event.busy
            case events.ReplicaHalted():
                self._halts[event.replica].append(event)

    def busy(self) -> list[Span]:
        """Spans in which any of the replicas prefilled or decoded, as a union."""
        return union(span for spans in self._busy.values() for span in spans)

    def lane(self, replica: str, life: Span, shared: Sequence[list[LaneSpan]], updates: UpdateLanes) -> Lane:
        """Return the lane of ``replica``. ``shared``: claims that hold for every replica, from `AdmissionLanes`."""
        work = [LaneSpan(*span, SpanKind.DECODE, "decodes") for span in union(self._busy[replica])]
        halts = [_halt(event, updates) for event in self._halts[replica]]
        present = complement(updates.absent(replica, life), life)
        return Lane(REPLICAS, replica, tuple(s for part in present for s in lay_out(work, [halts, *shared], part)))


@dataclass(slots=True)
class AdmissionLanes:
    """Accumulates the times when all groups of the run were admitted, so that more room would not help."""

    total: int | None = None
    end: float = 0.0
    _complete: list[Span] = field(default_factory=list)
    _since: float | None = None

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.total = event.total_groups
            case events.GroupAdmitted():  # a discarded group is replaced: the last admission may come more than once
                if self._since is not None:
                    self._complete.append((self._since, event.time))
                whole = self.total is not None and event.admitted - event.discarded >= self.total
                self._since = event.time if whole else None

    def no_requests(self, loader: StageLog, generate: StageLog, in_steps: Sequence[Span]) -> list[list[LaneSpan]]:
        """Return claims for replicas without requests: the reasons why replicas that were not halted had no work.

        ``in_steps``: when programs of episodes worked, whose next turns will be requests.
        """
        complete = [*self._complete, *([] if self._since is None else [(self._since, self.end)])]
        return [
            [idle(span, "no requests: generation is paused") for span in generate.when(PAUSED)],
            *_with_steps([*complete, *loader.when(*ENDED)], NONE_ADMITTED, in_steps),
            *_with_steps(loader.when(WAITING_INPUT), NO_ROOM, in_steps),
            [idle(span, f"no requests: {IN_ENVIRONMENTS}") for span in in_steps],
            [idle((stay.start, stay.end), NONE_FOR_IT) for stay in loader.stays],
        ]


def _with_steps(spans: Sequence[Span], reason: str, in_steps: Sequence[Span]) -> list[list[LaneSpan]]:
    """Claims for ``reason``, first for the time in which programs of episodes worked: it may come from them."""
    both = intersection(spans, in_steps)
    return [[idle(span, f"{reason}, and {IN_ENVIRONMENTS}") for span in both], [idle(span, reason) for span in spans]]


def _halt(event: events.ReplicaHalted, updates: UpdateLanes) -> LaneSpan:
    reason = HALTED.get(event.reason, f"halted: {event.reason}")
    version = updates.loading(event.replica, event.span[0]) if event.reason == "load" else None
    label = reason if version is None else f"halted: loads v{version}"
    if event.interrupted:
        label += f"; {event.interrupted} answers were cut and go on"
    return idle(event.span, reason, label, SpanKind.HALTED)
