"""The native engine keeps the contract of `RolloutEngine`."""

from __future__ import annotations

from tests.engines.contract.harness_native import NativeHarness
from tests.engines.contract.suite import Contract
from tests.engines.contract.updating import Updating


class TestNative(Contract):
    harness = NativeHarness()


class TestNativeInPlace(Updating):
    """New weights are written over those that are served."""

    harness = NativeHarness(dual_buffer=False)
