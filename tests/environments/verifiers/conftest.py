"""Tests with the real `verifiers`: only where it is installed (``make test-verifiers``)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("verifiers") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verifiers' processes, and those of a run, take their time where others run."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(400))
