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
"""Value of ``StageChanged.waiting_for`` for a stage that takes fetches; reports look for this text."""

Span = tuple[float, float]

DecodeSteps = tuple[int, float, int]
"""Sums (steps, seconds, cached) over decode steps with the same number of active sequences. ``seconds`` is wall time
from one step's end to the next one's; ``cached`` counts the tokens in the KV cache, once for each step."""

PrefillSteps = tuple[int, int, int, float, int]
"""Sums (steps, active, tokens, seconds, cached) over steps that prefilled ``tokens``, beside decoding. ``active``
counts all that were given a token, those that began with these prefills included. The rest is as in `DecodeSteps`."""


def add_prefill(merged: dict[int, PrefillSteps], active: int, tokens: int, seconds: float, cached: int) -> None:
    """Add one step to the sums for steps of about its size. ``merged`` is keyed by the largest power of two that is no
    more than a step's ``tokens``: comparing sizes tells what a token costs, and there are never many sizes.
    """
    size = 1 << (tokens.bit_length() - 1)
    before = merged.get(size, (0, 0, 0, 0.0, 0))
    merged[size] = (before[0] + 1, before[1] + active, before[2] + tokens, before[3] + seconds, before[4] + cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events."""

    kind: ClassVar[str] = "event"
    on_clock: ClassVar[tuple[str, ...]] = ("time",)
    """Names of the fields that hold moments on the clock: numbers, spans, or lists of spans."""
    time: float

    def to_json(self) -> dict[str, Any]:
        """Return the event as one flat JSON object, ``kind`` first. The values are the event's own, not copies."""
        event_type: Any = type(self)
        return {"kind": self.kind, **{name: getattr(self, name) for name in _field_names(event_type)}}

    def later(self, seconds: float) -> Self:
        """Return the same event with its times moved to a clock that is ahead by so many seconds."""
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
    """Number of trajectories that each replica can decode at once."""
    on_update: str = ""
    """Policy for trajectories in flight when new weights arrive: ``drain``, ``interrupt`` or ``keep``."""
    stages: list[str] = field(default_factory=list)
    """Names of the run's stages, in the order in which data flows."""
    episodes: int = 0
    """Number of episodes of each group, its baseline included; 0 in records that do not have it."""

    def place_of(self, stage: str) -> int:
        """Return the position of ``stage`` among the run's stages; a position behind the last for any other name."""
        return self.stages.index(stage) if stage in self.stages else len(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescribed(Event):
    """Event: a worker of the run is up. ``cpu`` and ``gpu`` are models; it may use so many ``cores`` of ``host``."""

    kind: ClassVar[str] = "worker.described"
    worker: str
    host: str
    cpu: str
    cores: int
    gpu: str | None
    threads: int
    """Number of threads that torch uses in the worker."""
    pid: int | None = None
    """Id of the worker's process on ``host``. None in records that do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged(Event):
    """Event: a stage entered ``state``; ``waiting_for`` names the other party while it waits."""

    kind: ClassVar[str] = "stage.changed"
    stage: str
    state: str
    waiting_for: str | None = None
    active: int = 0
    """Number of items that the stage is processing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted(Event):
    """Event: a group was admitted. ``limit`` is ⌊(version + 1 + η)·B⌋, ``version`` the oldest served."""

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
    """Source of the prompt: a file, a dataset, or what its row says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFinished(Event):
    """Event: a trajectory ended. ``version_spans``: ``[[start, version], …]``, each version sampled from its start."""

    kind: ClassVar[str] = "trajectory.finished"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "started", "finished", "steps", "waits")
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
    """True where the trajectory is not trained on: its reward is its group's baseline."""
    turns: int = 1
    failure: str | None = None
    """Reason why the episode failed; None where it did not."""
    limit: str | None = None
    """The limit that ended the episode: ``turns``, ``tokens``, ``step`` or ``time``; None for none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of an episode that a program made: seconds of its environment, forks, tool errors, its own."""
    steps: list[Span] = field(default_factory=list)
    """Spans in which the episode's program worked, and no turn of it was awaited. They are a bounded number: of many,
    neighbours are joined. Empty where no program makes the episodes."""
    waits: list[Span] = field(default_factory=list)
    """Spans in which the program waited to begin: for a process, or for what was away."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the episode's agent asked the endpoint for and did not get: the first reason of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewarded(Event):
    """Event: a group was rewarded.

    ``parts``: values by part, before their weights, and further numbers by name; None: the part does not apply.
    """

    kind: ClassVar[str] = "group.rewarded"
    number: int
    rewards: list[float]
    parts: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettled(Event):
    """Event: an admitted group met its fate. ``lag``, that of its oldest token, is given only for a trained group."""

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
    """Event: the trainer computed during ``span``; ``what`` is ``forward``, ``critic``, ``step`` or ``gather``."""

    kind: ClassVar[str] = "trainer.busy"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    what: str
    version: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepped(Event):
    """Event: an optimizer step. ``lags``: one per group; ``stale_trajectories``: trajectories with lag ≥ 1, counted;
    ``rows``: rows of all trajectories, which are more than these where turns forked, and 0 where nobody counted.
    """

    kind: ClassVar[str] = "optimizer.stepped"
    step: int
    fetch: int
    version: int
    skipped: bool
    tokens: int
    trajectories: int
    lags: list[int]
    token_lag: dict[int, int] = field(default_factory=dict)
    """Histogram of the tokens' lags: lag → number of tokens."""
    stale_trajectories: int = 0
    rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStepped(Event):
    """Event: one optimizer step of the critic."""

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
    """Event: the guard acted. A step's ``ess`` fell below ``min_ess``, or rose above it again, and it ``did`` that.

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
    """Event: one of the phases gather, send, recv, register and load of the update to ``version`` ended at ``where``.

    Gather and a send to all replicas together are at ``actor``; a send to one replica alone is at that replica.
    """

    kind: ClassVar[str] = "update.phase"
    version: int
    phase: str
    where: str
    seconds: float
    nbytes: int = 0
    probe_difference: float | None = None
    """Largest difference, in nats, between the log-probs that ``where`` serves and the trainer's; only in phase
    ``load``, None where it was not measured. On shared devices a replica measures it once it is awake again, in a
    ``load`` event of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFinished(Event):
    """Event: every replica serves ``version``, or skipped it for a newer one that is on its way (`UpdateSuperseded`).

    Stalls are spans in which a side waited for the update and did nothing else.
    """

    kind: ClassVar[str] = "update.finished"
    version: int
    trainer_stall_s: float
    rollout_stall_s: float
    interrupted: int
    """Number of trajectories that were cut and go on under the new version."""
    validation_stall_s: float = 0.0
    """Part of ``trainer_stall_s`` in which the update waited for a validation before it paused the replicas."""
    full_nbytes: int | None = None
    """Number of bytes of the complete weights, where fewer may have been sent; None where all were."""
    changed: float | None = None
    """Share of 16-bit units that differ from the version before; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRetried(Event):
    """Event: a transfer of ``version`` failed, and is tried again to ``receivers``, which still serve what they did."""

    kind: ClassVar[str] = "update.retried"
    version: int
    receivers: list[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSuperseded(Event):
    """Event: ``replica`` skips ``version``, because a newer one was ready before the transfer began."""

    kind: ClassVar[str] = "update.superseded"
    version: int
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHalted(Event):
    """Event: nothing decoded on ``replica`` during ``span``, as it was paused for ``reason``.

    ``reason`` is ``load`` (new weights) or ``lease`` (training has the shared devices).
    """

    kind: ClassVar[str] = "replica.halted"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    replica: str
    reason: str
    span: Span
    interrupted: int
    """Number of trajectories with tokens that the pause cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJoined(Event):
    """Event: a late replica serves from now on, with ``version``."""

    kind: ClassVar[str] = "replica.joined"
    replica: str
    version: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost(Event):
    """Event: a replica died or was fenced off; the others rerun its calls."""

    kind: ClassVar[str] = "replica.lost"
    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeWorkerLost(Event):
    """Event: an episode worker died, or does not answer; others make its unfinished groups again."""

    kind: ClassVar[str] = "episode_worker.lost"
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged(Event):
    """Event: shared devices went to ``holder``, ``train`` or ``generate``. The hand-over began at ``asked``."""

    kind: ClassVar[str] = "lease.changed"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "asked")
    holder: str
    asked: float
    validation_s: float = 0.0
    """Seconds of the hand-over in which the trainer waited for a validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaActivity(Event):
    """Event: a replica's work since its last report: ``busy`` spans, and ``slot_seconds``, active slots × time."""

    kind: ClassVar[str] = "replica.activity"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "busy")
    replica: str
    busy: list[Span]
    slot_seconds: float
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int = 0
    """Tokens of contexts that needed no prefill: the prefix cache had them, or another call brought them."""
    preempted: int = 0
    """Number of answers that were parked because memory for keys and values ran short."""
    unpinned: int = 0
    """Number of times that an open episode lost what was kept for its next call, because memory ran short."""
    decode_steps: dict[int, DecodeSteps] = field(default_factory=dict)
    """Sums over the steps that prefilled nothing, by number of active sequences; empty where they are unknown."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """Sums over the steps that prefilled something, by the size of their prefills (`add_prefill`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationFinished(Event):
    kind: ClassVar[str] = "validation.finished"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    version: int
    accuracy: float
    problems: int
    mean_tokens: float
    failed: int
    """Problems without a score, which count as 0."""
    span: Span
    failed_episodes: int = 0
    """Answers that are missing since their episodes failed. A problem with others has the mean of these."""
    versions: list[int] = field(default_factory=list)
    """Versions that sampled the answers, ascending: several where programs are validated while weights change."""
    by_source: dict[str, float] = field(default_factory=dict)
    """Accuracy on the problems of each source, where there are several sources."""
    parts: dict[str, float] = field(default_factory=dict)
    """Means of the reward's parts and of further numbers that they told, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsLeftOut(Event):
    """Event: rows of ``source`` were left out for one reason; ``part`` is ``training`` or ``held-out``."""

    kind: ClassVar[str] = "prompts.left_out"
    part: str
    source: str
    count: int
    max_tokens: int
    reason: str = "too_long"
    """A `headway.data.tokenize.Reason`; ``too_long``: prompts of more than ``max_tokens``."""
    why: str = ""
    """What is wrong with one of them; empty where they are too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReached(Event):
    """Event: a version boundary. All groups before ``version`` are consumed, and the update to it comes next.

    A checkpoint of ``version`` holds what was true at this instant; a run that is resumed there undoes what came after.
    """

    kind: ClassVar[str] = "version.reached"
    version: int
    groups: dict[str, int]
    """Balance of the ledger at the boundary: number of groups by fate, and ``admitted``."""
    episodes: dict[str, int] = field(default_factory=dict)
    """The same of episodes; empty in records that do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """Event: the run resumes from its checkpoint of ``version``. Events after that `VersionReached` are undone.

    `RunStarted` follows, with what holds from now on.
    """

    kind: ClassVar[str] = "run.resumed"
    version: int
    times: int
    """Number of times that the run was resumed, this time included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint.saved"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    version: int
    path: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTaken(Event):
    """Event: what workers computed during ``span``, while versions from ``version`` on were trained, is in files.

    ``time`` is the end of the span: writing the files takes longer.
    """

    kind: ClassVar[str] = "profile.taken"
    on_clock: ClassVar[tuple[str, ...]] = ("time", "span")
    version: int
    versions: int
    """Number of versions that were trained to their end meanwhile; fewer than asked for where the window was cut."""
    span: Span
    folder: str
    """Folder of the traces, relative to the run's directory."""
    files: list[str]
    """Names of the traces in that folder, one for each process."""
    reason: str | None = None
    """Reason why the window was closed early; None where it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Event: a line for the log. ``level`` is ``info`` or ``warning``."""

    kind: ClassVar[str] = "note"
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    """Event: the run ended as ``completed``, ``interrupted`` or ``failed``. ``groups`` is the ledger's balance."""

    kind: ClassVar[str] = "run.finished"
    status: str
    reason: str | None
    version: int
    groups: dict[str, int]
    episodes: dict[str, int] = field(default_factory=dict)
    """The ledger's balance of episodes; empty in records that do not have it."""


class Observer(Protocol):
    """Observer of a run. Called on the event loop's thread, in order; must return at once and never raise."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


Emit = Callable[[Event], None]


def fan_out(observers: Sequence[Observer]) -> Emit:
    """Return one function that hands an event to every observer, in the order given."""

    def emit(event: Event) -> None:
        for observer in observers:
            observer.on_event(event)

    return emit
