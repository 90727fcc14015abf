"""What the machines of a run saw, held against what the pipeline said: tokens and their versions, updates, pauses, the
lease, validations. The fakes keep records of their own; nothing here asks the pipeline's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isclose

from headway.events import (
    BatchTaken,
    GroupSettled,
    LeaseChanged,
    Note,
    ReplicaActivity,
    ReplicaHalted,
    ReplicaJoined,
    ReplicaLost,
    Span,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    UpdateRetried,
    UpdateSuperseded,
    ValidationFinished,
)
from headway.pipeline.run import Status
from tests.pipeline.fakes import SECONDS_PER_TOKEN, FakeRollout
from tests.pipeline.scenario import Run

ROUNDING = 1e-9
FOREVER = float("inf")


def overlap(a: Span, b: Span) -> bool:
    """For longer than an instant."""
    return min(a[1], b[1]) > max(a[0], b[0])


def check_machines(run: Run) -> None:
    for replica in run.rollouts:
        check_tokens(run, replica)
        check_loads(run, replica)
        check_halts(run, replica)
        check_activity(run, replica)
    check_trainer(run)
    check_updates(run)
    check_superseding(run)
    check_validations(run)
    if run.scenario.config.cluster.placement == "shared":
        check_lease(run)
    else:
        assert run.of(LeaseChanged) == []


def died(run: Run) -> bool:
    """Any replica, or it was fenced off, or a transfer had to be tried again for another reason."""
    return bool(run.of(UpdateRetried)) or any(is_gone(run, replica) for replica in run.rollouts)


def is_gone(run: Run, replica: FakeRollout) -> bool:
    return replica.died_at is not None or any(event.replica == replica.name for event in run.of(ReplicaLost))


# ---------------------------------------------------------------------------------------------- tokens


def is_late(replica: FakeRollout) -> bool:
    return "+" in replica.name or not replica.name.startswith("rollout-")


def versions_had(run: Run, replica: FakeRollout) -> dict[int, Span]:
    """Each version that ``replica`` had, and when it could sample under it."""
    load_s = run.scenario.engine.get("load_s", 0.125)
    loads = replica.loads if is_late(replica) else [(0, 0.0), *replica.loads]
    ends = [time - load_s for _, time in loads[1:]]
    return {version: (since, until) for (version, since), until in zip(loads, [*ends, FOREVER], strict=False)}


def check_tokens(run: Run, replica: FakeRollout) -> None:
    """Every token carries a version that its replica had just then, and there was time to sample so many under it."""
    joined = next((event.time for event in run.of(ReplicaJoined) if event.replica == replica.name), None)
    for time, _, _ in replica.submitted:
        assert joined is None or time >= joined, "it was asked before it served"
    for t in run.of(TrajectoryFinished):
        if t.replica != replica.name or not t.tokens:
            continue
        check_spans(run, replica, t.version_spans, t.tokens, t.started, t.finished)


def check_spans(
    run: Run, replica: FakeRollout, spans: list[list[int]], tokens: int, started: float, finished: float
) -> None:
    """Tokens of one call: ``replica`` had their versions, and enough time."""
    had = versions_had(run, replica)
    starts, versions = zip(*spans, strict=True)
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < tokens
    assert list(versions) == sorted(set(versions)), "versions only grow"
    first, last = had[versions[0]], had[versions[-1]]
    assert first[0] <= started <= first[1] and last[0] <= finished, "sampled by weights that were not loaded"
    for version, start, end in zip(versions, starts, [*starts[1:], tokens], strict=True):
        since, until = had[version]
        seconds = min(until, finished) - max(since, started - SECONDS_PER_TOKEN)
        assert (end - start) * SECONDS_PER_TOKEN <= seconds + ROUNDING, "more tokens than there was time for"
    if run.scenario.config.async_training.on_update == "drain":
        assert len(versions) == 1, "an answer that was let finish has one version"


def check_activity(run: Run, replica: FakeRollout) -> None:
    """It computes nothing while it stands, and no time is reported twice. When it must compute is in figures.py."""
    spans = [span for event in run.of(ReplicaActivity) if event.replica == replica.name for span in event.busy]
    assert all(start < end for start, end in spans) and all(a[1] <= b[0] for a, b in pairwise(spans))
    for busy in spans:
        assert not any(overlap(busy, stood) for stood in replica.stood), "busy while it stood"


# ---------------------------------------------------------------------------------------------- updates


def check_loads(run: Run, replica: FakeRollout) -> None:
    told = [(e.version, e.time) for e in run.of(UpdatePhase) if e.phase == "load" and e.where == replica.name]
    assert told == replica.loads[: len(told)] and len(replica.loads) - len(told) <= (
        run.status is None or is_gone(run, replica)
    )
    versions = [version for version, _ in replica.loads]
    assert versions == sorted(set(versions)), "versions only grow"
    received = dict(replica.received)
    if not run.of(UpdateRetried):
        assert len(received) == len(replica.received), "a version was sent twice"
    for version, time in replica.loads:
        assert received[version][1] <= time
    skipped = {e.version for e in run.of(UpdateSuperseded) if e.replica == replica.name}
    assert not skipped & received.keys(), "a transfer that began was superseded"


def check_halts(run: Run, replica: FakeRollout) -> None:
    halts = [event for event in run.of(ReplicaHalted) if event.replica == replica.name]
    assert [halt.span for halt in halts] == replica.stood[: len(halts)]
    if run.status is Status.COMPLETED and not is_gone(run, replica):
        assert len(halts) == len(replica.stood)
        assert sum(halt.interrupted for halt in halts) == replica.cut
    if died(run) or validates_in_passing(run):  # it may stand when it takes over from one that died
        return
    for start, end in replica.validated:
        assert not any(start < stood[0] < end for stood in replica.stood), "stopped in the middle of its validation"
        assert not any(start < time < end for _, time in replica.loads), "loaded before its validation was done"


def validates_in_passing(run: Run) -> bool:
    """Tell whether replicas take new versions in the middle of a validation: with programs and staleness."""
    config = run.scenario.config
    return config.agent.has_program and config.async_training.staleness_threshold > 0


def check_updates(run: Run) -> None:
    """Each version is published once, and the trainer's stall is what it says."""
    updates = run.of(UpdateFinished)
    versions = [update.version for update in updates]
    assert versions == list(range(1, len(versions) + 1))
    if run.status is not None:
        assert len(versions) == run.version
    if died(run):
        return  # transfers that began again, and gathers that were for nothing
    gathers = {b.version: b.span for b in run.of(TrainerBusy) if b.what == "gather"}
    fetches = run.of(BatchTaken)
    overlapped = run.scenario.config.param_update.schedule == "overlapped"
    for update in updates:
        if run.scenario.epochs is not None and update.version == run.version:
            continue  # made when no more groups can come, which may be long after the last of them
        asked, gather = reached(run, update.version), gathers[update.version]
        goes_on = gather[1] if overlapped else update.time
        assert isclose(update.trainer_stall_s, goes_on - asked - (gather[1] - gather[0]), abs_tol=ROUNDING)
        following = [fetch for fetch in fetches if fetch.version == update.version]
        if following:
            waits = following[0].waited[0] - goes_on
            assert waits == 0 or run.scenario.config.trainer.save_freq > 0
        if overlapped:
            sending = [when[1] for r in run.rollouts for _, when in r.received if when[0] <= asked < when[1]]
            assert gather[0] == max(sending, default=asked), "it waits for the copy to be free, and for nothing else"


