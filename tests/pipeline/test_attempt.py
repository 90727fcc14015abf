"""What follows from one attempt to send, as far as no run is needed to see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from headway.data.interfaces.weights import ReceiveReport, SendReport
from headway.errors import UpdateFailed, UpdateMissed
from headway.pipeline.remote_workers import ReceiverClient
from headway.pipeline.update.version_transfer import Attempt, decide

LIMIT = "param_update.timeout_s = 1 s"


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Holding:
    name: str
    copy: str


@pytest.mark.parametrize("swapped", [False, True])
def test_who_holds_the_weights_in_another_dtype_is_held_to_its_own_checksum(swapped: bool):
    receivers = [cast(Any, Named(name)) for name in ("rollout-0", "logp")]
    attempt = Attempt(3, receivers, 0, limit=LIMIT)
    attempt.sent = SendReport(0.0, 0.0, 8, checksum=1, checksums={"rollout-0": 1, "logp": 2})
    got = (2, 1) if swapped else (1, 2)
    attempt.answers = {
        receiver: ReceiveReport(0.0, 0.0, 8, checksum) for receiver, checksum in zip(receivers, got, strict=True)
    }
    attempt.compare()
    assert sorted(receiver.name for receiver in attempt.failed) == (["logp", "rollout-0"] if swapped else [])
    assert len(attempt.holding) == (0 if swapped else 2)


def attempt_on(*receivers: tuple[str, str], failures: int = 0) -> Attempt:
    """An attempt to send version 3 to receivers, each given by its name and its copy's."""
    return Attempt(3, [cast(Any, Holding(*receiver)) for receiver in receivers], failures, limit=LIMIT)


def names(groups: Sequence[Sequence[ReceiverClient]]) -> list[list[str]]:
    return [[receiver.name for receiver in group] for group in groups]


def test_who_misses_a_version_through_another_is_not_lost_with_it():
    attempt = attempt_on(("a", "here"), ("b", "here"), ("c", "there"), failures=1)
    attempt.sent = UpdateFailed("somebody gave up")
    a, b, c = attempt.receivers
    attempt.answers = {
        a: UpdateFailed("a bucket came twice"),
        b: UpdateMissed("b was to map what a has"),
        c: ReceiveReport(0.0, 0.0, 8, 1),
    }
    decision = decide(attempt)
    assert [gone.remote.name for gone in decision.lost] == ["a"]
    assert names(decision.again) == [["b", "c"]]


def test_receivers_that_are_silent_together_are_tried_by_their_copies_and_those_of_one_copy_alone():
    together = attempt_on(("a", "here"), ("b", "here"), ("c", "there"))
    assert names(decide(together).again) == [["a", "b"], ["c"]]
    assert names(decide(attempt_on(("a", "here"), ("b", "here"))).again) == [["a"], ["b"]]


@pytest.mark.parametrize("failures", [0, 1])
def test_a_receiver_that_is_silent_where_the_trainer_failed_is_tried_again_once_before_it_is_lost(failures: int):
    attempt = attempt_on(("a", "here"), failures=failures)
    attempt.sent = UpdateFailed("the store is full")
    decision = decide(attempt)
    again, lost = names(decision.again), [gone.remote.name for gone in decision.lost]
    assert (again, lost) == (([["a"]], []), ([], ["a"]))[failures]
    assert decision.failures == len(again)
