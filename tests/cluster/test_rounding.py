"""What a receiver's probe may be off by is measured while everybody has the same weights."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.cluster.worker_engines import CEILING, FLOOR, SAFETY, ProbeTolerance
from headway.data.interfaces.weights import PolicyReceiver
from headway.errors import ModelError

EXPECTED = np.array([-1.0, -2.0], np.float32)


class Probing:
    def __init__(self, name: str, served: NDArray[np.float32] | None) -> None:
        self.name = name
        self.served = served

    async def probe(self) -> NDArray[np.float32] | None:
        return self.served


def off_by(name: str, nats: float) -> PolicyReceiver:
    return cast(PolicyReceiver, Probing(name, EXPECTED + np.array([0.0, nats], np.float32)))


@pytest.mark.parametrize(
    ("dtype", "nats", "expected"),
    [
        ("float32", 1e-6, FLOOR["float32"]),
        ("float32", 4e-4, SAFETY * 4e-4),
        ("float32", 0.04, CEILING["float32"]),
        ("bfloat16", 0.001, FLOOR["bfloat16"]),
        ("bfloat16", 0.02, SAFETY * 0.02),
    ],
)
async def test_the_tolerance_follows_what_was_measured_between_a_floor_and_a_ceiling(
    dtype: str, nats: float, expected: float
) -> None:
    rounding = ProbeTolerance(("float32", dtype), EXPECTED)
    await rounding.measure([off_by("rollout-0", nats), off_by("rollout-1", 0.0)])
    assert rounding.tolerance("rollout-0") == pytest.approx(expected, rel=1e-3)
    assert rounding.tolerance("rollout-1") == FLOOR[dtype], "each receiver has its own"


@pytest.mark.parametrize("served", [EXPECTED + 0.6, np.full(2, np.nan, np.float32), EXPECTED[:1]], ids=str)
async def test_what_rounding_cannot_explain_is_another_model(served: Any) -> None:
    rounding = ProbeTolerance(("bfloat16",), EXPECTED)
    receiver = cast(PolicyReceiver, Probing("rollout-0", served))
    with pytest.raises(ModelError, match=r"rollout-0 and the trainer .*different log-probs"):
        await rounding.measure([receiver])


async def test_a_receiver_that_was_not_measured_gets_the_ceiling() -> None:
    rounding = ProbeTolerance(("float32",), EXPECTED)
    await rounding.measure([cast(PolicyReceiver, Probing("rollout-0", None))])
    assert rounding.tolerance("rollout-0") == rounding.tolerance("rollout-0+1") == CEILING["float32"]
    unverified = ProbeTolerance(("float32",), None)
    await unverified.measure([off_by("rollout-0", 9.0)])
    assert unverified.tolerance("rollout-0") == CEILING["float32"]
