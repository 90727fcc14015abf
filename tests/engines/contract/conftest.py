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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a binding names in ``slow``: the tests that take long over its engine."""
    for item in items:
        if item.name in getattr(getattr(item, "cls", None), "slow", ()):
            item.add_marker(pytest.mark.slow)
