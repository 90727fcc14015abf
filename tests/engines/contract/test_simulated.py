"""The simulated engine keeps the contract of `RolloutEngine`, where that is not about tokens."""

from __future__ import annotations

from tests.engines.contract.harness_simulated import SimulatedHarness
from tests.engines.contract.suite import Contract


class TestSimulated(Contract):
    harness = SimulatedHarness()