def reached(run: Run, version: int) -> float:
    """When the trainer had consumed what makes ``version``."""
    b = run.pipeline.config.groups_per_version
    taken = {number for fetch in run.of(BatchTaken) for number in fetch.numbers}
    consumed = [event.time for event in run.of(GroupSettled) if event.number in taken and event.fate != "in_flight"]
    return consumed[min(version * b, len(consumed)) - 1]


def check_superseding(run: Run) -> None:
    superseded = run.of(UpdateSuperseded)
    if run.scenario.config.param_update.schedule == "synchronous":
        assert superseded == []
    if run.status is None or not run.of(UpdateFinished):
        return
    lost = {event.replica for event in run.of(ReplicaLost)}
    for replica in run.rollouts:
        versions = [version for version, _ in replica.loads]
        if is_gone(run, replica) or not versions:
            continue
        skipped = [event.version for event in superseded if event.replica == replica.name]
        first = min(versions + skipped)
        assert sorted(versions + skipped) == list(range(first, run.version + 1)), "neither loaded nor superseded"
        assert first == 1 or is_late(replica)
    for event in superseded:
        assert any(t.version > event.version and t.phase == "gather" for t in run.of(UpdatePhase)) or lost


# ---------------------------------------------------------------------------------------------- training


def check_trainer(run: Run) -> None:
    """It was busy when its ranks were, and did one thing at a time."""
    names = {"an optimizer step": "step", "a forward pass": "forward", "gather": "gather"}
    ranks = sorted((span, names[what]) for what, span in run.trainer.computed if what in names)
    assert all(a[0][1] <= b[0][0] for a, b in pairwise(ranks))
    told = sorted((busy.span, busy.what) for busy in run.of(TrainerBusy))
    if run.status is not None and not died(run):
        assert told == ranks
    fetched = {fetch.version: fetch.time for fetch in reversed(run.of(BatchTaken))}
    for busy in run.of(TrainerBusy):
        assert busy.what == "gather" or busy.span[0] >= fetched[busy.version]


