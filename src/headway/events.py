"""Events: what happens in a run, typed. Metrics, timelines and the live view derive from these alone.

``time`` is the event loop's clock (seconds, monotonic; virtual under simulation), which a machine's workers share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from headway.records import Event as Event
from headway.records import event

WAITS_FOR_GROUPS = "groups from the message queue"
"""Value of ``StageChanged.waiting_for`` for a stage that takes batches; reports look for this text."""

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
    """Number of episodes of each group, its baseline included; 0 in records that do not have it."""

    def place_of(self, stage: str) -> int:
        """Return the position of ``stage`` among the run's stages; a position behind the last for any other name."""
        return self.stages.index(stage) if stage in self.stages else len(self.stages)


@event("worker.described")
class WorkerDescribed(Event):
    """Event: a worker of the run is up. ``cpu`` and ``gpu`` are models, ``cores`` the number that it may use."""

    worker: str
    host: str
    cpu: str
    cores: int
    gpu: str | None
    threads: int
    """Number of threads that torch uses in the worker."""
    pid: int | None = None
    """Id of the worker's process on ``host``. None in records that do not have it."""


@event("stage.changed")
class StageChanged(Event):
    """Event: a stage entered ``state``; ``waiting_for`` names the other party while it waits."""

    stage: str
    state: str
    waiting_for: str | None = None
    active: int = 0
    """Number of items that the stage is processing."""


@event("group.admitted")
class GroupAdmitted(Event):
    """Event: a group was admitted. ``limit`` is ⌊(version + 1 + η)·B⌋, ``version`` the oldest served."""

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


@event("group.rewarded")
class GroupRewarded(Event):
    """Event: a group was rewarded. ``parts``: values by part, unweighted, and further numbers; None: does not apply."""

    number: int
    rewards: list[float]
    parts: dict[str, list[float | None]] = field(default_factory=dict)


@event("group.settled")
class GroupSettled(Event):
    """Event: an admitted group met its fate. ``lag``, that of its oldest token, is given only for a trained group."""

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
    """Event: an optimizer step. ``lags``: one per group; ``stale_trajectories``: trajectories with lag ≥ 1, counted;
    ``rows``: rows of all trajectories, which are more than these where turns forked, and 0 where nobody counted.
    """

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
    """Event: the guard ``did`` something about a step's ``ess``. ``clip_scale`` and ``eta`` hold from now on."""

    version: int
    ess: float
    min_ess: float
    did: str
    clip_scale: float
    eta: float


@event("update.phase")
class UpdatePhase(Event):
    """Event: one of the phases gather, send, recv, register and load of the update to ``version`` ended at ``where``.

    Gather and a send to all replicas together are at ``actor``; a send to one replica alone is at that replica.
    """

    version: int
    phase: str
    where: str
    seconds: float
    nbytes: int = 0
    probe_difference: float | None = None
    """Largest difference, in nats, between the log-probs that ``where`` serves and the trainer's; only in phase
    ``load``, None where it was not measured. On shared devices a replica measures it once it is awake again, in a
    ``load`` event of its own."""


@event("update.finished")
class UpdateFinished(Event):
    """Event: every replica serves ``version``, or skipped it for a newer one that is on its way (`UpdateSuperseded`).

    Stalls are spans in which a side waited for the update and did nothing else.
    """

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


@event("update.retried")
class UpdateRetried(Event):
    """Event: a transfer of ``version`` failed, and is tried again to ``receivers``, which still serve what they did."""

    version: int
    receivers: list[str]
    reason: str


@event("update.superseded")
class UpdateSuperseded(Event):
    """Event: ``replica`` skips ``version``, because a newer one was ready before the transfer began."""

    version: int
    replica: str


@event("replica.halted", "span")
class ReplicaHalted(Event):
    """Event: ``replica`` was paused during ``span``, to ``load`` new weights, or by the ``lease`` of its devices."""

    replica: str
    reason: str
    span: Span
    interrupted: int
    """Number of trajectories with tokens that the pause cut."""


@event("replica.joined")
class ReplicaJoined(Event):
    """Event: a late replica serves from now on, with ``version``."""

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
    """Event: an episode worker died, or does not answer; others make its unfinished groups again."""

    worker: str
    reason: str


