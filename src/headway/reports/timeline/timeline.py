"""Timelines: a real or simulated run as lanes on one time axis, with work and the reasons of idle time.

    StageChanged ───────────────────────────────────────────▶ Stages: one lane each
    TrainerBusy, BatchTaken, CheckpointCopied ──────────────▶ Trainer
    ReplicaActivity, ReplicaHalted ─────────────────────────▶ Replicas: one lane each, and the version that it serves
    TrajectoryFinished ─────────────────────────────────────▶ Environments: steps of programs, and what waits for them
    UpdatePhase ────────────────────────────────────────────▶ Parameter update: phases at the trainer and each replica
    LeaseChanged, ValidationFinished, CheckpointSaved ──────▶ Run
    UpdateFinished, GroupSettled, ReplicaLost, Note, … ─────▶ marks
    every event ────────────────────────────────────────────▶ figures of the whole run, as in summary.json
    rows of metrics, groups ────────────────────────────────▶ curves, the fates of groups

Everything is derived from events, so a run that failed or still goes on has a timeline up to its last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from headway import events
from headway.events import Event, Span
from headway.reports.human import score
from headway.reports.live.plain_log import words
from headway.reports.metrics.intervals import complement, intersection
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.timeline.lanes import Counter, Counters, Lane, LaneSpan, Named, SpanKind, clipped, side_by_side
from headway.reports.timeline.run_history import CurveLog, GroupLog, ledger
from headway.reports.timeline.worker_lanes import (
    PROCESSING,
    REPLICAS,
    TRAINER,
    AdmissionLanes,
    Replicas,
    StageLog,
    TrainerLanes,
    UpdateLanes,
    environment_lanes,
)

RUN = "Run"
LEASES = {"train": SpanKind.TRAIN_LEASE, "generate": SpanKind.GENERATE_LEASE}
KEPT_DISCARDS = 20_000
"""Largest number of marks of discarded groups. The figures count all groups."""


class MarkKind(Named):
    """Kind of an event at one instant. Kinds with words have their own row."""

    UPDATE = "update"
    """A new version that every replica serves."""
    SUPERSEDED = "superseded", "updates superseded"
    DISCARDED = "discarded", "groups discarded"
    """The end of a group that was not trained on."""
    JOINED = "joined", "replicas joined"
    LOST = "lost", "replicas lost"
    NOTE = "note", "notes"
    WARNING = "warning", "warnings"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Mark:
    time: float
    kind: MarkKind
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run on a time axis. ``window``: from first to last event; ``lanes`` are in the order to show them in."""

    window: Span
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    counters: tuple[Counter, ...]
    summary: dict[str, Any]
    """The run in one object, as in ``summary.json``."""
    measured: Span | None
    """The wall time that the figures' shares refer to: first admission to last optimizer step."""
    simulated: bool = False
    """True for a simulation: times are predictions, and rewards mean nothing."""
    versions: tuple[int, int] | None = None
    """First and last version that lanes, marks, counters and groups cover; None for the whole run."""
    curves: CurveLog = field(default_factory=CurveLog)
    """Curves of how the run learned."""
    groups: GroupLog = field(default_factory=GroupLog)
    """Outcomes of the groups."""
    ledger: dict[str, Any] = field(default_factory=dict)

    @property
    def spans(self) -> int:
        return sum(len(lane.spans) for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class IdleReason:
    """Reason why ``who`` was idle for ``seconds``, which are ``share`` of the wall time.

    For replicas these are means, weighted by the time that each was part of the run.
    """

    who: str
    reason: str
    seconds: float
    share: float


def build_timeline(history: Iterable[Event], *, simulated: bool = False) -> Timeline:
    """Build the timeline of a run from its events, in the order in which they happened.

    ``simulated``: the events are a simulation's, whose rewards mean nothing.
    """
    builder = TimelineBuilder(simulated=simulated)
    for event in history:
        builder.on_event(event)
    return builder.build()


def idle_reasons(timeline: Timeline) -> list[IdleReason]:
    """Reasons why trainer and replicas did not work, most time first; shares add up to the idle ratios."""
    window = timeline.measured
    if window is None:
        return []
    wall = window[1] - window[0]
    reasons: list[IdleReason] = []
    for group in (TRAINER, REPLICAS):
        lanes = [lane for lane in timeline.lanes if lane.group == group and not lane.annotates]
        present = sum(lane.seconds(window) for lane in lanes)
        totals: dict[str, float] = {}
        for lane in lanes:
            for reason, seconds in lane.idle_by_reason(window).items():
                totals[reason] = totals.get(reason, 0.0) + seconds / present
        reasons += [IdleReason(group, reason, share * wall, share) for reason, share in totals.items()]
    return sorted(reasons, key=lambda found: -found.seconds)


@dataclass(slots=True)
class TimelineBuilder:
    """An observer that takes a run's events one by one, and lays the lanes out at the end."""

    curves: CurveLog = field(default_factory=CurveLog)
    groups: GroupLog = field(default_factory=GroupLog)
    metrics: RunMetrics = field(default_factory=RunMetrics)
    stages: dict[str, StageLog] = field(default_factory=dict)
    trainer: TrainerLanes = field(default_factory=TrainerLanes)
    replicas: Replicas = field(default_factory=Replicas)
    admission: AdmissionLanes = field(default_factory=AdmissionLanes)
    updates: UpdateLanes = field(default_factory=UpdateLanes)
    counters: Counters = field(default_factory=Counters)
    validations: list[LaneSpan] = field(default_factory=list)
    saves: list[LaneSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    simulated: bool = False
    discards: int = 0
    first: float | None = None
    last: float = 0.0
    versions: tuple[int, int] | None = None
    """The versions that are drawn; None for the whole run."""
    since: float | None = None
    """Time at which the first of these versions began; earlier events are not drawn. None for the whole run."""

    def __post_init__(self) -> None:
        self.metrics.sinks = [self.curves]

    def on_event(self, event: Event) -> None:
        self.metrics.on_event(event)
        self.draw(event)

    def close(self) -> None: ...

    def draw(self, event: Event) -> None:
        """Draw an event that was given to ``metrics`` before."""
        self.first = event.time if self.first is None else min(self.first, event.time)
        self.last = max(self.last, event.time)
        self._record(event)
        self._mark(event)

    def build(self, *, ended: bool = True) -> Timeline:
        """Return the timeline so far. With ``ended`` no event follows: rows of an unfinished run are closed."""
        since = -inf if self.since is None else self.since
        life = (max(self.first or 0.0, since), self.last)
        # Before `close`, which also emits rows of unfinished versions.
        figures = summary(self.metrics)
        if ended:
            self.metrics.close()
        self.admission.end = life[1]
        for log in self.stages.values():
            log.end = life[1]
        whole = Timeline(
            window=life,
            lanes=() if self.first is None else tuple(self._lanes(life)),
            marks=tuple(sorted(self.marks, key=lambda mark: mark.time)),
            counters=self.counters.all(),
            summary=figures,
            measured=self.metrics.window,
            simulated=self.simulated,
            versions=self.versions,
            curves=self.curves,
            groups=self.groups,
            ledger=ledger(self.metrics),
        )
        return whole if self.versions is None else _within(whole, life)

    # ------------------------------------------------------------------------------------------ events

    def _record(self, event: Event) -> None:
        for part in (self.trainer, self.replicas, self.admission, self.updates, self.counters, self.groups):
            part.on_event(event)
        match event:
            case events.StageChanged():
                self.stages.setdefault(event.stage, StageLog(event.stage)).change(event)
            case events.ValidationFinished():
                reward = "" if self.simulated else f"mean reward {score(event.accuracy)} on "
                label = f"validates v{event.version}: {reward}{event.problems} problems"
                self.validations.append(LaneSpan(*event.span, SpanKind.VALIDATE, label))
            case events.CheckpointSaved():
                self.saves.append(LaneSpan(*event.span, SpanKind.CHECKPOINT, f"saves v{event.version} to {event.path}"))

    def _mark(self, event: Event) -> None:
        if (mark := _mark_of(event)) is None:
            return
        if self.simulated and mark.kind is MarkKind.FINISHED:
            mark = replace(mark, label="the simulation ends")
        self.discards += mark.kind is MarkKind.DISCARDED
        if mark.kind is not MarkKind.DISCARDED or self.discards <= KEPT_DISCARDS:
            self.marks.append(mark)

    def _in_steps(self) -> list[Span]:
        """Spans in which any episode was in a step of its program, as a union."""
        return [span for span, _ in self.counters.in_steps.stretches()]

    def _stage(self, name: str) -> StageLog:
        return self.stages.get(name) or StageLog(name)

    # ------------------------------------------------------------------------------------------ lanes

    def _lanes(self, life: Span) -> Iterator[Lane]:
        yield self._trainer_lane(life)
        yield from self._replica_lanes(life)
        yield from environment_lanes(self.counters, life)
        yield from self.updates.lanes()
        yield from self._lease_lanes(life)
        for name, spans in (("validation", self.validations), ("checkpoints", self.saves)):
            if any(span.end > span.start for span in spans):
                yield from side_by_side(RUN, name, spans)
        started = self.metrics.started
        for name in sorted(self.stages, key=started.place_of) if started else self.stages:
            yield self.stages[name].lane(life, late=self.since is not None)

    def _trainer_lane(self, life: Span) -> Lane:
        started = self.metrics.started
        nothing_decodes = complement(self.replicas.busy(), life)
        return self.trainer.lane(
            life,
            self._stage("ActorTrain"),
            self.updates,
            scoring=intersection(nothing_decodes, self._stage("Reward").when(PROCESSING)),
            in_steps=intersection(nothing_decodes, self._in_steps()),
            drains=started is not None and started.on_update == "drain",
        )

    def _replica_lanes(self, life: Span) -> Iterator[Lane]:
        in_steps = self._in_steps()
        claims = self.admission.no_requests(self._stage("PromptLoader"), self._stage("Generate"), in_steps)
        for name in self.replicas.names:
            yield self.replicas.lane(name, life, claims, self.updates)
            if served := self.updates.serving(name, life[1]):
                yield Lane(REPLICAS, f"{name}: version", tuple(served), annotates=True)

    def _lease_lanes(self, life: Span) -> Iterator[Lane]:
        if not self.trainer.leases:
            return
        # Generation has the devices until training asks for them the first time.
        holders = [(life[0], "generate"), *((lease.time, lease.holder) for lease in self.trainer.leases)]
        held = [
            LaneSpan(start, end, LEASES[holder], f"{holder} holds the devices")
            for (start, holder), (end, _) in pairwise([*holders, (life[1], "")])
            if end > start
        ]
        asked = [
            LaneSpan(lease.asked, lease.time, SpanKind.IDLE, f"{lease.holder} has asked for the devices")
            for lease in self.trainer.leases
            if lease.time > lease.asked
        ]
        yield Lane(RUN, "shared devices", tuple(held))
        yield from side_by_side(RUN, "shared devices: asked for", asked)


def _within(timeline: Timeline, window: Span) -> Timeline:
    """The part of a timeline inside ``window``. Its figures, curves and ledger stay those of the whole run."""
    lanes = (replace(lane, spans=tuple(clipped(lane.spans, [window]))) for lane in timeline.lanes)
    counters = (counter.since(window[0]) for counter in timeline.counters)
    return replace(
        timeline,
        lanes=tuple(lane for lane in lanes if lane.spans),
        marks=tuple(mark for mark in timeline.marks if mark.time >= window[0]),
        counters=tuple(counter for counter in counters if counter.times),
        measured=next(iter(intersection([timeline.measured or window], [window])), None),
    )


def _mark_of(event: Event) -> Mark | None:
    match event:
        case events.UpdateFinished():
            return Mark(event.time, MarkKind.UPDATE, f"v{event.version}")
        case events.UpdateSuperseded():
            return Mark(
                event.time, MarkKind.SUPERSEDED, f"{event.replica} never gets v{event.version}: newer was ready"
            )
        case events.GroupSettled(fate="filtered" | "dropped" | "failed"):
            why = f": {event.reason}" if event.reason else ""
            return Mark(event.time, MarkKind.DISCARDED, f"group {event.number} {event.fate}{why}")
        case events.ReplicaJoined():
            return Mark(event.time, MarkKind.JOINED, f"{event.replica} joins with v{event.version}")
        case events.ReplicaLost() | events.EpisodeWorkerLost() | events.RanksLost() | events.CheckpointFailed():
            return Mark(event.time, MarkKind.LOST, (words(event) or ("", ""))[1])
        case events.RanksRestarted():
            return Mark(event.time, MarkKind.JOINED, (words(event) or ("", ""))[1])
        case events.ProfileTaken():
            until = f", to v{event.version + event.versions - 1}" if event.versions > 1 else ""
            seconds = event.span[1] - event.span[0]
            what = f"a profile of {seconds:.1f} s begins with v{event.version}{until}"
            traces = event.files[0] if len(event.files) == 1 else f"{len(event.files)} traces"
            return Mark(event.span[0], MarkKind.NOTE, f"{what}: {traces} in {event.folder}")
        case events.Note():
            return Mark(event.time, MarkKind.WARNING if event.level == "warning" else MarkKind.NOTE, event.text)
        case events.RunResumed():
            return Mark(event.time, MarkKind.NOTE, f"resumed from the checkpoint of v{event.version}")
        case events.RunFinished():
            why = f": {event.reason}" if event.reason else ""
            return Mark(event.time, MarkKind.FINISHED, f"the run {event.status}{why}")
    return None
