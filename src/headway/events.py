"""Events: typed records of everything that happens in a run. Metrics, timelines and the live view use nothing else.

``time`` is the event loop's clock (seconds, monotonic; virtual in a simulation). All workers of a machine share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from headway.records import Event as Event
from headway.records import event

WAITS_FOR_GROUPS = "groups from the message queue"
"""Value of ``StageChanged.waiting_for`` for a stage that waits for batches; reports look for this text."""

Span = tuple[float, float]
DecodeSteps = tuple[int, float, int]
"""Sums (steps, seconds, cached) over decode steps with the same number of active sequences. ``seconds``: wall time from
the end of one step to the end of the next. ``cached``: tokens in the KV cache, added up over the steps."""

PrefillSteps = tuple[int, int, int, float, int]
"""Sums (steps, active, tokens, seconds, cached) over steps that prefilled, with or without decoding. ``active``:
sequences that got a token, including those that were prefilled. ``tokens``: prefilled tokens. The rest is as in
`DecodeSteps`."""


def add_prefill(merged: dict[int, PrefillSteps], active: int, tokens: int, seconds: float, cached: int) -> None:
    """Add one step to the sums for steps of similar size. ``merged``: largest power of two ≤ ``tokens`` -> sums.
    Comparing sizes shows the cost of a token, and powers of two keep the number of sizes small."""
    size = 1 << (tokens.bit_length() - 1)
    before = merged.get(size, (0, 0, 0, 0.0, 0))
    merged[size] = (before[0] + 1, before[1] + active, before[2] + tokens, before[3] + seconds, before[4] + cached)


@event("run.started")
class RunStarted(Event):
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
    """Number of episodes of each group, including its baseline; 0 in older records."""

    def place_of(self, stage: str) -> int:
        """Return the index of ``stage`` among the run's stages; for an unknown name, their number."""
        return self.stages.index(stage) if stage in self.stages else len(self.stages)


@event("worker.described")
class WorkerDescribed(Event):
    """Event: a worker of the run has started. ``cpu`` and ``gpu`` name the models; it may use ``cores`` CPU cores."""

    worker: str
    host: str
    cpu: str
    cores: int
    gpu: str | None
    threads: int
    """Number of threads that torch uses in the worker."""
    pid: int | None = None
    """Id of the worker's process on ``host``; None in older records."""


@event("stage.changed")
class StageChanged(Event):
    """Event: a stage entered ``state``. ``waiting_for`` names what it waits for; None if it does not wait."""

    stage: str
    state: str
    waiting_for: str | None = None
    active: int = 0
    """Number of items that the stage is processing."""


@event("group.admitted")
class GroupAdmitted(Event):
    """Event: a group was admitted. ``limit`` is ⌊(version + 1 + η)·B⌋; ``version`` is the oldest served version."""

    number: int
    epoch: int
    row: int
    attempt: int
    version: int
    admitted: int
    discarded: int
    limit: int
    source: str = ""
    """Source of the prompt: a file, a dataset, or the name that its row gives."""


@event("trajectory.finished", "started", "finished", "steps", "waits")
class TrajectoryFinished(Event):
    """Event: a trajectory ended. ``version_spans``: ``[[start, version], …]``, each version sampled from its start."""

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
    """True if the trajectory is not trained on: its reward is its group's baseline."""
    turns: int = 1
    failure: str | None = None
    """Reason why the episode failed; None if it did not fail."""
    limit: str | None = None
    """Limit that ended the episode: ``turns``, ``tokens``, ``step`` or ``time``; None if no limit did."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers about a program's episode: seconds in its environment, forks, tool errors, and the program's own."""
    steps: list[Span] = field(default_factory=list)
    """Spans in which the episode's program worked and waited for no turn. If there are too many, neighbours are
    joined. Empty if no program makes the episodes."""
    waits: list[Span] = field(default_factory=list)
    """Spans in which the program waited to begin: for a process, or for something that was unavailable."""
    notes: dict[str, str] = field(default_factory=dict)
    """Requests of the episode's agent that the endpoint did not fulfil: kind -> first reason."""


@event("group.rewarded")
class GroupRewarded(Event):
    """Event: a group was rewarded. ``parts``: part or further number -> unweighted values; None: does not apply."""

    number: int
    rewards: list[float]
    parts: dict[str, list[float | None]] = field(default_factory=dict)


@event("group.settled")
class GroupSettled(Event):
    """Event: an admitted group met its fate. ``lag``: lag of its oldest token, given only for a trained group."""

    number: int
    fate: str
    reason: str | None = None
    lag: int | None = None


@event("fetch.taken", "waited")
class BatchTaken(Event):
    fetch: int
    version: int
    numbers: list[int]
    waited: Span


