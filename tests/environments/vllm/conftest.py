"""Tests of the engine over vLLM: only where vLLM is installed (``make test-vllm``)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    from tests.environments.vllm.serving import Served

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """vLLM's processes take half a minute to start, and more beside others."""
        for item in items:
            item.add_marker(pytest.mark.timeout(300))

    @pytest.fixture(scope="session")
    def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        """One engine for all tests that leave it as they found it: a tied model."""
        yield from _serving(tmp_path_factory.mktemp("tied"), tied=True)

    @pytest.fixture(scope="session")
    def untied_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        yield from _serving(tmp_path_factory.mktemp("untied"), tied=False)

    @pytest.fixture
    def served(one_engine: Served) -> Iterator[Served]:
        """`one_engine`, with nothing in it before and after; counts are those of the test alone."""
        asyncio.run(one_engine.at_rest())
        yield one_engine
        asyncio.run(one_engine.at_rest())

    def _serving(folder: Path, *, tied: bool) -> Iterator[Served]:
        served = Served(folder, shape={"tied": tied})
        asyncio.run(served.engine.start())
        yield served
        asyncio.run(served.engine.close())
