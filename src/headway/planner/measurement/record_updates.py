"""The costs of a run's parameter updates, phase by phase, and what it took to hand shared devices over.

gather ▶ send ║ recv ▶ register ─▶ pause: what is in flight drains ─▶ load ─▶ resume ─▶ finished
└──────── transfer ─────────────┘  └ latency ┘     └ not a cost ┘             └ latency ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.events import (
    Event,
    LeaseChanged,
    ReplicaHalted,
    Span,
    TrainerBusy,
    UpdateFinished,
    UpdatePhase,
    UpdateSuperseded,
)

BusyWithin = Callable[[str, Span], float]
"""Function of a replica's name and a time window: seconds of the window in which that replica computed."""


@dataclass(slots=True)
class UpdateRecord:
    """One parameter update. Seconds of each phase: the slowest replica's, where several had it."""

    began: float = 0.0
    transfer_s: float = 0.0
    """Seconds from the begin of gather until every replica had received; known for synchronous updates."""
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    halted_s: float = 0.0
    """Seconds for which a replica decoded nothing: the mean over replicas."""
    finished: float | None = None
    superseded: bool = False
    loads: dict[str, Span] = field(default_factory=dict)
    """Time span of each replica, by name, from when it stood still until it had loaded."""

    def recv_s(self, *, synchronous: bool) -> float:
        """Seconds of the receive phase. In a synchronous update a replica's report includes its wait for gather: there
        it is what the transfer took after gather and besides register. Sending goes on at the same time."""
        if not synchronous:
            return self.phases.get("recv", 0.0)
        return max(0.0, self.transfer_s - self.phases.get("gather", 0.0) - self.phases.get("register", 0.0))

    @property
    def load_s(self) -> float:
        """Seconds of the load phase, with the way to the replica and back where that is known."""
        if not self.loads:
            return max(self.phases.get("load", 0.0), self.halted_s)
        return max(loaded - stopped for stopped, loaded in self.loads.values())

    def latency_s(self, busy: BusyWithin, *, synchronous: bool) -> float | None:
        """Seconds of the update beside its phases and beside what replicas finished before they stood still; None where
        other updates were under way, or it is not known when replicas stood still.
        """
        if self.finished is None or self.superseded or not self.loads:
            return None
        name, (stopped, loaded) = max(self.loads.items(), key=lambda load: load[1][1])
        gather_s, register_s = self.phases.get("gather", 0.0), self.phases.get("register", 0.0)
        transferred = self.began + gather_s + self.recv_s(synchronous=synchronous) + register_s
        drained = busy(name, (transferred, stopped))
        return max(0.0, stopped - transferred - drained) + self.finished - loaded


@dataclass(slots=True)
class UpdatesRecord:
    """Collects the updates from the events of a run, which `add` takes in order."""

    updates: defaultdict[int, UpdateRecord] = field(default_factory=lambda: defaultdict(UpdateRecord))
    versions: int = 0
    """Number of updates that finished."""
    warm_at: float = float("inf")
    """The time at which the first update ended."""
    to_train_s: list[float] = field(default_factory=list)
    """Seconds from when replicas stood still until the trainer had their devices."""
    to_generate_s: list[float] = field(default_factory=list)
    _loaded: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Replica → (version, time) of its load, while it is still halted."""
    _leased: float = 0.0
    """The time at which the trainer was given the devices that it has, or had last."""
    _stood: list[float] = field(default_factory=list)
    """Times at which replicas stopped for the latest lease, of those that have resumed."""

    def add(self, event: Event) -> None:
        match event:
            case TrainerBusy(what="gather", span=(start, _)):
                update = self.updates[event.version]
                update.began, update.transfer_s = start, event.time - start
            case UpdatePhase():
                self._phase(event)
            case ReplicaHalted():
                self._halted(event)
            case UpdateSuperseded():
                self.updates[event.version].superseded = True
            case UpdateFinished():
                self.versions += 1
                self.warm_at = min(self.warm_at, event.time)
                update = self.updates[event.version]
                update.halted_s, update.finished = event.rollout_stall_s, event.time
            case LeaseChanged(holder="train"):
                self._leased = event.time
            case LeaseChanged(holder="generate"):
                if self._stood:
                    self.to_train_s.append(self._leased - max(self._stood))
                    self.to_generate_s.append(event.time - event.asked)
                self._stood = []

    def _phase(self, event: UpdatePhase) -> None:
        update = self.updates[event.version]
        update.phases[event.phase] = max(update.phases.get(event.phase, 0.0), event.seconds)
        update.nbytes = max(update.nbytes, event.nbytes)
        if event.phase == "load":
            self._loaded[event.where] = event.version, event.time

    def _halted(self, event: ReplicaHalted) -> None:
        """Record a halt, whose event is emitted at its end."""
        loaded = self._loaded.pop(event.replica, None)
        if event.reason == "load" and loaded is not None:
            version, at = loaded
            self.updates[version].loads[event.replica] = event.span[0], at
        elif event.reason == "lease":
            self._stood.append(event.span[0])
