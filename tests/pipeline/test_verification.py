"""After each update a receiver's log-probs of a few fixed sequences must be the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.data.interfaces.weights import SendReport
from headway.errors import UpdateFailed
from headway.events import ReplicaHalted, UpdateFinished, UpdatePhase
from tests.pipeline.fakes import FakeRollout
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import Run, Scenario
from tests.pipeline.test_update_recovery import SCHEDULES, both_schedules, failed, lost, scenario
from tests.tiers import mostly_slow


def logprobs(version: int, off_by: float = 0.0) -> NDArray[np.float32]:
    """[4]"""
    return np.array([-1.0, -2.0, -3.0, -4.0 - off_by], np.float32) / (1 + version)


def probing(off_by: float = 0.0, replica: int = 1):
    """Everybody computes the probe; ``replica`` is ``off_by``/(1 + version) nats off."""

    def script(run: Run) -> None:
        run.trainer.probes = logprobs
        for index, rollout in enumerate(run.rollouts):
            rollout.serves = lambda version, index=index: logprobs(version, off_by * (index == replica))
        for other in run.others:
            other.serves = logprobs

    return script


def differences(run: Run) -> dict[tuple[int, str], float]:
    told = [event for event in run.of(UpdatePhase) if event.probe_difference is not None]
    assert all(event.phase == "load" for event in told)
    return {(event.version, event.where): event.probe_difference or 0.0 for event in told}


@mostly_slow("mode", SCHEDULES, quick=["overlapped"])
def test_each_load_is_verified_against_the_trainers_probe_of_that_version(mode: str):
    run = check_everything(scenario(mode, receivers=("logp",), script=probing(4e-4)).run().assert_completed())
    loaded = {(version, replica.name) for replica in run.rollouts for version, _ in replica.loads}
    found = differences(run)
    assert set(found) == loaded | {(version, "logp") for version, _ in run.others[0].loads}
    for (version, name), difference in found.items():
        assert difference == pytest.approx(4e-4 / (1 + version) if name == "rollout-1" else 0.0, abs=1e-6)


@both_schedules
def test_a_replica_that_serves_something_else_ends_the_run_and_is_named(mode: str):
    match = (
        r"rollout-1 serves something else than version 1, which it received: log-probs of the 4 tokens .* by up to "
        r"0.2 nats, 0.05 on average"
    )
    run = failed(scenario(mode, script=probing(0.4)), UpdateFailed, match)
    assert lost(run) == [], "a wrong engine is a defect, not a loss"
    assert run.rollouts[1].paused, "it never goes on with it"


def test_a_receiver_that_serves_something_else_ends_the_run():
    def script(run: Run) -> None:
        probing()(run)
        run.others[0].serves = lambda version: logprobs(version, 1.0)

    failed(scenario(receivers=("logp",), script=script), UpdateFailed, "logp serves something else than version 1")


@pytest.mark.parametrize("served", [np.full(4, np.nan, np.float32), np.zeros(3, np.float32)])
def test_what_is_not_a_number_or_not_of_the_same_shape_is_something_else(served: NDArray[np.float32]):
    def script(run: Run) -> None:
        probing()(run)
        run.rollouts[0].serves = lambda version: served

    failed(scenario(script=script), UpdateFailed, "rollout-0 serves something else than version 1")


@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_weights_whose_log_probs_are_not_finite_at_the_trainer_blame_training(broken: float):
    def script(run: Run) -> None:
        run.trainer.probes = lambda version: np.array([-1.0, broken], np.float32)
        for rollout in run.rollouts:
            rollout.serves = run.trainer.probes

    message = "training diverged: with the weights of version 1 .* not finite; lower actor.optim.lr"
    failed(scenario(script=script), UpdateFailed, message)


@pytest.mark.parametrize("who", ["trainer", "replicas"])
def test_nothing_is_compared_where_one_side_cannot_tell(who: str):
    def script(run: Run) -> None:
        if who == "replicas":
            probing(9.0)(run)
            run.trainer.probes = None
        else:
            run.trainer.probes = logprobs

    run = scenario(script=script).run().assert_completed()
    assert differences(run) == {}


@pytest.mark.parametrize("mode", ["colocate_sync", "colocate_async"])
def test_on_shared_devices_a_replica_is_verified_when_it_is_awake_again_and_before_it_goes_on(mode: str):
    run = Scenario(mode, replicas=2, script=probing(4e-4)).run().assert_completed()
    assert set(differences(run)) == {(v, r) for v in range(1, 7) for r in ("rollout-0", "rollout-1")}
    goes_on = {halt.span[1] for halt in run.of(ReplicaHalted)}
    assert {event.time for event in run.of(UpdatePhase) if event.probe_difference is not None} <= goes_on
    run = failed(Scenario(mode, replicas=2, script=probing(0.4)), UpdateFailed, "rollout-1 serves something else")
    assert run.rollouts[1].paused


def test_a_replica_that_hangs_over_its_probe_is_fenced_off():
    def script(run: Run) -> None:
        probing()(run)
        run.rollouts[1].silent_on.add("probe")

    run = check_everything(scenario(script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"]


def test_what_was_sent_and_what_changed_is_reported():
    def script(run: Run) -> None:
        values: dict[str, Any] = {"nbytes": 100, "full_nbytes": 1000, "changed": 0.03}
        run.trainer.reports = values

    run = scenario(script=script).run().assert_completed()
    assert {(update.full_nbytes, update.changed) for update in run.of(UpdateFinished)} == {(1000, 0.03)}
    sent = {event.phase: event.nbytes for event in run.of(UpdatePhase) if event.where == "actor"}
    assert sent == {"gather": 1000, "send": 100}


class OfOneMachine(FakeRollout):
    """All replicas load from one copy."""

    def __init__(self, name: str, *arguments: Any, **more: Any) -> None:
        super().__init__(name, *arguments, **more)
        self.copy = "the machine's"


@mostly_slow("mode", SCHEDULES, quick=["async_partial"])
def test_replicas_that_load_from_one_copy_compute_the_probe_in_turn(mode: str):
    run = scenario(mode, rollout=OfOneMachine, script=probing()).run().assert_completed()
    found = differences(run)
    assert sorted(version for version, _ in found) == [version for version, _ in run.rollouts[0].loads]
    assert {name for _, name in found} == {replica.name for replica in run.rollouts}


def test_a_replica_that_joins_computes_the_probe_of_its_first_version_whoevers_turn_it_is():
    async def beside(run: Run) -> None:
        await asyncio.sleep(1.0)
        run.join("late").serves = lambda version: logprobs(version, 0.9)

    joins = scenario(rollout=OfOneMachine, script=probing(), beside=beside)
    failed(joins, UpdateFailed, "late serves something else than version 1,")


@both_schedules
def test_one_of_one_copys_replicas_that_serves_something_else_is_found_in_its_turn(mode: str):
    failed(scenario(mode, rollout=OfOneMachine, script=probing(0.9)), UpdateFailed, "rollout-1 serves something else")


def test_bytes_of_a_version_that_copies_get_in_different_dtypes_are_those_of_the_largest():
    def script(run: Run) -> None:
        send = run.trainer.send_gathered

        async def send_gathered(version: int, receivers: Sequence[str]) -> SendReport:
            return replace(await send(version, receivers), full_nbytes=1000 if "logp" in receivers else 500)

        run.trainer.send_gathered = send_gathered  # type: ignore[method-assign]

    run = scenario("overlapped", receivers=("logp",), script=script).run().assert_completed()
    assert {update.full_nbytes for update in run.of(UpdateFinished)} == {1000}
