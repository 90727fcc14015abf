"""Parameter updates on the time axis: the phases at each place, and the version that each replica serves.

An `UpdatePhase` says how long a phase took and is reported when a transfer is over, several phases at once. Phases of
one version at one place follow each other, so they are placed from the last one backwards: each ends where it was
reported, or where the next one begins if that is earlier.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from headway.events import ReplicaJoined, ReplicaLost, RunStarted, Span, UpdateFinished, UpdatePhase
from headway.reports.human import number
from headway.reports.metrics.intervals import complement
from headway.reports.metrics.version_row import PHASES
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind, side_by_side

GROUP = "Parameter update"
KINDS = {"gather": SpanKind.GATHER, "load": SpanKind.LOAD}


@dataclass(slots=True)
class UpdateLanes:
    """Accumulates the phases of updates, and which version each replica served when."""

    finished: list[UpdateFinished] = field(default_factory=list)
    served: dict[str, list[tuple[float, int | None]]] = field(default_factory=dict)
    """Replica → (time, version that it served from then on; None from its loss on)."""
    _phases: dict[str, dict[int, list[UpdatePhase]]] = field(default_factory=lambda: defaultdict(dict))

    def start(self, event: RunStarted) -> None:
        """Note a start, first or resumed: all replicas are new, and have the initial model until the next update."""
        for replica, points in self.served.items():
            points.append((event.time, 0 if replica in event.slots else None))
        for replica in event.slots:
            self.served.setdefault(replica, [(event.time, 0)])

    def phase(self, event: UpdatePhase) -> None:
        self._phases[event.where].setdefault(event.version, []).append(event)
        if event.phase == "load" and event.where in self.served:
            self.served[event.where].append((event.time, event.version))

    def join(self, event: ReplicaJoined) -> None:
        self.served[event.replica] = [(event.time, event.version)]

    def lose(self, event: ReplicaLost) -> None:
        if event.replica in self.served:
            self.served[event.replica].append((event.time, None))

    def phases(self) -> dict[str, list[LaneSpan]]:
        """The phases of all updates, by the place where they happened."""
        return {
            where: [span for phases in versions.values() for span in _placed(phases)]
            for where, versions in self._phases.items()
        }

    def transferred(self, version: int) -> float | None:
        """The time at which the last replica had registered ``version``; None when nothing says so."""
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
        return [lane for where, spans in phases for lane in side_by_side(GROUP, where, spans)]

    def serving(self, replica: str, end: float) -> list[LaneSpan]:
        """One span for each version that ``replica`` served."""
        points = self.served.get(replica, [])
        ends = [time for time, _ in points[1:]] + [end]
        return [
            LaneSpan(start, stop, SpanKind.SERVE, f"serves v{version}")
            for (start, version), stop in zip(points, ends, strict=True)
            if version is not None and stop > start
        ]

    def absent(self, replica: str, life: Span) -> list[Span]:
        """The parts of ``life`` before ``replica`` joined and after it was lost."""
        return (
            complement((span.span for span in self.serving(replica, life[1])), life) if replica in self.served else []
        )

    def loading(self, replica: str, around: float) -> int | None:
        """The version that ``replica`` began to serve at the time ``around`` or next; None where there is none."""
        return next((v for time, v in self.served.get(replica, []) if time >= around and v is not None), None)


def _placed(phases: list[UpdatePhase]) -> list[LaneSpan]:
    placed: list[LaneSpan] = []
    next_phase, next_start = len(PHASES), float("inf")
    for event in reversed(phases):
        phase = PHASES.index(event.phase)
        # The same phase twice is two transfers side by side: neither one makes room for the other.
        end = min(event.time, next_start) if phase < next_phase else event.time
        next_phase, next_start = phase, end - event.seconds
        moved = f", {number(event.nbytes / 1e6)} MB" if event.nbytes else ""
        label = f"{event.phase} v{event.version}{moved}"
        placed.append(LaneSpan(next_start, end, KINDS.get(event.phase, SpanKind.TRANSFER), label))
    return placed[::-1]
