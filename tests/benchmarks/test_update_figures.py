"""What `make bench-update` reads from a run's events, and which updates it compares."""

from __future__ import annotations

import json

import pytest

from benchmarks.table import page
from benchmarks.update import Results, Row, tables_of
from benchmarks.update_figures import Figures, figures, transfers
from benchmarks.update_raw import Raw
from benchmarks.update_runs import LONG, Kind, kinds
from headway.events import (
    Event,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaHalted,
    TrainerBusy,
    UpdateFinished,
    UpdatePhase,
)

VERSION_S = 10.0
NBYTES = 1000


def update(version: int) -> list[Event]:
    """Version ``version``, made at ten times that: gather 1 s, send and recv 2 s, register 1 s, load 0.5 s."""
    made = VERSION_S * version

    def phase(name: str, seconds: float, time: float, nbytes: int = NBYTES) -> UpdatePhase:
        return UpdatePhase(time=time, version=version, phase=name, where="anywhere", seconds=seconds, nbytes=nbytes)

    return [
        TrainerBusy(time=made, what="step", version=version - 1, span=(made - 5, made)),
        OptimizerStepped(
            time=made,
            step=version,
            fetch=version,
            version=version - 1,
            skipped=False,
            tokens=1,
            trajectories=1,
            lags=[],
        ),
        TrainerBusy(time=made + 1, what="gather", version=version, span=(made, made + 1)),
        phase("gather", 1.0, made + 1),
        phase("send", 2.0, made + 4, NBYTES // 2),
        phase("recv", 2.0, made + 4, NBYTES // 2),
        phase("register", 1.0, made + 4, NBYTES // 2),
        phase("load", 0.5, made + 5, 0),
        ReplicaHalted(time=made + 5, replica="r", reason="load", span=(made + 4, made + 5), interrupted=2),
        UpdateFinished(
            time=made + 5,
            version=version,
            trainer_stall_s=3.0,
            validation_stall_s=1.0,
            rollout_stall_s=1.0,
            interrupted=2,
            full_nbytes=NBYTES,
            changed=0.25,
        ),
        decoding(made + 3, made + 4, seconds=0.4),
        decoding(made + 6, made + 7, seconds=0.2, prefill=True),
    ]


def decoding(start: float, end: float, *, seconds: float, prefill: bool = False) -> ReplicaActivity:
    """Ten steps of two sequences, of ``seconds`` each."""
    return ReplicaActivity(
        time=end,
        replica="r",
        busy=[(start, end)],
        slot_seconds=0.0,
        generated_tokens=20,
        prefilled_tokens=30 * prefill,
        decode_steps={2: (10, 10 * seconds, 0)},
        prefill_steps={16: (1, 2, 30, 0.7, 0), 4: (1, 1, 5, 0.1, 0)} if prefill else {},
    )


@pytest.fixture
def run() -> list[Event]:
    """Seven versions, of which the first two and the last two are not measured."""
    return [event for version in range(1, 8) for event in update(version)]


@pytest.fixture
def found(run: list[Event]) -> Figures:
    return figures(run, warm_up=2, at_the_end=2)


def test_the_measured_time_is_that_of_the_measured_versions(found: Figures) -> None:
    assert found.versions == 3
    assert found.window_s == 3 * VERSION_S
    assert found.version_s == VERSION_S


def test_each_phase_is_there_once_per_measured_update(found: Figures) -> None:
    expected = {"gather": 1.0, "send": 2.0, "recv": 2.0, "register": 1.0, "load": 0.5, "steps": 5.0}
    assert {name: found[name] for name in expected} == {name: [seconds] * 3 for name, seconds in expected.items()}


def test_stalls_are_shares_of_the_measured_time_and_a_validation_is_none(found: Figures) -> None:
    assert found.trainer_share == pytest.approx(2.0 / VERSION_S)
    assert found.rollout_share == pytest.approx(1.0 / VERSION_S)


def test_what_was_sent_is_compared_with_the_full_bytes(found: Figures) -> None:
    assert found.sent_share == 0.5
    assert found.send_bytes_per_s == NBYTES / 2 / 2.0
    assert found["changed"] == [0.25] * 3


def test_decode_steps_beside_a_transfer_are_compared_with_those_outside(found: Figures) -> None:
    assert found.decode_slowdown == pytest.approx(2.0)


def test_what_was_prefilled_again_is_the_largest_prefill_after_each_cut(found: Figures) -> None:
    assert found["again"] == [(30, 0.7)] * 3


def test_a_transfer_is_from_the_beginning_of_gather_to_the_end_of_register(run: list[Event]) -> None:
    assert transfers(run)[0] == (VERSION_S, VERSION_S + 4)


def test_figures_of_two_runs_add_up(run: list[Event], found: Figures) -> None:
    found.extend(figures(run, warm_up=2, at_the_end=2))
    assert (found.versions, found.version_s, len(found["sent"])) == (6, VERSION_S, 6)
    assert found.decode_slowdown == pytest.approx(2.0)


def test_a_run_with_too_few_versions_is_refused() -> None:
    with pytest.raises(ValueError, match="3 versions were made"):
        figures([event for version in range(1, 4) for event in update(version)], warm_up=2, at_the_end=2)


def test_everything_that_the_doctor_permits_is_compared_once() -> None:
    names = [kind.name for kind in kinds()]
    assert len(set(names)) == len(names)
    assert {"broadcast overlapped delta", "disk overlapped full", "local synchronous full shared interrupt"} <= {*names}
    assert not {"disk synchronous delta", "local synchronous full"} & {*names}


def test_only_what_was_asked_for_is_run() -> None:
    kind = Kind("broadcast", "overlapped", "delta")
    assert kind.is_asked_for([]) and kind.is_asked_for(["disk", "broadcast:overlapped"])
    assert not kind.is_asked_for(["broadcast:overlapped:full"])


def test_the_tables_have_every_row_the_aims_and_what_failed(found: Figures) -> None:
    raw = Raw(nbytes=50_000_000, broadcast_s=0.02, transport_s=0.025, memcpy_s=0.01)
    rows = [
        Row("25m", Kind("broadcast"), 4, [raw], found),
        Row("25m", Kind("disk"), 4, [raw], failure="the disk is full"),
        Row("25m", Kind("shared_memory")),
    ]
    assert json.loads(json.dumps(rows[0].raw()))["sent"] == found["sent"]
    text = page(*tables_of(Results({"25m": 25_000_000}, rows, [Row("25m", LONG, 8, figures=found)])))
    assert "| broadcast synchronous full | 1,000 | 2,000 |" in text
    assert "| disk synchronous full | failed |" in text and "the disk is full" in text
    assert "shared_memory" not in text
    assert "| the same without decoding and training beside it | 25m, synchronous | 80.0% | hit |" in text
    assert "rollout stall ≤ 1% | 25m, 10 s a version | 10.0% | **miss** |" in text
