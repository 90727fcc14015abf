"""Events: what happens in a run, typed. Metrics, timelines and the live view derive from these alone.

``time`` is the event loop's clock (seconds, monotonic; virtual under simulation). Worker processes on the same machine
share that clock; their spans arrive as ``[start, end]`` pairs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Protocol, Self

WAITS_FOR_GROUPS = "groups from the message queue"
"""``StageChanged.waiting_for`` of a stage that takes fetches; reports look for this text."""

Span = tuple[float, float]

DecodeSteps = tuple[int, float, int]
"""(steps, seconds, cached) of decode steps with the same number of active sequences, added up. ``seconds`` is wall time
from one step's end to the next one's; ``cached`` counts the tokens in the KV cache, once for each step."""

PrefillSteps = tuple[int, int, int, float, int]
"""(steps, active, tokens, seconds, cached) of steps that prefilled ``tokens``, beside decoding, added up. ``active``
counts all that were given a token, those that began from these contexts included. The rest is as in `DecodeSteps`."""


def add_prefill(merged: dict[int, PrefillSteps], active: int, tokens: int, seconds: float, cached: int) -> None:
    """Add one step to those of about its size. ``merged`` is keyed by the largest power of two that is no more than a
    step's ``tokens``: what a token costs can be told by comparing sizes, and there are never many of them.
    """
    size = 1 << (tokens.bit_length() - 1)
    before = merged.get(size, (0, 0, 0, 0.0, 0))
    merged[size] = (before[0] + 1, before[1] + active, before[2] + tokens, before[3] + seconds, before[4] + cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = "event"
    on_clock: ClassVar[tuple[str, ...]] = ("time",)
    """Fields that hold moments: numbers, spans, or lists of spans."""
    time: float

    def to_json(self) -> dict[str, Any]:
        """The event as one flat JSON object, ``kind`` first. Its values are the event's own, not copies."""
        event_type: Any = type(self)
        return {"kind": self.kind, **{name: getattr(self, name) for name in _field_names(event_type)}}

    def later(self, seconds: float) -> Self:
        """Return the same event on a clock that is ahead by so much."""
        return replace(self, **{name: _later(getattr(self, name), seconds) for name in self.on_clock})


@cache
def _field_names(event_type: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(event_type))