def ranks_named(role: str) -> str:
    """Return the name of the ranks of ``role`` in messages."""
    return "the trainer" if role == "actor" else f"the role {role}"


@event("ranks.lost")
class RanksLost(Event):
    """Event: a rank of ``role`` died or does not move; all its ranks are started again."""

    role: str
    reason: str


@event("ranks.restarted", "span")
class RanksRestarted(Event):
    """Event: the ranks of ``role`` stand where they stood when they were lost, at the beginning of ``span``."""

    role: str
    version: int
    batches: int
    """Number of batches since the newest checkpoint that they were trained on again."""
    span: Span
    ranks: int = 0
    """Number of ranks that there are now; 0 in records that do not say."""
    of: int = 0
    """Number of ranks at the start: fewer go on where no machine has room for all."""


@event("lease.changed", "asked")
class LeaseChanged(Event):
    """Event: shared devices went to ``holder``, ``train`` or ``generate``. The hand-over began at ``asked``."""

    holder: str
    asked: float
    validation_s: float = 0.0
    """Seconds of the hand-over in which the trainer waited for a validation."""


@event("replica.activity", "busy")
class ReplicaActivity(Event):
    """Event: a replica's work since its last report: ``busy`` spans, and ``slot_seconds``, active slots × time."""

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


@event("validation.finished", "span")
class ValidationFinished(Event):
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


@event("prompts.left_out")
class PromptsLeftOut(Event):
    """Event: rows of ``source`` were left out for one reason; ``part`` is ``training`` or ``held-out``."""

    part: str
    source: str
    count: int
    max_tokens: int
    reason: str = "too_long"
    """A `headway.data.tokenize.Reason`; ``too_long``: prompts of more than ``max_tokens``."""
    why: str = ""
    """What is wrong with one of them; empty where they are too long."""


@event("version.reached")
class VersionReached(Event):
    """Event: a version boundary. All before ``version`` is consumed; a checkpoint of it holds what was true now."""

    version: int
    groups: dict[str, int]
    """Balance of the ledger at the boundary: number of groups by fate, and ``admitted``."""
    episodes: dict[str, int] = field(default_factory=dict)
    """The same of episodes; empty in records that do not have it."""


@event("run.resumed")
class RunResumed(Event):
    """Event: the run resumes from ``version``. Events after that `VersionReached` are undone, `RunStarted` is next."""

    version: int
    times: int
    """Number of times that the run was resumed, this time included."""


@event("checkpoint.copied", "span")
class CheckpointCopied(Event):
    """Event: training stood still during ``span``, while ``version`` was copied for a checkpoint or a snapshot."""

    version: int
    span: Span


@event("checkpoint.saved", "span")
class CheckpointSaved(Event):
    """Event: the checkpoint of ``version`` was written during ``span``, beside training, and is complete."""

    version: int
    path: str
    span: Span


@event("snapshot.kept", "span")
class SnapshotKept(Event):
    """Event: the state of each training rank at ``version`` was sent to another process's memory during ``span``."""

    version: int
    span: Span


@event("checkpoint.failed")
class CheckpointFailed(Event):
    """Event: the checkpoint of ``version``, the ``in_row``-th one after the other, could not be written."""

    version: int
    reason: str
    in_row: int


@event("storage.reached")
class StorageReached(Event):
    """Event: the storage has all that was closed, or lacks some for a ``reason``; ``version``: newest checkpoint."""

    version: int | None
    reason: str | None


@event("profile.taken", "span")
class ProfileTaken(Event):
    """Event: what workers computed during ``span``, in versions from ``version`` on, is in files soon after it."""

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


@event("note")
class Note(Event):
    """Event: a line for the log. ``level`` is ``info`` or ``warning``."""

    level: str
    text: str


@event("run.finished")
class RunFinished(Event):
    """Event: the run ended as ``completed``, ``interrupted`` or ``failed``. The rest is the ledger's balance."""

    status: str
    reason: str | None
    version: int
    groups: dict[str, int]
    episodes: dict[str, int] = field(default_factory=dict)


class Observer(Protocol):
    """Observer of a run. Called on the event loop's thread, in order; must return at once and never raise."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


Emit = Callable[[Event], None]