def check_lease(run: Run) -> None:
    """Training and generation never compute at once, and the devices change hands with a whole batch in hand."""
    changes = run.of(LeaseChanged)
    assert [change.holder for change in changes] == (["train", "generate"] * len(changes))[: len(changes)]
    fetches = [fetch.time for fetch in run.of(BatchTaken)]
    takes = [change for change in changes if change.holder == "train"]
    gives = [change for change in changes if change.holder == "generate"]
    assert [take.asked for take in takes][: len(fetches)] == fetches[: len(takes)]
    if run.status is not None:
        assert len(takes) == len(gives) >= len(fetches), "returned after each batch"
    held = list(zip((take.time for take in takes), [*(give.asked for give in gives), FOREVER], strict=False))
    trains = [busy.span for busy in run.of(TrainerBusy)]
    decodes = [span for event in run.of(ReplicaActivity) for span in event.busy]
    for span in trains:
        assert any(start <= span[0] and span[1] <= end for start, end in held), "trained on devices it had not"
    for span in held:
        assert not any(overlap(span, decoding) for decoding in decodes), "decoded on devices that training had"
        for replica in [] if died(run) or validates_in_passing(run) else run.rollouts:
            assert not any(start < span[0] < end for start, end in replica.validated), "a validation was cut short"


# ---------------------------------------------------------------------------------------------- validation


def check_validations(run: Run) -> None:
    told, scenario = run.of(ValidationFinished), run.scenario
    if not scenario.problems:
        assert told == []
        return
    assert all(event.problems == scenario.problems for event in told)
    if run.status is None:
        return
    left = left_unfinished(run)
    if not died(run):
        validators = run.rollouts if scenario.config.agent.has_program else run.rollouts[:1]
        loaded: dict[int, float] = {0: 0.0}
        for version, time in (load for replica in validators for load in replica.loads):
            loaded[version] = min(time, loaded.get(version, time))
        versions = sorted(loaded)[1:]
        expected = [version for version in due(versions, scenario.test_freq) if version not in left]
        if run.version in left and validated_again(run):
            expected.append(run.version)
        if run.stopped_at is not None:  # nothing is begun after a stop
            expected = expected[: len(told)]
        assert [event.version for event in told] == expected
        assert all(event.span[0] >= loaded[event.version] for event in told)
        return
    stopped = run.stopped_at is not None  # nothing is begun after that
    assert stopped or run.version in left or (told and told[-1].version == run.version), "the last is always validated"


def left_unfinished(run: Run) -> set[int]:
    """Versions whose validation was given up, because a stop waited in vain for its scores, or did not begin then."""
    left = {int(text.split()[1]) for event in run.of(Note) if "was not validated" in (text := event.text)}
    assert not left or run.stopped_at is not None
    return left | {run.version} if run.pipeline._wiring.scoring.closed else left


def validated_again(run: Run) -> bool:
    """Whether the last version was validated once more after it was given up, as scores came again before the end."""
    begun = [event.span[0] for event in run.of(ValidationFinished) if event.version == run.version]
    given_up = [event.time for event in run.of(Note) if f"version {run.version} was not validated" in event.text]
    return bool(begun and given_up) and begun[0] >= given_up[0]


def due(loads: Sequence[int], every: int) -> list[int]:
    """What is validated of the versions that the validating replica loaded, the first and the last always."""
    found = [0]
    for version in loads:
        if every > 0 and version // every > found[-1] // every:
            found.append(version)
    return [*found, *([loads[-1]] if loads and found[-1] != loads[-1] else [])]
