"""Lanes of the trainer and the replicas: their work, and why they did nothing in between.

Idle time is what ``trainer/idle_ratio`` and ``rollouter/idle_ratio`` count: saving a checkpoint and loading weights are
not work. Claims go from the most telling to the least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from headway.events import (
    WAITS_FOR_GROUPS,
    CheckpointSaved,
    FetchTaken,
    GroupAdmitted,
    LeaseChanged,
    ReplicaActivity,
    ReplicaHalted,
    Span,
    TrainerBusy,
    UpdateFinished,
)
from headway.reports.metrics.intervals import complement, intersection, union
from headway.reports.metrics.occupancy import TRAINER_WORK
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind, clipped, idle, lay_out
from headway.reports.timeline.stage_lanes import ENDED, PAUSED, PROCESSING, WAITING_INPUT, WAITING_OUTPUT, StageLog
from headway.reports.timeline.update_lanes import UpdateLanes

TRAINER, REPLICAS = "Trainer", "Replicas"
TRAINER_KINDS = {
    "step": SpanKind.STEP,
    "forward": SpanKind.FORWARD,
    "critic": SpanKind.FORWARD,
    "gather": SpanKind.GATHER,
}
GROUPS_AWAITED = f"waits for {WAITS_FOR_GROUPS}"
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
PREPARES = "prepares a fetch or an update"
HALTED = {"load": "halted: loads new weights", "lease": "halted: training has the shared devices"}


@dataclass(slots=True)
class TrainerLanes:
    """Accumulates the trainer's activity for its lanes."""

    _work: list[LaneSpan] = field(default_factory=list)
    _saves: list[LaneSpan] = field(default_factory=list)
    _waits: list[Span] = field(default_factory=list)
    _fetch: int | None = None

    def take(self, event: FetchTaken) -> None:
        self._fetch = event.fetch
        self._waits.append(event.waited)

    def work(self, event: TrainerBusy) -> None:
        if event.what in TRAINER_WORK:
            fetch = "" if self._fetch is None or event.what == "gather" else f", fetch {self._fetch}"
            self._work.append(LaneSpan(*event.span, TRAINER_KINDS[event.what], f"{event.what} v{event.version}{fetch}"))

    def save(self, event: CheckpointSaved) -> None:
        self._saves.append(idle(event.span, SAVES, f"saves the checkpoint of v{event.version}", SpanKind.CHECKPOINT))

    def lane(
        self,
        life: Span,
        stage: StageLog,
        updates: UpdateLanes,
        *,
        leases: Iterable[LeaseChanged],
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
            [idle((lease.asked, lease.time), HANDOVER[lease.holder]) for lease in leases],
            [idle(span, SCORES_AWAITED) for span in intersection(waits, scoring)],
            [idle(span, STEPS_AWAITED) for span in intersection(waits, in_steps)],
            [idle(span, GROUPS_AWAITED) for span in waits],
            *_update_claims(stage, updates, drains),
            [idle(span, PREPARES) for span in stage.when(PROCESSING)],
            [idle(span, NO_MORE) for span in stage.when(*ENDED)],
        ]
        return Lane(TRAINER, "trainer", lay_out(self._work, claims, life))


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
        [idle(span, DRAIN_AWAITED if drains else UPDATE_AWAITED) for span in waited],
    ]


def _validation_wait(event: UpdateFinished, updates: UpdateLanes) -> LaneSpan:
    """Claim for the wait for a validation, which comes right after the transfer, before any replica is halted."""
    start = updates.transferred(event.version)
    start = event.time - event.trainer_stall_s if start is None else start
    return idle((start, start + event.validation_stall_s), VALIDATION_AWAITED)


@dataclass(slots=True)
class Replicas:
    """Accumulates the replicas' activity. A lane begins with its replica's join and ends with its loss.

    Time in which a replica was no part of the run is not idle time, neither here nor in the ratio.
    """

    names: list[str] = field(default_factory=list)
    _busy: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    _halts: dict[str, list[ReplicaHalted]] = field(default_factory=lambda: defaultdict(list))

    def declare(self, names: Iterable[str]) -> None:
        self.names += [name for name in names if name not in self.names]

    def work(self, event: ReplicaActivity) -> None:
        self.declare([event.replica])
        self._busy[event.replica] += event.busy

    def halt(self, event: ReplicaHalted) -> None:
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
    _complete: list[Span] = field(default_factory=list)
    _since: float | None = None

    def admit(self, event: GroupAdmitted) -> None:
        """Note an admission. A discarded group is replaced, so the last admission may come more than once."""
        self.close(event.time)
        if self.total is not None and event.admitted - event.discarded >= self.total:
            self._since = event.time

    def close(self, end: float) -> None:
        if self._since is not None:
            self._complete.append((self._since, end))
            self._since = None

    def copy(self) -> AdmissionLanes:
        """Return a copy that may be closed while this one stays open."""
        return replace(self, _complete=list(self._complete))

    def no_requests(self, loader: StageLog, generate: StageLog, in_steps: Sequence[Span]) -> list[list[LaneSpan]]:
        """Claims for replicas without requests: why they had nothing to do though nothing halted them.

        ``in_steps``: when programs of episodes worked, whose next turns will be requests.
        """
        return [
            [idle(span, "no requests: generation is paused") for span in generate.when(PAUSED)],
            *_with_steps([*self._complete, *loader.when(*ENDED)], NONE_ADMITTED, in_steps),
            *_with_steps(loader.when(WAITING_INPUT), NO_ROOM, in_steps),
            [idle(span, f"no requests: {IN_ENVIRONMENTS}") for span in in_steps],
            [idle((stay.start, stay.end), NONE_FOR_IT) for stay in loader.stays],
        ]


def _with_steps(spans: Sequence[Span], reason: str, in_steps: Sequence[Span]) -> list[list[LaneSpan]]:
    """Claims for ``reason``, first for the time in which programs of episodes worked: it may come from them."""
    both = intersection(spans, in_steps)
    return [[idle(span, f"{reason}, and {IN_ENVIRONMENTS}") for span in both], [idle(span, reason) for span in spans]]


def _halt(event: ReplicaHalted, updates: UpdateLanes) -> LaneSpan:
    reason = HALTED.get(event.reason, f"halted: {event.reason}")
    version = updates.loading(event.replica, event.span[0]) if event.reason == "load" else None
    label = reason if version is None else f"halted: loads v{version}"
    if event.interrupted:
        label += f"; {event.interrupted} answers were cut and go on"
    return idle(event.span, reason, label, SpanKind.HALTED)