@event("trainer.busy", "span")
class TrainerBusy(Event):
    """Event: the trainer computed during ``span``; ``what`` is ``forward``, ``critic``, ``step`` or ``gather``."""

    what: str
    version: int
    span: Span


@event("optimizer.stepped")
class OptimizerStepped(Event):
    """Event: an optimizer step. ``lags``: one per group. ``stale_trajectories``: number of trajectories with lag ≥ 1.
    ``rows``: number of rows of all trajectories, several for one whose turns forked; 0 if they were not counted.
    """

    step: int
    fetch: int
    version: int
    skipped: bool
    tokens: int
    trajectories: int
    lags: list[int]
    token_lag: dict[int, int] = field(default_factory=dict)
    """Histogram of the tokens' lags: lag -> number of tokens."""
    stale_trajectories: int = 0
    rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@event("critic.stepped", "span")
class CriticStepped(Event):
    """Event: one optimizer step of the critic."""

    step: int
    fetch: int
    version: int
    skipped: bool
    span: Span
    metrics: dict[str, float] = field(default_factory=dict)


@event("guard.acted")
class GuardActed(Event):
    """Event: the guard acted on a step's ``ess``. ``did``: the action. ``clip_scale`` and ``eta`` hold from now on."""

    version: int
    ess: float
    min_ess: float
    did: str
    clip_scale: float
    eta: float


@event("update.phase")
class UpdatePhase(Event):
    """Event: a phase (gather, send, recv, register or load) of the update to ``version`` ended at ``where``.

    ``where`` is ``actor`` for gather, and for a send to all replicas together. A send to a single replica has its name.
    """

    version: int
    phase: str
    where: str
    seconds: float
    nbytes: int = 0
    probe_difference: float | None = None
    """Largest difference, in nats, between the log-probs of ``where`` and the trainer's. Only in phase ``load``; None
    if not measured. On shared devices a replica measures it once it is awake again, in a further ``load`` event."""


@event("update.finished")
class UpdateFinished(Event):
    """Event: every replica serves ``version``, or skipped it for a newer one (`UpdateSuperseded`).

    A stall is time in which trainer or replicas only waited for the update.
    """

    version: int
    trainer_stall_s: float
    rollout_stall_s: float
    interrupted: int
    """Number of trajectories that were interrupted and go on under the new version."""
    validation_stall_s: float = 0.0
    """Seconds of ``trainer_stall_s`` in which the update waited for a validation before it paused the replicas."""
    full_nbytes: int | None = None
    """Number of bytes of the complete weights, if fewer may have been sent; None if all were sent."""
    changed: float | None = None
    """Share of 16-bit units that differ from the version before; None if not measured."""


@event("update.retried")
class UpdateRetried(Event):
    """Event: a transfer of ``version`` failed, and is retried to ``receivers``. They still serve their old version."""

    version: int
    receivers: list[str]
    reason: str


@event("update.superseded")
class UpdateSuperseded(Event):
    """Event: ``replica`` skips ``version``, because a newer version was ready before the transfer began."""

    version: int
    replica: str


@event("replica.halted", "span")
class ReplicaHalted(Event):
    """Event: ``replica`` was paused during ``span``: to ``load`` new weights, or for the ``lease`` of its devices."""

    replica: str
    reason: str
    span: Span
    interrupted: int
    """Number of trajectories that the pause interrupted after their first token."""


@event("replica.joined")
class ReplicaJoined(Event):
    """Event: a replica that joined late serves from now on, with ``version``."""

    replica: str
    version: int
    slots: int


@event("replica.lost")
class ReplicaLost(Event):
    """Event: a replica died or was fenced off; the others rerun its calls."""

    replica: str
    reason: str


@event("episode_worker.lost")
class EpisodeWorkerLost(Event):
    """Event: an episode worker died or does not answer; others make its unfinished groups again."""

    worker: str
    reason: str


def ranks_named(role: str) -> str:
    """Return the words for the ranks of ``role`` in messages."""
    return "the trainer" if role == "actor" else f"the role {role}"


@event("ranks.lost")
class RanksLost(Event):
    """Event: a rank of ``role`` died or makes no progress; all ranks of the role are restarted."""

    role: str
    reason: str


@event("ranks.restarted", "span")
class RanksRestarted(Event):
    """Event: the restarted ranks of ``role`` are back in their state at the loss. ``span``: from the loss until now."""

    role: str
    version: int
    batches: int
    """Number of batches since the newest checkpoint that were trained on again."""
    span: Span
    ranks: int = 0
    """Number of ranks now; 0 in older records."""
    of: int = 0
    """Number of ranks at the start of the run. ``ranks`` is smaller if no machine has room for all."""


@event("lease.changed", "asked")
class LeaseChanged(Event):
    """Event: shared devices went to ``holder``: ``train`` or ``generate``. The hand-over began at ``asked``."""

    holder: str
    asked: float
    validation_s: float = 0.0
    """Seconds of the hand-over in which the trainer waited for a validation."""


