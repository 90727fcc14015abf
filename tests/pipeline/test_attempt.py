"""What follows from one attempt to send, as far as no run is needed to see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from headway.interfaces import ReceiveReport, SendReport
from headway.pipeline.attempt import Attempt, Audience


@dataclass(frozen=True)
class Named:
    name: str


@pytest.mark.parametrize("swapped", [False, True])
def test_who_holds_the_weights_in_another_dtype_is_held_to_its_own_checksum(swapped: bool):
    receivers = [cast(Any, Named(name)) for name in ("rollout-0", "logp")]
    attempt = Attempt(3, Audience(receivers), timeout_s=1.0)
    attempt.sent = SendReport(0.0, 0.0, 8, checksum=1, checksums={"rollout-0": 1, "logp": 2})
    got = (2, 1) if swapped else (1, 2)
    attempt.received = {
        receiver.name: ReceiveReport(0.0, 0.0, 8, checksum) for receiver, checksum in zip(receivers, got, strict=True)
    }
    assert sorted(attempt.failed) == (["logp", "rollout-0"] if swapped else [])
    assert len(attempt.holding) == (0 if swapped else 2)