def _later(moment: Any, seconds: float) -> Any:
    match moment:
        case tuple():
            return tuple(end + seconds for end in moment)
        case list():
            return [_later(span, seconds) for span in moment]
    return moment + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run.started"
    mode: str
    seed: int
    groups_per_version: int
    total_groups: int | None
    lag_bound: int | None
    order: str
    slots: dict[str, int]
    """Trajectories that each replica can decode at once."""
    on_update: str = ""
    """The policy for trajectories in flight when new weights arrive: ``drain``, ``interrupt`` or ``keep``."""
    stages: list[str] = field(default_factory=list)
    """The names of the run's stages, in the order in which data flows."""

    def place_of(self, stage: str) -> int:
        """The place of ``stage`` among the run's stages; behind them where it is none of them."""
        return self.stages.index(stage) if stage in self.stages else len(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescribed(Event):
    """A worker of the run is up. ``cpu`` and ``gpu`` are models; ``cores`` are those of ``host`` that it may use."""

    kind: ClassVar[str] = "worker.described"
    worker: str
    host: str
    cpu: str
    cores: int
    gpu: str | None
    threads: int
    """Threads of torch."""
    pid: int | None = None
    """The id of the worker's process on ``host``. None in records that do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged(Event):
    """A stage entered ``state``; ``waiting_for`` names the other party while it waits."""

    kind: ClassVar[str] = "stage.changed"
    stage: str
    state: str
    waiting_for: str | None = None
    active: int = 0
    """Items in processing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted(Event):
    """A group was admitted. ``limit`` is ⌊(version + 1 + η)·B⌋, ``version`` the oldest served; admitted counts it."""

    kind: ClassVar[str] = "group.admitted"
    number: int
    epoch: int
    row: int
    attempt: int
    version: int
    admitted: int
    discarded: int
    limit: int
    source: str = ""
    """The source of the prompt: a file, a dataset, or what its row says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFinished(Event):
    """A trajectory's end. ``version_spans`` is ``[[start, version], …]``: from ``start`` on, ``version`` sampled."""

    kind: ClassVar[str] = "trajectory.finished"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "started", "finished")
    number: int
    k: int
    replica: str
    prompt_tokens: int
    tokens: int
    finish_reason: str
    version_spans: list[list[int]]
    started: float
    finished: float
    baseline: bool = False
    """The trajectory is not trained on: its reward is its group's baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewarded(Event):
    """Rewards of a group. ``parts``: what each of several gave, by name, before its weight; None: it does not apply."""

    kind: ClassVar[str] = "group.rewarded"
    number: int
    rewards: list[float]
    parts: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettled(Event):
    """The final outcome of an admitted group. ``lag``, that of its oldest token, is given only for a trained group."""

    kind: ClassVar[str] = "group.settled"
    number: int
    fate: str
    reason: str | None = None
    lag: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTaken(Event):
    kind: ClassVar[str] = "fetch.taken"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "waited")
    fetch: int
    version: int
    numbers: list[int]
    waited: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBusy(Event):
    """The trainer computed during ``span``: ``what`` is ``forward``, ``critic``, ``step`` or ``gather``."""

    kind: ClassVar[str] = "trainer.busy"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    what: str
    version: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepped(Event):
    """One optimizer step. ``lags`` has each group's lag, ``stale_trajectories`` counts trajectories with lag ≥ 1."""

    kind: ClassVar[str] = "optimizer.stepped"
    step: int
    fetch: int
    version: int
    skipped: bool
    tokens: int
    trajectories: int
    lags: list[int]
    token_lag: dict[int, int] = field(default_factory=dict)
    """Histogram: lag → number of tokens."""
    stale_trajectories: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStepped(Event):
    """One optimizer step of the critic."""

    kind: ClassVar[str] = "critic.stepped"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    step: int
    fetch: int
    version: int
    skipped: bool
    span: Span
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardActed(Event):
    """Action of the guard: the step's ``ess`` fell below ``min_ess``, or rose above it again, and it ``did`` that.

    ``clip_scale`` and ``eta`` hold from now on.
    """

    kind: ClassVar[str] = "guard.acted"
    version: int
    ess: float
    min_ess: float
    did: str
    clip_scale: float
    eta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePhase(Event):
    """One of the five phases (gather, send, recv, register, load) of the update to ``version``, at ``where``.

    Gather and a send to all replicas together are at ``actor``; a send to one replica alone is at that replica.
    """

    kind: ClassVar[str] = "update.phase"
    version: int
    phase: str
    where: str
    seconds: float
    nbytes: int = 0
    probe_difference: float | None = None
    """Largest difference (nats), in phase ``load``, between log-probs that ``where`` serves and the trainer's; None
    where nobody looked. On shared devices a replica can tell only when it is awake again: then in a load event of its
    own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFinished(Event):
    """Every replica serves ``version``, or skipped it for a newer one that is on its way (`UpdateSuperseded`).

    Stalls are spans in which a side waited for the update and did nothing else.
    """

    kind: ClassVar[str] = "update.finished"
    version: int
    trainer_stall_s: float
    rollout_stall_s: float
    interrupted: int
    """Trajectories that were cut and go on under the new version."""
    validation_stall_s: float = 0.0
    """The part of ``trainer_stall_s`` in which the update waited for a validation before it paused the replicas."""
    full_nbytes: int | None = None
    """Bytes of the complete weights, where less could be sent; None where everything was."""
    changed: float | None = None
    """Share of 16-bit units that differ from the version before; None where nobody looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRetried(Event):
    """A transfer of ``version`` failed, and is tried again to ``receivers``, which serve what they served."""

    kind: ClassVar[str] = "update.retried"
    version: int
    receivers: list[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSuperseded(Event):
    """A newer version was ready before the transfer of ``version`` to ``replica`` began: it never gets this one."""

    kind: ClassVar[str] = "update.superseded"
    version: int
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHalted(Event):
    """Nothing decodes on ``replica`` during ``span``: it was paused for ``reason``, and had stopped.

    ``reason`` is ``load`` (new weights) or ``lease`` (training has the shared devices).
    """

    kind: ClassVar[str] = "replica.halted"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    replica: str
    reason: str
    span: Span
    interrupted: int
    """Trajectories with tokens that the pause cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJoined(Event):
    """A late replica serves from now on, with ``version``."""

    kind: ClassVar[str] = "replica.joined"
    replica: str
    version: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost(Event):
    """A replica died, or was fenced off, and the others go on; what it was generating is run again."""

    kind: ClassVar[str] = "replica.lost"
    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged(Event):
    """Shared devices went to ``holder``, ``train`` or ``generate``. The hand-over began at ``asked``."""

    kind: ClassVar[str] = "lease.changed"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "asked")
    holder: str
    asked: float
    validation_s: float = 0.0
    """Seconds of the hand-over in which the trainer waited for a validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaActivity(Event):
    """Spans of prefill or decoding since the replica's last report; ``slot_seconds`` sums active slots × time."""

    kind: ClassVar[str] = "replica.activity"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "busy")
    replica: str
    busy: list[Span]
    slot_seconds: float
    generated_tokens: int
    prefilled_tokens: int
    preempted: int = 0
    """Answers that were parked for want of memory for keys and values."""
    decode_steps: dict[int, DecodeSteps] = field(default_factory=dict)
    """Active sequences → the steps that prefilled nothing; empty if the engine does not say."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """All other steps, by the size of their prefills (`add_prefill`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationFinished(Event):
    kind: ClassVar[str] = "validation.finished"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    version: int
    accuracy: float
    problems: int
    mean_tokens: float
    failed: int
    span: Span
    by_source: dict[str, float] = field(default_factory=dict)
    """The accuracy of each source's problems, where there are several sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsLeftOut(Event):
    """Prompts of ``source`` with more than ``max_tokens`` tokens; ``part`` is ``training`` or ``held-out``."""

    kind: ClassVar[str] = "prompts.left_out"
    part: str
    source: str
    count: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReached(Event):
    """A boundary: all that came before ``version`` is consumed, and the update to it comes next.

    A checkpoint of ``version`` holds what was true at this instant; a run that is resumed there undoes what came after.
    """

    kind: ClassVar[str] = "version.reached"
    version: int
    groups: dict[str, int]
    """The ledger's balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """The run goes on from its checkpoint of ``version``: what was told since that `VersionReached` is undone.

    `RunStarted` follows, with what holds from now on.
    """

    kind: ClassVar[str] = "run.resumed"
    version: int
    times: int
    """The number of times that the run was resumed, this time included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint.saved"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    version: int
    path: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """A line for the log: ``level`` is ``info`` or ``warning``."""

    kind: ClassVar[str] = "note"
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    """The run ended: ``status`` is ``completed``, ``interrupted`` or ``failed``; ``groups`` is the ledger's balance."""

    kind: ClassVar[str] = "run.finished"
    status: str
    reason: str | None
    version: int
    groups: dict[str, int]


class Observer(Protocol):
    """Observer of a run. Called on the event loop's thread, in order; must return at once and never raise."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


Emit = Callable[[Event], None]


def fan_out(observers: Sequence[Observer]) -> Emit:
    """One function that hands an event to every observer, in the order given."""

    def emit(event: Event) -> None:
        for observer in observers:
            observer.on_event(event)

    return emit