@event("replica.activity", "busy")
class ReplicaActivity(Event):
    """Event: a replica's work since its last report. ``busy``: spans; ``slot_seconds``: active slots × seconds."""

    replica: str
    busy: list[Span]
    slot_seconds: float
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int = 0
    """Number of context tokens that needed no prefill: from the prefix cache, or prefilled once for several calls."""
    preempted: int = 0
    """Number of answers that were parked because memory for keys and values ran short."""
    unpinned: int = 0
    """Number of times that an open episode lost its cached keys and values because memory ran short."""
    decode_steps: dict[int, DecodeSteps] = field(default_factory=dict)
    """Number of active sequences -> sums over the steps that prefilled nothing; empty if unknown."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """Size of the prefills -> sums over the steps that prefilled something (`add_prefill`)."""


@event("validation.finished", "span")
class ValidationFinished(Event):
    version: int
    accuracy: float
    problems: int
    mean_tokens: float
    failed: int
    """Number of problems without a score; they count as 0."""
    span: Span
    failed_episodes: int = 0
    """Number of answers that are missing because their episodes failed. A problem's score is the mean of the rest."""
    versions: list[int] = field(default_factory=list)
    """Versions that sampled the answers, ascending; several if weights changed while programs were validated."""
    by_source: dict[str, float] = field(default_factory=dict)
    """Source -> accuracy on its problems; empty if there is one source."""
    parts: dict[str, float] = field(default_factory=dict)
    """Part of the reward, or further number that a part reports -> its mean; empty unless there are several."""


@event("prompts.left_out")
class PromptsLeftOut(Event):
    """Event: rows of ``source`` were left out for one reason; ``part`` is ``training`` or ``held-out``."""

    part: str
    source: str
    count: int
    max_tokens: int
    reason: str = "too_long"
    """A `headway.data.tokenize.Reason`; ``too_long``: the prompt has more than ``max_tokens`` tokens."""
    why: str = ""
    """Description of the problem of one of the rows; empty if the rows are too long."""


@event("version.reached")
class VersionReached(Event):
    """Event: a version boundary. All batches before ``version`` are consumed; its checkpoint has the present state."""

    version: int
    groups: dict[str, int]
    """Balance of the ledger at the boundary: fate, or ``admitted`` -> number of groups."""
    episodes: dict[str, int] = field(default_factory=dict)
    """The same balance for episodes; empty in older records."""


@event("run.resumed")
class RunResumed(Event):
    """Event: the run resumes from ``version``. Events after its `VersionReached` are undone; `RunStarted` follows."""

    version: int
    times: int
    """Number of times that the run was resumed, including this time."""


@event("checkpoint.copied", "span")
class CheckpointCopied(Event):
    """Event: training paused during ``span`` while ``version`` was copied for a checkpoint or a snapshot."""

    version: int
    span: Span


@event("checkpoint.saved", "span")
class CheckpointSaved(Event):
    """Event: the checkpoint of ``version`` is complete. It was written during ``span``, in parallel with training."""

    version: int
    path: str
    span: Span


@event("snapshot.kept", "span")
class SnapshotKept(Event):
    """Event: during ``span``, each training rank's state at ``version`` was sent to another process's memory."""

    version: int
    span: Span


@event("checkpoint.failed")
class CheckpointFailed(Event):
    """Event: the checkpoint of ``version`` could not be written: the ``in_row``-th failure in a row."""

    version: int
    reason: str
    in_row: int


@event("storage.reached")
class StorageReached(Event):
    """Event: the storage has all closed files; if not, ``reason`` says why. ``version``: newest checkpoint there."""

    version: int | None
    reason: str | None


@event("profile.taken", "span")
class ProfileTaken(Event):
    """Event: workers were profiled during ``span``, from ``version`` on. Their traces are written soon afterwards."""

    version: int
    versions: int
    """Number of versions whose training ended during ``span``; fewer than requested if the window closed early."""
    span: Span
    folder: str
    """Folder of the traces, relative to the run's directory."""
    files: list[str]
    """Names of the traces in that folder, one for each process."""
    reason: str | None = None
    """Reason why the window closed early; None if it did not."""


@event("note")
class Note(Event):
    """Event: a line for the log. ``level`` is ``info`` or ``warning``."""

    level: str
    text: str


@event("run.finished")
class RunFinished(Event):
    """Event: the run ended as ``completed``, ``interrupted`` or ``failed``. ``groups``, ``episodes``: final ledger."""

    status: str
    reason: str | None
    version: int
    groups: dict[str, int]
    episodes: dict[str, int] = field(default_factory=dict)


class Observer(Protocol):
    """Observer of a run's events. Called on the event loop's thread, in order; must return at once and never raise."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


Emit = Callable[[Event], None]
