"""The contract's assertions are in modules that pytest would not rewrite by itself."""

import pytest

for module in (
    "caching",
    "ending",
    "harness",
    "logprobs",
    "pausing",
    "preempting",
    "reference",
    "reproducing",
    "sampling",
    "serving",
    "sessions",
    "updating",
):
    pytest.register_assert_rewrite(f"tests.engines.contract.{module}")
