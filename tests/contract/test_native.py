"""The native engine keeps the contract of `RolloutEngine`."""

from __future__ import annotations

from tests.contract.harness_native import NativeHarness
from tests.contract.suite import Contract
from tests.contract.updating import Updating


class TestNative(Contract):
    harness = NativeHarness()


class TestNativeInPlace(Updating):
    """New weights are written over those that are served."""

    harness = NativeHarness(dual_buffer=False)
