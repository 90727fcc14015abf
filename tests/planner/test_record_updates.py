"""What an update took is told apart: its phases, what was waited for, and what passed beside both."""

from __future__ import annotations

from collections import defaultdict

import pytest

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
from headway.planner.profile_fitting.recording import UpdateRecord, UpdatesRecord
from headway.reports.metrics.intervals import IntervalUnion

GATHER_S, RECV_S, REGISTER_S = 1.0, 4.0, 2.0
TRANSFERRED = 100 + GATHER_S + RECV_S + REGISTER_S


def phase(version: int, name: str, seconds: float, at: float, where: str = "rollout-0") -> Event:
    return UpdatePhase(time=at, version=version, phase=name, where=where, seconds=seconds, nbytes=8)


def halted(span: Span, reason: str = "load", replica: str = "rollout-0") -> Event:
    return ReplicaHalted(time=span[1], replica=replica, reason=reason, span=span, interrupted=0)


def finished(version: int, at: float) -> Event:
    return UpdateFinished(time=at, version=version, trainer_stall_s=0, rollout_stall_s=0.5, interrupted=0)


def transfer(version: int = 1) -> list[Event]:
    """From 100 s on; the replica counts its wait for gather as receiving."""
    return [
        TrainerBusy(time=TRANSFERRED, what="gather", version=version, span=(100, 100 + GATHER_S)),
        phase(version, "gather", GATHER_S, TRANSFERRED, "actor"),
        phase(version, "recv", GATHER_S + RECV_S, TRANSFERRED),
        phase(version, "register", REGISTER_S, TRANSFERRED),
    ]


def recorded(*events: Event) -> UpdatesRecord:
    record = UpdatesRecord()
    for event in events:
        record.add(event)
    return record


def the_update(*events: Event) -> UpdateRecord:
    (update,) = recorded(*events).updates.values()
    return update


def busy(*spans: Span) -> dict[str, IntervalUnion]:
    """When each replica computed: the first one in ``spans``, no other one ever."""
    computed = defaultdict(IntervalUnion)
    for span in spans:
        computed["rollout-0"].add(span)
    return computed


def test_phases_are_the_replicas_own_but_for_the_wait_for_gather() -> None:
    update = the_update(*transfer(), phase(1, "load", 0.5, TRANSFERRED + 3), halted((TRANSFERRED + 2, TRANSFERRED + 5)))
    assert update.recv_s(synchronous=True) == RECV_S
    assert update.recv_s(synchronous=False) == GATHER_S + RECV_S
    assert update.load_s == 1.0  # with the way there and back


def test_latency_is_what_passes_before_the_halt_and_after_the_load() -> None:
    update = the_update(
        *transfer(),
        phase(1, "load", 0.5, TRANSFERRED + 3),
        halted((TRANSFERRED + 2, TRANSFERRED + 5)),
        finished(1, TRANSFERRED + 7),
    )
    assert update.latency_s(busy(), synchronous=True) == 2 + 4


def test_a_drain_is_no_latency() -> None:
    update = the_update(
        *transfer(),
        phase(1, "load", 0.5, TRANSFERRED + 23),
        halted((TRANSFERRED + 22, TRANSFERRED + 24)),
        finished(1, TRANSFERRED + 24),
    )

    decodes = busy((TRANSFERRED - 5, TRANSFERRED), (TRANSFERRED + 1, TRANSFERRED + 21), (TRANSFERRED + 23, 1e6))
    assert update.latency_s(decodes, synchronous=True) == 2 + 1


def test_of_several_replicas_the_last_to_load_counts() -> None:
    update = the_update(
        *transfer(),
        phase(1, "load", 0.5, TRANSFERRED + 3, "rollout-0"),
        phase(1, "load", 0.5, TRANSFERRED + 9, "rollout-1"),
        halted((TRANSFERRED + 2, TRANSFERRED + 4), replica="rollout-0"),
        halted((TRANSFERRED + 6, TRANSFERRED + 9), replica="rollout-1"),
        finished(1, TRANSFERRED + 10),
    )
    assert update.load_s == 3.0
    assert update.latency_s(busy(), synchronous=True) == 6 + 1


def test_an_update_that_was_superseded_and_one_that_never_ended_have_no_latency() -> None:
    load = [phase(1, "load", 0.5, TRANSFERRED + 3), halted((TRANSFERRED + 2, TRANSFERRED + 5))]
    assert the_update(*transfer(), *load).latency_s(busy(), synchronous=False) is None
    overtaken = UpdateSuperseded(time=0, version=1, replica="rollout-0")
    update = the_update(*transfer(), *load, overtaken, finished(1, TRANSFERRED + 7))
    assert update.latency_s(busy(), synchronous=False) is None


def test_where_it_is_not_known_when_replicas_stood_still_there_is_a_load_but_no_latency() -> None:
    update = the_update(*transfer(), phase(1, "load", 0.25, TRANSFERRED + 3), finished(1, TRANSFERRED + 4))
    assert update.load_s == 0.5  # it was halted for so long
    assert update.latency_s(busy(), synchronous=True) is None


def test_handing_shared_devices_over_is_measured_from_when_the_last_replica_stood_still() -> None:
    record = recorded(
        LeaseChanged(time=10, holder="train", asked=2),
        halted((6, 20), "lease", "rollout-0"),
        halted((8, 21), "lease", "rollout-1"),
        LeaseChanged(time=21, holder="generate", asked=18),
    )
    assert (record.to_train_s, record.to_generate_s) == ([2], [3])


def test_the_first_update_ends_the_warm_up() -> None:
    record = recorded(finished(1, 50), finished(2, 60))
    assert (record.versions, record.warm_at) == (2, 50)
    assert recorded().warm_at == pytest.approx(float("inf"))
