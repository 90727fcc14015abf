"""Counts of what a GPU would be asked to do: only where torch is a CUDA build (``make test-fake-cuda``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
MISSING = pytest.mark.skip(reason="torch is no CUDA build, which decomposes otherwise: make test-fake-cuda has one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(MISSING)
